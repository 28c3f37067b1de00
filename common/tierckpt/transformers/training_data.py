"""The training loader of a Trainer, resumable at any optimizer step.

The place is a recipe (`ResumableLoader`): the random states at the start of the epoch, and the
number of batches. A resumed epoch starts from these states and skips the batches. Accelerate's
loader fetches one batch ahead, in the same call that yields the one before.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from accelerate import skip_first_batches
from accelerate.data_loader import DataLoaderShard

from tierckpt.integrations.loader_passes import Pass, Passes
from tierckpt.integrations.other_ranks import PlaceOfAnyRanks
from tierckpt.resumable_loader import samplers_of
from tierckpt.state.extras import Generator
from tierckpt.state.witness import Ways

WAYS = Ways(
    give="tierckpt={'generators': [...]}",
    set_epoch="call it in on_epoch_begin of a callback, with state.epoch",
    count="set its count from state.epoch in on_epoch_begin of a callback",
    begin="begin a new job at another path",
)


class TrainingData:
    """Takes the loader's place in the Trainer's loop. Training thread."""

    def __init__(self, loader: Any, evaluated: Any, generators: Iterable[Generator]) -> None:
        """`evaluated`: the data sets of evaluations."""
        self.loader = loader
        self.resumable = PlaceOfAnyRanks[Any](
            Passes(loader, _Pass, evaluated), of=[loader], generators=generators
        )
        """The place; an object for `extra_per_rank`."""
        self.resumable.ways = WAYS
        self._skip = 0
        self.is_over = False
        """True: the next pass has no batches."""

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    @property
    def batches(self) -> int:
        """Batches of the current epoch that were trained on."""
        place = self.resumable.state_dict()["place"]
        return int(place["batches"]) if place["begun"] else 0

    def set_epoch(self, epoch: int) -> None:
        """Start this epoch, or continue it if it is the current one."""
        self.resumable.set_epoch(epoch)
        for owner in (self.loader, *samplers_of(self.loader)):
            if callable(set_epoch := getattr(owner, "set_epoch", None)):
                set_epoch(epoch)

    def skip(self, batches: int) -> None:
        """Load and drop so many batches at the start of the next pass, for a start from a
        checkpoint of the Trainer's."""
        self._skip = batches

    def __iter__(self) -> Iterator[Any]:
        skip, self._skip = self._skip, 0
        batches = iter(self.resumable)
        if self.is_over:
            self.is_over = False
            return iter(())
        next(itertools.islice(batches, skip, skip), None)
        return batches


class _Pass(Pass):
    def skip(self, count: int) -> int:
        """Skip batches by drawing only their indices; returns how many, 0 where that would not be
        exact: worker processes draw random numbers of their own."""
        if type(self._loader) is not DataLoaderShard or self._loader.num_workers or count < 2:
            return 0
        # The last one is requested, as it loads the one after it, too.
        self._batches = iter(skip_first_batches(self._loader, count - 1))
        next(self._batches)
        return count


__all__ = ["TrainingData"]
