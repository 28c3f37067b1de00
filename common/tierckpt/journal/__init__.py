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

That a log of gradients is as good as checkpoints at every step is the idea of LowDiff (Yao et al.,
2025, arXiv:2509.04084), which logs compressed gradients; a log of inputs that a deterministic
program repeats is the redo log of databases (ARIES: Mohan et al., 1992).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierckpt import lazy_exports

if TYPE_CHECKING:
    from .copies import neighbours
    from .journal import Journal
    from .segments import BOUNDARY, FOLDER, HEAD_BYTES, ITSELF, STEP, FrameHead, JournalReader
    from .segments import SegmentName, names_in
    from .steps import REPEATABLE, CopiedTree, Image
    from .writer import MAX_WAITING

__getattr__ = lazy_exports(__name__)
