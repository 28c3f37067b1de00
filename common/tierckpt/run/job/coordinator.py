"""Decisions for all shims of a job: start the next attempt, leave the job to the launcher, or end.

Pure: messages of the ranks go in, orders to all ranks come out.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from tierckpt import _milestones

OUTSIDE = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals by which somebody outside of the job ends it; a failure is none of these."""


@dataclass(frozen=True)
class End:
    """The end of one rank's script in one attempt."""

    status: int
    """As from `os.waitpid`."""
    milestone: str = ""
    """The last milestone that its checkpointer reported."""
    passed_boundary: bool = False
    is_final: bool = False
    """The job ends on purpose: the ranks agreed to, or a signal asked this rank to."""
    uses_mpi: bool = False
    """MPI was initialized in the script's process."""

    @property
    def is_success(self) -> bool:
        """True for exit status 0."""
        return self.status == 0

    @property
    def text(self) -> str:
        """The end in words."""
        return describe(self.status)


@dataclass(frozen=True)
class Start:
    """Order: end the script if it runs, and start this attempt."""

    attempt: int
    text: str = ""


@dataclass(frozen=True)
class Leave:
    """Order: the launcher decides from now on; the end of a script is the end of its shim."""

    text: str = ""


@dataclass(frozen=True)
class Finish:
    """Order: all scripts have ended well; end."""


Order = Start | Leave | Finish


def describe(status: int) -> str:
    """The end of a process in words; `status` as from `os.waitpid`."""
    if not os.WIFSIGNALED(status):
        return f"ended with status {os.waitstatus_to_exitcode(status)}"
    number = os.WTERMSIG(status)
    try:
        return f"was killed by {signal.Signals(number).name}"
    except ValueError:
        return f"was killed by signal {number}"


class Coordinator:
    """The state of the job, in rank 0's shim."""

    def __init__(self, size: int, max_restarts: int) -> None:
        self._size, self._max_restarts = size, max_restarts
        self.attempt = 0
        """The current attempt, from 1; 0 before the first."""
        self._finished: set[int] = set()
        self._last: tuple[int, int, str] | None = None
        """The last failure, if its script had passed no boundary."""
        self.is_over = False
        """No further attempt starts."""

    def begin(self) -> Order:
        """All shims are there."""
        self.attempt = 1
        return Start(1)

    def ended(self, rank: int, attempt: int, end: End) -> Order | None:
        """The script of a rank has ended."""
        if self.is_over or attempt != self.attempt:
            return None  # a consequence of the failure that ended this attempt
        if end.is_success:
            self._finished.add(rank)
            if len(self._finished) < self._size:
                return None
            self.is_over = True
            return Finish()
        if end.is_final or (os.WIFSIGNALED(end.status) and os.WTERMSIG(end.status) in OUTSIDE):
            return self.leave()
        cause = f"rank {rank} {end.text}"
        if end.uses_mpi:
            return self.leave(
                f"{cause}: a process that uses MPI cannot be started again under one mpirun, which "
                "handles the failure. Gloo or NCCL in place of MPI can be restarted"
            )
        if end.milestone == _milestones.REFUSED:
            return self.leave(f"{cause}: it was refused at its start")
        place = (rank, end.status, end.milestone)
        same, self._last = place == self._last, None if end.passed_boundary else place
        if same and not end.passed_boundary:
            return self.leave(f"{cause} for the second time in a row before its first boundary")
        if attempt > self._max_restarts:
            return self.leave(f"{cause}; --max-restarts {self._max_restarts} leaves no attempt")
        self.attempt += 1
        self._finished.clear()
        most = self._max_restarts + 1
        return Start(self.attempt, f"{cause}; attempt {self.attempt} of {most} starts")

    def lost(self, node: str, spare: str, ranks: Sequence[int]) -> Order | None:
        """A node is lost, and a spare one can take its ranks."""
        if self.is_over:
            return None
        cause = f"node {node} is lost"
        if self.attempt > self._max_restarts:
            return self.leave(f"{cause}; --max-restarts {self._max_restarts} leaves no attempt")
        self.attempt += 1
        self._finished.clear()
        self._last = None
        word = "rank" if len(ranks) == 1 else "ranks"
        return Start(
            self.attempt,
            f"{cause}; spare {spare} takes {word} {', '.join(map(str, ranks))}; "
            f"attempt {self.attempt} of {self._max_restarts + 1} starts",
        )

    def leave(self, text: str = "") -> Order | None:
        """The launcher decides from now on: a shim is lost, or has received a signal."""
        if self.is_over:
            return None
        self.is_over = True
        return Leave(f"{text}. The launcher takes over" if text else "")


__all__ = ["OUTSIDE", "Coordinator", "End", "Finish", "Leave", "Order", "Start", "describe"]
