"""A data loader that goes on at the very next batch after a restart.

    data = tierckpt.ResumableLoader(DataLoader(dataset, batch_size=64, shuffle=True))
    ckpt = ddp_ckpt.Checkpointer(model, optimizer, extra_per_rank={"data": data})
    ckpt.restore() for epoch in range(data.epoch, epochs):
        data.set_epoch(epoch)
        for batch in data:
            ...
            optimizer.step()
            ckpt.step()

A loader has no place that could be saved: its iterator draws seeds when it is made, samplers draw
an order when the first batch is asked for, and datasets draw for each sample. The place is
therefore saved as what leads to it: the state of all generators at the beginning of the epoch, and
the number of batches that were taken since. A resumed epoch begins with the former, skips the
latter, puts the generators back to what they were at the boundary, and goes on.

The number of ranks must be the same: the place is each rank's own. `ResumableSampler` is for jobs
that shrink or grow.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader

from tierckpt.state.extras import Generator, generator_state, load_extra

from .errors import ConfigError, TierckptError
from .state import rng as generators
from .state import tree_codec

Batch = TypeVar("Batch")

SKIPS = ("auto", "load", "index", "none")


@dataclass
class _Place:
    """Where in its epochs a loader is."""

    epoch: int = 0
    begun: bool = False
    """A pass over this epoch was begun."""
    batches: int = 0
    """Batches of the epoch that the loop took."""
    ended: bool = False
    """The loop was told that there are no more."""
    sampler_epoch: int | None = None
    """What `set_epoch` of the loader's sampler was called with last, where that can be seen."""


@dataclass
class _Streams:
    """States of generators: the process's global ones, and those in `_generators`."""

    process: Any
    """As text, or a `tree.Later` of it."""
    own: list[Any]

    def packed(self) -> dict[str, Any]:
        """For `state_dict`."""
        if isinstance(self.process, tree_codec.Later):
            self.process = self.process.make()
        return {"process": self.process, "own": self.own}


class ResumableLoader(Generic[Batch]):
    """Iterates over a loader, one pass an epoch, and can be resumed at any batch.

    Goes into the checkpointer's `extra_per_rank`. Exact for torch's `DataLoader` with any number of
    workers, for its subclasses, and for any iterable that yields the same batches again when
    the generators begin with the same states. The generators are Python's, NumPy's and torch's
    global ones, and those that the loader and its samplers have as `generator`.

    Args:
        loader: what is iterated over, anew for each epoch.
        ahead: 1 where the loop has taken a batch at the boundary that it has not trained on yet
            (it prefetches the next one while it computes); else 0.
        skip: how a resumed epoch comes to its place. "load": it loads the batches again and drops
            them, exact also where workers draw. "index": it draws the indices alone, which takes
            no time; not exact where a sample's transforms draw in *worker processes*. "none": it
            skips nothing, for an iterator that keeps no place but draws each batch from the
            generators. "auto": "index" for a plain `DataLoader` without workers over a dataset
            with indices, where it is exact; else "load".
        generators: others that loader, samplers or dataset draw from.

    Training thread only. Raises ConfigError for values that cannot be.
    """

    def __init__(
        self,
        loader: Iterable[Batch],
        *,
        ahead: int = 0,
        skip: str = "auto",
        generators: Iterable[Generator] = (),
    ) -> None:
        if ahead not in (0, 1):
            raise ConfigError(f"ahead={ahead!r}: it is 0, or 1 where the loop prefetches a batch")
        if skip not in SKIPS:
            raise ConfigError(f"skip={skip!r}: it is one of {', '.join(SKIPS)}")
        if skip == "index" and not _has_indices(loader):
            raise ConfigError(
                f"skip='index' takes a torch DataLoader over a dataset with indices, not "
                f"{_kind_of(loader)}; skip='load' takes any"
            )
        self.loader = loader
        self._ahead, self._skip = ahead, skip
        self._generators = _generators_of(loader, generators)
        self._place = _Place()
        self._first = self._before = _Streams(None, [])
        """As they were when the pass was begun, and before the newest batch was asked for."""
        self._resuming: dict[str, Any] | None = None
        """After a restore, until a pass is begun: the state that was restored."""
        self._restored: _Streams | None = None
        """Likewise: the generators, as the restore has set them."""
        self._trained: int | None = None
        """So many batches of the epoch the loop had taken at its last boundary; None: it told of
        none."""
        self.between = self.end_is_done = False
        """Set by the checkpointer while it takes a version that is of no boundary, and where what
        the loop does at the end of the epoch was done."""

    @property
    def epoch(self) -> int:
        """The epoch under way; after a restore, the one to go on with.

        It may be one of which all batches were taken: what a loop does at the end of an epoch (a
        scheduler's step) was not done yet, and is, after a pass without batches. Where it was done
        (see `epoch_ends`), it is the next one.
        """
        return self._place.epoch

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch, or go on with it if it is under way; also for the loader's sampler.

        Optional: each pass over this object is an epoch. Raises TierckptError for an epoch
        before the one under way.
        """
        if epoch < self._place.epoch:
            raise TierckptError(
                f"set_epoch({epoch}), but epoch {self._place.epoch} is under way; after a restore "
                "begin the loop there: for epoch in range(data.epoch, epochs)"
            )
        if epoch != self._place.epoch:
            self._place, self._resuming, self._restored = _Place(epoch), None, None
            self._trained = None
        for sampler in _samplers_of(self.loader):
            if callable(told := getattr(sampler, "set_epoch", None)):
                told(epoch)

    def __len__(self) -> int:
        """Batches of a whole epoch. Raises TypeError where the loader has no length."""
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Batch]:
        """A pass over the epoch; after a restore, over the rest of the one under way."""
        if self._resuming is not None and self._place.begun:
            return self._rest(self._resuming)
        if self._place.begun:
            self._place = _Place(self._place.epoch + 1)
        elif self._resuming is not None:
            self._set(self._now(self._resuming))
        self._resuming = self._restored = self._trained = None
        self._place.begun, self._first = True, self._streams()
        self._first.packed()  # once: every version of the epoch has it
        self._place.sampler_epoch = _sampler_epoch(self.loader)
        return self._pass(self._place, iter(self.loader))

    def _pass(self, place: _Place, batches: Iterator[Batch]) -> Iterator[Batch]:
        while True:
            if self._place is not place:
                raise TierckptError(
                    "another epoch was begun, or a checkpoint restored, since this pass began; "
                    "iterate over the ResumableLoader anew"
                )
            self._before = self._streams()
            try:
                batch = next(batches)
            except StopIteration:
                place.ended = True
                return
            place.batches += 1
            yield batch

    def _rest(self, state: dict[str, Any]) -> Iterator[Batch]:
        """What is left of the epoch under way, which another process began."""
        place = self._place
        _refuse_other_epoch(place, self.loader)
        now = self._now(state)
        if state["now"] is not None:
            now = _Streams(**state["now"])
        self._first = _Streams(**state["first"])
        self._set(self._first)
        batches = iter(self.loader)
        if place.batches == 0:
            rest = self._pass(place, batches)
        else:
            if self._skip != "none":
                self._skip_batches(batches, place.batches - 1)
            # What is read ahead together with the newest batch is drawn as it was.
            self._before = _Streams(**state["before"])
            self._set(self._before)
            newest = self._next_of(batches, place.batches)
            rest = self._pass(place, batches)
            if state["held"]:
                rest = itertools.chain([newest], rest)
        self._set(now)
        self._resuming = self._restored = None
        return rest

    def _now(self, state: dict[str, Any]) -> _Streams:
        """The generators as they were when `state` was taken, if it does not say otherwise."""
        return self._restored or _Streams(generators.pack_rng(), state["own"])

    def _skip_batches(self, batches: Iterator[Batch], count: int) -> None:
        indexed = self._skip == "index" or (
            self._skip == "auto"
            and type(self.loader) is DataLoader
            and self.loader.num_workers == 0
        )
        draw = getattr(batches, "_next_index", None) if indexed else None
        for number in range(count):
            if draw is None or not _has_indices(self.loader):
                self._next_of(batches, number + 1)
                continue
            try:
                draw()
            except StopIteration:
                raise self._too_short(number) from None

    def _next_of(self, batches: Iterator[Batch], number: int) -> Batch:
        try:
            return next(batches)
        except StopIteration:
            raise self._too_short(number - 1) from None

    def _too_short(self, there: int) -> TierckptError:
        return TierckptError(
            f"the checkpoint was taken after {self._place.batches} batches of epoch "
            f"{self._place.epoch}, and this loader ends after {there}: dataset, batch size or "
            "sampler are others than they were. Make the loader as it was, or begin the next "
            f"epoch with set_epoch({self._place.epoch + 1})"
        )

    # --- state ---------------------------------------------------------------------------------

    def _streams(self) -> _Streams:
        return _Streams(generators.pack_rng(), [generator_state(g) for g in self._generators])

    def _set(self, streams: _Streams) -> None:
        generators.load_rng(streams.packed()["process"])
        for generator, state in zip(self._generators, streams.own, strict=True):
            load_extra(generator, state)

    @property
    def at_end(self) -> bool:
        """All batches of the epoch were taken, as far as that can be told."""
        place = self._place
        try:
            return place.ended or (place.begun and place.batches >= len(self))
        except TypeError:
            return False

    def passed(self) -> None:
        """A boundary: the batches that were taken were trained on (but one, with `ahead`). Called
        by the checkpointer."""
        self._trained = self._place.batches

    def state_dict(self, in_forward: bool = False) -> dict[str, Any]:
        """The place: counts, and states of generators (20 kB, and 15 kB for each of its own).

        Not changed by anything that comes later. `in_forward`: the boundary is the forward pass of
        the next iteration, whose batch was taken already, and drawn.
        """
        if self._resuming is not None:  # and no pass begun since
            return dict(self._resuming)
        place, now = self._place, self._streams()
        if self.end_is_done:
            return self._next_epoch(now)
        untrained = in_forward or self._ahead > 0 or self._is_one_too_far
        then = now if in_forward else None
        if self.between and place.ended:
            then = self._before  # what is done at the end of the epoch is done again from there
        return {
            "place": dict(vars(place)),
            "held": untrained and place.begun and not place.ended,
            "first": self._first.packed(),
            "before": self._before.packed(),
            "own": now.own,
            "now": None if then is None else then.packed(),
        }

    @property
    def _is_one_too_far(self) -> bool:
        """The loop took a batch, and ended before it had trained on it."""
        known = self.between and self._trained is not None
        return known and self._place.batches > (self._trained or 0)

    def _next_epoch(self, now: _Streams) -> dict[str, Any]:
        """The state of a loader that is about to begin it, with the generators as they are."""
        none = _Streams(None, []).packed()
        place = dict(vars(_Place(self._place.epoch + 1)))
        streams = {"first": none, "before": none, "own": now.own, "now": None}
        return {"place": place, "held": False, **streams}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have the next pass go on there. Raises ConfigError, with nothing changed, where the
        saved loader drew from another number of generators."""
        if len(state["own"]) != len(self._generators):
            raise ConfigError(
                f"the saved loader drew from {len(state['own'])} generators of its own, this one "
                f"has {len(self._generators)}. Make it, and its sampler, as they were"
            )
        self._place, self._resuming = _Place(**state["place"]), dict(state)
        self._restored = self._trained = None

    def restored(self) -> None:
        """A restore is over, and has set the global generators: what is drawn until the loop
        begins (a first evaluation) does not count. Called by the checkpointer."""
        if self._resuming is not None:
            self._restored = _Streams(generators.pack_rng(), self._resuming["own"])


def _has_indices(loader: Iterable[Any]) -> bool:
    return isinstance(loader, DataLoader) and not isinstance(
        loader.dataset, torch.utils.data.IterableDataset
    )


def _kind_of(loader: Iterable[Any]) -> str:
    if isinstance(loader, DataLoader):
        return f"one over a {type(loader.dataset).__name__}, which has none"
    return f"a {type(loader).__name__}"


def _samplers_of(loader: Iterable[Any]) -> list[Any]:
    """What decides the order, outermost first; each once."""
    found: list[Any] = []
    todo = [getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)]
    while todo:
        sampler = todo.pop(0)
        if sampler is None or any(sampler is each for each in found):
            continue
        found.append(sampler)
        todo.append(getattr(sampler, "sampler", None))
    return found


def _generators_of(loader: Iterable[Any], more: Iterable[Generator]) -> Sequence[Generator]:
    owners = (loader, *_samplers_of(loader))
    found: list[Generator] = []
    for each in (*(getattr(owner, "generator", None) for owner in owners), *more):
        if isinstance(each, Generator) and not any(each is known for known in found):
            found.append(each)
    return found


def _sampler_epoch(loader: Iterable[Any]) -> int | None:
    """As `DistributedSampler` has it."""
    epochs = (getattr(sampler, "epoch", None) for sampler in _samplers_of(loader))
    return next((epoch for epoch in epochs if type(epoch) is int), None)


def _refuse_other_epoch(place: _Place, loader: Iterable[Any]) -> None:
    now = _sampler_epoch(loader)
    if now != place.sampler_epoch:
        raise TierckptError(
            f"the checkpoint was taken in epoch {place.sampler_epoch} of the loader's sampler, "
            f"which is set to epoch {now}: other samples would be skipped than were trained on. "
            f"Begin the loop at epoch {place.epoch} (for epoch in range(data.epoch, epochs)), and "
            "call data.set_epoch(epoch) before each pass"
        )


__all__ = ["ResumableLoader"]
