"""The adapter proper: what happens where Horovod launches reductions and makes steps."""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import horovod.torch as hvd
import torch

import tierckpt
from tierckpt.group import Group
from tierckpt.state import label_optimizers

from .group import current_group

LAUNCHERS = ("_allreduce_grad_async", "_grouped_allreduce_grad_async")
"""Methods that Horovod's backward hooks and `synchronize` look up at each call."""
Names = str | tuple[str, ...]
"""What is reduced at once: a parameter, or a group of them."""


class Checkpointer(tierckpt.Checkpointer):
    """Checkpoints a model that Horovod trains; see `tierckpt.Checkpointer` for the rest.

    Args:
        model: the module that is trained.
        optimizer: what `hvd.DistributedOptimizer` returned: one, a sequence, or a dict.
        settings: as in `tierckpt.Checkpointer`.

    Its ranks are those of the optimizer's process set.
    """

    def __init__(self, model: torch.nn.Module, optimizer: Any, **settings: Any) -> None:
        if not hvd.is_initialized():
            raise tierckpt.ConfigError("call hvd.init() before making a Checkpointer")
        optimizers = label_optimizers(optimizer)
        for label, each in optimizers.items():
            _check_optimizer(label, each)
        process_set = _common_process_set(optimizers.values())
        self._reductions = {name: Reductions(each) for name, each in optimizers.items()}
        self.releases_by_layer = all(r.known_before_step for r in self._reductions.values())
        super().__init__(model, optimizer, group=current_group(process_set), **settings)
        for reductions in self._reductions.values():
            reductions.watch(self.release)

    def restore(
        self, version: int | None = None, strict: bool = True, progress: bool | None = None
    ) -> tierckpt.Restored:
        """See `tierckpt.Checkpointer`; what an iteration cut short launched is dropped."""
        for reductions in self._reductions.values():
            reductions.even_out(self.group)
        restored = super().restore(version, strict, progress)
        for reductions in self._reductions.values():
            reductions.forget()
        return restored

    def _before_step(self, label: str) -> None:
        if not self._reductions[label].step_begins():
            super()._before_step(label)

    def _made_step(self, label: str) -> bool:
        return self._reductions[label].step_ended()

    def _shut_down(self, remove: bool) -> None:
        for reductions in self._reductions.values():
            reductions.unwatch()
        super()._shut_down(remove)


class Reductions:
    """The gradient reductions of one Horovod optimizer. Training thread.

    Horovod's step is a step within a step: its own `step` synchronizes and then calls the wrapped
    optimizer's, and torch's hooks fire for both. Only the inner one changes weights, so only there
    copies must be complete; and only both together are a step of the training.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._release: Callable[[Iterable[torch.Tensor]], None] | None = None
        self._entered = 0
        """Pre-hooks seen since the last whole step."""
        self._launched: Counter[Names] = Counter()
        self.known_before_step = bool(optimizer._grad_accs)
        """Horovod registers no hooks in a job of one."""

    def watch(self, release: Callable[[Iterable[torch.Tensor]], None]) -> None:
        """Call `release(parameters)` whenever a reduction was launched."""
        self._release = release
        for name in LAUNCHERS:
            setattr(self._optimizer, name, self._launcher(getattr(self._optimizer, name)))

    def unwatch(self) -> None:
        """The inverse of `watch`."""
        if self._release is not None:
            self._release = None
            for name in LAUNCHERS:
                self._optimizer.__dict__.pop(name, None)

    def _launcher(self, launch: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def launch_and_release(what: Any) -> Any:
            handle = launch(what)
            self._launched[self._names(what)] += 1
            if self._release is not None:
                self._release(what if isinstance(what, tuple) else (what,))
            return handle

        return launch_and_release

    def _names(self, what: Any) -> Names:
        names = self._optimizer._parameter_names
        return tuple(names[p] for p in what) if isinstance(what, tuple) else names[what]

    def step_begins(self) -> bool:
        """A pre-hook fired; True when weights are not changed before the next one fires."""
        self._entered += 1
        optimizer = self._optimizer
        # With reductions under way, a step that synchronizes will first wait for them.
        return bool(optimizer._should_synchronize and optimizer._handles)

    def step_ended(self) -> bool:
        """A post-hook fired; True when that was a step of the training.

        None is the inner step that `hvd.broadcast_optimizer_state` makes alone to have optimizer
        state.
        """
        whole = self._entered >= 2
        self._entered = 0
        return whole

    def even_out(self, group: Group) -> None:
        """Launch what other ranks have launched and this one has not. Collective.

        After an iteration that was cut short, and not at the same point on all ranks, a reduction
        would wait for ever for the rank that left it out, and Horovod would refuse the next one of
        its name.
        """
        everyone: list[Counter[Names]] = group.all_gather_object(self._launched)
        missing = functools.reduce(operator.or_, everyone) - self._launched
        param = {name: p for p, name in self._optimizer._parameter_names.items()}
        for names in missing:
            if isinstance(names, str):
                self._optimizer._allreduce_grad_async(param[names])
                continue
            layer = tuple(param[name] for name in names)
            for p in layer:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            self._optimizer._grouped_allreduce_grad_async(layer)

    def forget(self) -> None:
        """Drop what an iteration that was cut short left behind, as Horovod itself does when an
        optimizer's state is loaded."""
        optimizer = self._optimizer
        optimizer._handles = {}
        optimizer._synchronized = False
        optimizer._should_synchronize = True
        for param in optimizer._allreduce_delay:
            optimizer._allreduce_delay[param] = optimizer.backward_passes_per_step
        for group in optimizer._group_counts:
            optimizer._group_counts[group] = 0
        self._entered = 0


def is_horovod(optimizer: Any) -> bool:
    """True for what `hvd.DistributedOptimizer` returns: an instance of a class made on the spot."""
    return type(optimizer).__module__ == "horovod.torch.optimizer"


def _check_optimizer(label: str, optimizer: Any) -> None:
    if not is_horovod(optimizer):
        name = f"optimizer {label!r}" if label else "the optimizer"
        raise tierckpt.ConfigError(
            f"{name} is a {type(optimizer).__name__} of {type(optimizer).__module__}, not what "
            "hvd.DistributedOptimizer returned. Horovod's does not share its state with the one "
            "it was made from, so pass the one whose step() is called"
        )
    if hasattr(optimizer, "_starting_models"):
        raise tierckpt.ConfigError(
            "op=hvd.Adasum is not supported: each rank's optimizer then steps on the rank's own "
            "gradients, so momentum and the like differ from rank to rank, and a checkpoint has "
            "one copy of them, of which every rank stores a part. Use hvd.Average or hvd.Sum"
        )


def _common_process_set(optimizers: Iterable[Any]) -> Any:
    sets = [getattr(o, "process_set", hvd.global_process_set) for o in optimizers]
    if any(s is not sets[0] for s in sets):
        raise tierckpt.ConfigError(
            "the optimizers have different process sets; make a Checkpointer for each, with a path "
            "of its own"
        )
    if not sets[0].included():
        raise tierckpt.ConfigError(
            f"rank {hvd.rank()} is not in the optimizer's process set {sets[0].ranks}; make the "
            "Checkpointer on the ranks that are, and one with another path for the others"
        )
    return sets[0]
