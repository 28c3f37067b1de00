"""The results file, written after every round: an interrupted run loses one round at most.

Until it is complete, its key `partial` holds the raw timings as well, and another run can continue
with the missing rounds.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lib import targets
from lib.files import write_json

# Runs that differ in one of these, or in a setting, are different measurements.
SAME = (
    "commit",
    "changes",
    "cpu",
    "cores",
    "memory_bytes",
    "gpu",
    "kernel",
    "filesystem",
    "python",
    "torch",
)


class CannotResumeError(Exception):
    """A results file cannot be continued; the message for the user has the reason."""


def write(
    path: Path, about: dict[str, Any], run: targets.Run, partial: dict[str, Any] | None = None
) -> None:
    """Write all figures in seconds and bytes, and `partial` unless the run is complete.

    The file is replaced in one step, so a reader always finds a complete one.
    """
    document = {
        **about,
        "model": run.model,
        "every": run.every,
        "world": run.world,
        "state_bytes": run.state_bytes,
        "methods": [asdict(row) for row in run.rows.values()],
        "limits": {name: asdict(value) for name, value in run.limits.items()},
        "targets": [asdict(verdict) for verdict in targets.judge(run)],
    }
    if partial is not None:
        document["partial"] = partial
    write_json(path, document, indent=None if partial else 1)


def take_up(path: Path, about: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the description of the file's run, with this resumption noted, and its `partial`.

    about: the description of this run. Raises CannotResumeError if the two differ.
    """
    try:
        document = json.loads(path.read_text())
        partial = document.pop("partial", None)
        before = {name: document[name] for name in about}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CannotResumeError(
            f"--resume {path}: no results of an interrupted run of this script ({error!r}); "
            "for a new run, remove --resume"
        ) from error
    if partial is None:
        raise CannotResumeError(f"--resume {path}: this run is complete; nothing is missing")
    found = differences(before, about)
    if found:
        raise CannotResumeError(
            f"--resume {path}: another measurement, started with\n  {before['command']}\n"
            + "".join(f"  {line}\n" for line in found)
            + "Use the same options and code, or remove --resume for a new run"
        )
    return {**before, "resumed": [*document.get("resumed", []), about["date"]]}, partial


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """One line for each forbidden difference between two runs."""
    pairs = [(name, before[name], now[name]) for name in SAME]
    old, new = before["settings"], now["settings"]
    pairs += [(f"--{name}", old.get(name), new.get(name)) for name in sorted({*old, *new})]
    return [f"{name}: {there} there, {here} here" for name, there, here in pairs if there != here]
