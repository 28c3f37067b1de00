"""SCR's Python module on Tierckpt: `import tierckpt.scr as scr`.

The functions have the names, arguments and results of the module `scr` of SCR, the Scalable
Checkpoint/Restart library (Moody et al., SC 2010), so a program for it runs with another import::

    from mpi4py import MPI
    import tierckpt.scr as scr

    scr.config("SCR_CHECKPOINT_INTERVAL=10")
    scr.init()
    while scr.have_restart():
        name = scr.start_restart()
        valid = load(scr.route_file(f"{name}/rank_{rank}.ckpt"))
        if scr.complete_restart(valid):
            break
    ...
        if scr.need_checkpoint():
            scr.start_output(f"step_{step}", scr.FLAG_CHECKPOINT)
            valid = save(scr.route_file(f"step_{step}/rank_{rank}.ckpt"))
            scr.complete_output(valid)
    scr.finalize()

All functions are collective over MPI_COMM_WORLD, except `config` and `route_file`. All errors are
RuntimeError, as in SCR. docs/files.md has the settings and the differences.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from tierckpt._process import host_id
from tierckpt.errors import TierckptError
from tierckpt.files.scr_session import CHECKPOINT, OUTPUT, ScrSession, merged, of_file, scr_settings

FLAG_NONE = 0
"""No flag."""
FLAG_CHECKPOINT = CHECKPOINT
"""The job can restart from this dataset."""
FLAG_OUTPUT = OUTPUT
"""The dataset's files are to be at their own paths in SCR_PREFIX."""

_given: dict[str, str] = {}
"""Settings by `config`."""
_session: ScrSession | None = None
T = TypeVar("T")


def _now(call: Callable[[ScrSession], T], name: str) -> T:
    """The result of a call of the session, with errors as SCR's module raises them."""
    if _session is None:
        raise RuntimeError(f"{name} before init(), or after finalize()")
    try:
        return call(_session)
    except TierckptError as error:
        raise RuntimeError(str(error)) from error


def config(conf: str) -> str | None:
    """Query (`NAME`), set (`NAME=value`) or unset (`NAME=`) a setting; before `init`.

    Returns the value for a query, None if there is none. An environment variable of the name wins.
    """
    name, is_set, value = conf.partition("=")
    name = name.strip()
    if not is_set:
        return merged(_given, _in_file(), os.environ).get(name) or None
    if _session is not None:
        raise RuntimeError(f"config({conf!r}) after init(): call it before")
    if value.strip():
        _given[name] = value.strip()
    else:
        _given.pop(name, None)
    return None


def _in_file() -> dict[str, str]:
    """The settings of the user's file: SCR_CONF_FILE, or `.scrconf` in SCR_PREFIX."""
    prefix = merged(_given, {}, os.environ)["SCR_PREFIX"]
    named = os.environ.get("SCR_CONF_FILE")
    try:
        text = Path(named or os.path.join(prefix, ".scrconf")).read_text()
    except FileNotFoundError:
        if not named:
            return {}
        raise RuntimeError(f"SCR_CONF_FILE is {named}, which does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RuntimeError(f"SCR's configuration file cannot be read: {error}") from error
    return of_file(text, os.environ)


def init() -> None:
    """Start. MPI must be initialised, which `from mpi4py import MPI` does."""
    global _session
    if _session is not None:
        raise RuntimeError("init() was called before: call it once, and finalize() at the end")
    from mpi4py import MPI

    from tierckpt.files.job import group_of

    group = group_of(MPI.COMM_WORLD)
    hosts = group.all_gather_object(host_id(os.environ.get("TIERCKPT_NODE", "")))
    try:
        found = merged(_given, _in_file(), os.environ)
        _session = ScrSession(scr_settings(found, len(set(hosts))), group)
    except TierckptError as error:
        raise RuntimeError(str(error)) from error


def finalize() -> None:
    """End: the newest checkpoint is brought to SCR_PREFIX, and memory is freed."""
    global _session
    _now(ScrSession.finalize, "finalize()")
    _session = None


def route_file(fname: str) -> str:
    """The path to open for a file. Not collective.

    In an output phase: the path at which to write it. In a restart phase: the path at which to read
    it. Else: `fname`. The file must be inside SCR_PREFIX.
    """
    return _now(lambda session: session.route(os.fspath(fname)), "route_file()")


def have_restart() -> str | None:
    """Name of the checkpoint that the job can restart from; None if there is none."""
    return _now(ScrSession.have_restart, "have_restart()")


def start_restart() -> str:
    """Start to read the checkpoint; returns its name."""
    return _now(ScrSession.start_restart, "start_restart()")


def complete_restart(valid: bool = True) -> bool:
    """End the reading; returns True if it was `valid` on all ranks. If not, `have_restart` offers
    the checkpoint before."""
    return _now(lambda session: session.complete_restart(bool(valid)), "complete_restart()")


def need_checkpoint() -> bool:
    """True if a checkpoint is due by SCR_CHECKPOINT_INTERVAL (in calls), SCR_CHECKPOINT_SECONDS or
    SCR_CHECKPOINT_OVERHEAD, or if the job is to end."""
    return _now(ScrSession.need_checkpoint, "need_checkpoint()")


def start_output(name: str, flags: int) -> None:
    """Start to write the dataset `name`: FLAG_CHECKPOINT, FLAG_OUTPUT, or both."""
    _now(lambda session: session.start_output(name, int(flags)), "start_output()")


def complete_output(valid: bool = True) -> bool:
    """End the writing; returns True if it was `valid` on all ranks, and is complete."""
    return _now(lambda session: session.complete_output(bool(valid)), "complete_output()")


def should_exit() -> bool:
    """True if the job is to end early: a signal, `tierckpt halt`, or SCR_HALT_SECONDS."""
    return _now(lambda session: session.files.should_exit(), "should_exit()")


def current(name: str) -> None:
    """Name a checkpoint, before the first output: the one that `have_restart` is to offer, or the
    one from which the program restarted without these calls."""
    _now(lambda session: session.current(name), "current()")


def drop(name: str) -> None:
    """Not supported: raises RuntimeError. Retention removes versions (SCR_PREFIX_SIZE)."""
    raise RuntimeError(_kept("drop", name))


def delete(name: str) -> None:
    """Not supported: raises RuntimeError. Retention removes versions (SCR_PREFIX_SIZE)."""
    raise RuntimeError(_kept("delete", name))


def _kept(call: str, name: Any) -> str:
    return (
        f"{call}({name!r}): tierckpt removes no single version on demand, as other versions and "
        "nodes may depend on it. Leave this call out: SCR_CACHE_SIZE and SCR_PREFIX_SIZE limit the "
        "number of checkpoints. Files of output are at their own paths: remove them there"
    )


__all__ = [
    "FLAG_CHECKPOINT",
    "FLAG_NONE",
    "FLAG_OUTPUT",
    "complete_output",
    "complete_restart",
    "config",
    "current",
    "delete",
    "drop",
    "finalize",
    "have_restart",
    "init",
    "need_checkpoint",
    "route_file",
    "should_exit",
    "start_output",
    "start_restart",
]
