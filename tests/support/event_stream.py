"""Event files that a rank would write, at chosen times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from tierckpt.events import Event


class EventStream:
    """One rank's file. Times are seconds of the story; `shift_seconds` is the error of the rank's
    clock, which may be changed on the way."""

    def __init__(self, folder: Path, rank: int = 0, shift_seconds: float = 0.0) -> None:
        self.path = folder / f"events-r{rank:05d}.jsonl"
        self.rank, self.shift_seconds = rank, shift_seconds
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, name: str, at: float, **values: Any) -> None:
        """Append an event of this time."""
        times = {"time_seconds": at + self.shift_seconds, "monotonic_seconds": 1000.0 + at}
        event = Event(name=name, rank=self.rank, **values, **times)
        with self.path.open("a") as file:
            file.write(json.dumps(asdict(event)) + "\n")

    def start(
        self,
        process: float,
        imported: float,
        attach: float,
        attached: float,
        world: int = 1,
        heartbeat_seconds: float = 5.0,
        job: str = "job",
        host: str = "node0",
        **facts: Any,
    ) -> None:
        """Write `started` and `attached`."""
        common = {"host": host, "pid": 1, "world": world, "shim": False}
        seconds = {"import": imported - process, "setup": attach - imported, "attach": 0.0}
        facts = {**common, "heartbeat_seconds": heartbeat_seconds, **facts}
        self.write("started", attach, seconds=seconds, facts=facts)
        self.write("attached", attached, seconds={"attach": attached - attach}, facts={"job": job})

    def restored(self, at: float, version: int, seconds: float) -> None:
        """Write the end of a restore."""
        level = "memory" if version else ""
        self.write("restored", at, level=level, version=version, seconds={"total": seconds})

    def progress(self, at: float, version: int, stall_seconds: float = 0.0, **facts: Any) -> None:
        """Write a record of progress. The first one of a run has the facts `run` and `begun`."""
        if "begun" in facts:
            facts["from"] = facts.pop("begun")
        seconds = {"boundary": stall_seconds, "barrier": 0.0, "save": 0.0}
        self.write("progress", at, version=version, seconds=seconds, facts=facts)

    def closed(
        self, at: float, version: int, seconds: float, reason: str = "the training's end",
        interrupted: bool = False,
    ) -> None:  # fmt: skip
        """Write the clean end."""
        facts = {"interrupted": interrupted}
        what = {"version": version, "seconds": {"close": seconds}, "message": reason}
        self.write("closed", at, **what, facts=facts)
