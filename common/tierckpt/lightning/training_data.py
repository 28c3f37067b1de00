"""The training loaders of a fit, resumable at any batch.

Lightning takes all of its training loaders through one `CombinedLoader`. The one of a fit gets a
class of ours, which iterates as before, and records a recipe for the place (`ResumableLoader`):
the random states at the start of the epoch, and the number of batches. A resumed epoch starts from
these states, after the samplers have received the epoch's number, and skips the batches.

`LoopHooks` are places in Lightning's fit loop for which it has no callback: methods of one
Trainer's loops are replaced by ones that call them, until `close`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from tierckpt.integrations import PlaceOfAnyRanks, order_batch_of
from tierckpt.resumable_loader import samplers_of
from tierckpt.state.extras import Generator
from tierckpt.state.witness import Comparison, Fingerprint, Ways

from .package import part

__all__ = ["LoopHooks", "Replaced", "TrainingData"]


class Replaced:
    """Takes the place of a method on one object. In a copy of the object (`copy.deepcopy(trainer)`
    or a pickle in a fit) it is the plain method."""

    def __init__(self, owner: Any, name: str, call: Callable[..., Any]) -> None:
        self._owner, self._name, self._call = owner, name, call
        setattr(owner, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call what takes the place."""
        return self._call(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles: the owner's copy exists then, without its attributes."""
        return getattr, (self._owner, self._name)


class LoopHooks:
    """The replaced methods of one fit loop. Training thread."""

    def __init__(
        self, fit_loop: Any, after_batch: Callable[[], None], after_run: Callable[[], None]
    ) -> None:
        """`after_batch`: called after all work of a batch, validation and logging included.
        `after_run`: called after the training, unless it ends with an exception."""
        self._loop = fit_loop
        self._replaced: list[tuple[Any, str]] = []
        self._then(fit_loop.epoch_loop, "on_advance_end", after_batch)
        self._then(fit_loop, "run", after_run)

    def resume(self, mid_epoch: bool, place: Callable[[], None]) -> None:
        """Let the next epoch be a resumed one: `place` sets the state, and is called last before
        the first batch. If `mid_epoch`, the epoch's start is left out: it was before."""
        epoch, start = self._loop.epoch_loop, self._loop.on_advance_start

        def on_advance_start() -> None:
            self._give_back(self._loop, "on_advance_start")
            place() if not mid_epoch else None
            start() if not mid_epoch else None

        self._replace(self._loop, "on_advance_start", on_advance_start)
        if not mid_epoch:
            return

        def reset() -> None:
            """Keep the counters of the epoch."""
            self._give_back(epoch, "reset")

        run_start = epoch.on_run_start

        def on_run_start(fetcher: Any) -> None:
            self._give_back(epoch, "on_run_start")
            run_start(fetcher)
            place()

        self._replace(epoch, "reset", reset)
        self._replace(epoch, "on_run_start", on_run_start)

    def close(self) -> None:
        """Give all methods back."""
        for owner, name in [*self._replaced]:
            self._give_back(owner, name)

    def _then(self, owner: Any, name: str, call: Callable[[], None]) -> None:
        method = getattr(owner, name)

        def both(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            call()
            return result

        self._replace(owner, name, both)

    def _replace(self, owner: Any, name: str, method: Callable[..., Any]) -> None:
        Replaced(owner, name, method)
        self._replaced.append((owner, name))

    def _give_back(self, owner: Any, name: str) -> None:
        vars(owner).pop(name, None)
        if (owner, name) in self._replaced:
            self._replaced.remove((owner, name))


WAYS = Ways(
    give="TierCheckpoint(generators=[...])",
    set_epoch="call it in on_train_start, too, with trainer.current_epoch",
    count="set its count in on_train_start from trainer.current_epoch",
    start="start a new job at another path",
)


class LoaderFacts(NamedTuple):
    """Facts of the training loaders; a place can be converted to other numbers of ranks or other
    batches only if there is one loader."""

    batch: int = 0
    """The samples of a batch of this rank; 0 if they are unknown, or there are several loaders."""
    order: int = 0
    """See `order_batch_of`."""
    is_distributed: bool = False
    """Whether a `DistributedSampler` decides the order, which is that of all ranks then."""


class TrainingData:
    """The training loaders of one Trainer. Training thread."""

    def __init__(self, trainer: Any, generators: Sequence[Generator]) -> None:
        """Adopt the loaders that the fit loop requests from now on."""
        self._given = generators
        self.witnesses, self.named = True, dict[str, Generator]()
        """Whether batches get fingerprints, and the generators of `extra` and `extra_per_rank`;
        both are set by the checkpointer."""
        self._loop, self._package = trainer.fit_loop, part(trainer, "utilities.combined_loader")
        self._source = self._loop._data_source
        self._request = self._source.dataloader
        self.waits = False
        """True until a resumed pass can start: Lightning makes an iterator, of which it knows only
        the length then, before it sets the samplers' epoch."""
        Replaced(self._source, "dataloader", self._adopted)
        self._known: list[Any] = []
        """The loaders of `_facts`."""
        self._facts = LoaderFacts()

    def close(self) -> None:
        """Leave later loaders as they are."""
        vars(self._source).pop("dataloader", None)

    def state_dict(self) -> dict[str, Any] | None:
        """The place in the data; None if the loop has no iterator yet."""
        data = self._resumable
        if data is None:
            return None
        self._look_at_evaluation(data)
        return data.state_dict()

    @property
    def comparison(self) -> Comparison | None:
        """Of the newest batch; None if the loop has no iterator yet."""
        return getattr(self._resumable, "comparison", None)

    @property
    def _resumable(self) -> PlaceOfAnyRanks[Any] | None:
        return getattr(self._loop._combined_loader, "resumable", None)

    def _look_at_evaluation(self, data: PlaceOfAnyRanks[Any]) -> None:
        """Find the generators of the loaders of validations, which Lightning makes later."""
        validation = self._loop.epoch_loop.val_loop._combined_loader
        loaders = list(getattr(validation, "flattened", ()))
        if loaders != data.loader.evaluated:  # type: ignore[attr-defined]
            data.loader.evaluated = loaders  # type: ignore[attr-defined]
            data.draws_from(self.named)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of all samplers, as Lightning does."""
        for loader in self._loop._combined_loader.flattened:
            for sampler in samplers_of(loader):
                if callable(set_epoch := getattr(sampler, "set_epoch", None)):
                    set_epoch(epoch)

    @property
    def facts(self) -> LoaderFacts:
        """Facts of the loop's loaders: samplers are searched once for each set of loaders."""
        loaders = list(getattr(self._loop._combined_loader, "flattened", ()))
        if loaders != self._known:
            self._known, self._facts = loaders, _facts_of(loaders)
        return self._facts

    def resume(
        self, state: dict[str, Any], taken: int, factor: Fraction, is_of_other_ranks: bool
    ) -> None:
        """Start the pass at the saved place. The global generators must be as the restore has set
        them, and are so afterwards. `taken`: batches of the epoch that were trained on; `factor`:
        as in `PlaceOfAnyRanks.convert`."""
        self.waits = False
        fetcher, data = self._loop._data_fetcher, self._loop._combined_loader.made_resumable()
        self._look_at_evaluation(data)
        data.load_state_dict(state)
        data.convert(factor, is_of_other_ranks)
        data.restored()
        iter(fetcher)
        fetcher.fetched += taken

    def start_next(self, state: dict[str, Any]) -> None:
        """Set the generators of the loaders, which start an epoch."""
        data = self._loop._combined_loader.made_resumable()
        self._look_at_evaluation(data)
        data.load_generators(state)

    def _adopted(self) -> Any:
        """The loaders that the script gives, combined as Lightning does it."""
        combined, package = self._request(), self._package
        if not isinstance(combined, package.CombinedLoader):
            combined = package.CombinedLoader(combined, "max_size_cycle")
        if not hasattr(combined, "made_resumable"):
            combined.__class__ = _resumable(type(combined))
        combined.waits, combined.resumable = lambda: self.waits, None
        combined.made = self._made
        return combined

    def _made(self, passes: _Passes, ahead: int) -> PlaceOfAnyRanks[Any]:
        made = _Place(passes, of=passes.loaders, ahead=ahead, generators=self._given)
        made.witnesses = self.witnesses
        made.draws_from(self.named)
        return made


class _Place(PlaceOfAnyRanks[Any]):
    ways = WAYS

    def _fingerprint(self, batch: Any) -> Fingerprint:
        """Of the batch alone: a CombinedLoader adds its number, and that of its loader."""
        return super()._fingerprint(batch[0])


def _facts_of(loaders: Sequence[Any]) -> LoaderFacts:
    samplers = [each for loader in loaders for each in samplers_of(loader)]
    is_distributed = any(isinstance(each, DistributedSampler) for each in samplers)
    if len(loaders) != 1:
        return LoaderFacts(is_distributed=is_distributed)
    (loader,) = loaders
    batch = getattr(loader, "batch_size", 0) or 0
    return LoaderFacts(batch, order_batch_of(loader), is_distributed)


_classes: dict[Any, type] = {}


def _resumable(kind: Any) -> type:
    """A subclass of a kind of CombinedLoader, for objects that exist already."""
    if kind not in _classes:
        _classes[kind] = _made_resumable(kind)
    return _classes[kind]


def _made_resumable(kind: Any) -> type:

    class ResumableCombinedLoader(kind):  # type: ignore[misc]
        """Iterates through `resumable`, a `ResumableLoader` around the base's iteration."""

        waits: Callable[[], bool]
        made: Callable[[_Passes, int], PlaceOfAnyRanks[Any]]
        resumable: PlaceOfAnyRanks[Any] | None
        _unread: list[Any] | None = None

        def __iter__(self) -> Any:
            if self.waits():
                self._know_length()
                self._batches: Iterator[Any] = iter(())
            else:
                self._batches = iter(self.made_resumable())
            return self

        def __next__(self) -> Any:
            return next(self._batches)

        def __reduce_ex__(self, protocol: Any) -> Any:
            """Make a copy, with a copy of the Trainer, one of the base's."""
            own = ("waits", "made", "resumable", "_batches", "_unread")
            state = {name: value for name, value in vars(self).items() if name not in own}
            return object.__new__, (kind,), state

        def made_resumable(self) -> PlaceOfAnyRanks[Any]:
            """The object that knows the place."""
            if self.resumable is None:
                # Lightning fetches one batch ahead where it knows no length.
                ahead = 0 if self._know_length() else 1
                passes = _Passes(self, super().__iter__, super().__next__)
                self.resumable = self.made(passes, ahead)
            return self.resumable

        def _know_length(self) -> bool:
            """Let `len()` work without an iterator of the loaders. False if it is unknown."""
            self._unread = [_Unread(loader) for loader in self.flattened]
            try:
                super().__iter__()
                return len(self) is not None
            except (TypeError, NotImplementedError):
                return False
            finally:
                self._unread = None

        @property
        def flattened(self) -> Any:
            return kind.flattened.fget(self) if self._unread is None else self._unread

        @flattened.setter
        def flattened(self, loaders: Any) -> None:
            kind.flattened.fset(self, loaders)

    return ResumableCombinedLoader


class _Unread:
    """Has the length of a loader, if it has one, and no batches."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class _Passes:
    """The passes over a combined loader, by the methods of its own class."""

    def __init__(
        self, combined: Any, start: Callable[[], Any], following: Callable[[], Any]
    ) -> None:
        self._combined, self._start, self._next = combined, start, following
        self.loaders = combined.flattened
        self.evaluated: list[Any] = []
        """Generators are looked for in these loaders, and in those of validations."""

    def __len__(self) -> int:
        return len(self._combined)

    def __iter__(self) -> Iterator[Any]:
        self._start()
        return _Pass(self._combined, self._next)


class _Pass:
    def __init__(self, combined: Any, following: Callable[[], Any]) -> None:
        self._combined, self._next = combined, following

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._next()

    def skip(self, count: int) -> int:
        """Skip batches without loading them; returns how many, 0 where that would not be exact."""
        loaders, iterators = self._combined.flattened, self._combined._iterator.iterators
        if len(loaders) != 1 or type(loaders[0]) is not DataLoader or loaders[0].num_workers:
            return 0
        draw = getattr(iterators[0], "_next_index", None)
        if draw is None or isinstance(loaders[0].dataset, IterableDataset):
            return 0
        for number in range(count):
            try:
                draw()
            except StopIteration:
                return number
        self._combined._iterator._idx += count  # the number of the next batch
        return count
