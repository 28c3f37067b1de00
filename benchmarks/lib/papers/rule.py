"""One rule for every verdict of docs/papers.md. Pure.

What checkpoints cost is the larger of two shares of the training: the overhead over all of its
steps, whether these took a version or not, and the CPU time of the versions, which is the least
that they cost where the training uses all cores. The overhead of a visit beside which other
processes took more than `QUIET_CORES` does not count. A verdict needs `MIN_VISITS` that count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from lib.figures import MIN_QUIET_VISITS as MIN_VISITS
from lib.figures import QUIET_CORES
from lib.papers.results import Row

TEXT = (
    "a checkpoint costs the larger of two shares of the training, in %: its overhead over all "
    "steps, taken or not, and the CPU time of its versions. *~*, *≥*: other processes (*others*) "
    f"took more than {QUIET_CORES:g} cores, so the figure is CPU time alone, a lower bound. In "
    f"parentheses: the range of the visits and their number n; below {MIN_VISITS} there is no "
    "verdict."
)

WORDS = ("met", "missed", "so far within", "so far missed", "not known")
"""Verdicts; the last three are none."""


@dataclass(frozen=True)
class Cost:
    """What checkpoints at an interval cost, as a share of the training.

    share: the median over the visits. low, high: their range; None if the file does not have it.
    visits: those that count. others: cores that other processes took, if the overhead does not
    count, else 0. taken, due: versions that were finished, and those that were asked for.
    """

    share: float
    low: float | None
    high: float | None
    visits: int
    others: float
    taken: int
    due: int
    every: int

    @property
    def of_one(self) -> float:
        """The cost of one version that was taken, in steps."""
        return self.share * self.every * self.due / max(self.taken, 1)

    @property
    def text(self) -> str:
        """The cell of a table, in percent."""
        return f"{'~' if self.others else ''}{100 * self.share:.1f} ({self.notes})"

    @property
    def notes(self) -> str:
        """The spread and number of visits, and whatever else limits the figure."""
        notes = [f"others {self.others:.1f}"] if self.others else []
        if self.low is not None and self.high is not None:
            notes.append(f"{100 * self.low:.1f} to {100 * self.high:.1f}")
        notes.append(visits_text(self.visits))
        if self.taken < self.due:
            notes.append(f"took {self.taken} of {self.due}")
        return ", ".join(notes)

    def verdict(self, goal: float) -> str:
        """One of WORDS. A lower bound can miss a goal, and not meet it."""
        is_above = self.share > goal or self.taken < self.due
        if not is_above and self.others:
            return "not known"
        return word(not is_above, self.visits)


def word(is_reached: bool, visits: int) -> str:
    """The verdict of a figure that counts."""
    if visits < MIN_VISITS:
        return "so far within" if is_reached else "so far missed"
    return "met" if is_reached else "missed"


def visits_text(count: int) -> str:
    """The number of visits."""
    return f"n = {count}"


def cost_of(row: Row) -> Cost:
    """The cost from a row of `lib.papers.frequency`, at one interval.

    Rows from before each visit was kept have the medians of one visit or of two.
    """
    visits = row.get("visits") or [row] * (1 + (len(set(row["overhead_range"])) > 1))
    due, taken, every = row["due"], row["taken"], row["every"]
    quiet = [visit for visit in visits if visit["others_cores"] <= QUIET_CORES]
    cpu = median(visit["cpu_share"] for visit in visits) * taken / due / every
    shares = [max(visit["total_overhead"], cpu) for visit in quiet] or [cpu]
    is_known = "visits" in row and len(quiet) > 1
    return Cost(
        share=median(shares),
        low=min(shares) if is_known else None,
        high=max(shares) if is_known else None,
        visits=len(quiet) if quiet else len(visits),
        others=0.0 if quiet else median(visit["others_cores"] for visit in visits),
        taken=taken,
        due=due,
        every=every,
    )


@dataclass(frozen=True)
class Interval:
    """The fewest iterations between checkpoints that keep to a budget, and the cost there.

    measured: at that interval, and not computed from the cost of a version at another one.
    """

    iterations: int
    share: float
    measured: bool
    cost: Cost

    @property
    def text(self) -> str:
        """The cell of a table."""
        least = "≥ " if self.cost.others else ""
        how = "" if self.measured else f"by {self.cost.every}, "
        number = f"{least}{self.iterations:,} at {100 * self.share:.1f}"
        return f"{number} ({how}{self.cost.notes})"


def interval(tried: Sequence[Row], budget: float, own: int = 1) -> Interval:
    """The interval by the last try with an overhead that counts; if none does, by the last one.

    own: the least interval that the method itself allows. Intervals at which versions were skipped
    are too short.
    """
    costs = [cost_of(row) for row in tried]
    last = ([cost for cost in costs if not cost.others] or costs)[-1]
    least = max(1, own, math.ceil(last.of_one / budget))
    if len(tried) > 1:  # shorter ones were tried before
        least = max(least, last.every)
    least = max([least, *(cost.every + 1 for cost in costs if cost.taken < cost.due)])
    share = last.of_one / least
    return Interval(least, share, least == last.every and last.taken == last.due, last)


@dataclass(frozen=True)
class Judged:
    """A goal, and its cases: a name, and one of WORDS."""

    goal: str
    cases: Sequence[tuple[str, str]]

    @property
    def line(self) -> list[str]:
        """The line of the table of goals."""
        by: dict[str, str] = {}
        for word in WORDS:
            names = [name for name, found in self.cases if found == word]
            is_all = len(names) == len(self.cases) > 2
            by[word] = f"all {len(names)}" if is_all else ", ".join(names)
        none = [f"{word}: {by[word]}" for word in WORDS[2:] if by[word]]
        missed = f"**{by['missed']}**" if by["missed"] else "-"
        return [self.goal, by["met"] or "-", missed, "; ".join(none) or "-"]


def table(lines: list[list[str]]) -> str:
    """A Markdown table; the first line is the head."""
    head, *rest = lines
    lines = [f"| {' | '.join(cells)} |" for cells in [head, *rest]]
    return "\n".join([lines[0], f"|{'---|' * len(head)}", *lines[1:]])
