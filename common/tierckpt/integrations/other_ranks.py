"""Other numbers of ranks: a job goes on in mid-epoch with more or fewer ranks.

Loaders of the frameworks hand out an epoch's samples in order, one global batch after the other.
So the samples of each step are the same for any number of ranks, if ranks x batch size x
accumulated batches is the same: the condition for a restart. Torch's elastic jobs and large-batch
recipes keep this product, too, since learning rate and schedule belong to it.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

from tierckpt.errors import RestoreError
from tierckpt.resumable_loader import Batch, ResumableLoader

OTHER_STEPS = (
    "v{version} was taken with {had} samples a step ({old}), and this job has {has} ({new}): the "
    "samples to skip would not be those trained on, and learning rate and schedule belong to "
    "another batch. {cure}"
)
CURE = "Set {accumulation}={value}, or start {ranks} ranks"
UNKNOWN = (
    "v{version} was taken by {had} rank(s), and this job has {has}: the loader's batch size is "
    "unknown (a batch sampler without batch_size), so the samples to skip are, too. Start {had} "
    "rank(s), or begin a new job at another path"
)
OTHER_CURE = "Start {ranks} ranks with the former sizes, or begin a new job at another path"


@dataclass(frozen=True)
class StepSize:
    """The samples of one optimizer step, by factors: ranks, samples in a batch of one rank (0: not
    known), and batches that are accumulated."""

    ranks: int
    batch: int
    accumulation: int

    @property
    def samples(self) -> int:
        """Samples that all ranks together take for one step."""
        return self.ranks * self.batch * self.accumulation

    def batches_for_one_of(self, other: StepSize) -> Fraction:
        """Batches of one rank here that have as many samples as one of `other` there."""
        if (self.ranks, self.batch) == (other.ranks, other.batch):
            return Fraction(1)
        return Fraction(other.ranks * other.batch, self.ranks * self.batch)

    def require(self, saved: StepSize, version: int, names: tuple[str, str]) -> None:
        """Raise RestoreError unless a step has as many samples as one of the saved job. `names`:
        the settings of the framework for batch size and accumulation."""
        if self == saved:
            return
        if not (self.batch and saved.batch):
            text = UNKNOWN.format(version=version, had=saved.ranks, has=self.ranks)
            raise RestoreError(text)
        if self.samples == saved.samples:
            return
        value, rest = divmod(saved.samples, self.ranks * self.batch)
        cure = OTHER_CURE if rest else CURE
        cure = cure.format(accumulation=names[1], value=value, ranks=saved.ranks)
        raise RestoreError(
            OTHER_STEPS.format(
                version=version,
                had=saved.samples,
                has=self.samples,
                old=saved._named(names),
                new=self._named(names),
                cure=cure,
            )
        )

    def _named(self, names: tuple[str, str]) -> str:
        count = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        return f"{count}, {names[0]}={self.batch}, {names[1]}={self.accumulation}"

    def as_dict(self) -> dict[str, int]:
        """The factors, for a version."""
        return asdict(self)


class PlaceOfAnyRanks(ResumableLoader[Batch]):
    """A ResumableLoader that also takes the place of a job with another number of ranks; call
    `convert` then. Exact if the ranks draw one order of the epoch together."""

    def load_of_other_ranks(self, state: dict[str, Any], ranks: int) -> None:
        """Take the place of one of `ranks` ranks."""
        self.load_state_dict(state)

    def convert(self, factor: Fraction) -> None:
        """Count the batches of the restored epoch in batches of this rank: `factor` for each. A
        batch that the saved loop had taken and not trained on is loaded again."""
        if self._resuming is None or factor == 1:
            return
        place = self._place
        trained = place.batches - bool(self._resuming["held"])
        place.batches = min(math.ceil(trained * factor), len(self))
        self._resuming |= {"place": dict(vars(place)), "held": False, "earlier": None}


__all__ = ["PlaceOfAnyRanks", "StepSize"]
