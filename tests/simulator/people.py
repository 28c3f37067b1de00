"""What people do to a job: they halt it, send it back, pin a version, start it a second time, each
with the product's own commands in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .cluster import ENVIRONMENT, Launch
from .library import Library
from .world import Node, Process

if TYPE_CHECKING:
    from .history import Plan
    from .oracle import Oracle

COMMANDS = "tierckpt.cli.main"


class People:
    """The people of one history, whose job has this path on a node."""

    def __init__(self, library: Library, oracle: Oracle, path: Callable[[Node], str]) -> None:
        self.library, self.world, self.oracle, self.path = library, library.world, oracle, path
        self.halting = False
        """Whether the job was asked to end."""
        self._second: Launch | None = None
        self._pins: list[tuple[Process, Node, int]] = []

    def _run(self, node: Node, *arguments: str) -> Process:
        def main(process: Process) -> int:
            commands = self.library.image(process).load(COMMANDS)
            return int(commands.main(list(arguments)) or 0)

        return self.world.start(node, f"tierckpt {arguments[0]}", main, environ=ENVIRONMENT)

    def _wait(self, process: Process) -> bool:
        """Whether a command ends well. In the driver alone."""
        while process.alive:
            self.world.scheduler.park()
        return _ended_well(process)

    # --- at any moment ----------------------------------------------------------------------------

    def halt(self, node: Node) -> None:
        """Ask the job to end."""
        self.halting = True
        self._run(node, "halt", self.path(node), "--now")

    def pin(self, node: Node) -> None:
        """Keep the newest version on disk for good."""
        version = self.oracle.floor["local"]
        process = self._run(node, "pin", self.path(node), str(version))
        self._pins.append((process, node, version))

    def start_again(self, launch: Launch, plan: Plan, settings: Callable[[Node], Any]) -> None:
        """Start the job while it runs: that must fail, and do no harm."""

        def tell(run: int, rank: int, kind: str, *what: Any) -> None:
            if kind == "restored":
                self.oracle.wrong = self.oracle.wrong or "a job was started while it ran"

        self._second = Launch(self.library, -launch.number, launch.places)
        self._second.start(plan, settings, tell)

    def note_end(self, launch: Launch) -> None:
        """A process has ended. A second start ends before the first one does."""
        for each in [each for each in self._pins if not each[0].alive]:
            self._pins.remove(each)
            process, node, version = each
            self.oracle.pin(node, version, _ended_well(process))
        second = self._second
        if second is None:
            return
        second.note_deaths()
        if any(not each.alive for each in launch.processes):
            self._second = None
            second.kill()

    # --- between two starts -----------------------------------------------------------------------

    def allow(self, node: Node) -> None:
        """Take a request to end back."""
        self.halting = False
        self._wait(self._run(node, "halt", self.path(node), "--clear"))

    def send_back(self, node: Node, version: int) -> bool:
        """Ask for an older version; returns whether the next start must have it."""
        return self._wait(self._run(node, "rollback", self.path(node), str(version)))


def _ended_well(process: Process) -> bool:
    return process.status == 0 and process.failure is None


__all__ = ["People"]
