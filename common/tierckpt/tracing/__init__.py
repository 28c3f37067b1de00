"""Tracing: one rank's recorder, and traces of all ranks on one time axis with Horovod's timeline.

`recorder` writes. `timeline` is the common form, with its summary, and one step of it for
`tierckpt report`. `traces` reads the files of Tierckpt and of Horovod, and writes merged ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierckpt import lazy_exports

if TYPE_CHECKING:
    from .recorder import ALLREDUCE, COPIER, TRAINING, Trace, open_trace
    from .timeline import MAX_ROWS, TREE_ROW, Interval, Span, Stats, Timeline, TimelineError, hidden
    from .timeline import intersection, lanes, length, overlap, rows_of_step, size_buckets, step_of
    from .timeline import summarize, typical_version, union, update_gaps
    from .traces import agreement, load as load_traces, read_entries, read_horovod, read_trace
    from .traces import write as write_traces

__getattr__ = lazy_exports(__name__)
