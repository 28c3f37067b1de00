"""The Checkpointer of loops that use Accelerate."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Unpack

import ddp_ckpt
from tierckpt.checkpointer.adapter import Handle
from tierckpt.errors import ConfigError, RestoreError, TierckptError
from tierckpt.integrations.kept_gradients import KeptGradients
from tierckpt.settings import Arguments, with_settings
from tierckpt.state.extras import Generator

from .package import check, model_of, objects_of, optimizers_of
from .resumed_loader import ResumedLoader

if TYPE_CHECKING:
    from accelerate import Accelerator

TAKEN = (
    "extra={{{name!r}: ...}}: attach() uses this name for a part of the accelerator. Give the "
    "object another name"
)

TWICE = (
    "resume() was called before, and has restored the checkpoint: give all loaders in one call, "
    "first, second = ckpt.resume(first, second)"
)
OTHER_LOADERS = (
    "v{version} has no place in the data for these loaders: another job took it, or one with other "
    "loaders in resume(). Give the same loaders; or call ckpt.restore() in place of "
    "ckpt.resume(loader), and choose the data yourself"
)


class Checkpointer(ddp_ckpt.Checkpointer):
    """Checkpoints what an Accelerator has prepared; see `tierckpt.Checkpointer` for the rest.

    It stores the prepared models, the optimizers and schedulers inside Accelerate's wrappers, the
    scaler, the objects of `register_for_checkpointing`, and the accelerator's counts. Its versions
    count iterations in which gradients were synchronized and a step was made.
    """

    def __init__(self, accelerator: Accelerator, **settings: Unpack[Arguments]) -> None:
        """Attach. Collective; raises the errors of `package.check` and of
        `ddp_ckpt.Checkpointer`."""
        said: list[tuple[str, int]] = []
        check(accelerator, lambda text, severity: said.append((text, severity)))
        given: Arguments = {
            **settings,
            "boundary": "explicit",
            "extra": _merged(objects_of(accelerator), settings.get("extra") or {}),
        }
        optimizers = optimizers_of(accelerator)
        super().__init__(model_of(accelerator), optimizers, **given)
        self._accelerator = accelerator
        say = Handle(self).notice
        for text, severity in said:
            say(text, severity)
        every = optimizers if isinstance(optimizers, list) else [optimizers]
        self._gradients = KeptGradients(every, say)
        self._amid_accumulation = False
        self._resumed = False

    def resume(self, *loaders: Iterable[Any], generators: Iterable[Generator] = ()) -> Any:
        """Restore the newest version, and return the loaders, as `prepare` does, each as one that
        begins at the next batch. Iterate over these, and begin at their attribute `epoch`.

        Give all prepared loaders that the training takes batches from, in one call, and none of an
        evaluation. `generators`: random generators that data draw from, if they are not found; as
        in `tierckpt.ResumableLoader`. Collective. Raises the errors of `restore`, and RestoreError
        if a step had another number of samples (ranks x batch size x accumulation).
        """
        if self._resumed:
            raise TierckptError(TWICE)
        given = [*generators]
        resumed = [ResumedLoader(loader, self._accelerator, given) for loader in loaders]
        self._resumed = True
        for number, each in enumerate(resumed):
            self.register(f"loader{number}", each, per_rank=True)
        restored = self.restore()
        placed = all(each.saved_step for each in resumed)
        if restored.version and not placed and not restored.imported:  # those start fresh
            raise RestoreError(OTHER_LOADERS.format(version=restored.version))
        for each in resumed:
            each.fit(restored.version)
        return resumed[0] if len(resumed) == 1 else tuple(resumed)

    def step(self, metric: float | None = None) -> None:
        """Mark the boundary: call it once for each batch, after the optimizer's and the
        scheduler's step and `zero_grad`.

        Nothing happens while gradients accumulate, in `accelerator.accumulate` or for an optimizer
        that made no step, since gradients are in no version. `metric`: as in
        `tierckpt.Checkpointer.step`.
        """
        kept = self._accelerator.sync_gradients and self._gradients.are_kept()
        self._amid_accumulation = kept or not self._accelerator.sync_gradients
        if not self._amid_accumulation:
            super().step(metric)

    def should_exit(self) -> bool:
        """True if the job is to end early, and no gradients are being accumulated; as in
        `tierckpt.Checkpointer.should_exit`."""
        return not self._amid_accumulation and super().should_exit()

    def _shut_down(self, remove: bool, abandoned: bool = False) -> None:
        self._gradients.close()
        super()._shut_down(remove, abandoned)


@with_settings
def attach(accelerator: Accelerator, **settings: Unpack[Arguments]) -> Checkpointer:
    """Add checkpoints to a loop that uses `accelerator`: call it after `accelerator.prepare`.

    Args:
        accelerator: the Accelerator, which has prepared models, optimizers and schedulers.
        settings: the keyword arguments of `ddp_ckpt.Checkpointer`, except `boundary`. Objects that
            differ between ranks go into `extra_per_rank`.

    Raises ConfigError if nothing was prepared, UnsupportedStateError if the accelerator shards the
    model (FSDP, DeepSpeed, Megatron-LM), and the errors of `ddp_ckpt.Checkpointer`. Collective.
    """
    return Checkpointer(accelerator, **settings)


def _merged(own: dict[str, Any], given: Any) -> dict[str, Any]:
    for name in given:
        if name in own:
            raise ConfigError(TAKEN.format(name=name))
    return {**own, **given}


__all__ = ["Checkpointer", "attach"]
