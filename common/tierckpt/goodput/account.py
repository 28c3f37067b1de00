"""The account of a job: every second from its first process to its last record, by category. Pure.

The clock is that of the lowest rank with records. Stalls are those of the slowest rank: all others
wait for it in the next reduction.

The categories have the terms of ML Goodput Measurement, in the order of reports. The records of
all ranks that belong together are a run of the job. The time between two restores is divided into
training, stalls and lost work.

The account for people and programs: tables, sentences, advice, and a document for JSON. Pure.

The advice names the largest badput that something can be done about.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from enum import Enum
from functools import cached_property
from itertools import pairwise
from statistics import median
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from tierckpt._text import counted
from tierckpt.errors import ConfigError

from .records import RankRun, Sample, Span

__all__ = ["category_lines", "conclusions", "run_lines"]


class Category(Struct, frozen=True):
    """One category. `google` is its type in the library ML Goodput Measurement."""

    title: str
    google: str
    colour: str


PRODUCTIVE = "productive step time"
SAVING = "checkpoint saving"
PREPARATION = "training preparation"
STARTUP = "program startup"
RECOVERY = "infrastructure recovery"
CATEGORIES = {
    "training": Category("training that counted", PRODUCTIVE, "#54a24b"),
    "checkpoint": Category("checkpoint stalls", SAVING, "#f58518"),
    "close": Category("final checkpoint", SAVING, "#ffbf79"),
    "lost": Category("lost work", "wasted progress", "#e45756"),
    "noticed": Category("failure noticed", RECOVERY, "#b279a2"),
    "ended": Category("processes ended", RECOVERY, "#d6a5c9"),
    "relaunch": Category("processes started again", RECOVERY, "#9d755d"),
    "import": Category("imports", STARTUP, "#4c78a8"),
    "setup": Category("setup by the script", PREPARATION, "#72b7b2"),
    "rendezvous": Category("wait for other ranks", PREPARATION, "#9ecae9"),
    "attach": Category("attach", PREPARATION, "#88d27a"),
    "restore": Category("restore", "checkpoint loading", "#eeca3b"),
    "first_step": Category("first step", STARTUP, "#2f6b99"),
    "waiting": Category("wait for machines", RECOVERY, "#bab0ac"),
}
NOT_RUNNING = "not_running"
"""Time after the job's own end; it is no part of the elapsed time."""
WITHOUT_PROCESSES = ("relaunch", "waiting")
"""Categories in which the job has no processes: the badput of scheduling."""
RESTART = ("noticed", "ended", "relaunch", "import", "setup", "rendezvous", "attach", "restore")
"""Categories between the failure and the first step."""


class Run(Struct, frozen=True, dict=True):
    """One run of the job, on all ranks with records of it."""

    ranks: dict[int, RankRun]

    @cached_property
    def reference(self) -> RankRun:
        """The lowest rank: its clock is the job's, in this run."""
        return self.ranks[min(self.ranks)]

    @property
    def wait_seconds(self) -> float:
        """Time for which the reference waited in its attach for ranks that came later: all ranks
        end an attach together."""
        return self.reference.attach_seconds - self.ranks[self.last_to_attach].attach_seconds

    @property
    def last_to_attach(self) -> int:
        """The rank with the shortest attach: all others waited for it."""
        done = {rank: run for rank, run in self.ranks.items() if run.attached is not None}
        return min(
            done, key=lambda rank: (done[rank].attach_seconds, rank), default=min(self.ranks)
        )

    def spans_of(self, number: int) -> dict[int, Span]:
        """The span of this number on every rank that has it."""
        return {r: run.spans[number] for r, run in self.ranks.items() if number < len(run.spans)}

    def slowest(self, number: int) -> tuple[int, Span]:
        """The rank that waited longest for checkpoints in this span, and its span."""
        spans = self.spans_of(number)

        def stall(rank: int) -> tuple[float, int]:
            samples = spans[rank].samples
            return (samples[-1].stall_seconds if samples else 0.0, -rank)

        rank = max(spans, key=stall)
        return rank, spans[rank]

    def newest(self, number: int) -> int:
        """The newest version that some rank reached in this span."""
        return max(span.newest for span in self.spans_of(number).values())


def runs_of(found: Sequence[RankRun]) -> list[Run]:
    """The runs in order of time.

    A run gets its name at its first boundary. Those that failed before count if the lowest rank
    recorded them: its records alone give the time of all others."""
    lowest = min(run.rank for run in found)
    named: dict[str, dict[int, RankRun]] = defaultdict(dict)
    nameless = []
    for run in found:
        if run.run:
            named[run.run][run.rank] = run
        elif run.rank == lowest:
            nameless.append({run.rank: run})
    runs = [Run(ranks) for ranks in (*named.values(), *nameless)]
    return sorted(runs, key=lambda run: run.reference.attach)


class Ending(Enum):
    """The end of a span."""

    CLOSED = "closed"
    FAILED = "failed"
    ROLLED_BACK = "rolled back"
    """A restore in the same process."""
    OPEN = "open"
    """The newest records of the job: it runs, or it failed and was not started again."""


class Division(Struct):
    """Seconds by category, and steps."""

    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    made: int = 0
    lost: int = 0


class _Window(Struct, frozen=True):
    """Time between two boundaries with records."""

    seconds: float
    first: int
    last: int
    stall_seconds: float

    @property
    def steps(self) -> int:
        return self.last - self.first


class _Stalls:
    """The slowest rank's stalls up to a version, linear between its records."""

    def __init__(self, span: Span) -> None:
        known = {span.version: 0.0} | {s.version: s.stall_seconds for s in span.samples}
        self._versions, self._seconds = list(known), list(known.values())

    def until(self, version: int) -> float:
        i = bisect_left(self._versions, version)
        if i == len(self._versions):
            return self._seconds[-1]
        if i == 0 or self._versions[i] == version:
            return self._seconds[i]
        start, end = self._versions[i - 1], self._versions[i]
        share = (version - start) / (end - start)
        return self._seconds[i - 1] + share * (self._seconds[i] - self._seconds[i - 1])


def usual_step_seconds(span: Span) -> float | None:
    """Mean duration of a step without stalls, after the first record; None if unknown."""
    if len(span.samples) < 2 or span.samples[-1].version <= span.samples[0].version:
        return None
    first, last = span.samples[0], span.samples[-1]
    seconds = last.at - first.at - (last.stall_seconds - first.stall_seconds)
    return max(0.0, seconds) / (last.version - first.version)


def divide(
    span: Span,
    slowest: Span,
    end: float,
    newest: int,
    kept: float,
    ending: Ending,
    usual_seconds: float | None,
    least_exact_seconds: float,
) -> Division:
    """Divide the time from the span's start to `end`.

    Args:
        slowest: the same span of the rank with the longest stalls.
        newest: the newest version that any rank reached.
        kept: steps up to this version count; later ones were made again.
        ending: why the span ended.
        usual_seconds: usual duration of a step.
        least_exact_seconds: period of the records, if the end is that of a killed process.
    """
    result = Division(made=newest - span.version)
    result.lost = max(0, newest - int(max(min(kept, newest), span.version)))
    if not span.samples and newest <= span.version:
        result.seconds["first_step"] += end - span.start
        return result
    points = [Sample(span.start, span.version, 0.0), *span.samples]
    if newest > points[-1].version:
        at = max(points[-1].at, min(span.end, end))
        points.append(Sample(at, newest, points[-1].stall_seconds))
    for number, window in enumerate(_windows(points, _Stalls(slowest))):
        warm_up = 0.0
        if number == 0 and usual_seconds is not None:
            steps = window.steps * usual_seconds
            warm_up = max(0.0, window.seconds - window.stall_seconds - steps)
        result.seconds["first_step"] += warm_up
        _share(result.seconds, window, window.seconds - warm_up, kept)
    tail = max(0.0, end - points[-1].at)
    rest = _tail(tail, newest, kept, ending, usual_seconds, least_exact_seconds)
    for category, seconds in rest.items():
        result.seconds[category] += seconds
    return result


def _windows(points: Sequence[Sample], stalls: _Stalls) -> list[_Window]:
    found = []
    for start, end in pairwise(points):
        stall = end.stall_seconds - start.stall_seconds
        if end.version > start.version:
            stall = stalls.until(end.version) - stalls.until(start.version)
        seconds = end.at - start.at
        within = min(max(stall, 0.0), seconds)
        found.append(_Window(seconds, start.version, end.version, within))
    return found


def _share(seconds: defaultdict[str, float], window: _Window, rest: float, kept: float) -> None:
    """Divide `rest` of a window between steps that count and lost ones. All that lost steps took is
    lost work, with their stalls."""
    if window.steps:
        share = min(max((kept - window.first) / window.steps, 0.0), 1.0)
    else:
        share = 1.0 if kept > window.last else 0.0
    stall = share * window.stall_seconds
    seconds["checkpoint"] += stall
    seconds["training"] += max(0.0, share * rest - stall)
    seconds["lost"] += (1 - share) * rest


def _tail(
    tail: float,
    newest: int,
    kept: float,
    ending: Ending,
    usual_seconds: float | None,
    least_exact_seconds: float,
) -> dict[str, float]:
    """The time after the last boundary with a record."""
    if ending in (Ending.CLOSED, Ending.OPEN):
        return {"training" if kept >= newest else "lost": tail}
    if ending is Ending.ROLLED_BACK or usual_seconds is None:
        return {"lost": tail}
    # An interrupted step, and those without a record; a longer silence is an unnoticed failure.
    lost = min(tail, 2 * usual_seconds + least_exact_seconds)
    return {"lost": lost, "noticed": tail - lost}


MANY_RECORDS = 20
"""Of so many records, the longest silence shows how often there are some."""


class Part(Struct, frozen=True):
    """A stretch of one category, for the picture. Within one span the order is that of categories:
    stalls are between steps in truth."""

    category: str
    start: float
    seconds: float


class RunAccount(Struct):
    """One run of the job; times in Unix seconds by its lowest rank's clock."""

    number: int
    start: float
    """Start of its processes, or the end of the former run if later."""
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

    def add(self, category: str, start: float, end: float) -> None:
        """Add a stretch, if it is not empty."""
        if end > start:
            self.parts.append(Part(category, start, end - start))


class Account(Struct):
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
        one = _start_account(run, accounts[-1] if accounts else None, number, gap_seconds)
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


def _start_account(
    run: Run, before: RunAccount | None, number: int, gap_seconds: float
) -> RunAccount:
    """The run's account, with the time since the end of the former run."""
    own = run.reference
    start = own.process if before is None else max(own.process, before.end)
    one = RunAccount(number + 1, start, world=own.world, reference=own.rank)
    if before is None:
        return one
    one.after_failure = before.ending is Ending.FAILED
    one.by_shim, one.in_new_process = own.shim, own.process >= before.end
    if start - before.end > gap_seconds:
        one.add(NOT_RUNNING, before.end, start)
    elif before.ending is Ending.CLOSED:
        one.add("waiting" if before.interrupted else NOT_RUNNING, before.end, start)
    else:
        at = before.end
        _, noticed, ended = own.restart or (at, at, at)
        for category, until in (("noticed", noticed), ("ended", ended), ("relaunch", start)):
            until = min(max(at, until), start)
            one.add(category, at, until)
            at = until
    return one


def _end(one: RunAccount, run: Run, after: Run | None, usual_seconds: float | None) -> None:
    """Find the end of a run, and how exactly it is known."""
    own = run.reference
    one.end = max(own.last, one.start)
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
    own, at = run.reference, one.start
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
    at = min(max(one.start, own.attached), one.end)
    for number, span in enumerate(own.spans):
        restored = min(max(at, span.start), one.end)
        one.add("restore", at, restored)
        after = own.spans[number + 1] if number + 1 < len(own.spans) else None
        if after is not None:
            until = after.start - after.restore_seconds
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
    start, end = stretch
    result = divide(
        replace(span, start=start),
        run.slowest(number)[1],
        end,
        newest,
        kept,
        ending,
        usual_step_seconds(span) or usual,
        0.0 if own.told_end else own.heartbeat_seconds,
    )
    for category in ("first_step", "training", "checkpoint", "lost", "noticed"):
        one.add(category, start, start + result.seconds[category])
        start += result.seconds[category]
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
                f"run {one.number} started, by its clock, before the end of the run before: the "
                "time between them is unknown, and counts as 0"
            )
        if (lacking := one.world - len(run.ranks)) > 0 and run.reference.run:
            ranks = f"{lacking} of {one.world} ranks"
            found.append(f"run {one.number}: {ranks} have no records here, and may be slower")
    if accounts[-1].ending is Ending.OPEN:
        found.append("the last run has no end: it counts as it stands")
    return found


def document(job: Account, program_goodput: float | None) -> dict[str, Any]:
    """The whole account. Times are Unix seconds, shares are from 0 to 1.

    - `elapsed_seconds`: the sum of all categories; `not_running_seconds`: time not counted
    - `goodput`, `scheduling_goodput`, `runtime_goodput`, `program_goodput`: shares; the last one is
      null without its options
    - `categories`: for each name `title`, `google` (the term there), `seconds`, `share` of the
      elapsed time, and `count`, the number of runs that have it
    - `made_steps`, `lost_steps` (made again), `unseen_steps` (the most that may be missing in both)
    - `failures`: runs that ended without `closed`, and that another run followed
    - `uncertain_seconds`: sum of the times within which the failures are known
    - `notes`: sentences
    - `runs`: a list, with these fields and some of those above:

      - `number`, `begin`, `end`: from 1; the start of its processes, and its last sign of life or
        its failure
      - `world`, `clock_rank`: number of ranks; the rank with the clock that counts
      - `from_version`, `to_version`: restored and last version
      - `ending`, `reason`: `closed`, `failed` or `open` (the last run, without an end so far); the
        reason of a clean end
      - `slowest_rank`, `slowest_stall_seconds`, `fastest_stall_seconds`: the longest and the
        shortest stalls of a rank
      - `last_to_attach`, `wait_seconds`: the rank for which all waited at the start; how long
        `clock_rank` waited
      - `seconds`: by category, those of the restart before the run included
    """
    seconds, counts, elapsed = job.seconds, job.counts, job.elapsed_seconds
    return {
        "elapsed_seconds": elapsed,
        "not_running_seconds": seconds[NOT_RUNNING],
        "goodput": job.goodput,
        "scheduling_goodput": job.scheduling_goodput,
        "runtime_goodput": job.runtime_goodput,
        "program_goodput": program_goodput,
        "categories": {
            name: {
                "title": category.title,
                "google": category.google,
                "seconds": seconds[name],
                "share": seconds[name] / elapsed if elapsed else 0.0,
                "count": counts[name],
            }
            for name, category in CATEGORIES.items()
        },
        "made_steps": job.made_steps,
        "lost_steps": job.lost_steps,
        "unseen_steps": job.unseen_steps,
        "failures": job.failures,
        "uncertain_seconds": job.uncertain_seconds,
        "runs": [_run(run) for run in job.runs],
        "notes": job.notes,
    }


def _run(run: RunAccount) -> dict[str, Any]:
    return {
        "number": run.number,
        "begin": run.start,
        "end": run.end,
        "world": run.world,
        "clock_rank": run.reference,
        "from_version": run.from_version,
        "to_version": run.to_version,
        "made_steps": run.made_steps,
        "lost_steps": run.lost_steps,
        "ending": run.ending.value,
        "reason": run.reason,
        "uncertain_seconds": run.uncertain_seconds,
        "unseen_steps": run.unseen_steps,
        "slowest_rank": run.slowest_rank,
        "slowest_stall_seconds": run.slowest_seconds,
        "fastest_stall_seconds": run.fastest_seconds,
        "last_to_attach": run.last_to_attach,
        "wait_seconds": run.wait_seconds,
        "seconds": {name: value for name, value in run.seconds.items() if value},
    }


WORTH_SECONDS = 0.1
"""A rank that others waited for a shorter time for is not named."""


def category_lines(job: Account) -> list[tuple[str, ...]]:
    """The time by category, titles first."""
    seconds, counts, elapsed = job.seconds, job.counts, job.elapsed_seconds or 1.0
    lines: list[tuple[str, ...]] = [
        ("category", "seconds", "share", "runs", "ML Goodput Measurement")
    ]
    for name, category in CATEGORIES.items():
        if seconds[name] > 0:
            share = f"{100 * seconds[name] / elapsed:.1f} %"
            row = (category.title, f"{seconds[name]:.2f}", share, str(counts[name]))
            lines.append((*row, category.google))
    lines.append(("elapsed", f"{elapsed:.2f}", "100.0 %", str(len(job.runs)), ""))
    if seconds[NOT_RUNNING] > 0:
        row = ("not running", f"{seconds[NOT_RUNNING]:.2f}", "", str(counts[NOT_RUNNING]))
        lines.append((*row, "not counted"))
    return lines


def run_lines(job: Account) -> list[tuple[str, ...]]:
    """The runs, titles first."""
    lines = [("run", "began", "ranks", "seconds", "start", "steps", "lost", "stalls", "end")]
    return [*lines, *(_run_line(one) for one in job.runs)]


def _run_line(one: RunAccount) -> tuple[str, ...]:
    seconds = one.seconds
    start = sum(seconds[name] for name in (*RESTART, "first_step"))
    return (
        str(one.number),
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.start)),
        str(one.world),
        f"{one.end - one.start:.1f}",
        f"{start:.2f}",
        f"{one.from_version} to {one.to_version}",
        str(one.lost_steps),
        f"{seconds['checkpoint']:.2f}",
        _end_text(one),
    )


def _end_text(one: RunAccount) -> str:
    if one.ending is Ending.CLOSED:
        return f"closed: {one.reason}"
    if one.ending is Ending.FAILED:
        exact = one.uncertain_seconds
        return f"failed (± {exact:.1f} s)" if exact else "failed"
    return "no end yet"


def conclusions(job: Account, program: str = "") -> list[str]:
    """Sentences below the tables. `program`: what is known of the program goodput."""
    kept = job.made_steps - job.lost_steps
    unseen, were = "", "was" if job.lost_steps == 1 else "were"
    if job.unseen_steps:
        unseen = f"; up to {job.unseen_steps} more may have been lost after the last records"
    lines = [
        f"Goodput {100 * job.goodput:.1f} %: scheduling {100 * job.scheduling_goodput:.1f} % x "
        f"runtime {100 * job.runtime_goodput:.1f} %{program}.",
        f"{kept} of {job.made_steps} steps counted, and {job.lost_steps} {were} lost "
        f"({counted(job.failures, 'failure')}){unseen}.",
    ]
    if job.uncertain_seconds:
        lines.append(
            f"The times of the failures are known to {job.uncertain_seconds:.1f} s in all: so much "
            "of the restarts may be lost work."
        )
    slow = max(job.runs, key=lambda one: one.slowest_seconds)
    if slow.slowest_seconds > slow.fastest_seconds:
        lines.append(
            f"Slowest checkpoints: rank {slow.slowest_rank} in run {slow.number}, "
            f"{slow.slowest_seconds:.2f} s of stalls (the fastest rank: "
            f"{slow.fastest_seconds:.2f} s)."
        )
    late = max(job.runs, key=lambda one: one.wait_seconds)
    if late.wait_seconds >= WORTH_SECONDS:
        lines.append(
            f"Slowest start: rank {late.last_to_attach} in run {late.number}; rank "
            f"{late.reference} waited {late.wait_seconds:.2f} s for it."
        )
    return lines


WORTH_SHARE = 0.01
"""A smaller share of the elapsed time gets no advice."""
STALL_SHARE = 0.03
"""The default of the setting `overhead_budget`."""


def advice(job: Account, places: str) -> Iterator[str]:
    """Sentences on what would help, largest share first. `places`: the events, as arguments of a
    command."""
    if not (elapsed := job.elapsed_seconds):
        return
    seconds = job.seconds
    again = [run for run in job.runs if run.after_failure and run.in_new_process]
    restarts = [run for run in again if not run.by_shim]
    restart = sum(run.seconds[name] for run in restarts for name in RESTART)
    found = []
    if (share := seconds["lost"] / elapsed) > WORTH_SHARE:
        text = f"Lost work is {100 * share:.1f} %: `tierckpt interval --events {places}` computes "
        found.append((share, f"{text}the best interval of each level from the same events."))
    if (share := restart / elapsed) > WORTH_SHARE:
        mean = restart / len(restarts)
        text = f"Restarts are {100 * share:.1f} %, {mean:.1f} s each: `tierckpt run` keeps torch "
        found.append((share, f"{text}imported and starts the script again in milliseconds."))
    if (share := seconds["checkpoint"] / elapsed) > STALL_SHARE:
        text = f"Checkpoint stalls are {100 * share:.1f} %: longer intervals, or `auto`, which "
        found.append((share, f"{text}holds them within the setting overhead_budget."))
    if (share := seconds["noticed"] / elapsed) > WORTH_SHARE:
        text = f"Failures went unnoticed for {100 * share:.1f} %: a shorter timeout of the process "
        found.append((share, f"{text}group (init_process_group(timeout=...)) ends a hang sooner."))
    yield from (text for _, text in sorted(found, reverse=True))
