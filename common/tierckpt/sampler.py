"""A distributed sampler whose place in the epoch survives a restart, on any number of ranks.

    sampler = tierckpt.ResumableSampler(dataset, batch_size=64)
    loader = DataLoader(dataset, batch_sampler=sampler, generator=torch.Generator())
    ckpt = ddp_ckpt.Checkpointer(model, optimizer, extra={"position": sampler.position})
    ckpt.restore() for epoch in range(sampler.epoch, epochs):
        sampler.set_epoch(epoch)
        for batch in loader:
            ...
            optimizer.step()
            sampler.step()  # this batch was trained on
            ckpt.step()

An epoch is one order of all samples, alike on all ranks; the position is how many of them all ranks
together were trained on. It says nothing of ranks or batches, so whoever restores it, however many
they are, deals out the rest: nothing is skipped, nothing comes twice.

What counts is what was *trained on*. A loader's workers draw batches long before the loop sees
them, hence `step()`: once for every batch that the loop took from the loader, before the boundary.

The position is an object of its own, and the sampler has no `state_dict`, because torchdata's
`StatefulDataLoader` would take it, and when it draws, which is too early. It asks the sampler's
iterators instead, whose state is a place in the epoch, too. A job of the same size may restore both
(the loader under `extra_per_rank`), one of another size the position alone; they do not add up.

With the same seed the batches are those of torch's `DistributedSampler`, but for the end of an
epoch, where that one repeats or drops samples to serve all ranks alike. Training thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from .errors import ConfigError, TierckptError


@dataclass(frozen=True)
class Deal:
    """How the places 0 ... `length` - 1 of an epoch's order are dealt to ranks.

    Pure. A *global batch* is `ranks` times `batch_size` places in a row, dealt like cards: rank r
    gets every `ranks`-th of them, from the r-th on. All ranks have equally many batches, as
    collectives demand, none of them empty.
    """

    length: int
    batch_size: int
    """Of one rank."""
    rank: int
    ranks: int
    drop_last: bool
    """An incomplete global batch at the epoch's end is left out."""

    def end(self, begin: int) -> int:
        """Where the global batch that begins at the place `begin` ends; `begin` if there is none.

        Without `drop_last` the last one takes what is left. Were that fewer samples than ranks,
        some would have to repeat a sample; they join the batch before, whose parts then differ by
        one sample.
        """
        end = begin + self.ranks * self.batch_size
        if self.drop_last:
            return end if end <= self.length else begin
        return end if self.length - end >= self.ranks else self.length

    def share(self, begin: int, end: int) -> list[int]:
        """This rank's places of a global batch.

        Only when a job goes on with more ranks than the epoch has samples left, some ranks repeat
        samples from the epoch's beginning.
        """
        places = range(begin + self.rank, max(end, begin + self.ranks), self.ranks)
        return [place % self.length for place in places]

    def batches(self, begin: int) -> int:
        """How many global batches there are from the place `begin` on."""
        full, left = divmod(self.length - begin, self.ranks * self.batch_size)
        if self.drop_last:
            return full
        return full + (left >= self.ranks or (left > 0 and full == 0))


@dataclass
class Position:
    """Where in the data the training is: alike on all ranks, so it belongs into `extra`."""

    length: int
    """Samples of an epoch."""
    shuffle: bool
    seed: int
    epoch: int = 0
    taken: int = 0
    """Samples of the epoch that all ranks together were trained on: the first in its order."""
    moves: int = 0
    """How often it was set to another place, other than by training."""
    at_end: bool = False
    """All batches of the epoch were trained on."""
    between: bool = False
    end_is_done: bool = False
    """Set by the checkpointer while it takes a version that is of no boundary, and where what the
    loop does at the end of the epoch was done."""

    def passed(self) -> None:
        """A boundary: nothing to do, as the sampler is told what was trained on."""

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        names = ("length", "shuffle", "seed", "epoch", "taken")
        state = {name: getattr(self, name) for name in names}
        return state | ({"epoch": self.epoch + 1, "taken": 0} if self.end_is_done else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go where another run was; the seed is that one's, too.

        Raises ConfigError, with nothing changed, when that was another order: other samples were
        trained on than would be passed over here.
        """
        if (state["length"], state["shuffle"]) != (self.length, self.shuffle):
            saved = _shown(state["length"], state["shuffle"])
            raise ConfigError(
                f"the checkpoint's epoch {state['epoch']} is of {saved}, this sampler's of "
                f"{_shown(self.length, self.shuffle)}. Make the sampler as it was for as long as "
                "that epoch lasts, or leave its position out of `extra` to begin the epoch anew"
            )
        self.seed, self.epoch, self.taken = state["seed"], state["epoch"], state["taken"]
        self.at_end = False  # the sampler says so when it has dealt
        self.moves += 1


def _shown(length: int, shuffle: bool) -> str:
    return f"{length} samples, {'shuffled' if shuffle else 'in their own order'}"


class ResumableSampler(Sampler[list[int]]):
    """Batches of indices for a `DataLoader` (`batch_sampler=`), resumable at any batch.

    Give the loader a `generator` of its own. Without one, each pass over it draws a seed for its
    workers from torch's global stream, also the pass that a resumed job begins in mid-epoch, and
    the stream is no longer that of a job that was not interrupted.

    Args:
        dataset: what has a length; sizes of epochs do not change.
        batch_size: samples of a batch of one rank; may be another one in the next run.
        rank: of this process; default: that of torch.distributed. With Horovod: `hvd.rank()`.
        ranks: how many there are; default: likewise. With Horovod: `hvd.size()`.
        shuffle: False for the samples' own order.
        seed: of the order, alike on all ranks; a restored position brings its own.
        drop_last: leave out the incomplete batch at the end of an epoch. Otherwise all samples
            come, and where an epoch does not divide, the last batches are shorter, or longer by
            one sample.

    Raises ConfigError for values that cannot be; TierckptError for calls out of order.
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
                    "torch.distributed is not initialized and cannot say which rank this is: give "
                    "rank=hvd.rank(), ranks=hvd.size(), or rank=0, ranks=1 for a single process"
                )
            rank = dist.get_rank() if rank is None else rank
            ranks = dist.get_world_size() if ranks is None else ranks
        self.position = Position(len(dataset), shuffle, seed)
        """Goes into the checkpointer's `extra`."""
        self.deal = _checked(Deal(len(dataset), batch_size, rank, ranks, drop_last))
        self._newest: _Pass | None = None

    @property
    def epoch(self) -> int:
        """The epoch that is being trained on; after a restore, the one to go on with.

        It may be one that all batches were trained on already: what a loop does at the end of an
        epoch (a scheduler's step, say) was not done yet, and is, after a pass without batches.
        Where it was done (see `epoch_ends`), it is the next one.
        """
        return self.position.epoch

    def set_epoch(self, epoch: int) -> None:
        """Before each pass: its number decides the order.

        Another number begins that epoch; that of the epoch under way goes on with it. Raises
        TierckptError for an epoch before it (a loop that forgot what was restored), and when the
        one before was drawn and not a single batch of it reported by `step()`.
        """
        position, current = self.position, self._current()
        if epoch == position.epoch:
            return
        if epoch < position.epoch:
            raise TierckptError(
                f"set_epoch({epoch}), but the training is in epoch {position.epoch}; after a "
                "restore begin the loop there: for epoch in range(sampler.epoch, epochs)"
            )
        if current is not None and position.taken == current.begin < current.drawn:
            raise TierckptError(
                f"batches of epoch {position.epoch} were drawn, and step() was never called, so a "
                "restart would train on them again; call sampler.step() after every batch"
            )
        position.epoch, position.taken, position.at_end = epoch, 0, False
        position.moves += 1

    def step(self) -> None:
        """The oldest batch that was not yet reported was trained on; before the boundary."""
        current, position = self._current(), self.position
        if current is None or position.taken >= current.drawn:
            raise TierckptError(
                f"step() at sample {position.taken} of epoch {position.epoch}: no batch was drawn "
                "there. Call it once for every batch that came from the loader"
            )
        position.taken = current.deal.end(position.taken)
        position.at_end = current.deal.batches(position.taken) == 0

    def deal_to(self, rank: int, ranks: int) -> None:
        """The ranks are others now (Horovod elastic, after a reset); iterate anew."""
        self.deal = _checked(replace(self.deal, rank=rank, ranks=ranks))
        self.position.moves += 1

    def order(self) -> torch.Tensor:
        """The samples' numbers in the order of the epoch: int64, one for each, alike on all ranks.

        To be overridden for an order of another kind, which seed and epoch must decide.
        """
        position = self.position
        if not position.shuffle:
            return torch.arange(position.length, device="cpu")
        generator = torch.Generator().manual_seed(position.seed + position.epoch)
        return torch.randperm(position.length, generator=generator, device="cpu")

    def __iter__(self) -> _Pass:
        """The rest of the epoch, from what was trained on last."""
        position, current = self.position, self._current()
        if current is not None and current.ended and self.deal.batches(position.taken) == 0:
            raise TierckptError(
                f"epoch {position.epoch} is over; call sampler.set_epoch({position.epoch + 1}) "
                "before the next pass"
            )
        self._newest = _Pass(position, self.deal, self.order)
        return self._newest

    def __len__(self) -> int:
        """Batches of the newest pass, or of the one that would begin now."""
        current = self._current()
        return self.deal.batches(self.position.taken if current is None else current.begin)

    def _current(self) -> _Pass | None:
        """The newest pass, unless the position was moved since it began."""
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
    """What a loader iterates over. Its state, for torchdata, is how far it was drawn."""

    def __init__(
        self, position: Position, deal: Deal, make_order: Callable[[], torch.Tensor]
    ) -> None:
        self.moves = position.moves
        self.epoch = position.epoch
        self.deal = deal
        self.begin = position.taken
        self.drawn = position.taken
        """Samples of the epoch that all ranks together have drawn."""
        self.ended = False
        """All was drawn, and the loader knows."""
        self._position = position
        self._make_order = make_order
        self._order: torch.Tensor | None = None
        """Made when the first batch is drawn: a loader with workers makes passes it never uses."""

    def __next__(self) -> list[int]:
        if self.moves != self._position.moves:
            raise TierckptError(
                "the position was restored, or the epoch changed, since this pass over the loader "
                "began; iterate over the loader anew"
            )
        begin, self.drawn = self.drawn, self.deal.end(self.drawn)
        if begin == self.drawn:
            self.ended = True
            raise StopIteration
        if self._order is None:
            self._order = self._make_order()
        places = self.deal.share(begin, self.drawn)
        indices: list[int] = self._order[places].tolist()
        return indices

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "drawn": self.drawn}

    def load_state_dict(self, state: dict[str, int]) -> None:
        # A loader asked between two epochs tells of the pass that ended.
        if state["epoch"] == self.epoch:
            self.drawn = state["drawn"]
