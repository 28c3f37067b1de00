"""One run of a program that makes the calls of SCR: phases, routed paths, and advice."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from enum import Enum
from pathlib import Path

from tierckpt._text import counted
from tierckpt.errors import TierckptError
from tierckpt.group import Group

from .files import Files
from .scr_settings import ScrSettings

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
        self._began = self._ended
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

    def _begin_from_current(self) -> None:
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
        self._begin_from_current()
        if flags & CHECKPOINT:
            self.files.begin(str(name) if name else None)
        self._flags, self._phase, self._output = flags, Phase.OUTPUT, {}
        self._began = time.monotonic()

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
        self._costs_seconds.append(self._ended - self._began)
        return whole

    def _copy_out(self) -> str:
        """Copy the files of a checkpoint that is output as well to their own paths; returns the
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
        self._begin_from_current()
        self.files.close()


__all__ = ["CHECKPOINT", "OUTPUT", "Phase", "ScrSession"]
