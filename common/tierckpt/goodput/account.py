"""The account of a job: every second from its first process to its last record, by category. Pure.

The clock is that of the lowest rank with records. Stalls are those of the slowest rank: all others
wait for it in the next reduction.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median

from tierckpt.errors import ConfigError

from .categories import CATEGORIES, NOT_RUNNING, WITHOUT_PROCESSES
from .ranks import Run, runs_of
from .records import RankRun
from .spans import Ending, divide, usual_step_seconds

MANY_RECORDS = 20
"""Of so many records, the longest silence shows how often there are some."""


@dataclass(frozen=True)
class Part:
    """A stretch of one category, for the picture. Within one span the order is that of categories:
    stalls are between steps in truth."""

    category: str
    begin: float
    seconds: float


@dataclass
class RunAccount:
    """One run of the job; times in Unix seconds by its lowest rank's clock."""

    number: int
    begin: float
    """Start of its processes, or the end of the former run if that is later."""
    end: float = 0.0
    world: int = 1
    reference: int = 0
    from_version: int = 0
    to_version: int = 0
    made_steps: int = 0
    lost_steps: int = 0
    parts: list[Part] = field(default_factory=list)
    after_failure: bool = False
    """The former run failed."""
    by_shim: bool = False
    """`tierckpt run` started it."""
    in_new_process: bool = False
    """False for a survivor under elastic Horovod."""
    ending: Ending = Ending.OPEN
    reason: str = ""
    interrupted: bool = False
    """It closed on a signal, or at the end of its allocation."""
    uncertain_seconds: float = 0.0
    """The end is known to this: a killed process writes no last record. 0 if the failure's time is
    known from another process."""
    unseen_steps: int = 0
    """Most steps that may have been made after the last record, and lost."""
    slowest_rank: int = 0
    """The rank with the longest stalls, and how long they were."""
    slowest_seconds: float = 0.0
    fastest_seconds: float = 0.0
    """The stalls of the rank with the shortest ones."""
    last_to_attach: int = 0
    """The rank for which all others waited at the start."""
    wait_seconds: float = 0.0

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by category; 0 for those that it lacks."""
        found = dict.fromkeys((*CATEGORIES, NOT_RUNNING), 0.0)
        for part in self.parts:
            found[part.category] += part.seconds
        return found

    def add(self, category: str, begin: float, end: float) -> None:
        """Add a stretch, if it is not empty."""
        if end > begin:
            self.parts.append(Part(category, begin, end - begin))


@dataclass
class Account:
    """The whole job. `runs` have their restart's parts, from the failure before them on."""

    runs: list[RunAccount]
    notes: list[str]

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by category, with the time in which the job was not running."""
        each = [run.seconds for run in self.runs]
        names = (*CATEGORIES, NOT_RUNNING)
        return {name: math.fsum(seconds[name] for seconds in each) for name in names}

    @property
    def counts(self) -> Counter[str]:
        """Number of runs that have each category."""
        return Counter(name for run in self.runs for name, s in run.seconds.items() if s > 0)

    @property
    def elapsed_seconds(self) -> float:
        """Seconds in which the job ran, or was to run."""
        seconds = self.seconds
        return math.fsum(seconds[name] for name in CATEGORIES)

    @property
    def training_seconds(self) -> float:
        return self.seconds["training"]

    @property
    def available_seconds(self) -> float:
        """Seconds in which the job had its processes."""
        seconds = self.seconds
        return self.elapsed_seconds - math.fsum(seconds[name] for name in WITHOUT_PROCESSES)

    @property
    def goodput(self) -> float:
        """Share of the elapsed time that was training that counted."""
        return self.training_seconds / self.elapsed_seconds if self.elapsed_seconds else 0.0

    @property
    def scheduling_goodput(self) -> float:
        """Share of the elapsed time in which the job had its processes."""
        return self.available_seconds / self.elapsed_seconds if self.elapsed_seconds else 0.0

    @property
    def runtime_goodput(self) -> float:
        """Share of that time that was training that counted."""
        return self.training_seconds / self.available_seconds if self.available_seconds else 0.0

    @property
    def failures(self) -> int:
        return sum(run.ending is Ending.FAILED for run in self.runs)

    @property
    def made_steps(self) -> int:
        return sum(run.made_steps for run in self.runs)

    @property
    def lost_steps(self) -> int:
        return sum(run.lost_steps for run in self.runs)

    @property
    def unseen_steps(self) -> int:
        return sum(run.unseen_steps for run in self.runs)

    @property
    def uncertain_seconds(self) -> float:
        """Sum over all failures."""
        return math.fsum(run.uncertain_seconds for run in self.runs)


def account(
    found: Sequence[RankRun], notes: Sequence[str] = (), gap_seconds: float = math.inf
) -> Account:
    """The account of a job.

    Args:
        found: all runs of all ranks.
        notes: notes of the reader, which are passed on.
        gap_seconds: a longer time without processes is no part of the elapsed time.

    Raises ConfigError if runs of different jobs overlap.
    """
    runs = runs_of(found)
    _check_one_job(runs)
    kept = _kept_versions(runs)
    usual = _usual_seconds(runs)
    accounts: list[RunAccount] = []
    for number, run in enumerate(runs):
        after = runs[number + 1] if number + 1 < len(runs) else None
        one = _begin(run, accounts[-1] if accounts else None, number, gap_seconds)
        _end(one, run, after, usual)
        _add_startup(one, run)
        _add_spans(one, run, kept[number], usual)
        accounts.append(one)
    return Account(accounts, [*notes, *_notes(runs, accounts)])


def _check_one_job(runs: Sequence[Run]) -> None:
    for one, after in pairwise(runs):
        a, b = one.reference, after.reference
        if a.job and b.job and a.job != b.job and b.process < a.last and a.host == b.host:
            raise ConfigError(
                f"the events are of several jobs at the same time ({a.job} and {b.job}): give each "
                "job an events_dir of its own"
            )


def _kept_versions(runs: Sequence[Run]) -> list[list[float]]:
    """For every span of every run, the version up to which its steps were not made again."""
    kept: list[list[float]] = []
    newest = math.inf
    for run in reversed(runs):
        own: list[float] = []
        for span in reversed(run.reference.spans):
            own.insert(0, newest)
            is_last = newest == math.inf and span.is_restored
            if span.samples or is_last:  # without steps a later restore decides
                newest = min(newest, span.version)
        kept.insert(0, own)
    return kept


def _usual_seconds(runs: Sequence[Run]) -> float | None:
    """Usual duration of a step in the whole job, for spans with too few records."""
    spans = (span for run in runs for span in run.reference.spans)
    known = [seconds for span in spans if (seconds := usual_step_seconds(span)) is not None]
    return median(known) if known else None


def _begin(run: Run, before: RunAccount | None, number: int, gap_seconds: float) -> RunAccount:
    """The run's account, with the time since the end of the former run."""
    own = run.reference
    begin = own.process if before is None else max(own.process, before.end)
    one = RunAccount(number + 1, begin, world=own.world, reference=own.rank)
    if before is None:
        return one
    one.after_failure = before.ending is Ending.FAILED
    one.by_shim, one.in_new_process = own.shim, own.process >= before.end
    if begin - before.end > gap_seconds:
        one.add(NOT_RUNNING, before.end, begin)
    elif before.ending is Ending.CLOSED:
        one.add("waiting" if before.interrupted else NOT_RUNNING, before.end, begin)
    else:
        at = before.end
        _, noticed, ended = own.restart or (at, at, at)
        for category, until in (("noticed", noticed), ("ended", ended), ("relaunch", begin)):
            until = min(max(at, until), begin)
            one.add(category, at, until)
            at = until
    return one


def _end(one: RunAccount, run: Run, after: Run | None, usual_seconds: float | None) -> None:
    """Find the end of a run, and how exactly it is known."""
    own = run.reference
    one.end = max(own.last, one.begin)
    if own.closing is not None:
        one.ending, one.reason, one.interrupted = Ending.CLOSED, own.reason, own.interrupted
        return
    if after is None:
        return
    one.ending = Ending.FAILED
    most = max(after.reference.process, one.end) - one.end
    restart = after.reference.restart
    if restart is not None:
        most = min(max(one.end, restart[0]) - one.end, most)
    if not own.told_end:
        unknown = min(most, _silence_seconds(own, usual_seconds))
        one.uncertain_seconds = 0.0 if restart is not None else unknown
        one.unseen_steps = math.ceil(unknown / usual_seconds) if usual_seconds else 0
    if restart is not None:
        one.end += most


def _silence_seconds(own: RankRun, usual_seconds: float | None) -> float:
    """Longest time after which a process that does not hang writes its next record: a period and a
    step, or much less if it has recorded versions more often."""
    longest = own.heartbeat_seconds + 2 * (usual_seconds or math.inf)
    if own.records >= MANY_RECORDS:
        longest = min(longest, 2 * own.silence_seconds)
    return longest


def _add_startup(one: RunAccount, run: Run) -> None:
    """Add the time from the start of the processes to the end of the attach."""
    own, at = run.reference, one.begin
    attached = own.attached if own.attached is not None else one.end
    wait = run.wait_seconds if own.attached is not None else 0.0
    moments = (
        ("import", own.imported),
        ("setup", own.attach),
        ("rendezvous", own.attach + wait),
        ("attach", attached),
    )
    for category, until in moments:
        until = min(max(at, until), one.end)
        one.add(category, at, until)
        at = until
    one.last_to_attach, one.wait_seconds = run.last_to_attach, wait


def _add_spans(one: RunAccount, run: Run, kept: Sequence[float], usual: float | None) -> None:
    """Add restores and training, up to the end of the run."""
    own = run.reference
    if own.attached is None:
        return
    trained = [span for span in own.spans if span.samples] or own.spans[-1:]
    one.from_version = one.to_version = trained[0].version
    at = min(max(one.begin, own.attached), one.end)
    for number, span in enumerate(own.spans):
        restored = min(max(at, span.begin), one.end)
        one.add("restore", at, restored)
        after = own.spans[number + 1] if number + 1 < len(own.spans) else None
        if after is not None:
            until = after.begin - after.restore_seconds
        else:
            until = one.end if own.closing is None else own.closing
        at = max(restored, min(until, one.end))
        if after is not None and not span.samples:
            one.add("setup", restored, at)
            continue
        ending = one.ending if after is None else Ending.ROLLED_BACK
        _add_training(one, run, number, (restored, at), kept[number], ending, usual)
    if own.closing is not None:
        one.add("close", at, one.end)
    _compare_stalls(one, run)


def _add_training(
    one: RunAccount,
    run: Run,
    number: int,
    stretch: tuple[float, float],
    kept: float,
    ending: Ending,
    usual: float | None,
) -> None:
    """Add one span from its restore to its end."""
    own = run.reference
    span, newest = own.spans[number], run.newest(number)
    if ending is Ending.FAILED and span.samples and newest < kept < math.inf:
        newest = int(kept)  # made and stored after the last record
    begin, end = stretch
    result = divide(
        replace(span, begin=begin),
        run.slowest(number)[1],
        end,
        newest,
        kept,
        ending,
        usual_step_seconds(span) or usual,
        0.0 if own.told_end else own.heartbeat_seconds,
    )
    for category in ("first_step", "training", "checkpoint", "lost", "noticed"):
        one.add(category, begin, begin + result.seconds[category])
        begin += result.seconds[category]
    one.made_steps += result.made
    one.lost_steps += result.lost
    one.to_version = newest


def _compare_stalls(one: RunAccount, run: Run) -> None:
    """Name the rank that waited longest for checkpoints."""
    stalls: defaultdict[int, float] = defaultdict(float)
    for number in range(len(run.reference.spans)):
        for rank, span in run.spans_of(number).items():
            stalls[rank] += span.samples[-1].stall_seconds if span.samples else 0.0
    if stalls:
        one.slowest_rank = max(stalls, key=lambda rank: (stalls[rank], -rank))
        one.slowest_seconds, one.fastest_seconds = max(stalls.values()), min(stalls.values())


def _notes(runs: Sequence[Run], accounts: Sequence[RunAccount]) -> list[str]:
    """Facts that limit the account."""
    found = []
    if len(jobs := sorted({run.reference.job for run in runs} - {""})) > 1:
        found.append(f"the runs have several job ids ({', '.join(jobs)}), and count as one job")
    references = {run.reference.rank for run in runs}
    if len(references) > 1 or len({run.reference.host for run in runs}) > 1:
        found.append(
            "runs are timed on different nodes or by different ranks: the time between two runs is "
            "as exact as their clocks agree"
        )
    for run, one in zip(runs, accounts, strict=True):
        if run.reference.follows_at_once:
            found.append(
                f"run {one.number} began, by its clock, before the end of the run before: the time "
                "between them is unknown, and counts as 0"
            )
        if (lacking := one.world - len(run.ranks)) > 0 and run.reference.run:
            ranks = f"{lacking} of {one.world} ranks"
            found.append(f"run {one.number}: {ranks} have no records here, and may be slower")
    if accounts[-1].ending is Ending.OPEN:
        found.append("the last run has no end: it counts as it stands")
    return found
