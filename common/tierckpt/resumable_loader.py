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
their state at the boundary, and continues.

The number of ranks must be the same: each rank has its own place. Use `ResumableSampler` for jobs
that shrink or grow.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from msgspec import Struct
from msgspec.structs import asdict
from torch.utils.data import DataLoader, IterableDataset

from tierckpt._text import some
from tierckpt.state import tree_codec
from tierckpt.state.extras import (
    Generator,
    HeldGenerators,
    LoaderPlace,
    generator_state,
    is_generator,
    load_extra,
)
from tierckpt.state.witness import Comparison, Fingerprint, Ways, difference, fingerprint

from .errors import ConfigError, RestoreError, TierckptError
from .state import process_state as generators

Batch = TypeVar("Batch")

SKIPS = ("auto", "load", "index", "none")
COUNTERS = ("_num_iter_calls", "iteration")
"""Attributes by which loaders of Lightning Fabric and of Accelerate number their passes: each pass
sets the epoch of the samplers to that number."""

TAKES = 4
"""Boundaries at which the batches are counted."""


class _Place(Struct):
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
    """The loader's, if it is visible; likewise:"""
    number: int | None = None
    """The loader's own number of the pass, if it counts its passes; see `COUNTERS`."""
    length: int | None = None
    """Batches of a whole epoch."""
    samples: int | None = None
    """Samples of the data set."""
    sampler: str | None = None
    """Kind and seed of the sampler."""


class _Streams(Struct):
    """States of generators: the process's global ones, and by name those in `_generators`."""

    process: Any
    own: dict[str, Any]

    def packed(self) -> dict[str, Any]:
        """The states for `state_dict`."""
        return {"process": self.process, "own": self.own}

    def differs(self, other: _Streams) -> bool:
        """Whether a generator has drawn between the two."""
        mine, theirs = (
            tree_codec.pack(each.packed(), "", lambda tensor, _: {"v": tensor.tolist()})
            for each in (self, other)
        )
        return bool(mine != theirs)


class ResumableLoader(LoaderPlace, Generic[Batch]):
    """Iterates over a loader, one pass per epoch, and can be resumed at any batch.

    Give it to the checkpointer in `extra_per_rank`. Exact for torch's `DataLoader` with any number
    of workers, for its subclasses, and for any iterable that yields the same batches again if the
    generators start with the same states. The generators are Python's, NumPy's and torch's global
    ones, and those that loader, samplers, data set and `collate_fn` have in attributes, or that
    their functions name (see `state.extras`).

    A resumed pass loads the newest batch once more, and compares it with a fingerprint of the batch
    that the loop had taken. If it is another one, the checkpointer raises RestoreError on all
    ranks before the first step (setting `data_witness`).

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
        generators: other generators that loader, samplers or dataset draw from: torch's, NumPy's
            (both kinds), or a `random.Random`.

    Training thread only. Raises ConfigError for invalid values.
    """

    is_place = True
    """See `state.extras.is_place`."""
    ways = Ways()
    """See there."""
    _gives_again = True
    """A pass gives batches again that the loop was left with; not where a framework counts them."""

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
        given = [*generators]
        self._listed = generators_of(loader, given)
        """Those that a version without names has, in order."""
        self._given = {f"generators[{i}]": each for i, each in enumerate(given)}
        self._look_for_generators()
        self._place = _Place()
        self._first = self._before = self._earlier = _Streams(None, {})
        """The states at the start of the pass, and before the last two batches were requested."""
        self._opened: _Streams | None = None
        """The states before the first batch was requested, if something has drawn since the pass
        was started (another loader, in a `zip`)."""
        self._resuming: dict[str, Any] | None = None
        """The restored state, from a restore until a pass starts."""
        self._resumed: dict[str, Any] | None = None
        """The same of the pass that was resumed, until its first boundary."""
        self._restored: _Streams | None = None
        """The generators as the restore set them, for the same time."""
        self._trained = 0
        """Number of batches of the epoch that the loop had taken at its last boundary, or at its
        last optimizer step if `_sees_steps`."""
        self._sees_steps = False
        """`stepped` is called."""
        self._untrained: tuple[_Streams, _Streams, Fingerprint | None] | None = None
        """Of the first batch after those, once a second one was taken (the loop accumulates
        gradients): the states before the batch before it, and before itself; its fingerprint."""
        self._was_used = False
        """The pass has met a boundary."""
        self._was_between = False
        """The pass started and ended between two boundaries, and is over with its work: an
        evaluation, or an epoch of batches for one step."""
        self._takes: list[int] | None = None
        """Batches that the loop had taken at the first boundaries of a pass that was not resumed;
        see `held`."""
        self.has_boundaries = False
        """`passed` is called at each boundary. Set by the checkpointer."""
        self.witnesses = True
        """Whether batches get fingerprints. Set by the checkpointer, from its settings."""
        self._newest: Fingerprint | None = None
        """Of the batch that the loop took last."""
        self._drawn: _Drawn | None = None
        self.comparison = Comparison()
        """The result of the last restart."""
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
        sampler, or an iterable data set, if these have a `set_epoch`.

        Optional: each pass over this object is an epoch. Raises TierckptError for an epoch before
        the current one.
        """
        again = self._resuming is not None and self._resuming.get("again", False)
        if epoch < self._place.epoch - again:
            raise TierckptError(
                f"set_epoch({epoch}), but the current epoch is {self._place.epoch}; after a "
                "restore start the loop there: for epoch in range(data.epoch, epochs)"
            )
        if epoch != self._place.epoch:
            self._place, self._resuming, self._restored = _Place(epoch), None, None
            self._trained, self._resumed = 0, None
            self.comparison.waits = False
        elif self._resumed is not None and self._was_a_look:
            self._resume(self._resumed)
        owners = samplers_of(self.loader)
        if isinstance(data := getattr(self.loader, "dataset", None), IterableDataset):
            owners.append(data)
        for owner in owners:
            if callable(set_epoch := getattr(owner, "set_epoch", None)):
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
        self._look_for_generators()
        if self._place.begun:
            again = self._was_a_look and self._resumed is None
            self._place = _Place(self._place.epoch + (not again))
        elif self._resuming is not None:
            self._set(self._now(self._resuming))
        self._resuming = self._restored = self._newest = self._resumed = None
        self._trained = 0
        self.comparison.waits = False
        self._takes, self._was_between, self._was_used = [], False, False
        self._place.begun, self._first = True, self._streams()
        self._first.packed()  # once: every version of the epoch contains it
        self._place.sampler_epoch = _sampler_epoch(self.loader)
        self._place.number = _counter(self.loader)[1]
        for name, value in self._facts().items():
            setattr(self._place, name, value)
        return self._pass(self._place, self._new_pass())

    def _new_pass(self) -> Iterator[Batch]:
        """A pass over the loader, with a record of the indices that it draws. Without workers, it
        draws those of each batch when the batch is requested."""
        batches = iter(self.loader)
        self._drawn = None
        is_plain = type(self.loader) is DataLoader and self.loader.num_workers == 0
        if self.witnesses and is_plain and _has_indices(self.loader):
            indices = getattr(batches, "_sampler_iter", None)
            if isinstance(indices, Iterator):
                self._drawn = batches._sampler_iter = _Drawn(indices)  # type: ignore[attr-defined]
        self._opened = self._streams()
        return batches

    @property
    def _was_a_look(self) -> bool:
        """The loop took batches (`next(iter(data))`), trained on none, and left the rest: that pass
        was no epoch."""
        left = self._place.begun and self._resuming is None and not self._place.ended
        return left and self.has_boundaries and not self._was_used

    def _fingerprint(self, batch: Batch) -> Fingerprint:
        found = fingerprint(batch)
        return found if self._drawn is None else found.with_indices(self._drawn.newest)

    def _pass(self, place: _Place, batches: Iterator[Batch]) -> Iterator[Batch]:
        while True:
            if self._place is not place:
                raise TierckptError(
                    "another epoch was started, or a checkpoint restored, since this pass started; "
                    "iterate over the ResumableLoader again"
                )
            if place.batches == self._trained + 1:
                self._untrained = self._earlier, self._before, self._newest
            self._earlier, self._before = self._before, self._streams()
            if place.batches == 0 and self._opened is not None:
                self._opened = self._before if self._opened.differs(self._before) else None
            try:
                batch = next(batches)
            except StopIteration:
                place.ended = True
                return
            place.batches += 1
            if self.witnesses:  # now: the loop may change the batch in place
                self._newest = self._fingerprint(batch)
            if place.batches == 1:  # some are made for the first batch
                self._look_for_generators()
            yield batch

    def _rest(self, state: dict[str, Any]) -> Iterator[Batch]:
        """The rest of the current epoch, which another process started."""
        place = self._place
        _refuse_other_epoch(place, self.loader)
        _refuse_other_batches(place, self.loader)
        self._look_for_generators()
        other = _other_facts(place, self._facts())
        now = self._now(state)
        if state["now"] is not None:
            now = _Streams(**state["now"])
        self._first = _Streams(**state["first"])
        self._set(self._first)
        batches = self._new_pass()
        if place.batches == 0:
            rest = self._pass(place, batches)
        else:
            self._opened = None
            if (opened := state.get("opened")) is not None:
                self._opened = _Streams(**opened)
                self._set(self._opened)
            self._skip_to_newest(batches, state["earlier"])
            # Data prefetched together with the newest batch is drawn from the same states.
            self._before = _Streams(**state["before"])
            self._set(self._before)
            newest = self._next_of(batches, place.batches)
            other += self._compare(newest, state["witness"])
            rest = self._pass(place, batches)
            if state["held"]:
                rest = itertools.chain([newest], rest)
                if state.get("redrawn"):  # the loop had continued from there
                    now = self._streams()
        other += [] if (lost := self._set(now)) is None else [lost]
        self._resuming, self._resumed = None, state
        self._trained = place.batches - bool(state["held"])
        self._takes, self._was_between, self._was_used = None, False, False
        self._conclude(other)
        return rest

    def _compare(self, newest: Batch, witness: Any) -> list[str]:
        """Compare the newest batch, loaded once more, with the one that the loop had taken."""
        if not self.witnesses:
            return []
        self._newest = self._fingerprint(newest)
        if witness is None:
            return []
        self.comparison.batches += 1
        found = difference(Fingerprint.unpacked(witness), self._newest)
        return [found] if found else []

    def _conclude(self, other: list[str]) -> None:
        """The resumed pass can start; `other`: what differs."""
        comparison = self.comparison
        comparison.waits, comparison.epoch = False, self._place.epoch
        comparison.ways = self.ways
        comparison.differences = other if self.witnesses else []
        if comparison.differences and not comparison.collects:
            if comparison.late is None:
                raise RestoreError(f"the loader: {comparison.text()}")
            comparison.late(comparison.text())

    def _now(self, state: dict[str, Any]) -> _Streams:
        """The generators as they were when `state` was taken, unless it contains other states."""
        if self._restored is not None:
            return self._restored
        streams = self._streams()
        return _Streams(streams.process, {**state["own"], **streams.own})

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

    def draws_from(self, named: Mapping[str, Generator]) -> None:
        """Take these generators, besides those that are given or found, for ones that data may draw
        from. Called by the checkpointer, before the first pass."""
        given = {id(each) for each in self._given.values()}
        self._given |= {name: each for name, each in named.items() if id(each) not in given}
        self._look_for_generators()

    # --- state ---------------------------------------------------------------------------------

    def _look_for_generators(self) -> None:
        """Find the generators of the loader. Some are made only when they are first used."""
        self._held = HeldGenerators(self.loader)
        behind_methods = {f"listed[{i}]": each for i, each in enumerate(self._listed)}
        names: dict[int, str] = {}
        for found in (self._given, self._held.found, behind_methods):
            names |= {id(each): n for n, each in found.items() if id(each) not in names}
        every = self._given | self._held.found | behind_methods
        self._generators: dict[str, Generator] = {n: every[n] for n in names.values()}

    def _streams(self) -> _Streams:
        own = {name: generator_state(each) for name, each in self._generators.items()}
        return _Streams(generators.pack_rng(), own)

    def _set(self, streams: _Streams) -> str | None:
        """Set the generators. Returns a text about those that this loader does not have."""
        generators.load_rng(streams.packed()["process"])
        if streams.own.keys() - self._generators.keys():
            self._look_for_generators()  # batches that were skipped may have made some
        lost = []
        for name, state in streams.own.items():
            if (generator := self._generators.get(name)) is not None:
                load_extra(generator, state)
            elif self._held.put(name, state):
                self._generators[name] = self._held.found[name]
            else:
                lost.append(name)
        if not lost:
            return None
        return f"the saved loader drew from {some(lost)}, a generator that this one does not have"

    def _facts(self) -> dict[str, Any]:
        """Facts that decide which batches follow, for `_Place`."""
        return {**facts_of(self.loader), "length": self._length()}

    def _length(self) -> int | None:
        try:
            return len(self)
        except (TypeError, NotImplementedError):
            return None

    @property
    def at_end(self) -> bool:
        """Whether all batches of the epoch were taken, as far as known."""
        place = self._place
        try:
            return place.ended or (place.begun and place.batches >= len(self))
        except TypeError:
            return False

    def step_starts(self) -> None:
        """Record the first step after a restore, with batches of this loader or another one."""
        if self._resuming is not None:
            # The batches of another loader are trained on first: the generators stay as they are.
            self._restored = None
            self._resuming |= {"now": None, "own": self._now(self._resuming).own}

    def passed(self) -> None:
        """Record at a boundary that the taken batches were trained on (with `ahead`, all but one).
        Called by the checkpointer."""
        self.met_boundary()
        if not self._sees_steps:
            self._trained = self._place.batches
        if self._takes is not None and len(self._takes) < TAKES:
            self._takes.append(self._trained)
        if self._resuming is None:
            self._restored = None
        self.step_starts()

    def stepped(self) -> None:
        """Record at an optimizer step that the taken batches were trained on. Called by the
        checkpointer where the boundary comes later, in a forward pass."""
        self._trained, self._sees_steps = self._place.batches, True

    def met_boundary(self) -> None:
        """Note that there was a boundary, perhaps in the forward pass of the next iteration. Called
        by the checkpointer."""
        if not self._was_used and self._takes is not None and not self._ahead:
            self._was_between = self._place.ended
        self._was_used, self._resumed = True, None

    @property
    def held(self) -> int:
        """Batches that the loop seems to hold at a boundary without `ahead`: it took more than one
        before the first boundary, and one before each of the next."""
        takes = self._takes or []
        follow = all(b - a == 1 for a, b in itertools.pairwise(takes))
        return takes[0] - 1 if len(takes) == TAKES and follow and not self._ahead else 0

    def state_dict(self, in_forward: bool = False) -> dict[str, Any]:
        """The place: counts, the fingerprint of the newest batch, and states of generators (20 kB,
        and 15 kB for each extra one; 10 kB more if the loop holds a batch, or the loader is no
        plain DataLoader).

        Later events do not change the result. `in_forward`: the boundary is the forward pass of the
        next iteration, and its batch was already taken and drawn (not for a version taken between
        boundaries).
        """
        if self._resuming is not None:  # no pass has started since
            return dict(self._resuming)
        place, now = self._place, self._streams()
        if self.end_is_done or self._was_between:
            return self._next_epoch(now)
        if (held_first := self._first_held) is not None:
            # Gradients are no part of a version: the resumed pass gives all held batches again,
            # with the random numbers after the first of them.
            first, reads_again = self._trained + 1, self._trained > 0
            redrawn = {"redrawn": True}
            return self._recipe(held_first, now.own, None, first, True, reads_again) | redrawn
        early = in_forward and not self.between
        untrained = early or self._ahead > 0 or self._is_one_too_far
        then = now if in_forward and untrained else None
        if self.between and place.ended:
            # the resumed loop does its work at the end of the epoch again from there
            then = self._before
        held = untrained and place.batches > 0 and not place.ended
        fetches_ahead = self.witnesses and type(self.loader) is not DataLoader
        reads_again = (held or fetches_ahead) and place.batches > 1
        newest = self._earlier, self._before, None if place.ended else self._newest
        return self._recipe(newest, now.own, then, place.batches, held, reads_again)

    def _recipe(
        self,
        newest: tuple[_Streams, _Streams, Fingerprint | None],
        own: dict[str, Any],
        then: _Streams | None,
        batches: int,
        held: bool,
        reads_again: bool,
    ) -> dict[str, Any]:
        """The state after so many batches. `newest`: see `_untrained`; `then`: the states that the
        resumed pass sets; `reads_again`: it also loads the batch before the newest one."""
        earlier, before, fingerprint = newest
        return {
            "place": {**asdict(self._place), "batches": batches},
            "held": held,
            "earlier": earlier.packed() if reads_again and self._skip != "none" else None,
            "first": self._first.packed(),
            "opened": None if self._opened is None else self._opened.packed(),
            "before": before.packed(),
            "own": own,
            "now": None if then is None else then.packed(),
            "witness": None if fingerprint is None else fingerprint.packed(),
        }

    @property
    def _is_one_too_far(self) -> bool:
        """The loop took a batch, and ended before it had trained on it."""
        return self.between and self._place.batches > self._trained

    @property
    def _first_held(self) -> tuple[_Streams, _Streams, Fingerprint | None] | None:
        """As `_untrained`, if the loop is left with batches that it has not trained on."""
        place, loop_decides = self._place, self._gives_again and not self._ahead
        count = place.batches - self._trained
        if not (self.between and loop_decides) or count < 1 or place.ended:
            return None
        return self._untrained if count > 1 else (self._earlier, self._before, self._newest)

    def _next_epoch(self, now: _Streams) -> dict[str, Any]:
        """The state of a loader before the next epoch, with the generators as they are."""
        none = _Streams(None, {}).packed()
        number = _counter(self.loader)[1]
        place = asdict(_Place(self._place.epoch + 1, number=number))
        streams = {"first": none, "before": none, "own": now.own, "now": None}
        again = self._was_between
        return {"place": place, "held": False, "earlier": None, "again": again, **streams}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next pass resume there. Raises ConfigError, with nothing changed, if the saved
        loader drew from another number of given generators."""
        self._look_for_generators()
        names = {id(each): name for name, each in self._generators.items()}
        order = [names[id(each)] for each in self._listed if id(each) in names]
        own, has = state["own"], len(self._generators)
        given = [name for name in own if name.startswith("generators[")]
        mine = [name for name in self._given if name.startswith("generators[")]
        if len(given) != len(mine) or not all(name in own for name in order):
            raise ConfigError(
                f"the saved loader drew from {len(own)} generators of its own, this one has {has}. "
                "Make the loader and its sampler as they were"
            )
        self._restored = None
        self._resume(state)
        self.comparison = Comparison(waits=self._place.begun)

    def _resume(self, state: dict[str, Any]) -> None:
        self._place, self._resuming = _Place(**state["place"]), dict(state)
        self._trained, self._resumed = 0, None
        for name in state["own"].keys() & self._generators.keys():
            load_extra(self._generators[name], state["own"][name])
        if self._place.number is not None and (counter := _counter(self.loader)[0]):
            setattr(self.loader, counter, self._place.number)

    def restored(self) -> None:
        """Note the global generators that a restore has set: draws until the loop starts (a first
        evaluation) do not count. Called by the checkpointer."""
        if self._resuming is not None:
            self._restored = _Streams(generators.pack_rng(), self._resuming["own"])
            self.comparison.collects = True


class _Drawn:
    """The indices of the batches of a pass, and those of the newest one."""

    newest: Any = None

    def __init__(self, indices: Iterator[Any]) -> None:
        self._indices = indices

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.newest = next(self._indices)
        return self.newest


def _has_indices(loader: Iterable[Any]) -> bool:
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)


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
    found: list[Any] = []
    for each in (*(getattr(owner, "generator", None) for owner in owners), *more):
        if is_generator(each) and not any(each is other for other in found):
            found.append(each)
    return found


def _counter(loader: Iterable[Any]) -> tuple[str, int | None]:
    """Name and value of a loader's attribute in `COUNTERS`; "" and None if it has none."""
    found = [(name, getattr(loader, name, None)) for name in COUNTERS]
    wraps = hasattr(loader, "base_dataloader") or hasattr(loader, "_dataloader")
    return next((each for each in found if wraps and type(each[1]) is int), ("", None))


def _sampler_epoch(loader: Iterable[Any]) -> int | None:
    """The epoch of the loader's sampler, as `DistributedSampler` stores it, or as a loader is about
    to set it."""
    if (number := _counter(loader)[1]) is not None:
        return number
    epochs = (getattr(sampler, "epoch", None) for sampler in samplers_of(loader))
    return next((epoch for epoch in epochs if type(epoch) is int), None)


def _refuse_other_epoch(place: _Place, loader: Iterable[Any]) -> None:
    now = _sampler_epoch(loader)
    if now != place.sampler_epoch:
        cure = "call data.set_epoch(epoch) before each pass"
        if not any(hasattr(each, "set_epoch") for each in samplers_of(loader)):
            cure = f"set the sampler's own count, epoch, to {place.sampler_epoch} before the pass"
        raise TierckptError(
            f"the checkpoint was taken in epoch {place.sampler_epoch} of the loader's sampler, but "
            f"the sampler is set to epoch {now}: the samples to skip would not be those trained "
            f"on. Start the loop at epoch {place.epoch} (for epoch in range(data.epoch, epochs)), "
            f"and {cure}"
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
            f"the checkpoint was taken within an epoch with batch_size={saved}, and this loader "
            f"has batch_size={now}: the samples to skip would not be those trained on. Set "
            f"batch_size={saved}, or start the next epoch with set_epoch({place.epoch + 1})"
        )


def facts_of(loader: Iterable[Any]) -> dict[str, Any]:
    """Batch size, samples of the data set, kind and seed of the sampler; None if unknown."""
    samples: int | None = None
    data = getattr(loader, "dataset", None)
    if not isinstance(data, IterableDataset):
        with contextlib.suppress(TypeError, NotImplementedError):
            samples = len(data)  # type: ignore[arg-type]
    seeds = []
    samplers = samplers_of(loader)
    for sampler in samplers:
        own = getattr(sampler, "__dict__", {})
        seeds += [f"{n}={own[n]}" for n in ("seed", "initial_seed") if type(own.get(n)) is int]
    kinds = [*dict.fromkeys(type(sampler).__name__ for sampler in samplers), *seeds]
    return {
        "batch_size": _batch_size(loader),
        "samples": samples,
        "sampler": ", ".join(kinds) or None,
    }


_FACTS = {
    "samples": "another length, as the data set has {now} samples, and had {had}",
    "length": "another length, as an epoch has {now} batches, and had {had}",
    "sampler": "another sampler, {now}, which was {had}",
}


def _other_facts(place: _Place, facts: Mapping[str, Any]) -> list[str]:
    """What differs from the loader of the version, as text; the batch size apart."""
    pairs = {name: (getattr(place, name), facts[name]) for name in _FACTS}
    return [
        _FACTS[name].format(now=now, had=had)
        for name, (had, now) in pairs.items()
        if had is not None and now is not None and had != now
    ]


__all__ = ["ResumableLoader"]
