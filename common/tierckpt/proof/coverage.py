"""Coverage: what the steps that were compared did not put to the test, so that "exact" is never
heard as more than it is.

Pure, but that records are read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..extras import EXTRA_STATES
from ..offline.names import part_of
from ..wording import some
from .records import Life
from .verdict import object_of

NO_LOADER = (
    "not known: whether an epoch ended in these steps, as no DataLoader was in use. What is done "
    "only then (a scheduler's step, a new shuffle, an evaluation) is compared where --steps or "
    "--from have them pass one"
)
NO_END = (
    "not compared: no epoch ended in these steps. What is done only then (a scheduler's step, a "
    "new shuffle, an evaluation) was not put to the test: give {how}"
)
NO_END_BEFORE = (
    "not compared: no epoch ended before the kill, so what one changes (a scheduler's count) could "
    "not be lost by it: give {how}"
)
NO_RATE = "not compared: no learning rate changed in these steps, and there is a scheduler"
NO_CHANGE = "not compared: {names} did not change in these steps"
NO_SKIP = "not compared: the scale of {names} did not change, so no step was skipped in these steps"


@dataclass(frozen=True)
class Asked:
    """What the command was told."""

    begin: int
    """The version that runs begin with; 0: afresh."""
    kill_after: int
    steps: int


def gaps(life: Life, versions: Sequence[int], asked: Asked) -> list[str]:
    """Sentences. `life` is one rank's of the run that nobody disturbed; `versions` were compared,
    the last one that was restored is before these."""
    found = [_of_epochs(life, versions, asked)]
    before = max((v for v in life.states if v < versions[0]), default=versions[0])
    first = life.states[before].load()
    changed = set[str]()
    for version in versions:
        now = life.states[version].load()
        changed |= {n for n in now.keys() | first.keys() if now.get(n) != first.get(n)}
    rates = [n for n in first if part_of(n) == "options" and n.endswith("/lr")]
    if life.schedulers and rates and changed.isdisjoint(rates):
        found.append(NO_RATE)
    objects = {
        object_of(name)
        for name in first
        if part_of(name) in ("extra", "extra_per_rank") and "/" in name
    } - {f"extra/{EXTRA_STATES}"}
    if still := sorted(objects - {object_of(name) for name in changed}):
        found.append(NO_CHANGE.format(names=some(still, 6)))
    scales = {object_of(n) for n in first if n.endswith("/_growth_tracker")}
    scales -= {object_of(n) for n in changed if n.endswith("/scale")}
    if scaled := sorted(scales - set(still)):
        found.append(NO_SKIP.format(names=some(scaled)))
    return [text for text in found if text]


def _of_epochs(life: Life, versions: Sequence[int], asked: Asked) -> str:
    """Empty where one ended before the kill, and one after it."""
    seen = [(v, life.passes[v]) for v in sorted(life.passes) if v <= versions[-1]]
    if not any(passes for _, passes in seen):
        return NO_LOADER
    pairs = pairwise(seen)
    ends = [version for (_, one), (version, other) in pairs if one.keys() - other.keys()]
    before = [version for version in ends if version < versions[0]]
    after = [version for version in ends if version >= versions[0]]
    if before and after:
        return ""
    text = NO_END_BEFORE if after else NO_END
    return text.format(how=_how(seen, before, after, asked))


def _how(
    seen: Sequence[tuple[int, Mapping[int, tuple[int, int]]]],
    before: Sequence[int],
    after: Sequence[int],
    asked: Asked,
) -> str:
    """What to give for an epoch to end before the kill, and one after it, from the pace of the
    longest pass."""
    last, passes = seen[-1]
    number, (length, yielded) = max(passes.items(), key=lambda p: p[1], default=(0, (0, 0)))
    if not length:
        return "more --kill-after and --steps, so that one ends before the kill and one after it"
    first, begun = next((v, p[number][1]) for v, p in seen if number in p)
    pace = (yielded - begun) / (last - first) if last > first and yielded > begun else 1.0
    period, more = math.ceil(length / pace), math.ceil((length - yielded) / pace)
    if before:
        return (
            f"--steps {asked.steps + more + 2}, or --from a version shortly before the end of one"
        )
    end = after[0] if after else last + more
    return f"--kill-after {end - asked.begin + 3} --steps {max(asked.steps, period + 2)}"


__all__ = ["Asked", "gaps"]
