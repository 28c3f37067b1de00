"""A distributed sampler that keeps its place in the epoch over a restart, on any number of ranks.

::

    sampler = tierckpt.ResumableSampler(dataset, batch_size=64)
    loader = DataLoader(dataset, batch_sampler=sampler, generator=torch.Generator())
    ckpt = ddp_ckpt.Checkpointer(model, optimizer, extra={"position": sampler.position})
    ckpt.restore()
    for epoch in range(sampler.epoch, epochs):
        sampler.set_epoch(epoch)
        for batch in loader:
            ...
            optimizer.step()
            sampler.step()  # this batch was trained on
            ckpt.step()

An epoch is one order of all samples, the same on all ranks. The position is the number of samples
that all ranks together were trained on. It does not depend on ranks or batches, so any number of
ranks can restore it and deal out the rest: no sample is skipped or repeated.

Samples count when they were *trained on*. A loader's workers draw batches long before the loop sees
them, hence `step()`: call it once for every batch that the loop took, before the boundary.

The position is a separate object, and the sampler has no `state_dict`: torchdata's
`StatefulDataLoader` would call it when it draws, which is too early. It asks the sampler's
iterators instead, which have a place in the epoch as well. A job of the same size may restore both
(the loader under `extra_per_rank`), a job of another size only the position; they do not add up.

With the same seed the batches are those of torch's `DistributedSampler`, except at the end of an
epoch, where that one repeats or drops samples to give all ranks the same number. Training thread
only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from msgspec import Struct
from msgspec.structs import replace
from torch.utils.data import Sampler

from .errors import ConfigError, TierckptError
from .state.extras import DataPlace


class Deal(Struct, frozen=True):
    """The distribution of the places 0 ... `length` - 1 of an epoch's order over ranks.

    Pure. A *global batch* is `ranks` times `batch_size` consecutive places, dealt like cards: rank
    r gets every `ranks`-th of them, from the r-th on. All ranks have the same number of batches, as
    collectives need, and none is empty.
    """

    length: int
    batch_size: int
    """Size of one rank's batch."""
    rank: int
    ranks: int
    drop_last: bool
    """Whether an incomplete global batch at the end of the epoch is left out."""

    def end(self, start: int) -> int:
        """The end of the global batch from the place `start` on; `start` if there is none.

        Without `drop_last` the last batch takes the rest. If the rest were fewer samples than
        ranks, some ranks would have to repeat a sample; so it joins the batch before, and the
        ranks' parts then differ by one sample.
        """
        end = start + self.ranks * self.batch_size
        if self.drop_last:
            return end if end <= self.length else start
        return end if self.length - end >= self.ranks else self.length

    def share(self, start: int, end: int) -> list[int]:
        """This rank's places of a global batch.

        Ranks repeat samples from the start of the epoch in one case only: a job resumes with more
        ranks than the epoch has samples left.
        """
        places = range(start + self.rank, max(end, start + self.ranks), self.ranks)
        return [place % self.length for place in places]

    def batches(self, start: int) -> int:
        """Number of global batches from the place `start` on."""
        full, left = divmod(self.length - start, self.ranks * self.batch_size)
        if self.drop_last:
            return full
        return full + (left >= self.ranks or (left > 0 and full == 0))


@dataclass
class Position(DataPlace):
    """The training's place in the data: the same on all ranks, so it belongs into `extra`."""

    is_place: ClassVar = True
    """See `state.extras.is_place`."""
    length: int
    """Samples per epoch."""
    shuffle: bool
    seed: int
    epoch: int = 0
    taken: int = 0
    """Samples of the epoch that all ranks together were trained on: the first ones in its order."""
    moves: int = 0
    """Number of times it was set to another place, other than by training."""
    at_end: bool = False
    """True if all batches of the epoch were trained on."""
    between: bool = False
    end_is_done: bool = False
    """Set by the checkpointer while it takes a version between boundaries. `end_is_done`: the loop
    has done its work at the end of the epoch."""
    note_end: Callable[[], None] | None = None
    """Called when the last batch was trained on. Set by the checkpointer where no boundary comes
    before the loop's work at the end of the epoch."""

    def passed(self) -> None:
        """Do nothing at a boundary: the sampler's `step()` reports the batches."""

    def state_dict(self) -> dict[str, Any]:
        """The position as plain numbers."""
        names = ("length", "shuffle", "seed", "epoch", "taken")
        state = {name: getattr(self, name) for name in names}
        return state | ({"epoch": self.epoch + 1, "taken": 0} if self.end_is_done else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to another run's place, with its seed.

        Raises ConfigError, with nothing changed, if that run had another order: other samples were
        trained on than would be skipped here.
        """
        if (state["length"], state["shuffle"]) != (self.length, self.shuffle):
            saved = _shown(state["length"], state["shuffle"])
            raise ConfigError(
                f"the checkpoint's epoch {state['epoch']} has {saved}, this sampler's has "
                f"{_shown(self.length, self.shuffle)}. Make the sampler as it was until that epoch "
                "ends, or leave its position out of `extra` to start the epoch again"
            )
        self.seed, self.epoch, self.taken = state["seed"], state["epoch"], state["taken"]
        self.at_end = False  # the sampler sets it after dealing
        self.moves += 1


def _shown(length: int, shuffle: bool) -> str:
    return f"{length} samples, {'shuffled' if shuffle else 'in their own order'}"


class ResumableSampler(Sampler[list[int]]):
    """Batches of indices for a `DataLoader` (`batch_sampler=`), resumable at any batch.

    Give the loader a `generator` of its own. Without one, each pass draws a seed for its workers
    from torch's global stream. A resumed job starts one more pass, so its stream would differ from
    that of an uninterrupted job.

    Args:
        dataset: an object with a length; the size of epochs does not change.
        batch_size: samples in a batch of one rank; the next run may have another one.
        rank: rank of this process; default: that of torch.distributed. With Horovod: `hvd.rank()`.
        ranks: number of ranks; default: that of torch.distributed. With Horovod: `hvd.size()`.
        shuffle: False for the samples' own order.
        seed: seed of the order, the same on all ranks; a restored position brings its own.
        drop_last: leave out the incomplete batch at the end of an epoch. Otherwise all samples
            come; if they do not divide evenly, the last batches are shorter, or longer by one
            sample.

    Raises ConfigError for invalid values; TierckptError for calls out of order.
    """

    def __init__(
        self,
        dataset: Sized,
        batch_size: int,
        *,
        rank: int | None = None,
        ranks: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        if rank is None or ranks is None:
            if not (dist.is_available() and dist.is_initialized()):
                raise ConfigError(
                    "torch.distributed is not initialized, so the rank is unknown: give "
                    "rank=hvd.rank(), ranks=hvd.size(), or rank=0, ranks=1 for a single process"
                )
            rank = dist.get_rank() if rank is None else rank
            ranks = dist.get_world_size() if ranks is None else ranks
        self.position = Position(len(dataset), shuffle, seed)
        """Give it to the checkpointer in `extra`."""
        self.deal = _checked(Deal(len(dataset), batch_size, rank, ranks, drop_last))
        self._newest: _Pass | None = None

    @property
    def epoch(self) -> int:
        """The current epoch; after a restore, the epoch to resume.

        All of its batches may have been trained on already: the loop's work at the end of an epoch
        (such as a scheduler's step) was not done yet, and is done after a pass without batches. If
        it was done (see `epoch_ends`), this is the next epoch.
        """
        return self.position.epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the epoch before each pass; it decides the order.

        Another number starts that epoch; the current number continues it. Raises TierckptError for
        an earlier epoch (a loop that ignores the restored one), and if the current epoch was drawn
        and `step()` reported none of its batches.
        """
        position, current = self.position, self._current()
        if epoch == position.epoch:
            return
        if epoch < position.epoch:
            raise TierckptError(
                f"set_epoch({epoch}), but the training is in epoch {position.epoch}; after a "
                "restore start the loop there: for epoch in range(sampler.epoch, epochs)"
            )
        if current is not None and position.taken == current.start < current.drawn:
            raise TierckptError(
                f"batches of epoch {position.epoch} were drawn, but step() was never called, so a "
                "restart would train on them again; call sampler.step() after every batch"
            )
        position.epoch, position.taken, position.at_end = epoch, 0, False
        position.moves += 1

    def step(self) -> None:
        """Report that the oldest unreported batch was trained on. Call it before the boundary."""
        current, position = self._current(), self.position
        if current is None or position.taken >= current.drawn:
            raise TierckptError(
                f"step() at sample {position.taken} of epoch {position.epoch}: no batch was drawn "
                "there. Call it once for every batch that came from the loader"
            )
        position.taken = current.deal.end(position.taken)
        position.at_end = current.deal.batches(position.taken) == 0
        if position.at_end and position.note_end is not None:
            position.note_end()

    def deal_to(self, rank: int, ranks: int) -> None:
        """The ranks have changed (Horovod elastic, after a reset); start a new pass."""
        self.deal = _checked(replace(self.deal, rank=rank, ranks=ranks))
        self.position.moves += 1

    def order(self) -> torch.Tensor:
        """The sample numbers in the order of the epoch: int64, one for each, the same on all ranks.

        Override it for another order, which must depend only on seed and epoch.
        """
        position = self.position
        if not position.shuffle:
            return torch.arange(position.length, device="cpu")
        generator = torch.Generator().manual_seed(position.seed + position.epoch)
        return torch.randperm(position.length, generator=generator, device="cpu")

    def __iter__(self) -> _Pass:
        """A pass over the rest of the epoch, after the samples trained on."""
        position, current = self.position, self._current()
        if current is not None and current.ended and self.deal.batches(position.taken) == 0:
            raise TierckptError(
                f"epoch {position.epoch} is over; call sampler.set_epoch({position.epoch + 1}) "
                "before the next pass"
            )
        self._newest = _Pass(position, self.deal, self.order)
        return self._newest

    def __len__(self) -> int:
        """Batches of the newest pass, or of the one that would start now."""
        current = self._current()
        return self.deal.batches(self.position.taken if current is None else current.start)

    def _current(self) -> _Pass | None:
        """The newest pass, unless the position was moved since it started."""
        newest = self._newest
        return newest if newest is not None and newest.moves == self.position.moves else None


def _checked(deal: Deal) -> Deal:
    if deal.batch_size < 1:
        raise ConfigError(f"batch_size={deal.batch_size}: it must be 1 or more")
    if not 0 <= deal.rank < deal.ranks:
        raise ConfigError(f"rank={deal.rank}, ranks={deal.ranks}: ranks are numbered from 0")
    if deal.batches(0) == 0:
        raise ConfigError(
            f"{deal.length} samples make no batch for {deal.ranks} rank(s) of {deal.batch_size} "
            f"each{' with drop_last=True' if deal.drop_last else ''}"
        )
    return deal


class _Pass(Iterator[list[int]]):
    """The iterator for a loader. Its state, for torchdata, is the place up to which it was
    drawn."""

    def __init__(
        self, position: Position, deal: Deal, make_order: Callable[[], torch.Tensor]
    ) -> None:
        self.moves = position.moves
        self.epoch = position.epoch
        self.deal = deal
        self.start = position.taken
        self.drawn = position.taken
        """Samples of the epoch that all ranks together have drawn."""
        self.ended = False
        """True if everything was drawn, and the loader knows."""
        self._position = position
        self._make_order = make_order
        self._order: torch.Tensor | None = None
        """Made with the first batch: a loader with workers makes passes that it never uses."""

    def __next__(self) -> list[int]:
        if self.moves != self._position.moves:
            raise TierckptError(
                "the position was restored, or the epoch changed, since this pass over the loader "
                "started; iterate over the loader again"
            )
        start, self.drawn = self.drawn, self.deal.end(self.drawn)
        if start == self.drawn:
            self.ended = True
            raise StopIteration
        if self._order is None:
            self._order = self._make_order()
        places = self.deal.share(start, self.drawn)
        indices: list[int] = self._order[places].tolist()
        return indices

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "drawn": self.drawn}

    def load_state_dict(self, state: dict[str, int]) -> None:
        # Between two epochs a loader returns the state of the pass that ended.
        if state["epoch"] == self.epoch:
            self.drawn = state["drawn"]
