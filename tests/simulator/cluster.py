"""Jobs of a world: the ranks' processes and their collectives."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .image import PROGRAMS
from .library import Library
from .scheduler import Task
from .world import Node, Process, World

if TYPE_CHECKING:
    from .history import Plan

ENVIRONMENT = {"TIERCKPT_COPY_ENGINE": "torch", "PATH": "/usr/bin:/bin", "HOME": "/root"}
"""Of trainers. The copy engine in C would wait in the processor, and not in the world."""


PATIENCE_SECONDS = 1800.0


class Collectives:
    """The collectives of one launch. The n-th calls of all ranks belong together."""

    def __init__(self, world: World, size: int) -> None:
        self.world, self.size = world, size
        self.rounds: dict[int, dict[int, Any]] = {}
        self.kinds: dict[int, str] = {}
        self.gone: set[int] = set()
        self.waiting: list[Task] = []

    def enter(self, number: int, kind: str, rank: int, value: Any) -> dict[int, Any]:
        """Bring a value."""
        if self.kinds.setdefault(number, kind) != kind:
            raise RuntimeError(f"rank {rank} calls {kind} where another calls {self.kinds[number]}")
        brought = self.rounds.setdefault(number, {})
        brought[rank] = value
        self.notify()
        return brought

    def notify(self) -> None:
        """Let all that wait look again."""
        waiting, self.waiting = self.waiting, []
        for task in waiting:
            self.world.scheduler.wake(task)

    def wait(self, ready: Callable[[], bool], brought: dict[int, Any], seconds: float) -> None:
        """Wait until `ready`. Raises RuntimeError when a rank that is gone has not come."""
        scheduler = self.world.scheduler
        end = scheduler.now + seconds
        while not ready():
            if self.gone - brought.keys():
                raise RuntimeError("Connection closed by peer")
            if scheduler.now >= end:
                raise RuntimeError("Timed out in a collective")
            assert scheduler.current is not None
            self.waiting.append(scheduler.current)
            scheduler.park(end - scheduler.now)


class Reduction:
    """An all-reduce under way."""

    def __init__(self, group: SimulatedGroup, brought: dict[int, Any]) -> None:
        self._group, self._brought = group, brought

    def wait(self) -> list[int]:
        """The result."""
        self._group.wait_for_all(self._brought)
        return [min(column) for column in zip(*self._brought.values(), strict=True)]

    def done(self) -> bool:
        """Whether `wait` returns at once."""
        gone = self._group.collectives.gone - self._brought.keys()
        return len(self._brought) == self._group.size or bool(gone)


class SimulatedGroup:
    """A `tierckpt.Group` of simulated processes."""

    def __init__(self, collectives: Collectives, process: Process, rank: int) -> None:
        self.collectives, self.process = collectives, process
        self.rank, self.size = rank, collectives.size
        self._calls = 0

    def _enter(self, kind: str, value: Any) -> dict[int, Any]:
        self.process.world.enter("collective")
        self._calls += 1
        return self.collectives.enter(self._calls, kind, self.rank, value)

    def wait_for_all(self, brought: dict[int, Any], seconds: float = PATIENCE_SECONDS) -> None:
        """Wait until every rank has brought its part. Raises RuntimeError if one will not."""
        self.collectives.wait(lambda: len(brought) == self.size, brought, seconds)

    def all_gather_object(self, value: Any) -> list[Any]:
        """As of `Group`."""
        image = self.process.image
        assert image is not None
        image.show()
        data = pickle.dumps(value)
        brought = self._enter("gather", data)
        self.wait_for_all(brought)
        image.show()
        return [pickle.loads(brought[rank]) for rank in range(self.size)]

    def broadcast(self, buffer: Any, source: int) -> None:
        """As of `Group`."""
        mine = buffer.clone() if self.rank == source else None
        brought = self._enter(f"broadcast {source}", mine)
        if self.rank != source:
            self.collectives.wait(lambda: source in brought, brought, PATIENCE_SECONDS)
            buffer.copy_(brought[source])

    def all_reduce_min(self, values: list[int]) -> Reduction:
        """As of `Group`."""
        return Reduction(self, self._enter("minimum", list(values)))

    def barrier(self) -> None:
        """As of `Group`."""
        brought = self._enter("barrier", None)
        self.wait_for_all(brought)

    def meet(self, timeout_seconds: float) -> bool:
        """As of `Group`."""
        brought = self._enter("meet", None)
        try:
            self.wait_for_all(brought, timeout_seconds)
        except RuntimeError:
            return False
        return True

    def close(self) -> None:
        """As of `Group`: nothing to release."""


class Launch:
    """The processes of one start of a job."""

    def __init__(self, library: Library, number: int, places: list[Node]) -> None:
        self.library, self.world, self.number = library, library.world, number
        self.collectives = Collectives(self.world, len(places))
        self.gradients = Collectives(self.world, len(places))
        """Those of the training itself: no rank makes a step without the others."""
        self.places = places
        self.processes: list[Process] = []

    def start(self, plan: Plan, settings: Callable[[Node], dict[str, Any]], tell: Any) -> None:
        """Start all ranks."""
        for rank, node in enumerate(self.places):
            self.processes.append(
                self.world.start(
                    node,
                    f"rank{rank}",
                    self._main(rank, plan, settings(node), tell),
                    environ=dict(ENVIRONMENT),
                )
            )

    def _main(
        self, rank: int, plan: Plan, settings: dict[str, Any], tell: Any
    ) -> Callable[[Process], None]:
        def main(process: Process) -> None:
            image = self.library.image(process)
            programs = image.load(PROGRAMS)
            group = SimulatedGroup(self.collectives, process, rank)
            gradients = SimulatedGroup(self.gradients, process, rank)
            told = functools.partial(tell, self.number, rank)

            def reduce_gradients() -> None:
                self.world.scheduler.park(plan.step_seconds)
                gradients.barrier()

            programs.trainer(group, reduce_gradients, self.number, plan.steps, settings, told)

        return main

    @property
    def failed(self) -> bool:
        """Whether a rank has ended with an error, or was killed."""
        return any(not each.alive and each.status != 0 for each in self.processes)

    @property
    def over(self) -> bool:
        """Whether all have ended."""
        return all(not each.alive for each in self.processes)

    def note_deaths(self) -> None:
        """Let collectives learn who is gone."""
        gone = {rank for rank, each in enumerate(self.processes) if not each.alive}
        if gone != self.collectives.gone:
            for each in (self.collectives, self.gradients):
                each.gone = gone
                each.notify()

    def kill(self) -> None:
        """Kill all ranks, as a launcher does when one has failed. One of them may be running."""
        for each in self.processes:
            self.world.end(each, -9)
        self.note_deaths()


def agent_program(library: Library) -> Callable[[Process, list[str]], Any]:
    """The program of agents."""

    def run(process: Process, arguments: list[str]) -> Any:
        return library.image(process).load(PROGRAMS).agent(arguments)

    return run
