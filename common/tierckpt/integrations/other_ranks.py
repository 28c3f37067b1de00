"""Other numbers of ranks: a job goes on in mid-epoch with more or fewer ranks.

Loaders of the frameworks hand out an epoch's samples in order, one global batch after the other.
So the samples of each step are the same for any number of ranks, if ranks x batch size x
accumulated batches is the same: the condition for a restart. Torch's elastic jobs and large-batch
recipes keep this product, too, since learning rate and schedule belong to it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, astuple, dataclass
from fractions import Fraction
from typing import Any

from tierckpt._text import counted
from tierckpt.errors import RestoreError
from tierckpt.resumable_loader import (
    Batch,
    ResumableLoader,
    facts_of,
    generators_of,
    samplers_of,
)
from tierckpt.state.extras import Generator

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
UNKNOWN_BATCH = (
    "v{version} was taken with {name}={had}, and this job has {name}={has}: the loader's batch "
    "size is unknown (a batch sampler without batch_size), so the samples to skip are, too. Set "
    "{name}={had}, or begin a new job at another path"
)
OTHER_ORDER = (
    "v{version}: the sampler makes its order of samples for a batch size, which was {had} and is "
    "{has} now: the samples to skip would not be those trained on. Start {ranks} with the former "
    "batch size and accumulation, or begin a new job at another path"
)
OTHER_CURE = "Start {ranks} ranks with the former sizes, or begin a new job at another path"


@dataclass(frozen=True)
class StepSize:
    """The samples of one optimizer step, by factors: ranks, samples in a batch of one rank (0: not
    known), and batches that are accumulated."""

    ranks: int
    batch: int
    accumulation: int
    order: int = 0
    """See `order_batch_of`."""

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
            raise RestoreError(self._unknown(saved, version, names))
        if self.order != saved.order:
            raise RestoreError(self._other_order(saved, version))
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
                old=saved.named(names),
                new=self.named(names),
                cure=cure,
            )
        )

    def _unknown(self, saved: StepSize, version: int, names: tuple[str, str]) -> str:
        if self.ranks != saved.ranks:
            return UNKNOWN.format(version=version, had=saved.ranks, has=self.ranks)
        pairs = zip(names, astuple(saved)[1:], astuple(self)[1:], strict=False)
        name, had, has = next((n, a or "?", b or "?") for n, a, b in pairs if a != b)
        return UNKNOWN_BATCH.format(version=version, name=name, had=had, has=has)

    def _other_order(self, saved: StepSize, version: int) -> str:
        facts = {"had": saved.order or "any", "has": self.order or "any"}
        return OTHER_ORDER.format(version=version, ranks=counted(saved.ranks, "rank"), **facts)

    def named(self, names: tuple[str, str]) -> str:
        """The factors, with the settings of the framework as names."""
        count = counted(self.ranks, "rank")
        return f"{count}, {names[0]}={self.batch}, {names[1]}={self.accumulation}"

    def as_dict(self) -> dict[str, int]:
        """The factors, for a version."""
        return asdict(self)


class PlaceOfAnyRanks(ResumableLoader[Batch]):
    """A ResumableLoader of a framework's passes that also takes the place of a job with another
    number of ranks; call `convert` then. Exact if the ranks draw one order of the epoch
    together."""

    def __init__(
        self,
        passes: Iterable[Batch],
        *,
        of: Sequence[Any] = (),
        ahead: int = 0,
        generators: Iterable[Generator] = (),
    ) -> None:
        """`of`: the framework's loaders that `passes` iterates over."""
        self._loaders = of
        super().__init__(passes, ahead=ahead, generators=generators)
        listed = [each for loader in of for each in generators_of(loader)]
        self._listed = generators_of((), [*listed, *self._listed])

    def _facts(self) -> dict[str, Any]:
        each = [facts_of(loader) for loader in self._loaders]
        samples = [facts["samples"] for facts in each if facts["samples"] is not None]
        return {
            "batch_size": None,  # may change with the accumulation, see `StepSize`
            "length": self._length(),
            "samples": sum(samples) if samples else None,
            "sampler": ", ".join(facts["sampler"] for facts in each if facts["sampler"]) or None,
        }

    def load_of_other_ranks(self, state: dict[str, Any], ranks: int) -> None:
        """Take the place of one of `ranks` ranks."""
        self.load_state_dict(state)
        self._forget_batches()

    def load_generators(self, state: dict[str, Any]) -> None:
        """Set the loaders' generators as they were when this place was saved."""
        streams = self._streams()
        streams.own = state["own"]
        self._set(streams)

    def convert(self, factor: Fraction, is_of_other_ranks: bool = False) -> None:
        """Count the batches of the restored epoch in batches of this rank: `factor` for each. A
        batch that the saved loop had taken and not trained on is loaded again."""
        if self._resuming is None or (factor == 1 and not is_of_other_ranks):
            return
        self._forget_batches()
        if factor == 1:
            return
        place = self._place
        trained = place.batches - bool(self._resuming["held"])
        place.batches = math.ceil(trained * factor)
        with contextlib.suppress(TypeError):  # an iterable data set has no length
            place.batches = min(place.batches, len(self))
        self._resuming |= {"place": dict(vars(place)), "held": False, "earlier": None}

    def _forget_batches(self) -> None:
        """Other batches of the same order follow: nothing of the saved ones can be compared."""
        if self._resuming is not None:
            self._place.length = self._place.sampler = None
            self._resuming |= {"place": dict(vars(self._place)), "witness": None}


def order_batch_of(loader: Iterable[Any]) -> int:
    """The batch size for which a sampler makes the order of the epoch: one that sorts samples by
    length within several batches (`LengthGroupedSampler`), or fills batches with alike samples. 0:
    the order is the same for all sizes."""
    sizes = (getattr(each, "batch_size", 0) for each in samplers_of(loader) if _decides(each))
    return next((size for size in sizes if type(size) is int and size), 0)


def _decides(sampler: Any) -> bool:
    """False for batch samplers that keep the order which they get: torch's, and frameworks' around
    another one."""
    kind = type(sampler)
    is_plain = kind.__name__ == "BatchSampler" and kind.__module__.startswith(
        ("torch.", "torchdata.")
    )
    return not is_plain and not hasattr(sampler, "batch_sampler")


__all__ = ["PlaceOfAnyRanks", "StepSize", "order_batch_of"]
