"""A data loader that resumes at the next batch after a restart.

::

    data = tierckpt.ResumableLoader(DataLoader(dataset, batch_size=64, shuffle=True))
    ckpt = ddp_ckpt.Checkpointer(model, optimizer, extra_per_rank={"data": data})
    ckpt.restore()
    for epoch in range(data.epoch, epochs):
        data.set_epoch(epoch)
        for batch in data:
            ...
            optimizer.step()
            ckpt.step()

A loader has no place that could be saved: its iterator draws seeds when it is made, samplers draw
an order with the first batch, and datasets draw for each sample. Therefore the saved place is a
recipe: the state of all generators at the start of the epoch, and the number of batches taken
since. A resumed epoch sets the generators to that state, skips the batches, sets the generators to
their state at the boundary, and goes on.

The number of ranks must be the same: each rank has its own place. Use `ResumableSampler` for jobs
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

Batch = TypeVar("Batch")

SKIPS = ("auto", "load", "index", "none")


@dataclass
class _Place:
    """The place of a loader in its epochs."""

    epoch: int = 0
    begun: bool = False
    """A pass over this epoch has started."""
    batches: int = 0
    """Batches of the epoch that the loop took."""
    ended: bool = False
    """The loop has reached the end of the pass."""
    sampler_epoch: int | None = None
    """The last argument of `set_epoch` of the loader's sampler, if it is visible."""
    batch_size: int | None = None
    """The loader's, if it is visible."""


@dataclass
class _Streams:
    """States of generators: the process's global ones, and those in `_generators`."""

    process: Any
    own: list[Any]

    def packed(self) -> dict[str, Any]:
        """The states for `state_dict`."""
        return {"process": self.process, "own": self.own}


class ResumableLoader(Generic[Batch]):
    """Iterates over a loader, one pass per epoch, and can be resumed at any batch.

    Give it to the checkpointer in `extra_per_rank`. Exact for torch's `DataLoader` with any number
    of workers, for its subclasses, and for any iterable that yields the same batches again if the
    generators start with the same states. The generators are Python's, NumPy's and torch's global
    ones, and those that the loader and its samplers have as `generator`.

    Args:
        loader: the iterable; it is iterated over once per epoch.
        ahead: 1 if the loop has taken a batch at the boundary that it has not trained on yet (it
            prefetches the next batch while it computes); else 0.
        skip: the way in which a resumed epoch reaches its place. "load": it loads the batches again
            and drops them; exact also if workers draw. "index": it draws only the indices, which
            takes no time; not exact if a sample's transforms draw in *worker processes*. "none": it
            skips nothing, for an iterator that keeps no place but draws each batch from the
            generators. "auto": "index" for a plain `DataLoader` without workers over a dataset with
            indices, where it is exact; else "load". A method `skip(count)` of the loader's iterator
            is called first; it returns the number of batches that it skipped.
        generators: other generators that loader, samplers or dataset draw from.

    Training thread only. Raises ConfigError for invalid values.
    """

    is_place = True
    """See `state.extras.is_place`."""

    def __init__(
        self,
        loader: Iterable[Batch],
        *,
        ahead: int = 0,
        skip: str = "auto",
        generators: Iterable[Generator] = (),
    ) -> None:
        if ahead not in (0, 1):
            raise ConfigError(f"ahead={ahead!r}: it must be 0, or 1 if the loop prefetches a batch")
        if skip not in SKIPS:
            raise ConfigError(f"skip={skip!r}: it must be one of {', '.join(SKIPS)}")
        if skip == "index" and not _has_indices(loader):
            raise ConfigError(
                "skip='index' needs a torch DataLoader over a dataset with indices, but this is "
                f"{_kind_of(loader)}; skip='load' takes any iterable"
            )
        self.loader = loader
        self._ahead, self._skip = ahead, skip
        self._generators = generators_of(loader, generators)
        self._place = _Place()
        self._first = self._before = self._earlier = _Streams(None, [])
        """The states at the start of the pass, and before the last two batches were requested."""
        self._resuming: dict[str, Any] | None = None
        """The restored state, from a restore until a pass starts."""
        self._restored: _Streams | None = None
        """The generators as the restore set them, for the same time."""
        self._trained: int | None = None
        """Number of batches of the epoch that the loop had taken at its last boundary; None: it
        reported no boundary."""
        self.between = self.end_is_done = False
        """Set by the checkpointer while it takes a version between boundaries. `end_is_done`: the
        loop has done its work at the end of the epoch."""

    @property
    def epoch(self) -> int:
        """The current epoch; after a restore, the epoch to resume.

        All of its batches may have been taken: the loop's work at the end of an epoch (a
        scheduler's step) was not done yet, and is done after a pass without batches. If it was done
        (see `epoch_ends`), this is the next epoch.
        """
        return self._place.epoch

    @property
    def start(self) -> int:
        """The number of the first batch of the next pass: 0, or after a restore in the middle of an
        epoch the number of batches that the pass leaves out. For a loop that counts batches:
        `for i, batch in enumerate(data, data.start)`."""
        if self._resuming is None or not self._place.begun:
            return 0
        return self._place.batches - bool(self._resuming["held"])

    def set_epoch(self, epoch: int) -> None:
        """Start this epoch, or continue it if it is the current one; also sets the loader's
        sampler.

        Optional: each pass over this object is an epoch. Raises TierckptError for an epoch before
        the current one.
        """
        if epoch < self._place.epoch:
            raise TierckptError(
                f"set_epoch({epoch}), but the current epoch is {self._place.epoch}; after a "
                "restore start the loop there: for epoch in range(data.epoch, epochs)"
            )
        if epoch != self._place.epoch:
            self._place, self._resuming, self._restored = _Place(epoch), None, None
            self._trained = None
        for sampler in samplers_of(self.loader):
            if callable(set_epoch := getattr(sampler, "set_epoch", None)):
                set_epoch(epoch)

    def __getattr__(self, name: str) -> Any:
        """Attributes of the loader (`dataset`, `sampler`)."""
        if name.startswith("_") or name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute that only the loader has, there."""
        own = vars(self)
        mine = name.startswith("_") or name in own or hasattr(type(self), name)
        if mine or "loader" not in own or not hasattr(self.loader, name):
            super().__setattr__(name, value)
        else:
            setattr(self.loader, name, value)

    def __len__(self) -> int:
        """Batches of a whole epoch. Raises TypeError if the loader has no length."""
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Batch]:
        """A pass over the epoch; after a restore, over the rest of the current one."""
        if self._resuming is not None and self._place.begun:
            return self._rest(self._resuming)
        if self._place.begun:
            self._place = _Place(self._place.epoch + 1)
        elif self._resuming is not None:
            self._set(self._now(self._resuming))
        self._resuming = self._restored = self._trained = None
        self._place.begun, self._first = True, self._streams()
        self._first.packed()  # once: every version of the epoch contains it
        self._place.sampler_epoch = _sampler_epoch(self.loader)
        self._place.batch_size = _batch_size(self.loader)
        return self._pass(self._place, iter(self.loader))

    def _pass(self, place: _Place, batches: Iterator[Batch]) -> Iterator[Batch]:
        while True:
            if self._place is not place:
                raise TierckptError(
                    "another epoch was started, or a checkpoint restored, since this pass started; "
                    "iterate over the ResumableLoader again"
                )
            self._earlier, self._before = self._before, self._streams()
            try:
                batch = next(batches)
            except StopIteration:
                place.ended = True
                return
            place.batches += 1
            yield batch

    def _rest(self, state: dict[str, Any]) -> Iterator[Batch]:
        """The rest of the current epoch, which another process started."""
        place = self._place
        _refuse_other_epoch(place, self.loader)
        _refuse_other_batches(place, self.loader)
        now = self._now(state)
        if state["now"] is not None:
            now = _Streams(**state["now"])
        self._first = _Streams(**state["first"])
        self._set(self._first)
        batches = iter(self.loader)
        if place.batches == 0:
            rest = self._pass(place, batches)
        else:
            self._skip_to_newest(batches, state["earlier"])
            # Data that is prefetched together with the newest batch is drawn from the same states.
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
        """The generators as they were when `state` was taken, unless it contains other states."""
        return self._restored or _Streams(generators.pack_rng(), state["own"])

    def _skip_to_newest(self, batches: Iterator[Batch], earlier: dict[str, Any] | None) -> None:
        """Skip all batches before the newest one. `earlier`: the states before the last of these
        was requested, if the newest one is trained on: the loader may have read it ahead then."""
        count = self._place.batches - 1
        if self._skip == "none":
            return
        if earlier is None or count == 0:
            self._skip_batches(batches, count)
            return
        self._skip_batches(batches, count - 1)
        self._earlier = _Streams(**earlier)
        self._set(self._earlier)
        self._next_of(batches, count)

    def _skip_batches(self, batches: Iterator[Batch], count: int) -> None:
        indexed = self._skip == "index" or (
            self._skip == "auto"
            and type(self.loader) is DataLoader
            and self.loader.num_workers == 0
        )
        draw = getattr(batches, "_next_index", None) if indexed else None
        skip = getattr(batches, "skip", None) if self._skip == "auto" else None
        done = skip(count) if callable(skip) else 0
        for number in range(done, count):
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
            f"{self._place.epoch}, but this loader ends after {there}: dataset, batch size or "
            "sampler have changed. Make the loader as it was, or start the next epoch with "
            f"set_epoch({self._place.epoch + 1})"
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
        """Whether all batches of the epoch were taken, as far as that is known."""
        place = self._place
        try:
            return place.ended or (place.begun and place.batches >= len(self))
        except TypeError:
            return False

    def passed(self) -> None:
        """Record at a boundary that the taken batches were trained on (with `ahead`, all but one).
        Called by the checkpointer."""
        self._trained = self._place.batches

    def state_dict(self, in_forward: bool = False) -> dict[str, Any]:
        """The place: counts, and states of generators (20 kB, and 15 kB for each extra one; 10 kB
        more if the loop holds a batch).

        Later events do not change the result. `in_forward`: the boundary is the forward pass of the
        next iteration, and its batch was already taken and drawn.
        """
        if self._resuming is not None:  # no pass has started since
            return dict(self._resuming)
        place, now = self._place, self._streams()
        if self.end_is_done:
            return self._next_epoch(now)
        untrained = in_forward or self._ahead > 0 or self._is_one_too_far
        then = now if in_forward else None
        if self.between and place.ended:
            # the resumed loop does its work at the end of the epoch again from there
            then = self._before
        held = untrained and place.batches > 0 and not place.ended
        reads_again = held and place.batches > 1 and self._skip != "none"
        return {
            "place": dict(vars(place)),
            "held": held,
            "earlier": self._earlier.packed() if reads_again else None,
            "first": self._first.packed(),
            "before": self._before.packed(),
            "own": now.own,
            "now": None if then is None else then.packed(),
        }

    @property
    def _is_one_too_far(self) -> bool:
        """The loop took a batch, and ended before it had trained on it."""
        is_reported = self.between and self._trained is not None
        return is_reported and self._place.batches > (self._trained or 0)

    def _next_epoch(self, now: _Streams) -> dict[str, Any]:
        """The state of a loader before the next epoch, with the generators as they are."""
        none = _Streams(None, []).packed()
        place = dict(vars(_Place(self._place.epoch + 1)))
        streams = {"first": none, "before": none, "own": now.own, "now": None}
        return {"place": place, "held": False, "earlier": None, **streams}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next pass resume there. Raises ConfigError, with nothing changed, if the saved
        loader drew from another number of generators."""
        if len(state["own"]) != len(self._generators):
            raise ConfigError(
                f"the saved loader drew from {len(state['own'])} generators of its own, this one "
                f"has {len(self._generators)}. Make the loader and its sampler as they were"
            )
        self._place, self._resuming = _Place(**state["place"]), dict(state)
        self._restored = self._trained = None

    def restored(self) -> None:
        """Note the global generators that a restore has set: draws until the loop starts (a first
        evaluation) do not count. Called by the checkpointer."""
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


def samplers_of(loader: Iterable[Any]) -> list[Any]:
    """The samplers that decide the order, outermost first, each once; also those of batch samplers
    that another one wraps, as Accelerate's do."""
    found: list[Any] = []
    todo = [getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)]
    while todo:
        sampler = todo.pop(0)
        if sampler is None or any(sampler is each for each in found):
            continue
        found.append(sampler)
        todo += [getattr(sampler, name, None) for name in ("batch_sampler", "sampler")]
    return found


def generators_of(loader: Iterable[Any], more: Iterable[Generator] = ()) -> Sequence[Generator]:
    """The generators of a loader and its samplers, and `more`, each once."""
    owners = (loader, *samplers_of(loader))
    found: list[Generator] = []
    for each in (*(getattr(owner, "generator", None) for owner in owners), *more):
        if isinstance(each, Generator) and not any(each is other for other in found):
            found.append(each)
    return found


def _sampler_epoch(loader: Iterable[Any]) -> int | None:
    """The epoch of the loader's sampler, as `DistributedSampler` stores it."""
    epochs = (getattr(sampler, "epoch", None) for sampler in samplers_of(loader))
    return next((epoch for epoch in epochs if type(epoch) is int), None)


def _refuse_other_epoch(place: _Place, loader: Iterable[Any]) -> None:
    now = _sampler_epoch(loader)
    if now != place.sampler_epoch:
        raise TierckptError(
            f"the checkpoint was taken in epoch {place.sampler_epoch} of the loader's sampler, but "
            f"the sampler is set to epoch {now}: the samples to skip would not be those trained "
            f"on. Start the loop at epoch {place.epoch} (for epoch in range(data.epoch, epochs)), "
            "and call data.set_epoch(epoch) before each pass"
        )


def _batch_size(loader: Iterable[Any]) -> int | None:
    """The loader's batch size, also that of its own batch sampler, if it has a fixed one."""
    owners = (loader, getattr(loader, "batch_sampler", None))
    sizes = (getattr(owner, "batch_size", None) for owner in owners)
    return next((size for size in sizes if type(size) is int), None)


def _refuse_other_batches(place: _Place, loader: Iterable[Any]) -> None:
    now, saved = _batch_size(loader), place.batch_size
    if saved is not None and now is not None and now != saved:
        raise TierckptError(
            f"the checkpoint was taken amid an epoch with batch_size={saved}, and this loader has "
            f"batch_size={now}: the samples to skip would not be those trained on. Set "
            f"batch_size={saved}, or start the next epoch with set_epoch({place.epoch + 1})"
        )


__all__ = ["ResumableLoader"]
