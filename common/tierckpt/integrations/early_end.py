"""The end of the process after a framework's training was interrupted, or was not stored.

A framework ends its training by itself, and its script goes on as after a whole training: it
evaluates, exports, and ends with status 0. A scheduler that looks at the status then takes the job
for done. `halt_exit_status` is for such jobs, as for plain loops that never call `should_exit()`,
and `incomplete_exit_status` for those whose last version is missing somewhere.
"""

from __future__ import annotations

from tierckpt.checkpointer.checkpointer import Checkpointer


def end_if_interrupted(checkpointer: Checkpointer) -> None:
    """Raise SystemExit(`halt_exit_status`) if that is set, and the job is to be started again, or
    its `_exit_status`; the same on all ranks. Called last in a training, after the checkpointer is
    closed."""
    status = checkpointer.config.halt_exit_status
    if status and checkpointer.interrupted:
        raise SystemExit(status)
    if status := checkpointer._exit_status:
        raise SystemExit(status)


__all__ = ["end_if_interrupted"]
