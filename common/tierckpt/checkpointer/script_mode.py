"""Support for scripts with an unchanged loop: restore at the start, and a checkpoint at the end."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tierckpt.config import load_config
from tierckpt.coordination.proof_order import redirected
from tierckpt.errors import ConfigError
from tierckpt.state.names import unwrap
from tierckpt.state.training_state import label_optimizers
from tierckpt.storage.memory import job_directory

from . import shutdown
from .checkpointer import Checkpointer

_served: weakref.WeakSet[Checkpointer] = weakref.WeakSet()
_ends: list[Callable[[], Checkpointer | None]] = []
"""The arguments of `close_at_exit`."""


def attach_to_script(checkpointer: Checkpointer, restore: bool, ends_with_script: bool) -> None:
    """Restore now, if `restore`, and close at the end of the process, if `ends_with_script`. Raises
    the errors of `Checkpointer.restore`; the checkpointer is abandoned then."""
    _served.add(checkpointer)
    if restore:
        try:
            checkpointer.restore()
        except BaseException:
            checkpointer.abandon()  # the script has no reference to it
            raise
    if ends_with_script:
        close_at_exit(lambda: checkpointer)


def give_attribute(checkpointer: Checkpointer) -> None:
    """Set the attribute `checkpointer` of each optimizer that the script has given."""
    for each in checkpointer._state.given.values():
        each.checkpointer = checkpointer  # type: ignore[attr-defined]


def refuse_second(model: torch.nn.Module, optimizer: Any, settings: Mapping[str, Any]) -> None:
    """Raise ConfigError if an open checkpointer has the same model, optimizer or path.

    A second checkpointer for a job's second optimizer could restore it at a different step.
    """
    ours = [id(each) for each in label_optimizers(optimizer).values()]
    for other in [ckpt for ckpt in _served if not ckpt.closed]:
        theirs = [id(each) for each in other._state.given.values()]
        if unwrap(model) is other._state.model:
            taken = "this model has"
        elif not set(ours).isdisjoint(theirs):
            taken = "this optimizer has"
        elif _same_place(other, settings):
            taken = f"the job at {other.config.path} has"
        else:
            continue
        raise ConfigError(
            f"{taken} a checkpointer already, from an earlier call. Several optimizers go into one "
            "call, {'name': optimizer, 'other name': ...}; so do models that train together, "
            "torch.nn.ModuleDict({'name': model, ...}). A job of its own needs another path; to "
            "begin again, close() the attribute `checkpointer` first"
        )


def _same_place(other: Checkpointer, settings: Mapping[str, Any]) -> bool:
    names = {
        name: settings[name] for name in ("path", "job_id", "shm_dir", "node") if name in settings
    }
    try:
        config = redirected(load_config(names, config_file=settings.get("config_file")))
    except ConfigError:
        return False  # the Checkpointer raises it again, on all ranks
    return job_directory.job_directory(config) == job_directory.job_directory(other.config)


def close_at_exit(current: Callable[[], Checkpointer | None]) -> Callable[[], None]:
    """At the end of the process, close the checkpointer that `current()` returns then, if any.

    Closes as `Checkpointer.close_or_abandon` does, because a script may have shut its communication
    down before.

    Returns the function that was registered with `atexit`, which calls in reverse order. After a
    new start of the communication library register it again, so that it runs before the library's
    own shutdown.
    """

    def close() -> None:
        checkpointer = current()
        if checkpointer is None:
            return
        if shutdown.script_failed():
            checkpointer._abandon_after_error()
        else:
            shutdown.end_now(checkpointer.close_or_abandon)

    _ends.append(current)
    return atexit.register(close)


def close_now() -> None:
    """Close all checkpointers of `close_at_exit` now: for a script that shuts its communication
    library down before it ends. After that, ranks could not end together.

    Closes also while an exception is being handled: the script may end in this way on purpose (its
    data is used up, or Ctrl-C). If only some ranks get here, the meeting fails, and each ends
    alone."""
    for current in tuple(_ends):
        checkpointer = current()
        if checkpointer is not None:
            checkpointer.close_or_abandon()
