"""Event files: names, places and lines of what `EventLog` writes, for all readers."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ._text import counted
from .errors import ConfigError

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


__all__ = ["Record", "decode", "event_files", "files_in", "lines_of", "name_of", "unreadable"]
