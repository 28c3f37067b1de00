"""For scripts whose loop cannot be touched: restore at the start, and a checkpoint at the end."""

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
"""What `close_at_exit` was given."""


def attach_to_script(checkpointer: Checkpointer, restore: bool, ends_with_script: bool) -> None:
    """Do what the script does not: restore now if asked to, and close when the process ends."""
    _served.add(checkpointer)
    if restore:
        try:
            checkpointer.restore()
        except BaseException:
            checkpointer.abandon()  # nobody else has it, to try in another way
            raise
    if ends_with_script:
        close_at_exit(lambda: checkpointer)


def give_attribute(checkpointer: Checkpointer) -> None:
    """Make it the attribute `checkpointer` of each of its optimizers, as the script has them."""
    for each in checkpointer._state.given.values():
        each.checkpointer = checkpointer  # type: ignore[attr-defined]


def refuse_second(model: torch.nn.Module, optimizer: Any, settings: Mapping[str, Any]) -> None:
    """Raise ConfigError for what a checkpointer that serves has already: model, optimizer, or path.

    A second one for the second optimizer of a job would restore one at another step than the other.
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
        mine = redirected(load_config(names, config_file=settings.get("config_file")))
    except ConfigError:
        return False  # the Checkpointer will say so, on all ranks
    return job_directory.job_directory(mine) == job_directory.job_directory(other.config)


def close_at_exit(current: Callable[[], Checkpointer | None]) -> Callable[[], None]:
    """When the process ends, close the checkpointer that `current()` then gives, if any.

    Returns what was registered with `atexit`, which calls in reverse order: who starts the
    communication library anew has to register it again, to be called before that is shut down.

    As `Checkpointer.close_or_abandon` does it: scripts end their communication before they end.
    """

    def close() -> None:
        checkpointer = current()
        if checkpointer is None:
            return
        if shutdown.script_failed():
            checkpointer._abandon_after_error()
        else:
            checkpointer.close_or_abandon()

    _ends.append(current)
    return atexit.register(close)


def close_now() -> None:
    """What is to be done when the process ends, for a script that shuts its communication library
    down before: behind that, there is nobody to end together with.

    Also where an exception is being handled: a script that comes to this may well have meant to
    (its data came to an end, or Ctrl-C). Where only some ranks do, they do not meet."""
    for current in tuple(_ends):
        checkpointer = current()
        if checkpointer is not None:
            checkpointer.close_or_abandon()
