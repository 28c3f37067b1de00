"""Halting: all ranks end the job early at the same boundary, after one last checkpoint.

A rank with a reason (a signal, a halt request, the end of the allocation) puts it into its vote at
a boundary. At the next boundary all ranks know it: they take a version to every level, and
`should_exit()` is true from there on, on all ranks. As in SCR (see `request_file`), the script
calls it in its loop. If the script never calls it, all ranks close and end instead, at the same
boundary: no rank had called it when that vote was cast, though each had passed a boundary before.
"""

from __future__ import annotations

import logging
import math
import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, NoReturn, Self

from tierckpt import _milestones
from tierckpt._text import error_text
from tierckpt.config import Config, parse_signals
from tierckpt.core.decisions import NEVER_SECONDS, EarlyEnd, HaltRequest, HaltVote, Reason
from tierckpt.core.parts import Boundary, Part, VoteField
from tierckpt.errors import FormatError
from tierckpt.group import Node
from tierckpt.storage import answers
from tierckpt.storage.job_directory import watched_directories

from . import request_file
from .preemption import PreemptionWatcher, Watcher
from .signals import Signals

if TYPE_CHECKING:
    from tierckpt.checkpointer.loop import TrainingJob

LOOK_SECONDS = 5.0
"""Interval between two looks for requests in the directories."""
SPARE_SECONDS = 15.0
"""Time of the allocation left for processes, launcher and batch script to end."""
ANNOUNCED_SECONDS = 900.0
"""A signal within this time before the end of the allocation announces that end (Slurm's
`--signal=TERM@120`). An earlier signal is a preemption or a cancellation, which does not wait for
the end of the allocation."""
NOTICE_SECONDS = 120.0
"""Time before the announced end of a machine at which the job ends: AWS announces it so early.
Longer if `halt_seconds_left` is; a notice that comes earlier is kept until then."""
GRACE_SPARE_SECONDS = 10.0
"""Time of a signal's grace period left for the processes to end."""
STALL_SPARE_SECONDS = 5.0
"""More of it, left by waits for hanging places."""

Notice = Callable[[str, int], None]
"""Takes text and severity."""


CALM = frozenset(("read", "vote"))
"""Moments that can wait for a look while nobody asks for an end."""


class HaltController(EarlyEnd, Part):
    """One rank's part in halting. Training thread; signals are handled only on the main thread."""

    votes = (
        VoteField("halt", Reason.NONE),
        VoteField("unattended"),
        VoteField("halt_seconds", NEVER_SECONDS),
    )
    patient = CALM

    @classmethod
    def of(cls, job: TrainingJob) -> Self:
        """Of every job."""
        return cls(job.config, job.group.rank, job.node, job.reports.notice)

    def __init__(
        self,
        config: Config,
        rank: int,
        node: Node,
        notice: Notice,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self._margin_seconds = config.halt_seconds_left
        self._exit_status = config.requeue_exit_status
        self._standing = [HaltRequest(seconds_left=config.halt_seconds_left or None)]
        self._awaits = self._standing != [HaltRequest()]
        """False while no standing request has a condition."""
        self._end_seconds = request_file.allocation_end(environment)
        self._why_no_end = request_file.why_no_end(environment)
        self._rank, self._notice = rank, notice
        self._grace_seconds = config.halt_grace_seconds
        self._agreed_seconds: float | None = None
        """The time by `time.monotonic()` at which the ranks agreed that the job is interrupted."""
        self._boundaries = 0
        self._asked = False
        self._notified: set[str] = set()
        self._said_silence = False
        self._preempted_at = math.inf
        """The end of the first node that the cloud takes away, by `time.monotonic()`; agreed on."""
        self._voted_seconds = 0.0
        """The time of the last vote by `time.monotonic()`."""
        self._watcher = RequestWatcher(watched_directories(config, rank, node))
        notices = config.halt_notices if node.first == rank else ""
        self._preemption = PreemptionWatcher(notices, environment)
        grace_seconds = config.halt_grace_seconds
        waits = grace_seconds / 3, grace_seconds
        self._signals = Signals(parse_signals(config.halt_signals), *waits)
        self._signals.on_received = self.has_news
        for number, why in self._signals.unhandled.items():
            notice(f"{number.name} will not cause a last checkpoint: {why}", logging.INFO)

    @property
    def signal_name(self) -> str:  # type: ignore[override]
        """See `EarlyEnd`."""
        return self._signals.received.name if self._signals.received is not None else ""

    def exit(self) -> NoReturn:
        """End the process of a program that never asks whether to end, after all is closed: raise
        SystemExit, with `requeue_exit_status` if the job is to be started again."""
        raise SystemExit(self._exit_status if self.reason.is_interruption else 0)

    def ask(self, request: HaltRequest) -> None:
        """Obey this request, in addition to those in directories."""
        self._standing.append(request)
        self._awaits = True
        self.has_news()

    def read(self, at: Boundary, least: Sequence[int]) -> None:
        """Learn whether the job ends early, and whether the script does not."""
        at.ends |= self.receive(HaltVote(Reason(least[0]), bool(least[1]), least[2]))
        if self.reason is not Reason.NONE:
            _milestones.reached(_milestones.HALTING)

    def vote(self, at: Boundary) -> Sequence[int]:
        """A wish to end also asks for a version."""
        wish = self.wish(at.id.version)
        at.wanted |= wish.reason is not Reason.NONE
        return int(wish.reason), int(wish.silent), wish.seconds_left

    def apart(self) -> None:
        """Ranks can no longer agree on an end: a received signal ends this process, as without this
        library. Not if they had agreed before."""
        if self.reason is Reason.NONE:
            self._signals.redeliver()

    def wish(self, version: int) -> HaltVote:
        """Whether this rank wants the job to end at the boundary of `version`."""
        self._signals.passed_boundary()
        silent = self._boundaries > 0 and not self._asked
        self._boundaries += 1
        self._voted_seconds = time.monotonic()
        watcher, cloud = self._watcher, self._preemption
        found = watcher.requests or watcher.problems or cloud.notice or cloud.problem
        is_calm = not (self._signals.received or found or self._awaits)
        if is_calm is not bool(self.patient):  # each version counts while something is awaited
            self.wait_for_looks(*(CALM if is_calm else ()))
        if is_calm:
            return HaltVote(silent=silent)
        reason = Reason.NONE if self.reason < Reason.NONE else self._find(version)
        return HaltVote(reason, silent, self._seconds_left())

    def _seconds_left(self) -> int:
        """Seconds until the cloud takes this machine away, as far as announced."""
        notice = self._preemption.notice
        if notice is None:
            return NEVER_SECONDS
        return int(min(max(0.0, notice.end_seconds - time.time()), NEVER_SECONDS))

    def _find(self, version: int) -> Reason:
        if self.signal_name:
            self._notify_once(f"this rank received {self.signal_name}", logging.WARNING)
            return Reason.SIGNAL
        for problem in self._watcher.problems:
            self._notify_once(problem, logging.WARNING)
        if self._preemption.problem:
            self._notify_of_silence(self._preemption.problem)
        if self._is_preempted():
            return Reason.PREEMPTION
        found = (request.with_margin(self._margin_seconds) for request in self._watcher.requests)
        requests = [*self._standing, *found]
        for request in requests:
            if request.unknown(self._end_seconds):
                self._notify_once(
                    "the end of this job's allocation is unknown "
                    f"({self._why_no_end}), and so are the seconds left. Older versions of "
                    "Slurm omit it: in the batch script, export SLURM_JOB_END_TIME=$(date -d "
                    '"$(squeue -h -j $SLURM_JOB_ID -o %e)" +%s); or set a time with '
                    "tierckpt halt PATH --before TIME",
                    logging.WARNING,
                )
        now = time.time()
        return min(r.reason(version, now, self._end_seconds) for r in requests)

    def _is_preempted(self) -> bool:
        """True if the cloud takes this machine away, and soon."""
        notice = self._preemption.notice
        if notice is None:
            return False
        ends = datetime.fromtimestamp(notice.end_seconds).astimezone()
        text = f"the cloud takes this node away ({notice.action}) at {ends:%Y-%m-%d %H:%M:%S %Z}"
        self._notify_once(text, logging.WARNING)
        return self._seconds_left() <= max(NOTICE_SECONDS, self._margin_seconds)

    def receive(self, agreed: HaltVote) -> bool:
        """At a boundary: receive the most urgent wish of all ranks at the previous one.

        Returns True if the script will not end by itself: the caller must end the job after this
        boundary.
        """
        if self.reason is Reason.NONE and agreed.reason < Reason.NONE:
            self.reason = agreed.reason
            if agreed.seconds_left < NEVER_SECONDS:
                self._preempted_at = self._voted_seconds + agreed.seconds_left
            if self.reason.is_interruption:
                self._agreed_seconds = time.monotonic()
            # From here on a script may need longer between boundaries (an evaluation, an upload).
            self._signals.disarm()
            silent = "the job is ended here, as this script never calls should_exit()"
            how = silent if agreed.silent else "should_exit() is true from now on"
            self._notice(
                f"the job ends early: {self.reason.text()}. A last checkpoint is taken, {how}"
                f"{self._watcher.advice()}",
                logging.WARNING if self._rank == 0 else logging.DEBUG,
            )
        return self.reason is not Reason.NONE and agreed.silent

    def should_exit(self) -> bool:
        """The implementation of `Checkpointer.should_exit`."""
        if not self._asked:
            self._asked = True
            self.has_news()
        return self.reason is not Reason.NONE

    def seconds_to_wait(self) -> float | None:
        """Time that the end may take; None: no limit. If the scheduler is about to end the
        allocation, this leaves time for a clean end (a killed batch script requeues nothing), but
        it is never less than the signal's grace period."""
        notified, end = self._notified_seconds(), self._end()
        if notified is None or end is None:
            return None
        certain = self.reason in (Reason.ALLOCATION, Reason.PREEMPTION)
        if certain or 0 <= end - notified <= ANNOUNCED_SECONDS:
            return max(0.0, max(end - SPARE_SECONDS, self._granted_until(notified)) - time.time())
        return None

    def seconds_for_others(self) -> float:
        """Time that the end may wait for other nodes and stores, after the last checkpoint is on
        disk. As `seconds_to_wait`; but after a signal in an allocation that continues, until
        shortly before the sender kills the processes. The signal may arrive while the end
        waits."""
        granted, notified = self.seconds_to_wait(), self._notified_seconds()
        if granted is None and notified is not None:
            granted = max(0.0, self._granted_until(notified) - time.time())
        return math.inf if granted is None else granted

    def has_to_end(self) -> bool:
        """True if a signal came, or the like, and its time is nearly over: nothing that hangs is
        waited for any more."""
        return self.seconds_for_others() <= STALL_SPARE_SECONDS

    def _end(self) -> float | None:
        """Unix time of the end of the allocation, or of a node in it; None if unknown."""
        left = self._preempted_at - time.monotonic()
        ends = [time.time() + left] if left < math.inf else []
        if self._preemption.notice is not None:  # it may have come after the vote
            ends.append(self._preemption.notice.end_seconds)
        return min([*ends, *([self._end_seconds] if self._end_seconds else [])], default=None)

    def _notified_seconds(self) -> float | None:
        """Unix time at which this rank learned that its processes, its node or its allocation will
        end; None if it did not."""
        known = (self._signals.received_seconds, self._agreed_seconds)
        times = (*known, self._preemption.noticed_seconds)
        notified = next((seconds for seconds in times if seconds is not None), None)
        return None if notified is None else time.time() - (time.monotonic() - notified)

    def _granted_until(self, notified_seconds: float) -> float:
        return notified_seconds + self._grace_seconds - GRACE_SPARE_SECONDS

    def disarm(self) -> None:
        """The end has started; it may take longer than an iteration."""
        self._signals.disarm()

    def end(self, remove: bool) -> None:
        """Close."""
        self.close()

    def close(self) -> None:
        """Stop watching directories and handling signals."""
        self._watcher.close()
        self._preemption.close()
        self._signals.close()

    def _notify_once(self, text: str, severity: int) -> None:
        """Report a text once."""
        if text not in self._notified:
            self._notified.add(text)
            self._notice(text, severity)

    def _notify_of_silence(self, text: str) -> None:
        """Report once that the metadata service does not answer, whatever its errors are."""
        if not self._said_silence:
            self._said_silence = True
            self._notice(text, logging.WARNING)


class RequestWatcher(Watcher):
    """Looks for requests at intervals, on its own thread, as a file system may hang.

    Any thread may read the results; each look replaces them.
    """

    def __init__(self, directories: Sequence[str]) -> None:
        super().__init__()
        self.requests: tuple[HaltRequest, ...] = ()
        self.problems: tuple[str, ...] = ()
        """Requests that cannot be read, with the reasons."""
        self._where: tuple[str, ...] = ()
        self._directories = directories
        if directories:
            self._start_thread("tierckpt-halt-requests", LOOK_SECONDS)

    def advice(self) -> str:
        """Commands that remove the requests found; empty if there are none."""
        commands = [f"tierckpt halt {shlex.quote(each)} --clear" for each in self._where]
        return f"; before the next start: {', '.join(commands)}" if commands else ""

    def _look(self) -> None:
        found: dict[str, HaltRequest] = {}
        problems = []
        for directory in self._directories:
            if answers.silent([directory], LOOK_SECONDS):  # the level's own report says so
                continue
            try:
                request = request_file.read(directory)
            except OSError as error:
                text = f"{directory} cannot be read: {error}. Until it can, no halt request there"
                problems.append(f"{text} is seen")
                continue
            except Exception as error:  # any other error would end the thread
                why = error_text(error, FormatError)
                problems.append(f"a halt request in {directory} is ignored: {why}")
                continue
            if request is not None:
                found[directory] = request
        self._where = tuple(found)
        self.requests, self.problems = tuple(found.values()), tuple(problems)
