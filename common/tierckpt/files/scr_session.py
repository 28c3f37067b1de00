"""One run of a program that makes the calls of SCR: phases, routed paths, and advice.

The settings of SCR are known by their names, and the settings of Tierckpt follow from them; that
part is pure.

The names and their meaning are those of SCR's user guide, "Configure a job". A name that would
change where or how data is stored, and has no counterpart here, is refused with a text; names about
SCR's own commands, logs and buffers have no effect, and a notice says so.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from enum import Enum
from pathlib import Path
from string import Template
from typing import Any

from msgspec import Struct

from tierckpt._text import counted, near_names, question
from tierckpt.core.retention import KEEP_ALL
from tierckpt.errors import ConfigError, TierckptError
from tierckpt.group import Group

from .files import Files

__all__ = [
    "CHECKPOINT",
    "OUTPUT",
    "Phase",
    "ScrSession",
    "ScrSettings",
    "merged",
    "of_file",
    "scr_settings",
]


SCHEMES = ("SINGLE", "PARTNER", "XOR", "RS")
KNOWN = {
    "SCR_PREFIX": "",
    "SCR_CACHE_BASE": "/dev/shm",
    "SCR_CACHE_SIZE": "1",
    "SCR_COPY_TYPE": "XOR",
    "SCR_SET_SIZE": "8",
    "SCR_SET_FAILURES": "2",
    "SCR_FLUSH": "10",
    "SCR_PREFIX_SIZE": "0",
    "SCR_CHECKPOINT_INTERVAL": "0",
    "SCR_CHECKPOINT_SECONDS": "0",
    "SCR_CHECKPOINT_OVERHEAD": "0",
    "SCR_HALT_SECONDS": "0",
    "SCR_CURRENT": "",
}
"""Settings with an effect, and SCR's defaults."""
NO_EFFECT = {
    f"SCR_{name}"
    for name in (
        *("ENABLE", "GLOBAL_RESTART", "FETCH", "FETCH_WIDTH", "FETCH_BYPASS", "DISTRIBUTE"),
        *("CACHE_PURGE", "CACHE_BYPASS", "PREFIX_PURGE", "PRESERVE_DIRECTORIES", "USE_CONTAINERS"),
        *("HALT_EXIT", "HALT_ENABLED", "GROUP", "HOP_DISTANCE", "CONTAINER_SIZE"),
        *("FLUSH_ON_RESTART", "FLUSH_WIDTH", "FLUSH_TYPE", "FLUSH_POSTSTAGE", "FLUSH_ASYNC"),
        *("FLUSH_ASYNC_BW", "FLUSH_ASYNC_PERCENT", "FLUSH_ASYNC_USLEEP"),
        *("CRC_ON_COPY", "CRC_ON_DELETE", "CRC_ON_FLUSH", "MPI_BUF_SIZE", "FILE_BUF_SIZE"),
        *("DEBUG", "LOG_ENABLE", "LOG_TXT_ENABLE", "LOG_SYSLOG_ENABLE", "LOG_SYSLOG_PREFIX"),
        *("LOG_SYSLOG_FACILITY", "LOG_SYSLOG_LEVEL", "LOG_DB_ENABLE", "LOG_DB_DEBUG"),
        *("LOG_DB_HOST", "LOG_DB_NAME", "LOG_DB_USER", "LOG_DB_PASS"),
        *("RUNS", "MIN_NODES", "EXCLUDE_NODES", "WATCHDOG", "WATCHDOG_TIMEOUT"),
        *("WATCHDOG_TIMEOUT_PFS", "CNTL_BASE", "JOB_ID", "JOB_NAME", "USER_NAME", "CLUSTER_NAME"),
    )
}
"""SCR's other settings. Some of their values are refused."""
OF_THE_FILE = "SCR_CONF_FILE"
"""The variable with the name of the user's file."""
AFRESH = "to start without the checkpoints of earlier runs, give another SCR_PREFIX"
REFUSED = {
    ("SCR_ENABLE", "0"): "leave out the calls of scr instead",
    ("SCR_GLOBAL_RESTART", "1"): "open the paths that route_file() returns: each rank finds its "
    "own files on its node",
    ("SCR_FETCH", "0"): AFRESH,
    ("SCR_CACHE_PURGE", "1"): AFRESH,
    ("SCR_PREFIX_PURGE", "1"): AFRESH,
    ("SCR_HALT_EXIT", "1"): "leave the loop when should_exit() is true, and call finalize()",
    ("SCR_FLUSH_ON_RESTART", "1"): "restart with have_restart(), which needs no flush first",
    ("SCR_COPY_TYPE", "FILE"): f"give one of {', '.join(SCHEMES)}",
}
"""Values without a counterpart, each with the remedy."""


class ScrSettings(Struct, frozen=True):
    """The settings of one run."""

    prefix: str
    """Directory of the files' own paths."""
    interval: int
    seconds: float
    overhead: float
    """Largest share of the time that checkpoints take, in percent; 0: no limit is set."""
    current: str
    """Name of the checkpoint to restart from; empty: the newest."""
    of_files: dict[str, Any]
    """Settings of `Files`."""
    notices: tuple[str, ...] = ()
    """What of the settings this job cannot have, as text."""

    @property
    def advises(self) -> bool:
        """True if `need_checkpoint` can ever be true by itself."""
        return bool(self.interval or self.seconds or self.overhead)


def merged(
    given: Mapping[str, str], in_file: Mapping[str, str], environment: Mapping[str, str]
) -> dict[str, str]:
    """All settings by name: variables win over the user's file, and that over `config()`, as in
    SCR."""
    own = {name: value for name, value in environment.items() if name.startswith("SCR_") and value}
    return {**KNOWN, **given, **in_file, **own}


def of_file(text: str, environment: Mapping[str, str]) -> dict[str, str]:
    """The settings in a user's configuration file. Lines of descriptors (`CKPT=0 TYPE=XOR`) have no
    effect, as in SCR without SCR_COPY_TYPE=FILE."""
    found = {}
    for line in text.splitlines():
        name, is_set, value = line.partition("#")[0].partition("=")
        if is_set and name.strip().startswith("SCR_"):
            found[name.strip()] = Template(value.strip().strip('"')).safe_substitute(environment)
    return found


def scr_settings(found: Mapping[str, str], nodes: int) -> ScrSettings:
    """What follows from all settings (`merged`) for a job of that many nodes. Raises
    ConfigError."""
    for (name, value), remedy in REFUSED.items():
        if found.get(name, "").strip().upper() == value:
            raise ConfigError(f"{name}={value} is not supported by tierckpt.scr: {remedy}")
    number = {name: _number(name, found[name]) for name in KNOWN if KNOWN[name].isdigit()}
    prefix = os.path.realpath(found["SCR_PREFIX"] or os.getcwd())
    flush = int(number["SCR_FLUSH"])
    base = os.path.abspath(found["SCR_CACHE_BASE"])
    job = hashlib.sha256(os.fsencode(prefix)).hexdigest()[:12]
    of_files: dict[str, Any] = {
        "path": os.path.join(base, f"tierckpt-scr-{os.getuid()}", job),
        "job_id": f"scr-{job}",
        "local_every_steps": 1,
        "local_every_seconds": 0.0,
        "local_keep": max(int(number["SCR_CACHE_SIZE"]), 1),
        **_redundancy(found["SCR_COPY_TYPE"], number, nodes),
        "halt_seconds_left": number["SCR_HALT_SECONDS"],
    }
    of_files |= {
        "persistent_path": os.path.join(prefix, ".tierckpt"),
        "persistent_every_steps": flush,
        "persistent_every_seconds": 0.0 if flush else 1e8,
        "persistent_keep": int(number["SCR_PREFIX_SIZE"]) or KEEP_ALL,
    }
    return ScrSettings(
        prefix,
        int(number["SCR_CHECKPOINT_INTERVAL"]),
        number["SCR_CHECKPOINT_SECONDS"],
        number["SCR_CHECKPOINT_OVERHEAD"],
        found["SCR_CURRENT"],
        of_files,
        tuple(_without_effect(found, _too_few(found["SCR_COPY_TYPE"], number, nodes))),
    )


def _without_effect(found: Mapping[str, str], too_few: str) -> Iterator[str]:
    """Sentences about the settings that this job cannot have."""
    if too_few:
        yield too_few
    known = {*KNOWN, *NO_EFFECT, OF_THE_FILE}
    for name in sorted(found.keys() - known):
        hint = question(near_names(name, sorted(known), cutoff=0.75))
        yield "; ".join(
            filter(None, [f"{name} is no setting of SCR, and has no effect", hint.strip()])
        )
    if without := sorted(found.keys() & NO_EFFECT):
        verb = "have" if without[1:] else "has"
        yield f"{', '.join(without)} {verb} no effect in tierckpt.scr (docs/files.md)"


def _redundancy(scheme: str, number: Mapping[str, float], nodes: int) -> dict[str, Any]:
    """Settings of the peer level. As in SCR, sets are as large as the job's nodes allow."""
    scheme = scheme.strip().upper()
    if scheme not in SCHEMES:
        raise ConfigError(f"SCR_COPY_TYPE is {scheme!r}; valid: {', '.join(SCHEMES)}")
    size = min(max(int(number["SCR_SET_SIZE"]), 2), nodes)
    failures = int(number["SCR_SET_FAILURES"])
    if scheme == "SINGLE" or _too_few(scheme, number, nodes):
        return {"peer_redundancy": "none"}
    if scheme == "RS":
        return {"peer_redundancy": f"rs {size - failures}+{failures}"}
    return {"peer_redundancy": f"{scheme.lower()} of {size}"}


def _too_few(scheme: str, number: Mapping[str, float], nodes: int) -> str:
    """The reason why the job has no redundancy between nodes, though it asks for it."""
    scheme = scheme.strip().upper()
    size = min(max(int(number["SCR_SET_SIZE"]), 2), nodes)
    needs = int(number["SCR_SET_FAILURES"]) + 1 if scheme == "RS" else 2
    if scheme == "SINGLE" or size >= needs:
        return ""
    return (
        f"SCR_COPY_TYPE={scheme} needs sets of {needs} nodes or more, and sets have {size} here: "
        "a checkpoint is lost with its node, unless it is in SCR_PREFIX. SCR_COPY_TYPE=SINGLE says "
        "that this is meant"
    )


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9:
        raise ConfigError(f"{name} is {text!r}; it must be a number, 0 or more")
    return value


CHECKPOINT, OUTPUT = 1, 2
"""Flags of `start_output`."""


class Phase(Enum):
    """The program's phase, which decides what `route_file` means."""

    IDLE = "outside of start_output() and start_restart()"
    OUTPUT = "between start_output() and complete_output()"
    RESTART = "between start_restart() and complete_restart()"


class ScrSession:
    """From `init` to `finalize`. All methods but `route` are collective. Raises TierckptError for a
    call in the wrong phase."""

    def __init__(self, settings: ScrSettings, group: Group) -> None:
        self._settings, self._group = settings, group
        self.files = Files(group=group, when_busy="wait", **settings.of_files)
        for text in settings.notices:
            self._note(text)
        self._phase = Phase.IDLE
        self._restored: Mapping[str, str] = {}
        self._calls = 0
        """Number of calls of `need_checkpoint`."""
        self._ended = time.monotonic()
        self._started = self._ended
        self._costs_seconds: list[float] = []
        self._named = settings.current
        """Name of the checkpoint that was asked for, by SCR_CURRENT or `current`; else empty."""
        self._output: dict[str, str] = {}
        """Paths of a version's files by their paths in the prefix; of output, both are the same."""
        self._flags = 0

    def _note(self, text: str) -> None:
        self.files.warn(text)

    def _in(self, phase: Phase, call: str) -> None:
        if self._phase is not phase:
            raise TierckptError(f"{call} is called {self._phase.value}; it belongs {phase.value}")

    # --- paths ----------------------------------------------------------------------------------

    def route(self, name: str) -> str:
        """See `scr.route_file`."""
        if self._phase is Phase.IDLE:
            return name
        target = os.path.join(os.path.realpath(os.path.dirname(name) or "."), Path(name).name)
        if self._phase is Phase.RESTART:
            return self._restored_path(name, target)
        inside = self._inside(target, name)
        if not self._flags & CHECKPOINT:  # output goes where it belongs
            os.makedirs(os.path.dirname(target), exist_ok=True)
            self._output[target] = target
            return target
        current = self.files.current
        assert current is not None
        self._output[target] = current.route(inside)
        return self._output[target]

    def _inside(self, target: str, name: str) -> str:
        """The path relative to the prefix."""
        relative = os.path.relpath(target, self._settings.prefix)
        if relative.startswith(".."):
            raise TierckptError(
                f"{name!r} is not in SCR_PREFIX ({self._settings.prefix}): give a path inside, or "
                "another SCR_PREFIX"
            )
        return relative

    def _restored_path(self, name: str, target: str) -> str:
        with suppress(TierckptError, KeyError):
            return self._restored[self._inside(target, name)]
        alike = [path for path in self._restored if Path(path).name == Path(name).name]
        if len(alike) == 1:  # SCR takes a file's name alone, too
            return self._restored[alike[0]]
        raise TierckptError(
            f"{name!r} is no file of this rank in the checkpoint; it has "
            f"{', '.join(sorted(self._restored)[:8]) or 'none'}"
        )

    # --- a restart ------------------------------------------------------------------------------

    def have_restart(self) -> str | None:
        """See `scr.have_restart`."""
        self._in(Phase.IDLE, "have_restart()")
        return None if self.files.begun else self._find()

    def _find(self) -> str | None:
        """The newest checkpoint, or the named one."""
        name = self.files.latest()
        seen = []
        while self._named and name not in (None, self._named):
            seen.append(str(name))
            self.files.refuse()
            name = self.files.latest()
        if self._named and name is None:
            wanted, self._named = self._named, ""
            raise TierckptError(
                f"there is no complete checkpoint {wanted!r} (SCR_CURRENT, or current()), but: "
                f"{', '.join(seen) or 'none'}"
            )
        return name

    def start_restart(self) -> str:
        """See `scr.start_restart`."""
        self._in(Phase.IDLE, "start_restart()")
        name, size = self.have_restart(), self._group.size
        if name is not None and (wrote := self.files.ranks_found) != size:
            place = os.path.join(self._settings.prefix, ".tierckpt")
            raise TierckptError(
                f"checkpoint {name!r} has files of {counted(wrote, 'rank')}, and this job has "
                f"{size}: start as many. Or write all files to a folder (`tierckpt export {place} "
                f"FOLDER --format files`), read them there, and call current({name!r})"
            )
        restored = self.files.load() if name is not None else None
        if restored is None:
            raise TierckptError("start_restart(): there is no checkpoint; ask have_restart() first")
        self._restored, self._phase = restored, Phase.RESTART
        return restored.name

    def complete_restart(self, valid: bool) -> bool:
        """See `scr.complete_restart`."""
        self._in(Phase.RESTART, "complete_restart()")
        self._phase, self._restored, self._named = Phase.IDLE, {}, ""
        whole = all(self._group.all_gather_object(bool(valid)))
        if whole:
            self.files.accept()
        else:
            self.files.refuse()
        return whole

    def current(self, name: str) -> None:
        """See `scr.current`."""
        self._in(Phase.IDLE, "current()")
        if self.files.begun:
            raise TierckptError(
                f"current({name!r}) after the restart or the first output: call it before"
            )
        self._named = name
        self._find()

    def _start_from_current(self) -> None:
        """A program that named its checkpoint has restarted from it by itself."""
        if self._named and not self.files.begun and self._find() is not None:
            self.files.accept()

    # --- output ---------------------------------------------------------------------------------

    def need_checkpoint(self) -> bool:
        """See `scr.need_checkpoint`."""
        self._in(Phase.IDLE, "need_checkpoint()")
        self._calls += 1
        if self._calls == 1 and not self._settings.advises:
            self._note(
                "need_checkpoint() is true only if the job is to end: set SCR_CHECKPOINT_INTERVAL, "
                "SCR_CHECKPOINT_SECONDS or SCR_CHECKPOINT_OVERHEAD, or do not ask it"
            )
        due: bool = self._group.all_gather_object(self._is_due(time.monotonic()))[0]
        return self.files.should_exit() or due

    def _is_due(self, now_seconds: float) -> bool:
        settings, passed = self._settings, now_seconds - self._ended
        if settings.interval and self._calls % settings.interval == 0:
            return True
        if settings.seconds and passed >= settings.seconds:
            return True
        if not settings.overhead:
            return False
        if not self._costs_seconds:  # the first one shows the cost
            return True
        cost = sum(self._costs_seconds) / len(self._costs_seconds)
        return 100.0 * cost < settings.overhead * (passed + cost)

    def start_output(self, name: str, flags: int) -> None:
        """See `scr.start_output`."""
        self._in(Phase.IDLE, "start_output()")
        if flags & ~(CHECKPOINT | OUTPUT):
            raise TierckptError(
                f"start_output({name!r}, {flags}): flags are FLAG_CHECKPOINT and FLAG_OUTPUT"
            )
        calls = self._group.all_gather_object((name, flags))
        for rank, call in enumerate(calls):
            if call != calls[0]:
                raise TierckptError(
                    f"start_output{call} by rank {rank}, and start_output{calls[0]} by rank 0: all "
                    "ranks must give the same name and flags"
                )
        self._start_from_current()
        if flags & CHECKPOINT:
            self.files.begin(str(name) if name else None)
        self._flags, self._phase, self._output = flags, Phase.OUTPUT, {}
        self._started = time.monotonic()

    def complete_output(self, valid: bool) -> bool:
        """See `scr.complete_output`."""
        self._in(Phase.OUTPUT, "complete_output()")
        self._phase = Phase.IDLE
        trouble = "" if valid else "the program called complete_output(valid=False)"
        if not self._flags & CHECKPOINT:
            missing = [path for path in self._output if not os.path.isfile(path)]
            return all(self._group.all_gather_object(not (trouble or missing)))
        if self._flags & OUTPUT and not trouble:
            trouble = self._copy_out()
        whole = self.files.end(trouble)
        self._ended = time.monotonic()
        self._costs_seconds.append(self._ended - self._started)
        return whole

    def _copy_out(self) -> str:
        """Copy the files of a checkpoint, also an output, to their own paths; returns the
        reason of a failure."""
        part = ""
        try:
            for target, path in self._output.items():
                os.makedirs(os.path.dirname(target), exist_ok=True)
                part = f"{target}.tierckpt-part"
                shutil.copy2(path, part)
                os.replace(part, target)
        except OSError as error:
            with suppress(OSError):
                os.unlink(part)
            return f"its files could not be copied to SCR_PREFIX: {error}"
        return ""

    def finalize(self) -> None:
        """See `scr.finalize`."""
        self._in(Phase.IDLE, "finalize()")
        self._start_from_current()
        self.files.close()
