"""Halting: all ranks end the job early at the same boundary, after one last checkpoint.

A rank that has a reason (a signal, a halt request, the end of the allocation) says so in its vote
at a boundary. At the next one all ranks know it: they take a version to every level, and
`should_exit()` is true from there on, on all ranks alike. As in SCR, which `request_file` names,
the script asks that in its loop. Where it evidently never does, all ranks close and end instead, at
the same boundary: no rank had asked when that vote was cast, though each had passed a boundary
before.
"""

from __future__ import annotations

import logging
import math
import os
import shlex
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from tierckpt.config import Config, parse_signals
from tierckpt.core.halt_conditions import HaltRequest, Reason
from tierckpt.core.votes import Vote
from tierckpt.errors import FormatError
from tierckpt.group import Node

from . import request_file
from .signals import Signals

LOOK_SECONDS = 5.0
"""So often directories are looked at for a request."""
SPARE_SECONDS = 15.0
"""Left of the allocation for processes, launcher and batch script to end."""
ANNOUNCED_SECONDS = 900.0
"""A signal that comes at most so long before the end of the allocation announces it (Slurm's
`--signal=TERM@120`); an earlier one is a preemption or a cancellation, which does not wait for that
end."""
GRACE_SPARE_SECONDS = 10.0
"""Left of the time that a signal grants, for the processes to end."""
JOIN_SECONDS = 1.0
"""At the end: how long to wait for a look that does not return, as on a dead file system."""

Notice = Callable[[str, int], None]
"""Takes text and severity."""


class HaltController:
    """One rank's part. Training thread; signals are heard if that is the main thread."""

    def __init__(
        self,
        config: Config,
        rank: int,
        node: Node,
        notice: Notice,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self.reason = Reason.NONE
        """Why the job ends early; on all ranks from the same boundary on."""
        self._margin_seconds = config.halt_seconds_left
        self._standing = [HaltRequest(seconds_left=config.halt_seconds_left or None)]
        self._end_seconds = request_file.allocation_end(environment)
        self._why_no_end = request_file.why_no_end(environment)
        self._rank, self._notice = rank, notice
        self._grace_seconds = config.halt_grace_seconds
        self._agreed_seconds: float | None = None
        """When the ranks agreed that the job is interrupted, by `time.monotonic()`."""
        self._boundaries = 0
        self._asked = False
        self._told: set[str] = set()
        self._lookout = Lookout(watched_directories(config, rank, node))
        self._signals = Signals(parse_signals(config.halt_signals), config.halt_patience_seconds)
        for number, why in self._signals.left_alone.items():
            notice(f"{number.name} will bring no last checkpoint: {why}", logging.INFO)

    @property
    def signal_name(self) -> str:
        """That of the first signal that came to this rank; empty when none did."""
        return self._signals.came.name if self._signals.came is not None else ""

    def ask(self, request: HaltRequest) -> None:
        """Heed this one, too, besides those in directories."""
        self._standing.append(request)

    def vote(self, version: int) -> tuple[Reason, bool]:
        """At the boundary of `version`: why this rank wants the job to end, and whether its script
        has evidently never asked."""
        self._signals.passed_boundary()
        silent = self._boundaries > 0 and not self._asked
        self._boundaries += 1
        return (Reason.NONE if self.reason < Reason.NONE else self._find(version)), silent

    def _find(self, version: int) -> Reason:
        if self.signal_name:
            self._tell(f"{self.signal_name} came to this rank", logging.WARNING)
            return Reason.SIGNAL
        for problem in self._lookout.problems:
            self._tell(problem, logging.WARNING)
        found = (request.with_margin(self._margin_seconds) for request in self._lookout.requests)
        requests = [*self._standing, *found]
        for request in requests:
            if request.unknown(self._end_seconds):
                self._tell(
                    f"it is not known when this job's allocation ends ({self._why_no_end}), so "
                    "how many seconds are left can't be told. Older versions of Slurm leave it "
                    "out: in the batch script, export SLURM_JOB_END_TIME=$(date -d "
                    '"$(squeue -h -j $SLURM_JOB_ID -o %e)" +%s); or set a time with '
                    "tierckpt halt PATH --before TIME",
                    logging.WARNING,
                )
        now = time.time()
        return min(r.reason(version, now, self._end_seconds) for r in requests)

    def hear(self, agreed: Vote) -> bool:
        """At a boundary: what all ranks said at the one before.

        True when the script will not end by itself, and whoever calls has to, after the boundary.
        """
        if self.reason is Reason.NONE and agreed.halt < Reason.NONE:
            self.reason = Reason(agreed.halt)
            if self.reason.is_interruption:
                self._agreed_seconds = time.monotonic()
            # What a script does from here on (an evaluation, an upload) may take its time.
            self._signals.be_calm()
            silent = "it ends here, as this script never asks should_exit()"
            how = silent if agreed.unattended else "should_exit() is true from now on"
            self._notice(
                f"the job ends early, {self.reason.text()}: a last checkpoint is taken, {how}"
                f"{self._lookout.advice()}",
                logging.WARNING if self._rank == 0 else logging.DEBUG,
            )
        return self.reason is not Reason.NONE and bool(agreed.unattended)

    def should_exit(self) -> bool:
        """See `Checkpointer.should_exit`."""
        self._asked = True
        return self.reason is not Reason.NONE

    def seconds_to_wait(self) -> float | None:
        """How long the end may take; None: as long as it takes. Where the scheduler is about to end
        the allocation, so long that a clean end is still possible (a batch script that is killed
        requeues nothing); but never less than a signal grants."""
        told, end = self._told_seconds(), self._end_seconds
        if told is None or end is None:
            return None
        if self.reason is Reason.ALLOCATION or 0 <= end - told <= ANNOUNCED_SECONDS:
            return max(0.0, max(end - SPARE_SECONDS, self._granted_until(told)) - time.time())
        return None

    def seconds_for_others(self) -> float:
        """How long, after the last checkpoint is on disk, the end may wait for what is farther
        away: the same; and where a signal came, and the allocation does not end, until shortly
        before whoever sent it kills what is left. It may come while the end waits."""
        granted, told = self.seconds_to_wait(), self._told_seconds()
        if granted is None and told is not None:
            granted = max(0.0, self._granted_until(told) - time.time())
        return math.inf if granted is None else granted

    def _told_seconds(self) -> float | None:
        """When this rank heard that its processes, or its allocation, are to end (Unix); None while
        nobody says so."""
        came = self._signals.came_seconds
        told = self._agreed_seconds if came is None else came
        return None if told is None else time.time() - (time.monotonic() - told)

    def _granted_until(self, told_seconds: float) -> float:
        return told_seconds + self._grace_seconds - GRACE_SPARE_SECONDS

    def end_alone(self) -> None:
        """At a boundary, where ranks cannot agree on an end any more: a signal that came ends this
        process, as it would have without this library. Not where they had agreed before."""
        if self.reason is Reason.NONE:
            self._signals.hand_on()

    def be_calm(self) -> None:
        """The end has begun; it may take longer than an iteration."""
        self._signals.be_calm()

    def close(self) -> None:
        """Look and listen no more."""
        self._lookout.close()
        self._signals.close()

    def _tell(self, text: str, severity: int) -> None:
        """Once."""
        if text not in self._told:
            self._told.add(text)
            self._notice(text, severity)


def watched_directories(config: Config, rank: int, node: Node) -> list[str]:
    """Where this rank looks for requests: a node's first rank in `path`, which may be each node's
    own, and rank 0 in the persistent level's directory, which an operator sees from anywhere."""
    found = [config.directory] if node.first == rank else []
    shared = config.persistent.path
    if rank == 0 and shared and "://" not in shared:
        found.append(shared)
    return found


class Lookout:
    """Looks for requests now and then, on a thread of its own: a file system may hang.

    Any thread may read what was found; each look replaces it.
    """

    def __init__(self, directories: Sequence[str]) -> None:
        self.requests: tuple[HaltRequest, ...] = ()
        self.problems: tuple[str, ...] = ()
        """Requests that cannot be read, and why."""
        self._where: tuple[str, ...] = ()
        self._directories = directories
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        if directories:
            name = "tierckpt-halt-requests"
            self._thread = threading.Thread(target=self._work, name=name, daemon=True)
            self._thread.start()

    def advice(self) -> str:
        """How to get rid of the requests that were found; empty without any."""
        commands = [f"tierckpt halt {shlex.quote(each)} --clear" for each in self._where]
        return f"; before the next start: {', '.join(commands)}" if commands else ""

    def close(self) -> None:
        """Look no more."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(JOIN_SECONDS)

    def _work(self) -> None:
        self._look()
        while not self._over.wait(LOOK_SECONDS):
            self._look()

    def _look(self) -> None:
        found: dict[str, HaltRequest] = {}
        problems = []
        for directory in self._directories:
            try:
                request = request_file.read(directory)
            except Exception as error:  # or nobody would look any more
                known = isinstance(error, (OSError, FormatError))
                why = str(error) if known else f"{type(error).__name__}: {error}"
                problems.append(f"a halt request in {directory} is passed over: {why}")
                continue
            if request is not None:
                found[directory] = request
        self._where = tuple(found)
        self.requests, self.problems = tuple(found.values()), tuple(problems)
