"""A loader of Accelerate's that resumes at the next batch.

A prepared loader counts its passes (`iteration`), and each pass sets the epoch of samplers and data
set to that count. `SeedableRandomSampler` draws its order from a seed and this epoch. Both are
part of the place. Everything else is as in `tierckpt.ResumableLoader`: the random states at the
start of the pass, and the number of batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset

from tierckpt.errors import ConfigError, TierckptError
from tierckpt.integrations.loader_passes import Pass, Passes
from tierckpt.integrations.other_ranks import PlaceOfAnyRanks, StepSize, order_batch_of
from tierckpt.resumable_loader import samplers_of
from tierckpt.state.extras import Generator
from tierckpt.state.witness import Ways

if TYPE_CHECKING:
    from accelerate import Accelerator

NAMES = ("batch_size", "gradient_accumulation_steps")
UNPREPARED = (
    "resume(loader): the loader, a {kind}, was not prepared. Give what accelerator.prepare(loader) "
    "returned"
)
UNSEEDED = (
    "resume(loader): the checkpoint was taken in the first pass over a StatefulDataLoader with "
    "workers. Accelerate starts these workers in prepare(), and they draw from another seed now. "
    "Call accelerate.utils.set_seed() with the same number in each run, before "
    "accelerator.prepare(); or set use_stateful_dataloader=False"
)


class ResumedLoader(PlaceOfAnyRanks[Any]):
    """Iterates over a prepared loader, one pass per epoch, and can be resumed at any batch.

    Training thread only. Raises ConfigError for a loader that was not prepared.
    """

    ways = Ways(give="ckpt.resume(loader, generators=[...])")

    def __init__(
        self,
        loader: Iterable[Any],
        accelerator: Accelerator,
        generators: Iterable[Generator] = (),
    ) -> None:
        if not hasattr(loader, "base_dataloader") or not hasattr(loader, "iteration"):
            raise ConfigError(UNPREPARED.format(kind=type(loader).__name__))
        self._prepared: Any = loader
        self._samplers = samplers_of(loader)
        self._order = order_batch_of(loader)
        passes = Passes(loader, _Pass, evaluated=accelerator._dataloaders)
        super().__init__(passes, of=[loader], generators=generators)
        self._begun_at = 0
        """The loader's `iteration` in the newest pass."""
        self._early_seed: int | None = None
        """The seed of the newest pass's workers, if they were started by `prepare`."""
        self._accelerator = accelerator
        self.saved_step: StepSize | None = None
        """The samples of a step in the restored job; None if no restore has set the place."""

    def __getattr__(self, name: str) -> Any:
        """Attributes of the prepared loader (`dataset`, `total_batch_size`)."""
        if name == "_prepared":
            raise AttributeError(name)
        return getattr(self._prepared, name)

    def __iter__(self) -> Iterator[Any]:
        """A pass over the epoch; after a restore, over the rest of the current one. Raises
        TierckptError if its workers were started with another seed before the restore."""
        early = _early_iterator_of(self._prepared.base_dataloader)
        seed = None if early is None else early._base_seed
        if self._resuming is not None and seed is not None:
            saved = self._resuming["early_seed"]
            if saved is None:
                _forget_early_iterator(self._prepared.base_dataloader)
            elif saved != seed:
                raise TierckptError(UNSEEDED)
            seed = saved
        self._begun_at, self._early_seed = self._prepared.iteration, seed
        return super().__iter__()

    def set_epoch(self, epoch: int) -> None:
        """Start this epoch, or continue it if it is the current one. Optional, as in
        `tierckpt.ResumableLoader.set_epoch`."""
        super().set_epoch(epoch)
        self._prepared.set_epoch(epoch)

    @property
    def step_size(self) -> StepSize:
        """The samples of one step in this job."""
        ranks = self._accelerator.num_processes
        total = getattr(self._prepared, "total_batch_size", None) or 0
        accumulation = self._accelerator.gradient_accumulation_steps
        return StepSize(ranks, total // ranks, accumulation, self._order)

    def fit(self, version: int) -> None:
        """Convert the restored place to this job's ranks and batches. Raises RestoreError if a step
        has other samples."""
        if self.saved_step is not None:
            self.step_size.require(self.saved_step, version, NAMES)
            self.convert(self.step_size.batches_for_one_of(self.saved_step))
            if self.step_size != self.saved_step:  # `accumulate` counts from this boundary on
                self._accelerator.step = 0

    def state_dict(self, in_forward: bool = False) -> dict[str, Any]:
        """The place, with the loader's count of passes and the seeds of its samplers."""
        state = super().state_dict(in_forward)
        if "iteration" in state:  # no pass has started since the restore
            return state
        begun = state["place"]["begun"]
        seeds = [each.initial_seed for each in self._samplers if hasattr(each, "initial_seed")]
        iteration = self._begun_at if begun else self._prepared.iteration
        early = self._early_seed if begun else None
        step = self.step_size.as_dict()
        return {**state, "iteration": iteration, "seeds": seeds, "early_seed": early, "step": step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next pass resume there."""
        super().load_state_dict(state)
        self.saved_step = StepSize(**state["step"])
        self._prepared.iteration = state["iteration"]
        seeded = [each for each in self._samplers if hasattr(each, "initial_seed")]
        for sampler, seed in zip(seeded, state["seeds"], strict=False):
            sampler.initial_seed = seed


def _early_iterator_of(base: Any) -> Any:
    """The iterator with workers that a StatefulDataLoader has before its first pass, because
    `prepare` reads its state; its workers have drawn from samplers already. None if there is
    none."""
    is_early = getattr(base, "_initial_iter_for_state_dict", False) and base.num_workers > 0
    return base._iterator if is_early else None


def _forget_early_iterator(base: Any) -> None:
    base._iterator, base._initial_iter_for_state_dict = None, False


class _Pass(Pass):
    def skip(self, count: int) -> int:
        """Skip batches without loading them, before the first one; returns how many, 0 where that
        would not be exact. The last batch of `count` is loaded: with it the loader fetches the one
        after it."""
        base = self._loader.base_dataloader
        plain = type(base) is DataLoader and base.num_workers == 0
        fetches_itself = hasattr(self._loader, "rng_types")  # not a dispatcher
        if (
            count < 2
            or not plain
            or not fetches_itself
            or isinstance(base.dataset, IterableDataset)
        ):
            return 0
        self._loader.base_dataloader = _Skipping(self._loader, base, count - 1)
        next(self._batches)
        return count


class _Skipping:
    """Stands for a DataLoader until it is iterated over, and then skips batches."""

    def __init__(self, loader: Any, base: Any, count: int) -> None:
        self._loader, self._base, self._count = loader, base, count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)

    def __iter__(self) -> Iterator[Any]:
        self._loader.base_dataloader = self._base
        batches: Any = iter(self._base)
        for _ in range(self._count):
            batches._next_index()
        return batches  # type: ignore[no-any-return]


__all__ = ["ResumedLoader"]
