"""MLflow: curves as metrics of a run, in any store that it knows."""

from __future__ import annotations

import sys
import time
from typing import Any

from tierckpt.callbacks import Job
from tierckpt.events import Event

from .exporter import EVERY_SECONDS, Points, Ranks, ScalarExporter, logger, require

TAG = "tierckpt.job_id"


class MLflow(ScalarExporter):
    """Logs the curves `tierckpt/...` to MLflow; a step is a version.

    Without `experiment` and `run_id`, they go to the active run of the script
    (`mlflow.start_run()`).

    Args:
        experiment: a run of ours alone, of this experiment; a restarted job continues it.
        tracking_uri: the store, a folder or a server's URL; default: MLflow's own setting.
        run_id: an existing run, for example `logger.run_id` of Lightning's MLFlowLogger.
        every_seconds: time between two points of a curve.
        ranks: the ranks that export; by default only the first of the job.
    """

    def __init__(
        self,
        experiment: str = "",
        tracking_uri: str | None = None,
        *,
        run_id: str | None = None,
        every_seconds: float = EVERY_SECONDS,
        ranks: Ranks = "first",
    ) -> None:
        super().__init__(every_seconds, ranks)
        require("mlflow", "mlflow")
        self._experiment, self._uri, self._given_id = experiment, tracking_uri, run_id
        self._run_id: str | None = None
        self._client: Any = None

    def begin(self, job: Job) -> None:
        """Find or make the run, unless it is the script's: the import takes seconds."""
        super().begin(job)
        self._client, self._run_id = None, self._given_id
        if self._given_id or self._experiment:
            self._client = self._connected()
        if self._experiment and self._run_id is None:
            self._run_id = self._own_run(self._client, job.job_id)

    def _connected(self) -> Any:
        from mlflow import MlflowClient

        return MlflowClient(tracking_uri=self._uri)

    def on_event(self, event: Event) -> None:
        """Find the active run: MLflow has one for each thread."""
        if self.job is not None and self._run_id is None and not self._experiment:
            module = sys.modules.get("mlflow")  # a script that has a run has imported it
            run = module.active_run() if module is not None else None
            if run is not None:
                self._run_id = run.info.run_id
        super().on_event(event)

    def log(self, points: Points) -> bool:
        """See `ScalarExporter`."""
        if self._run_id is None:
            return False
        from mlflow.entities import Metric

        self._client = self._client or self._connected()
        now = int(1e3 * time.time())
        metrics = [Metric(curve, value, now, version) for curve, (version, value) in points.items()]
        self._client.log_batch(self._run_id, metrics)
        return True

    def _own_run(self, client: Any, job_id: str) -> str:
        """The job's run: the one of its earlier start, or a new one."""
        found = client.get_experiment_by_name(self._experiment)
        id_ = found.experiment_id if found else client.create_experiment(self._experiment)
        ours = f"tags.`{TAG}` = '{job_id}'"
        runs = client.search_runs([id_], ours, max_results=1)
        if runs:
            client.update_run(runs[0].info.run_id, "RUNNING")
            return str(runs[0].info.run_id)
        made = client.create_run(id_, tags={TAG: job_id}, run_name=job_id)
        return str(made.info.run_id)

    def end(self) -> None:
        """Log the last points, and end the run if it is ours."""
        super().end()
        if self._client is not None and self._experiment and self._run_id is not None:
            self._client.set_terminated(self._run_id)
        if self._run_id is None and not self._experiment:
            logger.warning(
                "MLflow: nothing was logged, as the script has no active run; call "
                "mlflow.start_run() in it before the first step, or give MLflow(experiment=...)"
            )


__all__ = ["MLflow"]
