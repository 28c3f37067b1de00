"""The gradient journal: the reduced gradients of every optimizer step, on the node's disk.

A restart loads the newest version and makes the journal's steps again, with the same optimizer and
the same gradients, bit for bit; see docs/internals/journal.md.

| module | content |
|---|---|
| `segments` | journal files: bytes, records, reading, removal, and how far they lead |
| `steps` | the steps that can be repeated: gradients and small state as bytes, digest |
| `writer` | the thread that appends records |
| `copies` | a copy of another rank's journal |
| `replay` | a restart: the records that lead on, and the steps, made again |
| `recorder` | one rank's journal, during the training |
| `journal` | its interface, and the journal of a job that keeps none |

A job that neither keeps nor finds a journal loads no more than this.

That a log of gradients is as good as checkpoints at every step is the idea of LowDiff (Yao et al.,
2025, arXiv:2509.04084), which logs compressed gradients; a log of inputs that a deterministic
program repeats is the redo log of databases (ARIES: Mohan et al., 1992).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from tierckpt import lazy_exports
from tierckpt.core.parts import Part

if TYPE_CHECKING:
    from tierckpt.checkpointer.adapter import Adapter
    from tierckpt.checkpointer.loop import TrainingJob
    from tierckpt.config import Config
    from tierckpt.state.training_state import TrainingState

    from .copies import neighbours
    from .journal import Journal
    from .segments import BOUNDARY, HEAD_BYTES, ITSELF, STEP, FrameHead, JournalReader
    from .segments import SegmentName, names_in
    from .steps import REPEATABLE, CopiedTree, Image
    from .writer import MAX_WAITING

__getattr__ = lazy_exports(__name__)

FOLDER = "journal"
"""Folder of the journal in the directory of the local level."""


class Journaled(Part):
    """The row of the journal in the table of parts."""

    @classmethod
    def check(cls, config: Config, state: TrainingState, adapter: Adapter) -> None:
        """Refuse steps that cannot be made again exactly."""
        if config.local.journal_steps:
            from .steps import check_support

            check_support(config, state, adapter.repeats_steps, adapter.step_class)

    @classmethod
    def of(cls, job: TrainingJob) -> Part | None:
        """The recorder, if the setting asks for it; else what removes files of an earlier run, if
        there are some."""
        if job.config.local.journal_steps:
            from .recorder import JournalRecorder

            return JournalRecorder(job)
        if not os.path.isdir(os.path.join(job.config.directory, FOLDER)):
            return None
        from .journal import Journal

        return Journal(job.config, job.group, job.node, job.agreement)
