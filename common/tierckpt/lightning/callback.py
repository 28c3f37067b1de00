"""The callback for Lightning's Trainer."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Unpack

from tierckpt.checkpointer.checkpointer import Checkpointer
from tierckpt.errors import TierckptError
from tierckpt.settings import Arguments, with_settings
from tierckpt.state.extras import Generator

from .fit import Fit
from .package import callback_base, for_every_package, searches

if TYPE_CHECKING:
    from lightning.pytorch import Callback
else:
    Callback = callback_base()

logger = logging.getLogger("tierckpt")

NO_FIT = (
    "checkpointer of a TierCheckpoint in a process in which fit() has not started. With the "
    "strategies ddp_spawn and ddp_fork only the processes that Lightning starts have one"
)

NONE = (
    "no checkpoints are taken: this is a fast_dev_run, a Tuner's search, or a copy of a Trainer "
    "that was made during a fit"
)


@with_settings
class TierCheckpoint(Callback):  # type: ignore[misc]
    """Takes checkpoints of a fit after each optimizer step, and restores the newest one when a fit
    starts, bit for bit, also in the middle of an epoch.

    Works with the strategies of a single device and of DDP. It saves the Trainer's loops, loaders,
    logged values and metrics, schedulers, precision, callbacks, datamodule, and what
    `on_save_checkpoint` adds. ModelCheckpoint works beside it.

    Args:
        monitor: name of a logged metric, for the setting `keep_best`; as in ModelCheckpoint.
        generators: random generators that the training data draw from, if they are not found; as in
            `tierckpt.ResumableLoader`.
        settings: the keyword arguments of `ddp_ckpt.Checkpointer`, except `boundary`.

    Errors of the settings, of a strategy that is not supported, and of a restore are raised when
    the fit starts.
    """

    def __new__(cls, *_: Any, **__: Any) -> TierCheckpoint:
        """Make a callback for the Lightning that the script has imported."""
        made: TierCheckpoint = super().__new__(for_every_package(cls))
        return made

    def __init__(
        self,
        *,
        monitor: str | None = None,
        generators: Iterable[Generator] = (),
        **settings: Unpack[Arguments],
    ) -> None:
        super().__init__()
        self._monitor, self._settings, self._generators = monitor, settings, [*generators]
        self._is_automatic = self._is_copy = False
        self._fit: Fit | None = None

    @classmethod
    def automatic(cls) -> TierCheckpoint:
        """A callback with the settings of the environment, for Lightning's entry points. It does
        nothing in a Trainer that has another one."""
        made = cls()
        made._is_automatic = True
        return made

    @property
    def checkpointer(self) -> Checkpointer:
        """The checkpointer of the current fit. Raises TierckptError before the first one starts."""
        if self._fit is None:
            raise TierckptError(NO_FIT)
        return self._fit.checkpointer

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Move to the front: other callbacks find their restored state in `on_fit_start`."""
        others = [each for each in trainer.callbacks if each is not self]
        if stage == "fit":
            trainer.callbacks = [self, *others]

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach, and restore. Collective."""
        ours = [each for each in trainer.callbacks if isinstance(each, TierCheckpoint)]
        given = [each for each in ours if not each._is_automatic]
        # Lightning calls an entry point once for each copy of the package's metadata that it finds.
        if self._is_automatic and self is not (given or ours)[0]:
            return
        self._fit = None
        if trainer.fast_dev_run or searches(trainer) or self._is_copy:
            logger.info(NONE)
            return
        self._fit = Fit(trainer, self._monitor, self._settings, self._generators)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Take signals back from Lightning."""
        if self._fit is not None:
            self._fit.take_signals()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Let go: the restart finds all versions."""
        if self._fit is not None and not self._fit.checkpointer.closed:
            self._fit.leave(exception)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the fit out, for launchers that pickle the Trainer, and for copies: one that is
        made during a fit takes no checkpoints, which would be the fit's own."""
        is_amid = self._fit is not None and not self._fit.checkpointer.closed
        return {**vars(self), "_fit": None, "_is_copy": self._is_copy or is_amid}


__all__ = ["TierCheckpoint"]
