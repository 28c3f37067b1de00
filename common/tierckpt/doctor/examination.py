"""Examination: all checks on this node, and the reports of all nodes of a launch, compared.

On a node all checks run at once, each in a thread of its own and with a time limit. Under torchrun
the ranks meet over gloo, under mpirun over mpi4py. One rank of each node examines it; the others
only take part in the exchanges, which also measure the offsets of the nodes' clocks.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from tierckpt._process import host_id
from tierckpt._text import error_text, is_url, some
from tierckpt.errors import ConfigError
from tierckpt.run.launcher import MPIRUN, NONE, TORCHRUN, Place, place_of
from tierckpt.storage.guarantees import PREFIX

from . import machine, software
from .software import Check, Finding, Mark, Subject, cross, good, warning

__all__ = ["NONE", "clock_offsets", "examine_all", "is_launched"]


LIMIT_SECONDS = 300.0
"""Time for all checks: importing torch takes a minute on a busy machine or a slow file system."""

SECTIONS: dict[str, tuple[Check, ...]] = {
    "Software": (
        software.python,
        software.torch,
        software.horovod,
        software.mpi,
        software.frameworks,
        software.extras,
    ),
    "Machine": (
        machine.shared_memory,
        machine.memory,
        machine.temporary,
        machine.limits,
        machine.synchronized,
    ),
    "Places": (machine.local, machine.persistent),
    "Network": (machine.interface, machine.infiniband),
    "Settings": (
        software.variables,
        software.configuration,
        software.iterations,
        software.notices,
        software.agents,
    ),
}


class Section(Struct, frozen=True):
    """The findings of some checks."""

    title: str
    findings: tuple[Finding, ...]


class Report(Struct, frozen=True):
    """All findings on one node."""

    node: str
    sections: tuple[Section, ...]

    @property
    def findings(self) -> list[Finding]:
        """Findings of all sections."""
        return [finding for section in self.sections for finding in section.findings]

    def count(self, mark: Mark) -> int:
        """Number of findings with this mark."""
        return sum(finding.mark is mark for finding in self.findings)


class _Run:
    """One check in a thread."""

    def __init__(self, check: Check, subject: Subject) -> None:
        self._check, self._subject = check, subject
        self._findings: list[Finding] | None = None
        # A daemon: a thread on a dead file system cannot be ended, and must not keep the process.
        self._thread = threading.Thread(target=self._run, name=check.__name__, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._findings = [*self._check(self._subject)]
        except Exception as error:
            text = f"the check failed: {error_text(error)}"
            self._findings = [cross(self._name, text, "report this error; other checks are valid")]

    @property
    def _name(self) -> str:
        return self._check.__name__.replace("_", " ")

    def findings(self, timeout_seconds: float) -> list[Finding]:
        """The findings, or one that it did not end in time."""
        self._thread.join(max(timeout_seconds, 0))
        if self._findings is None:
            text = "the check did not end in time; something that it needs hangs"
            return [cross(self._name, text, "look at the kernel's messages: dmesg | tail")]
        return self._findings


def examine(
    subject: Subject,
    sections: dict[str, tuple[Check, ...]] = SECTIONS,
    timeout_seconds: float = LIMIT_SECONDS,
) -> Report:
    """Run all checks. Never raises for anything that a check does."""
    deadline = time.monotonic() + timeout_seconds
    runs = {title: [_Run(check, subject) for check in checks] for title, checks in sections.items()}
    found = [Section(title, _gathered(each, deadline)) for title, each in runs.items()]
    node = subject.config.node or socket.gethostname()
    return Report(node, tuple(section for section in found if section.findings))


def _gathered(runs: Sequence[_Run], deadline: float) -> tuple[Finding, ...]:
    return tuple(f for run in runs for f in run.findings(deadline - time.monotonic()))


Gather = Callable[[Any], list[Any]]
"""Returns every rank's value, by rank. Collective."""
Clock = Callable[[], float]

MEET_SECONDS = 180.0
"""Time for all ranks to come."""
ROUNDS = 20
WORST_SECONDS = 0.5
"""A larger offset of a clock is a warning."""
COMPARED = ("tierckpt", "python", "torch", "copy engine", "horovod", "mpi")
"""Findings that should be the same on all nodes."""


class Offset(Struct, frozen=True):
    """Bounds of a clock's offset from that of rank 0, in seconds."""

    low: float
    high: float

    @property
    def least(self) -> float:
        """The smallest offset, without sign, within the bounds."""
        return max(self.low, -self.high, 0.0)

    def __str__(self) -> str:
        middle, half = 500 * (self.low + self.high), 500 * (self.high - self.low)
        return f"{middle:+.3g} ms (within {max(half, 0.001):.2g})"


def is_launched(environment: Mapping[str, str] = os.environ) -> bool:
    """True if this process is one of several ranks of a launcher that doctor can meet under."""
    place = place_of(environment)
    return place.size > 1 and place.launcher in (TORCHRUN, MPIRUN)


@contextmanager
def meeting(place: Place) -> Iterator[Gather]:
    """A way to exchange values with all ranks. Collective; raises ConfigError if they do not
    meet."""
    if place.launcher == MPIRUN:
        try:
            from mpi4py import MPI
        except ImportError as error:
            raise ConfigError(f"ranks under mpirun meet over mpi4py: {error}") from error
        size = MPI.COMM_WORLD.Get_size()
        if size != place.size:
            raise ConfigError(f"mpirun started {place.size} ranks, and mpi4py sees {size}")
        yield MPI.COMM_WORLD.allgather
        return
    import torch.distributed as dist

    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=MEET_SECONDS + LIMIT_SECONDS))
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"the ranks cannot meet over gloo: {error}") from error

    def gather(value: Any) -> list[Any]:
        found: list[Any] = [None] * dist.get_world_size()
        try:
            dist.all_gather_object(found, value)
        except RuntimeError as error:
            raise ConfigError(f"another rank ended, or is silent: {error}") from error
        return found

    try:
        yield gather
    finally:
        dist.destroy_process_group()


def clock_offsets(gather: Gather, rank: int, clock: Clock = time.time) -> list[Offset]:
    """Offsets of all ranks' clocks from rank 0's. Collective.

    Each rank reads its clock after it has received the values of one exchange, so after rank 0
    started that, and before it gives the value to the next one, so before rank 0 ends that. Each
    round gives bounds; all of them hold (Cristian, Probabilistic clock synchronization, 1989).
    """
    read: list[tuple[float, float]] = []
    """This rank's clock before and after each exchange."""
    rounds: list[list[float]] = []
    before = clock()
    for _ in range(ROUNDS + 1):
        rounds.append(gather(before))
        after = clock()
        read.append((before, after))
        before = after
    sent = gather(read)[0]  # rank 0's times
    offsets = []
    for other in range(len(rounds[0])):
        low, high = float("-inf"), float("inf")
        for number in range(1, ROUNDS + 1):
            there = rounds[number][other]
            low = max(low, there - sent[number][1])
            high = min(high, there - sent[number - 1][0])
        offsets.append(Offset(low, high) if other else Offset(0.0, 0.0))
    return offsets


def sees_probe(gather: Gather, rank: int, directory: str) -> list[bool]:
    """True for each rank that sees a file which rank 0 makes in the directory, and removes again;
    for all if rank 0 can make none. Collective."""
    probe = os.path.join(directory, f"{PREFIX}{secrets.token_hex(8)}")
    if rank == 0:
        try:
            os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        except OSError:
            probe = ""
    probe = gather(probe)[0]
    try:
        return gather(not probe or os.path.exists(probe))
    finally:
        if rank == 0 and probe:
            os.unlink(probe)


def examine_all(subject: Subject, run: Callable[[Subject], Report] = examine) -> list[Report]:
    """The reports of all nodes, by their first ranks; this process is one rank. Collective.

    The first report has a section more, which compares the nodes. Without a launcher, or if the
    ranks do not meet, there is one report.
    """
    place = place_of(subject.environment)
    if not is_launched(subject.environment):
        return [run(subject)]
    try:
        with meeting(place) as gather:
            return _examined(subject, gather, place, run)
    except ConfigError as error:
        problem = cross("launch", str(error), "start the same command on all nodes")
        report = run(subject)
        return [replace(report, sections=(*report.sections, Section("Nodes", (problem,))))]


def _examined(
    subject: Subject, gather: Gather, place: Place, run: Callable[[Subject], Report]
) -> list[Report]:
    host = subject.config.node or socket.gethostname()
    hosts = gather(host)
    names = list(dict.fromkeys(hosts))
    first = hosts.index(host) == place.rank
    others = [name for name in gather(socket.gethostname()) if name != socket.gethostname()]
    here = replace(subject, nodes=len(names), towards=next(iter(others), ""))
    report = run(here) if first else None
    found = [each for each in gather(report) if each is not None]
    offsets = dict(zip(hosts, clock_offsets(gather, place.rank), strict=True))
    apart = (*_apart(subject, gather), *_shared(subject, gather, hosts))
    nodes = Section("Nodes", (*_compared(found, offsets), *apart))
    return [replace(found[0], sections=(*found[0].sections, nodes)), *found[1:]]


def _apart(subject: Subject, gather: Gather) -> Iterator[Finding]:
    """Findings about ranks of one node that do not share its memory: a job refuses them.
    Collective."""
    from tierckpt.coordination.settings_check import device_of, split_nodes  # imports torch

    config = subject.config
    gathered = gather((host_id(config.node), device_of(config.shm_dir)))
    nodes, memories = zip(*gathered, strict=True)
    for text in filter(None, split_nodes(nodes, memories)):
        problem, _, cure = text.partition(". Give")
        yield cross("shm_dir", problem, f"give{cure}")


def _shared(subject: Subject, gather: Gather, hosts: Sequence[str]) -> Iterator[Finding]:
    """A finding about nodes that do not have the same persistent directory. Collective."""
    path = subject.config.persistent.path
    if not path or is_url(path):
        return
    seen = dict(
        zip(hosts, sees_probe(gather, place_of(subject.environment).rank, path), strict=True)
    )
    blind = [host for host, sees in seen.items() if not sees]
    if blind:
        text = f"{path} of {some(blind)} is another directory than that of {hosts[0]}"
        yield cross("persistent", text, f"mount it on {some(blind)}, as on {hosts[0]}")
    else:
        yield good("persistent", f"all nodes see the same {path}")


def _compared(reports: Sequence[Report], offsets: Mapping[str, Offset]) -> Iterator[Finding]:
    """Findings about differences between nodes."""
    names = ", ".join(report.node for report in reports)
    yield good("nodes", f"{len(reports)}: {names}")
    for name in COMPARED:
        texts = {report.node: _text(report, name) for report in reports}
        if len({*texts.values()}) > 1:
            differs = next(node for node, text in texts.items() if text != texts[reports[0].node])
            text = f"{name} on {differs}: {texts[differs]}; on {reports[0].node}: "
            cure = "install the same on all nodes"
            yield warning("differs", text + texts[reports[0].node], cure)
    worst = max(offsets, key=lambda node: offsets[node].least)
    spread = ", ".join(f"{node} {offset}" for node, offset in list(offsets.items())[1:4])
    if offsets[worst].least > WORST_SECONDS:
        text = f"{worst} differs from {reports[0].node} by {offsets[worst]}"
        yield warning("clocks", text, f"on {worst}: chronyc makestep, and start chronyd")
    elif spread:
        yield good("clocks", f"offsets: {spread}")


def _text(report: Report, name: str) -> str:
    texts = [
        f.text if f.name != "tierckpt" else f.text.split()[0]
        for f in report.findings
        if f.name == name
    ]
    return "; ".join(texts) or "nothing"
