"""The file of results, written again after every round: a run cut short loses the round it was in.

While it is not complete it holds the raw timings, too, under `partial`; a run that takes it up
again goes on with the missing rounds.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lib import targets
from lib.files import write_json

# Where two runs differ in one of these, they are two measurements. Beside them: the settings.
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
    """Why a file cannot be taken up; the message is for the user."""


def write(
    path: Path, about: dict[str, Any], run: targets.Run, partial: dict[str, Any] | None = None
) -> None:
    """Everything that is printed, in seconds and bytes, and `partial` if there is more to come.

    The file is replaced in one step: whoever reads it, or resumes it, finds a whole one.
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
    """What the file says about its run, with the resumption noted, and its `partial`.

    about: the same of this run. Raises CannotResumeError if the two do not belong together.
    """
    try:
        document = json.loads(path.read_text())
        partial = document.pop("partial", None)
        before = {name: document[name] for name in about}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CannotResumeError(
            f"--resume {path}: no results of a run of this script that was cut short ({error!r}); "
            "leave --resume away for a new run"
        ) from error
    if partial is None:
        raise CannotResumeError(f"--resume {path}: all rounds of it are done; nothing is missing")
    found = differences(before, about)
    if found:
        raise CannotResumeError(
            f"--resume {path}: that was another measurement, begun with\n  {before['command']}\n"
            + "".join(f"  {line}\n" for line in found)
            + "Make them alike, or leave --resume away for a new run"
        )
    return {**before, "resumed": [*document.get("resumed", []), about["date"]]}, partial


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """One line for everything in which two runs differ that must not."""
    pairs = [(name, before[name], now[name]) for name in SAME]
    old, new = before["settings"], now["settings"]
    pairs += [(f"--{name}", old.get(name), new.get(name)) for name in sorted({*old, *new})]
    return [f"{name}: {there} there, {here} here" for name, there, here in pairs if there != here]
