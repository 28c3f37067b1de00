"""Coverage: the behaviour that the compared steps did not exercise, so that "exact" does not
promise too much.

Pure, except that records are read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from tierckpt._text import some
from tierckpt.offline.entry_names import part_of
from tierckpt.state.extras import EXTRA_STATES

from .records import RankRun
from .verdict import object_of

NO_LOADER = (
    "unknown: whether an epoch ended in these steps, as no DataLoader was in use. Work at the end "
    "of an epoch (a scheduler's step, a new shuffle, an evaluation) is compared only if --steps or "
    "--from make the test pass one"
)
NO_END = (
    "not compared: no epoch ended in these steps. Work at the end of an epoch (a scheduler's step, "
    "a new shuffle, an evaluation) was not tested: give {how}"
)
NO_END_BEFORE = (
    "not compared: no epoch ended before the kill, so the kill could not lose a change made there "
    "(a scheduler's count): give {how}"
)
MORE = "more --kill-after and --steps, so that one ends before the kill and one after it"
SURE = 2
"""Steps between the restored version and the kill, with one to spare."""
NO_RATE = "not compared: no learning rate changed in these steps, and there is a scheduler"
NO_CHANGE = "not compared: {names} did not change in these steps"
NO_SKIP = "not compared: the scale of {names} did not change, so no step was skipped in these steps"


@dataclass(frozen=True)
class Request:
    """The numbers given on the command line."""

    begin: int
    """The version that runs start from; 0: from scratch."""
    kill_after: int
    steps: int


def gaps(run: RankRun, versions: Sequence[int], request: Request) -> list[str]:
    """Sentences about untested behaviour. `run` is one rank's part of the undisturbed run.
    `versions` were compared; the last restored version is the one before them."""
    found = [_of_epochs(run, versions, request)]
    before = max((v for v in run.states if v < versions[0]), default=versions[0])
    first = run.states[before].load()
    changed = set[str]()
    for version in versions:
        now = run.states[version].load()
        changed |= {n for n in now.keys() | first.keys() if now.get(n) != first.get(n)}
    rates = [n for n in first if part_of(n) == "options" and n.endswith("/lr")]
    if run.schedulers and rates and changed.isdisjoint(rates):
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


def over_epochs(run: RankRun, request: Request) -> Request | None:
    """The request that makes an epoch end before the kill and another one after it, at the pace of
    this run; `request` itself if it does; None if it cannot be computed."""
    kill_at = request.begin + request.kill_after
    epochs = _Epochs.of(run, kill_at + request.steps)
    return epochs.needed(kill_at - SURE, kill_at, request)


def _of_epochs(run: RankRun, versions: Sequence[int], request: Request) -> str:
    """A sentence; empty if an epoch ended before the kill and another one after it."""
    epochs = _Epochs.of(run, versions[-1])
    if not epochs.any_seen:
        return NO_LOADER
    needed = epochs.needed(versions[0] - 1, versions[0], request)
    if needed == request:
        return ""
    text = NO_END_BEFORE if any(v >= versions[0] for v in epochs.ends) else NO_END
    if needed is None:
        return text.format(how=MORE)
    if needed.kill_after == request.kill_after:
        return text.format(how=f"--steps {needed.steps}, or --from a version shortly before one")
    how = f"--epochs, or --kill-after {needed.kill_after} --steps {needed.steps}"
    return text.format(how=how)


@dataclass(frozen=True)
class _Epochs:
    """Passes over loaders that are in progress at boundaries: those of the training."""

    seen: Sequence[tuple[int, Mapping[int, tuple[int, int]]]]
    """By version, as `RankRun.passes`."""
    ends: Sequence[int]
    """Versions at whose boundary a pass had ended."""

    @classmethod
    def of(cls, run: RankRun, last: int) -> _Epochs:
        """The passes up to a version."""
        seen = [(v, run.passes[v]) for v in sorted(run.passes) if v <= last]
        pairs = pairwise(seen)
        return cls(seen, [v for (_, one), (v, other) in pairs if one.keys() - other.keys()])

    @property
    def any_seen(self) -> bool:
        """False if no loader was seen."""
        return any(passes for _, passes in self.seen)

    def needed(self, resumed: int, compared: int, request: Request) -> Request | None:
        """As `over_epochs`: one epoch must end by `resumed`, and one from `compared` on."""
        before = [version for version in self.ends if version <= resumed]
        after = [version for version in self.ends if version >= compared]
        if before and after:
            return request
        # A short script has ended: the newest pass is over.
        last, passes = next((each for each in reversed(self.seen) if each[1]), (0, {}))
        number = max(passes, key=lambda each: passes[each][::-1], default=0)
        length, yielded = passes.get(number, (0, 0))
        if not length:
            return None
        first, begun = next((v, p[number][1]) for v, p in self.seen if number in p)
        pacer = (yielded - begun) / (last - first) if last > first and yielded > begun else 1.0
        period, more = math.ceil(length / pacer), math.ceil((length - yielded) / pacer)
        if before:
            return replace(request, steps=request.steps + more + SURE)
        end = self.ends[0] if self.ends else last + more + 1
        steps = max(request.steps, period + SURE)
        return replace(request, kill_after=end - request.begin + SURE, steps=steps)


__all__ = ["Request", "gaps", "over_epochs"]
