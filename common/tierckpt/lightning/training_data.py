"""The training loaders of a fit, resumable at any batch.

Lightning takes all of its training loaders through one `CombinedLoader`. The one of a fit gets a
class of ours, which iterates as before, and records a recipe for the place (`ResumableLoader`): the
random states at the start of the epoch, and the number of batches. A resumed epoch starts from
these states, after the samplers have received the epoch's number, and skips the batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from tierckpt.integrations.other_ranks import PlaceOfAnyRanks, order_batch_of
from tierckpt.resumable_loader import generators_of, samplers_of
from tierckpt.state.extras import Generator

from .package import part


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

    def __init__(self, trainer: Any) -> None:
        """Adopt the loaders that the fit loop requests from now on."""
        self._loop, self._package = trainer.fit_loop, part(trainer, "utilities.combined_loader")
        self._source = self._loop._data_source
        self._request = self._source.dataloader
        self.waits = False
        """True until a resumed pass can begin: Lightning makes an iterator, of which it knows only
        the length then, before it sets the samplers' epoch."""
        self._source.dataloader = self._adopted
        self._known: list[Any] = []
        """The loaders of `_facts`."""
        self._facts = LoaderFacts()

    def close(self) -> None:
        """Leave later loaders as they are."""
        vars(self._source).pop("dataloader", None)

    def state_dict(self) -> dict[str, Any] | None:
        """The place in the data; None if the loop has no iterator yet."""
        data = getattr(self._loop._combined_loader, "resumable", None)
        return None if data is None else data.state_dict()

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

    def resume(self, state: dict[str, Any], taken: int, factor: Fraction) -> None:
        """Begin the pass at the saved place. The global generators must be as the restore has set
        them, and are so afterwards. `taken`: batches of the epoch that were trained on; `factor`:
        as in `PlaceOfAnyRanks.convert`."""
        self.waits = False
        fetcher, combined = self._loop._data_fetcher, self._loop._combined_loader
        data = combined.made_resumable()
        data.load_state_dict(state)
        data.convert(factor)
        data.restored()
        iter(fetcher)
        fetcher.fetched += taken

    def _adopted(self) -> Any:
        """The loaders that the script gives, combined as Lightning does it."""
        combined, package = self._request(), self._package
        if not isinstance(combined, package.CombinedLoader):
            combined = package.CombinedLoader(combined, "max_size_cycle")
        if not hasattr(combined, "made_resumable"):
            combined.__class__ = _resumable(type(combined))
        combined.waits, combined.resumable = lambda: self.waits, None
        return combined


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

        def made_resumable(self) -> PlaceOfAnyRanks[Any]:
            """The object that knows the place."""
            if self.resumable is None:
                found = [each for loader in self.flattened for each in _generators_of(loader)]
                # Lightning fetches one batch ahead where it knows no length.
                ahead = 0 if self._know_length() else 1
                passes = _Passes(self, super().__iter__, super().__next__)
                self.resumable = PlaceOfAnyRanks(passes, ahead=ahead, generators=found)
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


def _generators_of(loader: Any) -> Sequence[Generator]:
    """Also those of samplers that Lightning has wrapped to distribute what they draw."""
    wrapped = [getattr(each, "dataset", None) for each in samplers_of(loader)]
    inner = [getattr(each, "_sampler", None) for each in wrapped]
    more = [getattr(each, "generator", None) for each in inner]
    return generators_of(loader, [each for each in more if isinstance(each, Generator)])


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
        self, combined: Any, begin: Callable[[], Any], following: Callable[[], Any]
    ) -> None:
        self._combined, self._begin, self._next = combined, begin, following

    def __len__(self) -> int:
        return len(self._combined)

    def __iter__(self) -> Iterator[Any]:
        self._begin()
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


__all__ = ["TrainingData"]
