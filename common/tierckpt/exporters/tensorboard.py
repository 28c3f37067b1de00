"""TensorBoard: curves in its event files, by `torch.utils.tensorboard`."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from tierckpt.callbacks import Job
from tierckpt.events import Event

from .exporter import EVERY_SECONDS, Points, Ranks, ScalarExporter, require

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoard(ScalarExporter):
    """Writes the curves `tierckpt/...` to TensorBoard.

    Args:
        where: a folder for event files (the one of the script's own is good), or the script's
            SummaryWriter.
        every_seconds: time between two points of a curve.
        ranks: the ranks that export; by default only the first of the job.
    """

    def __init__(
        self,
        where: str | os.PathLike[str] | SummaryWriter,
        every_seconds: float = EVERY_SECONDS,
        *,
        ranks: Ranks = "first",
    ) -> None:
        super().__init__(every_seconds, ranks)
        require("tensorboard", "tensorboard")
        self._folder = ""
        self._writer: Any = None
        if isinstance(where, str | os.PathLike):
            self._folder = os.path.abspath(os.path.expanduser(where))
        else:
            self._writer = where
        self._restored = 0

    def begin(self, job: Job) -> None:
        """See `Exporter`."""
        super().begin(job)
        self._restored = 0

    def record_event(self, event: Event) -> None:
        """Note the version that the job resumes from."""
        if event.name == "restored":
            self._restored = event.version
        super().record_event(event)

    def log(self, points: Points) -> bool:
        """See `ScalarExporter`."""
        if self._writer is None:
            self._writer = self._open()
        for curve, (version, value) in points.items():
            self._writer.add_scalar(curve, value, version)
        self._writer.flush()
        return True

    def _open(self) -> Any:
        """A writer; TensorBoard hides the points of versions that the job makes again."""
        # By name: torch is not for all that import this folder.
        module = importlib.import_module("torch.utils.tensorboard")
        again = self._restored + 1 if self._restored else None
        return module.SummaryWriter(self._folder, purge_step=again, filename_suffix=".tierckpt")

    def end(self) -> None:
        """Log the last points, and close the file."""
        super().end()
        if self._folder and self._writer is not None:
            self._writer.close()
            self._writer = None


__all__ = ["TensorBoard"]
