"""Events: one small record per checkpoint and level, to logging, a JSONL file and callbacks.

    def on_event(event):
        if event.name == "sealed":
            print(event.version, event.seconds["stall"])

`tierckpt.exporters` has receivers for Prometheus, TensorBoard and other tools. Names, places and
lines of the files that `EventLog` writes are here for all readers.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from msgspec import Struct, field
from msgspec.structs import asdict

from ._appender import Appender
from ._text import counted
from .errors import ConfigError

if TYPE_CHECKING:
    from .callbacks import CallbackList

__all__ = ["Record", "decode", "event_files", "files_in", "lines_of", "name_of", "unreadable"]


Record = dict[str, Any]
"""An event as it was written. All fields of `Event` that `decode` names are there."""
LATEST_SECONDS = 1e11
"""A later Unix time, of the year 5138, is damage."""
_NAME = re.compile(r"events-r(\d+)\.jsonl")


def name_of(rank: int) -> str:
    """The name of a rank's file."""
    return f"events-r{rank:05d}.jsonl"


def files_in(folder: Path) -> dict[int, Path]:
    """The event files in a folder, by rank. Raises OSError."""
    found = {int(m[1]): folder / m[0] for m in map(_NAME.fullmatch, os.listdir(folder)) if m}
    return dict(sorted(found.items()))


def event_files(places: Iterable[Path]) -> list[Path]:
    """The event files in these folders and at these paths, each once. Raises ConfigError if a
    folder has none."""
    found: list[Path] = []
    for place in places:
        try:
            here = [*files_in(place).values()] if place.is_dir() else [place]
        except OSError as error:
            raise ConfigError(f"{place} cannot be read: {error.strerror or error}") from error
        if not here:
            below = sorted({str(path.parent) for path in place.glob("*/events-r*.jsonl")})
            hint = f"; there are some in {', '.join(below)}" if below else ""
            raise ConfigError(
                f"{place} has no files events-r*.jsonl{hint}; give the folder in the setting "
                "events_dir, with which the job has to be started"
            )
        found += here
    return [*{os.path.realpath(path): path for path in found}.values()]


def lines_of(path: Path) -> Iterator[bytes]:
    """The lines of a file. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            yield from file
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error


def unreadable(path: Path, number: int) -> list[str]:
    """The note about lines that `decode` refused; none if there were none."""
    lines = counted(number, "unreadable line was", "unreadable lines were")
    return [f"{path}: {lines} left out"] if number else []


def decode(line: bytes) -> Record | None:
    """The event in a line, with checked types; None if the line is none: half a line of a killed
    process, damage, or another program's line. Unknown names are events."""
    try:
        record = json.loads(line)
        found = {
            **record,
            "name": str(record["name"]),
            "level": str(record["level"]),
            "version": int(record["version"]),
            "rank": int(record["rank"]),
            "nbytes": int(record.get("nbytes", 0)),
            "seconds": {str(k): float(v) for k, v in record["seconds"].items()},
            "message": str(record.get("message", "")),
            "facts": dict(record.get("facts", {})),
            "time_seconds": float(record["time_seconds"]),
        }
        monotonic = found["monotonic_seconds"] = record.get("monotonic_seconds")
        times = [found["time_seconds"], *found["seconds"].values()]
        times += [] if monotonic is None else [float(monotonic)]
        damaged = not all(math.isfinite(each) for each in times)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
    return None if damaged or abs(found["time_seconds"]) > LATEST_SECONDS else found


logger = logging.getLogger("tierckpt")

WITH_MESSAGE = ("notice", "restored", "waiting", "ended")
"""Events with a complete message; a notice's version is only the one at which it came."""
ABOUT_NO_VERSION = ("rejected", "interval")
RECORDS = ("started", "attached", "progress")
"""Records of `goodput.heartbeat`, in the file alone."""
ALWAYS_SHOWN = ("restored", "waiting", "ended")
"""Also shown, like warnings, if the script has set up no logging; those of rank 0."""


class Event(Struct, frozen=True):
    """One event of one version on one level, seen from one rank."""

    name: str
    """`sealed`, `committed`, `skipped`, `failed`, `restored`, `rejected`, `interval`, `closed`,
    `ended`, `drifted`, `waiting`, `notice`; in the file also `started`, `attached`, `progress`
    (`RECORDS`)."""
    level: str = ""
    """`memory`, `local`, `peer`, `persistent`, or empty."""
    version: int = -1
    """Completed optimizer steps; -1: the event is about no version."""
    rank: int = 0
    """The rank that reports."""
    nbytes: int = 0
    """Bytes of this rank's part."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Durations by name: `boundary`, `barrier`, `stall` (both), `copy`, `write`, `commit`, ..."""
    reason: str = ""
    """For `skipped`: the level was `busy`, or a newer version `superseded` this one."""
    behind_since: int | None = None
    """For `failed` and `skipped`: the newest version that the level has, if any."""
    message: str = ""
    """The text for people."""
    severity: int = logging.DEBUG
    facts: dict[str, Any] = field(default_factory=dict)
    """Further values of records for `tierckpt goodput`, as JSON."""
    time_seconds: float = field(default_factory=time.time)
    """Unix time."""
    monotonic_seconds: float = field(default_factory=time.monotonic)
    """The same moment on the clock of `time.monotonic()`, which cannot be set."""

    def text(self) -> str:
        """The event in one line."""
        return f"[rank {self.rank}] {self._content()}"

    def _content(self) -> str:
        if self.name in WITH_MESSAGE:
            return self.message
        if self.name in ABOUT_NO_VERSION:
            return f"{' '.join(filter(None, (self.name, self.level)))}: {self.message}"
        spent = ", ".join(f"{k} {1e3 * v:.1f} ms" for k, v in self.seconds.items())
        newest = self.behind_since
        parts = [
            self.name,
            f"v{self.version}" if self.version >= 0 else "",
            f"to {self.level}" if self.level and self.name == "committed" else self.level,
            f"{self.nbytes / 1e6:.1f} MB" if self.nbytes else "",
            f"({spent})" if spent else "",
            f"- {self.message}" if self.message else "",
            f"(newest version there: v{newest})" if newest is not None else "",
        ]
        return " ".join(p for p in parts if p)


Callback = Callable[[Event], None]


class JobEnd(Struct, frozen=True):
    """What the end of a job has left: the newest version on each of its levels."""

    version: int = 0
    """Completed optimizer steps at the end; 0: nothing was trained or restored."""
    newest: Mapping[str, int | None] = field(default_factory=dict)
    """The newest version complete on each level, as far as this rank knows; None: it has
    none. `memory` only where it was not freed."""
    missing: tuple[str, ...] = ()
    """Levels that lack `version`."""

    @property
    def complete(self) -> bool:
        """True if every level has `version`."""
        return not self.missing


def check_receiver(callback: Callback | None) -> None:
    """Raise TypeError for anything but a callable: it would fail at every event."""
    if callback is not None and not callable(callback):
        raise TypeError(f"on_event is {callback!r}; give a function that takes an Event")


class EventLog:
    """Distributes events. Used on the training thread; never raises into it."""

    def __init__(
        self,
        rank: int,
        folder: str | None = None,
        callback: Callback | None = None,
        callbacks: CallbackList | None = None,
        by_child: bool = False,
    ) -> None:
        """`callback` receives every event, and so does `on_event` of `callbacks`. `by_child`: a
        child writes the file in `folder`, see `Appender`."""
        self.rank = rank
        self.counts: dict[str, int] = {}
        """Number of events, by `name` and `name/level`."""
        self.depth = 0
        """Number of nested calls of `emit` while receivers are called."""
        self._callbacks = [] if callback is None else [callback]
        self._objects = callbacks
        self._repeated_errors = RepeatedErrorLog()
        self._file: Appender | None = None
        self._was_late = False
        if folder is not None:
            path = Path(folder) / name_of(rank)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._file = Appender(_opened(path), by_child)
            except OSError as error:
                why = f"{path} is not written: {error}; check the setting events_dir"
                self.emit("notice", message=why, severity=logging.ERROR)

    def add_callback(self, callback: Callback) -> None:
        """Call `callback` with every event from now on, on the training thread."""
        self._callbacks.append(callback)

    def _count(self, name: str, level: str) -> None:
        for key in (name, f"{name}/{level}"):
            self.counts[key] = self.counts.get(key, 0) + 1

    def count_unwanted(self, key: str) -> bool:
        """Count an event for debugging, given as `name/level`, if it goes to no receiver, file or
        log; returns whether it was counted."""
        if self._callbacks or self._file is not None or logger.isEnabledFor(logging.DEBUG):
            return False
        if self._objects:
            return False
        name = key.partition("/")[0]
        counts = self.counts
        counts[name], counts[key] = counts.get(name, 0) + 1, counts.get(key, 0) + 1
        return True

    @property
    def has_file(self) -> bool:
        """True if events are written to a file."""
        return self._file is not None

    def record(self, name: str, **values: Any) -> None:
        """Write an event to the file alone: a record for `tierckpt goodput`, not for people."""
        self._call(0, self._write, Event(name=name, rank=self.rank, **values))

    def emit(self, name: str, **values: Any) -> Event:
        """Make an event and distribute it; a failing receiver is reported, not raised."""
        event = Event(name=name, rank=self.rank, **values)
        self._count(name, event.level)
        if logger.hasHandlers():
            if logger.isEnabledFor(event.severity):
                logger.log(event.severity, "%s", event.text())
        elif logger.isEnabledFor(_severity_shown(event)):
            _show(event.text())
        self.depth += 1
        try:
            for which, receive in enumerate((self._write, *self._callbacks)):
                self._call(which, receive, event)
            if self._objects:
                self._objects.call("on_event", event)
        finally:
            self.depth -= 1
        return event

    def _call(self, which: int, receive: Callback, event: Event) -> None:
        try:
            receive(event)
        except Exception as error:
            text = f"an event receiver failed; the event was: {event.text()}"
            self._repeated_errors.log(which, text, error)

    def _write(self, event: Event) -> None:
        if self._file is None:
            return
        line = json.dumps(asdict(event), separators=(",", ":")) + "\n"
        try:
            self._file.write(line.encode())
        except OSError as error:
            self._give_up(error)
        else:
            was_late, self._was_late = self._was_late, self._file.is_late
            if self._was_late and not was_late:
                why = f"{self._file.name} does not answer: events wait in memory"
                self.emit("notice", message=why, severity=logging.ERROR)

    def _give_up(self, error: OSError) -> None:
        file, self._file = self._file, None
        assert file is not None
        with contextlib.suppress(OSError):
            file.close()
        why = f"no more events are written to {file.name}: {error}"
        self.emit("notice", message=why, severity=logging.ERROR)

    def close(self) -> None:
        """Close the file."""
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                why = f"{file.name} lacks the last events: {error}"
                self.emit("notice", message=why, severity=logging.ERROR)


def _severity_shown(event: Event) -> int:
    """The severity used if no logging is set up: Python then shows warnings and errors."""
    if event.name in ALWAYS_SHOWN and event.severity == logging.INFO and event.rank == 0:
        return logging.WARNING
    return event.severity


def _show(text: str) -> None:
    """Print on standard error, as Python does without logging set up, but with the logger's
    name."""
    if logging.lastResort is not None and sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):  # without a reader
            print(f"tierckpt: {text}", file=sys.stderr, flush=True)


def _opened(path: Path) -> BinaryIO:
    """Open a file to append events, the next of which starts on a new line. Raises OSError."""
    # Unbuffered: `close` must not try again to write data that a full disk refused.
    file = path.open("ab+", buffering=0)
    try:
        if file.seek(0, os.SEEK_END) and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
            file.write(b"\n")  # a killed process, or a node without power, left half a line
    except OSError:
        file.close()
        raise
    return file


class RepeatedErrorLog:
    """Logs repeated errors of one caller at a decreasing rate. Its thread; never raises."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[Hashable, type[Exception]]] = Counter()

    def log(self, source: Hashable, text: str, error: Exception) -> None:
        """Report a failed function, described by `text`: with a traceback for the first error of
        this kind from `source`, then in one line for the 10th, 100th, ... error."""
        kind = (source, type(error))
        self._counts[kind] += 1
        count = self._counts[kind]
        if count == 1:
            logger.error("%s", text, exc_info=error)
        elif str(count).strip("0") == "1":
            repeated = "%s. Such an error %d times so far; the last: %s: %s"
            logger.error(repeated, text, count, type(error).__name__, error)
