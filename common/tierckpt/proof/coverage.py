"""Coverage: what the steps that were compared did not put to the test, so that "exact" is never
heard as more than it is.

Pure, but that records are read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from tierckpt._text import some
from tierckpt.offline.entry_names import part_of
from tierckpt.state.extras import EXTRA_STATES

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
MORE = "more --kill-after and --steps, so that one ends before the kill and one after it"
SURE = 2
"""Steps between the version that is restored and the kill, and to spare."""
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


def over_epochs(life: Life, asked: Asked) -> Asked | None:
    """What to ask for, at the pace of this run, to have an epoch end before the kill and one after
    it; `asked` itself where it has; None where that cannot be reckoned."""
    kill_at = asked.begin + asked.kill_after
    epochs = _Epochs.of(life, kill_at + asked.steps)
    return epochs.needed(kill_at - SURE, kill_at, asked)


def _of_epochs(life: Life, versions: Sequence[int], asked: Asked) -> str:
    """Empty where one ended before the kill, and one after it."""
    epochs = _Epochs.of(life, versions[-1])
    if not epochs.any_seen:
        return NO_LOADER
    needed = epochs.needed(versions[0] - 1, versions[0], asked)
    if needed == asked:
        return ""
    text = NO_END_BEFORE if any(v >= versions[0] for v in epochs.ends) else NO_END
    if needed is None:
        return text.format(how=MORE)
    if needed.kill_after == asked.kill_after:
        return text.format(how=f"--steps {needed.steps}, or --from a version shortly before one")
    how = f"--epochs, or --kill-after {needed.kill_after} --steps {needed.steps}"
    return text.format(how=how)


@dataclass(frozen=True)
class _Epochs:
    """Passes over loaders that are under way at boundaries: the training's."""

    seen: Sequence[tuple[int, Mapping[int, tuple[int, int]]]]
    """By version, see `Life.passes`."""
    ends: Sequence[int]
    """Versions by whose boundary one has ended."""

    @classmethod
    def of(cls, life: Life, last: int) -> _Epochs:
        """Those up to a version."""
        seen = [(v, life.passes[v]) for v in sorted(life.passes) if v <= last]
        pairs = pairwise(seen)
        return cls(seen, [v for (_, one), (v, other) in pairs if one.keys() - other.keys()])

    @property
    def any_seen(self) -> bool:
        """False where no loader is known."""
        return any(passes for _, passes in self.seen)

    def needed(self, resumed: int, compared: int, asked: Asked) -> Asked | None:
        """See `over_epochs`; one is to have ended by `resumed`, and one from `compared` on."""
        before = [version for version in self.ends if version <= resumed]
        after = [version for version in self.ends if version >= compared]
        if before and after:
            return asked
        last, passes = self.seen[-1] if self.seen else (0, {})
        number = max(passes, key=lambda each: passes[each][::-1], default=0)
        length, yielded = passes.get(number, (0, 0))
        if not length:
            return None
        first, begun = next((v, p[number][1]) for v, p in self.seen if number in p)
        pacer = (yielded - begun) / (last - first) if last > first and yielded > begun else 1.0
        period, more = math.ceil(length / pacer), math.ceil((length - yielded) / pacer)
        if before:
            return replace(asked, steps=asked.steps + more + SURE)
        end = self.ends[0] if self.ends else last + more + 1
        steps = max(asked.steps, period + SURE)
        return replace(asked, kill_after=end - asked.begin + SURE, steps=steps)


__all__ = ["Asked", "gaps", "over_epochs"]
