"""Weights & Biases: curves in a run, online or offline."""

from __future__ import annotations

import sys
from typing import Any

from tierckpt.callbacks import Job

from .exporter import EVERY_SECONDS, Points, Ranks, ScalarExporter, logger, require

VERSION = "tierckpt/version"


class WandB(ScalarExporter):
    """Logs the curves `tierckpt/...` to Weights & Biases, over `tierckpt/version`.

    Without `project`, they go to the run that the script starts with `wandb.init()`: its own next
    `log` writes them, so they never change its steps.

    Args:
        project: start a run of this project for us alone, named after the job.
        every_seconds: time between two points of a curve.
        ranks: the ranks that export; by default only the first of the job.
        init: further arguments of `wandb.init` for that run, `mode="offline"` for example.
    """

    def __init__(
        self,
        project: str = "",
        every_seconds: float = EVERY_SECONDS,
        *,
        ranks: Ranks = "first",
        **init: Any,
    ) -> None:
        super().__init__(every_seconds, ranks)
        require("wandb", "wandb")
        self._project, self._init = project, init
        self._run: Any = None
        self._name = ""
        self._has_run = False

    def begin(self, job: Job) -> None:
        """See `Exporter`."""
        super().begin(job)
        self._name, self._run, self._has_run = job.job_id, None, False

    def log(self, points: Points) -> bool:
        """See `ScalarExporter`."""
        run = self._current()
        if run is None:
            return False
        by_version: dict[int, dict[str, float]] = {}
        for curve, (version, value) in points.items():
            by_version.setdefault(version, {VERSION: version})[curve] = value
        for version in sorted(by_version):
            run.log(by_version[version], commit=bool(self._project))
        return True

    def _current(self) -> Any:
        """The run, once there is one."""
        if self._project:
            if self._run is None:
                self._run = self._define(self._find_run())
            return self._run
        module = sys.modules.get("wandb")  # a script that has a run has imported it
        run = getattr(module, "run", None)
        if run is not None and run is not self._run:
            self._run = self._define(run)
        self._has_run |= run is not None
        return run

    def _find_run(self) -> Any:
        import wandb

        given = {
            "project": self._project,
            "name": self._name,
            "job_type": "tierckpt",
            "reinit": "create_new",  # `wandb.run` stays the script's
            "settings": wandb.Settings(console="off"),
        }
        return wandb.init(**{**given, **self._init})

    @staticmethod
    def _define(run: Any) -> Any:
        run.define_metric(VERSION, hidden=True)
        run.define_metric("tierckpt/*", step_metric=VERSION)
        return run

    def end(self) -> None:
        """Log the last points, and finish the run if it is ours."""
        super().end()
        if self._project and self._run is not None:
            self._run.finish()
            self._run = None
        elif not self._has_run:
            logger.warning(
                "WandB: nothing was logged, as the script started no run; call wandb.init() in it, "
                "or give WandB(project=...)"
            )


__all__ = ["WandB"]
