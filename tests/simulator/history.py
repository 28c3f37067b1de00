"""Histories: a job, its settings, and the failures that meet it, all drawn from a seed."""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import io
import os
import random
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .cluster import Launch, agent_program
from .disk import Disk
from .library import Library
from .oracle import Oracle
from .people import People
from .scheduler import Killed
from .store import SCHEME
from .world import Node, Process, World

BEYOND_A_NODE = ("persistent_every_steps", "peer_redundancy")
"""Settings of levels that survive the loss of a disk."""
_VERSION = re.compile(r"/v(\d{10})\.")
HOUR_SECONDS = 3600.0
MOST_TURNS = 400_000
KINDS = {
    "rank": 6,
    "agent": 4,
    "ranks": 3,
    "node": 3,
    "disk": 1,
    "full": 2,
    "broken write": 2,
    "pause": 3,
    "stop": 3,
    "cut": 2,
    "parted": 2,
    "clock": 1,
    "server": 2,
    "halt": 2,
    "pin": 1,
    "second": 1,
}
"""Kinds of failures, with their weights."""


@dataclass(frozen=True)
class Fault:
    """One failure."""

    kind: str
    call: int
    """The number of system calls after the one before, or after the start."""
    where: int
    """A number that chooses a rank or a node."""

    def __str__(self) -> str:
        return f"{self.kind}({self.where}) after {self.call} calls"


@dataclass(frozen=True)
class Plan:
    """A history before it happens."""

    seed: int
    nodes: int
    sizes: tuple[int, ...]
    """Ranks on each node in the first start of the job, the second, ...; then the first again."""
    steps: int
    settings: dict[str, Any]
    faults: tuple[Fault, ...]
    step_seconds: float = 0.0
    """Of the training. The shorter, the more versions come before the levels are done with one."""

    bucket: bool = False
    """The persistent level is an object store, in place of a directory."""

    @staticmethod
    def drawn(seed: int) -> Plan:
        """The plan of a seed."""
        numbers = random.Random(seed)
        pick = numbers.choice
        settings: dict[str, Any] = {
            "local_every_steps": pick([1, 2, 3, 5]),
            "local_every_seconds": 0.0,
            "memory_every_steps": pick([1, 1, 2]),
            "local_keep": pick([1, 2, 2, 3]),
        }
        if pick([True, False]):
            settings["persistent_every_steps"] = pick([2, 4, 7])
        elif pick([True, False]):  # beside a lease that has to end it would wait for two minutes
            settings["when_busy"] = "wait"
        kinds = numbers.choices([*KINDS], [*KINDS.values()], k=numbers.randint(2, 6))
        faults = [
            Fault(kind, int(10 ** numbers.uniform(1, 3.4)), numbers.randrange(100))
            for kind in kinds
        ]
        nodes = pick([1, 1, 2, 3])
        sizes = tuple(numbers.choices([1, 2, 2, 3], k=pick([1, 1, 1, 3])))
        if nodes > 1 and pick([True, True, False]):
            settings["peer_redundancy"] = pick(["partner", "xor"])
        steps, seconds = numbers.randint(10, 40), pick([0.0, 0.0, 0.01, 0.3])
        bucket = pick([True, False])
        if numbers.random() < 0.25:
            settings["local_journal_steps"] = pick([3, 8])
        if numbers.random() < 0.25:
            at = numbers.randrange(len(faults))
            faults[at:at] = [
                Fault("flip", int(10 ** numbers.uniform(2, 3.4)), numbers.randrange(100)),
                Fault(pick(["ranks", "node"]), int(10 ** numbers.uniform(0, 2)), 0),
            ]
        return Plan(seed, nodes, sizes, steps, settings, tuple(faults), seconds, bucket)

    def __str__(self) -> str:
        faults = "; ".join(map(str, self.faults))
        return (
            f"seed {self.seed}: {self.nodes} nodes x {self.sizes} ranks, {self.steps} steps "
            f"of {self.step_seconds} s, "
            f"{self.settings}{' in a bucket' * self.bucket}, faults: {faults or 'none'}"
        )


def sweep(seed: int, kind: str) -> Iterator[Plan]:
    """One small history (two ranks, two slots, four versions) for each of its system calls, with a
    failure of this kind there: to each rank, where it is one of a rank."""
    settings = {"local_every_steps": 1, "local_every_seconds": 0.0, "memory_every_steps": 1}
    plan = Plan(seed, 1, (2,), 4, settings, ())
    calls = happen(plan, reference(4)).calls
    for where in range(2 if kind == "rank" else 1):
        for call in range(1, calls + 1):
            yield replace(plan, faults=(Fault(kind, call, where),))


@dataclass
class Outcome:
    """What came of a history."""

    plan: Plan
    wrong: str = ""
    versions: int = 0
    launches: int = 0
    calls: int = 0
    seconds: float = 0.0
    """Of the world."""
    met: list[str] = field(default_factory=list)
    """Failures that happened."""
    said: list[str] = field(default_factory=list)
    output: str = ""
    record: list[str] = field(default_factory=list)
    """All system calls, where that was asked for."""


class History:
    """Runs one plan."""

    def __init__(
        self,
        plan: Plan,
        reference: list[str],
        root: Path,
        world: World,
        library: Library,
        record: bool = False,
    ) -> None:
        self.plan, self.world, self.library = plan, world, library
        world.begin(plan.seed, root, plan.nodes)
        world.record = [] if record else None
        self.library.programs["tierckpt.agent.process"] = agent_program(self.library)
        self.oracle = Oracle(reference)
        self.outcome = Outcome(plan)
        self.people = People(library, self.oracle, lambda node: world.seen(node.disk / "ckpts"))
        self._left = list(plan.faults)
        self._next = self._left[0].call if self._left else None
        self._launch: Launch | None = None
        self._launches = 0
        self._full: tuple[str, int] | None = None
        """A disk that is full, and the call until which it is."""
        self._broken: str | None = None
        self._done = False
        self._lost_something = False
        self.world.before_call = self._before_call
        self.world.on_end = self._wake_driver

    def run(self) -> Outcome:
        """Let it happen."""
        world, outcome = self.world, self.outcome
        self._driver = world.scheduler.spawn(world.init, self._drive, "driver")
        why = world.scheduler.run(
            lambda: self._done or bool(self.oracle.wrong), HOUR_SECONDS * 4, MOST_TURNS
        )
        outcome.wrong = self.oracle.wrong or (f"the job did not end: {why}" if why else "")
        outcome.launches, outcome.calls = self._launches, world.calls
        outcome.seconds = world.scheduler.now - 1e6
        outcome.said = self.oracle.said
        outcome.record = world.record or []
        outcome.versions = sum(max(each.values()) for each in self.oracle.reached.values())
        if why:
            outcome.said += self._stacks()
        return outcome

    def _stacks(self) -> list[str]:
        import traceback

        found = [
            f"--- {each.name} {each.pid} failed: {getattr(each, 'log', each.failure)}"
            for each in self.world.processes.values()
            if each.failure is not None
        ]
        for process in self.world.processes.values():
            for task in process.tasks if process.alive else ():
                if not task.done and task.greenlet.gr_frame:
                    lines = traceback.format_stack(task.greenlet.gr_frame)[-8:]
                    found.append(f"--- {process.name} {task.name}\n" + "".join(lines))
        return found

    # --- the launcher ---------------------------------------------------------------------------

    def _wake_driver(self) -> None:
        if self._launch is not None:
            self._launch.note_deaths()
            self.people.note_end(self._launch)
        self.world.scheduler.wake(self._driver)

    def _drive(self) -> None:
        world, scheduler = self.world, self.world.scheduler
        while True:
            self._launches += 1
            self.oracle.run = self._launches
            faults_before = len(self._left)
            size = self.plan.sizes[(self._launches - 1) % len(self.plan.sizes)]
            places = [node for node in world.nodes for _ in range(size)]
            self._launch = launch = Launch(self.library, self._launches, places)
            launch.start(self.plan, self._settings, self.oracle.tell)
            while not launch.over:
                scheduler.park()
                if launch.failed and not launch.over:
                    scheduler.park(world.random.uniform(0.0, 0.3))
                    launch.kill()
            if not launch.failed:
                self._check_end()
                if not self.people.halting:
                    self._done = True
                    return
                for node in world.nodes:
                    self.people.allow(node)
                self._go_back()
                continue
            if self.oracle.nothing_left and self._refuses(launch):
                self._done = True  # a person has to decide
                return
            if faults_before == len(self._left) and not self._met_since(launch):
                self.oracle.wrong = self.oracle.wrong or self._why(launch)
                return
            if self._launches > 30:
                self.oracle.wrong = "thirty starts were not enough"
                return

    def _go_back(self) -> None:
        """Sometimes somebody wants an older version."""
        have = self.oracle.floor["local"]
        if len(self.world.nodes) == 1 and have > 1 and self.world.random.random() < 0.5:
            version = self.world.random.randint(max(1, have - 5), have)
            if self.people.send_back(self.world.nodes[0], version):
                self.oracle.must_go_back(version)

    @staticmethod
    def _refuses(launch: Launch) -> bool:
        """Whether the job does not start because disks with its versions are gone."""
        failures = [str(each.failure) for each in launch.processes if each.failure is not None]
        return any("Restart with the nodes, or the disks" in each for each in failures)

    def _met_since(self, launch: Launch) -> bool:
        return any(each.status == -9 for each in launch.processes) and self._killed_in == launch

    _killed_in: Launch | None = None

    def _why(self, launch: Launch) -> str:
        for each in launch.processes:
            if each.failure is not None and "Connection closed" not in str(each.failure):
                return f"{each.name} failed without a failure around it: {getattr(each, 'log', '')}"
        return "a rank ended without a reason: " + str([e.status for e in launch.processes])

    def _check_end(self) -> None:
        """The job has ended in order: its last version must be on disk."""
        have = max(self.oracle.floor["local"], self.oracle.floor["persistent"])
        reached = max(self.oracle.reached[self._launches].values())
        if have < reached and not self._lost_something:
            self.oracle.wrong = (
                f"close() left v{have}, and the state was v{reached}: {self.oracle.floor}"
            )
        elif reached < self.plan.steps and not self.people.halting:
            self.oracle.wrong = f"the job ended at v{reached}, and nobody had asked for that"
        else:
            self.oracle.check_pins()

    def _settings(self, node: Node) -> dict[str, Any]:
        settings = dict(self.plan.settings)
        settings["path"] = self.world.seen(node.disk / "ckpts")
        settings["shm_dir"] = self.world.seen(node.shm)
        if "persistent_every_steps" in settings:
            shared = self.world.seen(self.world.root / "shared")
            settings["persistent_path"] = f"{SCHEME}://ckpts" if self.plan.bucket else shared
        return settings

    # --- failures -------------------------------------------------------------------------------

    def _before_call(self, process: Process, name: str, args: tuple[Any, ...]) -> None:
        if self._next is not None and self.world.calls >= self._next and self._launch:
            self._strike(process)
        if name in ("write", "pwrite", "posix_fallocate", "open", "fsync", "pwritev"):
            self._refuse(process, name, args)

    def _strike(self, process: Process) -> None:
        fault = self._left.pop(0)
        self._next = self.world.calls + self._left[0].call if self._left else None
        self.outcome.met.append(f"{fault} in call {self.world.calls} of {process.name}")
        self.oracle.said.append(f"*** {self.outcome.met[-1]}")
        world, launch = self.world, self._launch
        assert launch is not None
        node = world.nodes[fault.where % len(world.nodes)]
        if fault.kind == "rank":
            self._killed_in = launch
            world.end(launch.processes[fault.where % len(launch.processes)], -9)
        elif fault.kind == "ranks":
            self._killed_in = launch
            for each in launch.processes:
                world.end(each, -9)
        elif fault.kind == "agent":
            for each in [*world.processes.values()]:
                if each.node is node and each.name == "agent":
                    world.end(each, -9)
        elif fault.kind in ("node", "disk"):
            self._killed_in = launch
            for each in [*world.processes.values()]:
                if each.node is node:
                    world.end(each, -9)
            node.boots += 1
            self._wipe(node.shm)
            # Without another level, a lost disk is the end of the job: it needs a person.
            gone = fault.kind == "disk" and (
                len(world.nodes) == 1 or {*self.plan.settings} & {*BEYOND_A_NODE}
            )
            self.oracle.lose("memory")
            changed = node.filesystem.crash(world.random)
            self.oracle.said.append(f"    the crash has changed: {', '.join(changed) or 'nothing'}")
            if gone:
                self._wipe(node.disk)
                node.filesystem = Disk(node.disk)
                self.oracle.lose_disk(node.index)
        elif fault.kind == "full":
            self._full = str(node.disk), world.calls + 40
            self._lost_something = True
        elif fault.kind == "broken write":
            self._broken = str(node.disk)
            self._lost_something = True
        elif fault.kind == "pause":
            world.scheduler.now += 3.0
        elif fault.kind == "stop":
            living = [each for each in world.processes.values() if each.alive]
            chosen = living[fault.where % len(living)]
            chosen.stopped_until = world.scheduler.now + 10 ** world.random.uniform(-2, 0.7)
        elif fault.kind == "cut":
            for end, nodes in [*world.links.items()]:
                if node in nodes and end.fileno() >= 0:
                    with contextlib.suppress(OSError):
                        socket.socket.shutdown(end, socket.SHUT_RDWR)
        elif fault.kind == "parted":
            until = world.scheduler.now + 10 ** world.random.uniform(-1, 2)
            for other in world.nodes:
                for pair in ((node.index, other.index), (other.index, node.index)):
                    if other is not node and world.random.random() < 0.8:  # or one way only
                        world.partitions[pair] = until
        elif fault.kind == "server":
            world.server.gone_until = world.scheduler.now + 10 ** world.random.uniform(-2, 1)
        elif fault.kind == "halt":
            self.people.halt(node)
        elif fault.kind == "pin" and self.oracle.floor["local"] and len(world.nodes) == 1:
            self.people.pin(node)
        elif fault.kind == "second" and len(world.nodes) == 1 and not launch.failed:
            self.people.start_again(launch, self.plan, self._settings)
        elif fault.kind == "flip":
            self._flip(node)
        elif fault.kind == "clock":
            node.clock_ahead_seconds += world.random.choice([-86400.0, -30.0, 2.0, 3600.0])
        if not process.alive:
            raise Killed

    def _flip(self, node: Node) -> None:
        """A bit of a version changes, on this node's disk or on the persistent level: whoever reads
        it must notice, and no other copy may be made of it."""
        chance, objects = self.world.random, self.world.server.objects
        here = [each for each in node.disk.glob("ckpts/v*") if each.is_file()]
        far = [each for each in self.world.root.glob("shared/**/v*") if each.is_file()]
        found: list[Path | str] = [each for each in (*here, *far) if each.stat().st_size]
        found += [key for key, data in objects.items() if data and _VERSION.search(key)]
        if not found:
            return
        last = max(map(_version_in, found))
        newest = [each for each in found if _version_in(each) >= last - 1]
        chosen = chance.choice(sorted(newest, key=str))
        if isinstance(chosen, str):
            objects[chosen] = _flipped(objects[chosen], chance)
        else:
            node.filesystem.replace(chosen, _flipped(chosen.read_bytes(), chance))
        self.oracle.said.append(f"    it is in {str(chosen).removeprefix(str(self.world.root))}")
        if chosen in here:
            self.oracle.lose_disk(node.index)
        else:
            self.oracle.lose("persistent")
        self._lost_something = True

    def _wipe(self, folder: Path) -> None:
        for each in folder.iterdir():
            shutil.rmtree(each) if each.is_dir() and not each.is_symlink() else each.unlink()

    def _refuse(self, process: Process, name: str, args: tuple[Any, ...]) -> None:
        if self._full is None and self._broken is None:
            return
        where = self._place_of(args[0]) if args else ""
        if self._full is not None and where.startswith(self._full[0]):
            if self.world.calls > self._full[1]:
                self._full = None
            elif name != "fsync" and (name != "open" or self._writes(args)):
                raise OSError(errno.ENOSPC, "No space left on device (simulated)")
        if self._broken is not None and where.startswith(self._broken) and name != "open":
            self._broken = None
            raise OSError(errno.EIO, "Input/output error (simulated)")

    @staticmethod
    def _writes(args: tuple[Any, ...]) -> bool:
        mode = args[1] if len(args) > 1 else "r"
        return bool(mode & 0o100) if isinstance(mode, int) else "w" in mode or "x" in mode

    def _place_of(self, what: Any) -> str:
        if isinstance(what, int):
            with contextlib.suppress(OSError):
                return os.readlink(f"/proc/self/fd/{what}")
            return ""
        return self.world.real(str(what))


def _version_in(place: Path | str) -> int:
    return max(map(int, _VERSION.findall(str(place))))


def _flipped(content: bytes, chance: random.Random) -> bytes:
    bit = chance.randrange(8 * len(content))
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def reference(steps: int) -> list[str]:
    """The fingerprint of the state by version."""
    from . import programs_reference

    return programs_reference.fingerprints(steps)


@contextlib.contextmanager
def silent() -> Iterator[io.StringIO]:
    """Context in which what the product prints is kept."""
    kept = io.StringIO()
    with contextlib.redirect_stdout(kept), contextlib.redirect_stderr(kept):
        yield kept


@functools.cache
def _world() -> tuple[World, Library]:
    world = World()
    world.begin(0, Path(tempfile.mkdtemp(prefix="tierckpt-world-", dir="/dev/shm")), 1)
    library = Library(world)
    shutil.rmtree(world.root)
    return world, library


def happen(plan: Plan, references: list[str], record: bool = False) -> Outcome:
    """Run a plan in a folder of its own."""
    root = Path(tempfile.mkdtemp(prefix="tierckpt-world-", dir="/dev/shm"))
    try:
        with silent() as output:
            gc.collect()  # when it runs by itself is not a part of the seed
            _world()[0].close_left()
            gc.freeze()
            gc.disable()
            history = History(plan, references, root, *_world(), record)
            try:
                outcome = history.run()
            finally:
                history.world.close()
                history.library.clear()
                gc.enable()
        outcome.output = output.getvalue()
        return outcome
    finally:
        shutil.rmtree(root, ignore_errors=True)


def shrunk(plan: Plan, references: list[str], most: int = 60) -> Plan:
    """A shorter plan that goes wrong, too."""
    tries = 0
    changed = True
    while changed and tries < most:
        changed = False
        for index in range(len(plan.faults)):
            faults = plan.faults[:index] + plan.faults[index + 1 :]
            shorter = replace(plan, faults=faults)
            tries += 1
            if happen(shorter, references).wrong:
                plan, changed = shorter, True
                break
        for steps in (plan.steps // 2, plan.steps - 1):
            shorter = replace(plan, steps=steps)
            tries += 1
            if steps > 2 and happen(shorter, references).wrong:
                plan, changed = shorter, True
                break
    return plan


__all__ = ["Fault", "History", "Outcome", "Plan", "happen", "reference", "shrunk"]
