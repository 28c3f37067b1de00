"""Tasks in one thread, and a clock that jumps: who runs next is drawn from the seed.

A task is a greenlet. It runs until it waits, or until a call of the operating system at which the
seed takes the processor away from it. When nobody can run, the clock jumps to the next moment for
which somebody waits.
"""

from __future__ import annotations

import contextlib
import heapq
import random
import select
from collections.abc import Callable
from typing import Any, Protocol

import greenlet

START_SECONDS = 1_000_000.0
"""The clock at the begin of a history."""
TICK_SECONDS = 1e-6
"""A look at the clock takes so long: a loop that waits for a time must come to it."""


class Killed(BaseException):
    """Raised where a task of a dead process would go on."""


class Owner(Protocol):
    """The process of a task."""

    alive: bool
    stopped_until: float


class Task:
    """One thread of a simulated process."""

    def __init__(self, owner: Owner, function: Callable[[], Any], name: str, ident: int) -> None:
        self.owner, self.name, self.ident = owner, name, ident
        self.greenlet = greenlet.greenlet(function)
        self.parked, self.woken = False, False
        self.turn = 0
        """Number of its waits: a timer of an earlier one has no effect."""
        self.done = False


class Scheduler:
    """Runs the tasks of one history after the other."""

    def __init__(self) -> None:
        self.random = random.Random()
        self._idents = 0
        self.begin(0)

    def begin(self, seed: int, switch: float = 0.02) -> None:
        """Start a history. `switch`: share of system calls after which another task runs."""
        self.random.seed(seed)
        self.first_ident = self._idents + 1
        self.switch = switch
        self.tick_seconds = TICK_SECONDS
        self.now = START_SECONDS
        self.steps = 0
        """Number of turns of tasks."""
        self._ready: list[Task] = []
        self._timers: list[tuple[float, int, Task, int]] = []
        self._sequence = 0
        self._watched: dict[int, list[tuple[Task, int]]] = {}
        self._poll = select.poll()
        self._hub = greenlet.getcurrent()
        self.current: Task | None = None

    def spawn(self, owner: Owner, function: Callable[[], Any], name: str) -> Task:
        """Start a task, which runs at some later time."""
        self._idents += 1  # never used again, also not by a later history
        task = Task(owner, function, name, self._idents)
        task.greenlet.parent = self._hub
        self._ready.append(task)
        return task

    # --- called by tasks --------------------------------------------------------------------------

    def look(self) -> float:
        """The time, in seconds."""
        self.now += self.tick_seconds
        return self.now

    def park(self, seconds: float | None = None) -> bool:
        """Wait to be woken. False when that took longer than `seconds`."""
        task = self.current
        assert task is not None, "only a task can wait"
        task.turn += 1
        task.parked, task.woken = True, False
        if seconds is not None:
            self._sequence += 1
            end = self.now + max(seconds, TICK_SECONDS)
            heapq.heappush(self._timers, (end, self._sequence, task, task.turn))
        self._hub.switch()
        return task.woken

    def wake(self, task: Task) -> None:
        """Let a task that waits run again."""
        if task.parked:
            task.parked, task.woken = False, True
            self._ready.append(task)

    def give_way(self) -> None:
        """A moment at which another task may run."""
        if self._ready and self.random.random() < self.switch:
            task = self.current
            assert task is not None
            self._ready.append(task)
            self._hub.switch()

    def wait_for(self, wanted: list[tuple[int, int]], seconds: float | None) -> None:
        """Wait until one of these descriptors may be ready for these events of poll, or so long."""
        task = self.current
        assert task is not None
        for fd, events in wanted:
            self._watched.setdefault(fd, []).append((task, events))
            self._register(fd)
        self.park(seconds)
        for fd, events in wanted:
            waiting = self._watched[fd]
            waiting.remove((task, events))
            if waiting:
                self._register(fd)
            else:
                del self._watched[fd]
                with contextlib.suppress(KeyError):
                    self._poll.unregister(fd)

    def poke(self, fd: int) -> None:
        """Let those who wait for a descriptor look again: it is shut down, or closed."""
        for task, _ in self._watched.get(fd, ()):
            self.wake(task)

    def _register(self, fd: int) -> None:
        events = 0
        for _, each in self._watched[fd]:
            events |= each
        self._poll.register(fd, events)

    # --- the loop ---------------------------------------------------------------------------------

    def run(self, until: Callable[[], bool], most_seconds: float, most_steps: int) -> str:
        """Run tasks until `until`, nobody can run, or a limit is over; returns why it ended."""
        end, last = self.now + most_seconds, self.steps + most_steps
        while not until():
            if not self._ready and not self._some_are_ready() and not self._jump(end):
                return "nobody can run" if not self._timers else "the time is over"
            if self.steps >= last:
                return "too many steps"
            self._turn()
        return ""

    def _turn(self) -> None:
        ready = self._ready
        index = int(self.random.random() * len(ready)) if len(ready) > 1 else 0
        task = ready[index]
        ready[index] = ready[-1]
        ready.pop()
        if not task.owner.alive:
            return  # it stays where it was killed
        if task.owner.stopped_until > self.now:
            self._sequence += 1
            task.parked = True
            later = task.owner.stopped_until, self._sequence, task, task.turn
            heapq.heappush(self._timers, later)
            return
        self.steps += 1
        self.current = task
        try:
            task.greenlet.switch()
        finally:
            self.current = None
        task.done = task.greenlet.dead

    def _some_are_ready(self) -> bool:
        if not self._watched:
            return False
        for fd, events in self._poll.poll(0):
            for task, wanted in self._watched[fd]:
                if task.owner.stopped_until > self.now:
                    continue
                if events & (wanted | select.POLLHUP | select.POLLERR | select.POLLNVAL):
                    self.wake(task)
        return bool(self._ready)

    def _jump(self, end: float) -> bool:
        while self._timers:
            at, _, task, turn = self._timers[0]
            if not task.parked or task.turn != turn or not task.owner.alive:
                heapq.heappop(self._timers)
                continue
            if at > end:
                return False
            heapq.heappop(self._timers)
            self.now = max(self.now, at)
            task.parked = False
            self._ready.append(task)
            return True
        return False

    def bury(self, tasks: list[Task]) -> None:
        """End tasks of dead processes for good: their code sees `Killed`, and must have no effect
        any more."""
        for task in tasks:
            if not task.greenlet.dead and task.greenlet:
                self.current = task
                try:
                    with contextlib.suppress(BaseException):
                        task.greenlet.throw(Killed)
                finally:
                    self.current = None
