"""The driver of the chaos test: rounds against one reference.

    with Run("ddp", folder, shm) as run:
        findings = run.round(seed)          # empty: every promise held, bit for bit

Every fault, recovery and finding is a line of `<folder>/log.jsonl` with the round's seed. The
schedule of a seed is always the same (`plan`). The progress of agents at a fault is not, since
nothing controls their speed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.chaos.cluster import Cluster
from tests.chaos.course import Course, FindingError, Losses, States, Watch
from tests.chaos.job import Orders
from tests.chaos.journals import Journals
from tests.chaos.plan import APART, RANKS, STEPS, Shape, make_round

NO_NODES = Shape(APART, "none", 0, 2)


class Run:
    """Rounds under one library, `ddp` or `horovod`."""

    def __init__(
        self, launcher: str, folder: Path, shm: Path, tell: Callable[[str], None] = print
    ) -> None:
        """`folder` keeps the log, and the files of rounds with findings; `tell` receives lines to
        show."""
        self.launcher, self.folder, self.shm, self._tell = launcher, folder, shm, tell
        self._reference: tuple[States, Losses] | None = None

    @property
    def reference(self) -> tuple[States, Losses]:
        """The reference, which the first round makes."""
        if self._reference is None:
            self._reference = make_reference(self.launcher, self.folder / "reference", self.shm)
        return self._reference

    def round(self, seed: int) -> list[str]:
        """Play the job and faults of `make_round(seed)`; returns the findings, as text."""
        plan = make_round(seed)
        states, losses = self.reference

        def log(**line: Any) -> None:
            with (self.folder / "log.jsonl").open("a") as file:
                head = {"launcher": self.launcher, "seed": seed}
                file.write(json.dumps({**head, **line}) + "\n")

        log(shape=asdict(plan.shape))
        folder = self.folder / f"{self.launcher}-{seed}"
        cluster = Cluster(folder, self.shm / folder.name, plan.shape, self.launcher)
        course = Course(plan, cluster, states, losses, log)
        findings = []
        try:
            course.run()
        except FindingError as finding:
            findings.append(
                f"seed {seed}, life {course.life}, after fault {course.number}: {finding}"
            )
            log(fault=course.number, life=course.life, finding=str(finding))
        finally:
            cluster.close()
        self._tell(
            f"{self.launcher}, seed {seed}: {plan.shape.scheme} on nodes {plan.shape.nodes}, "
            f"{'with' if plan.shape.persistent else 'without'} a persistent level, "
            f"{course.number} faults, {course.recoveries} recoveries, {len(findings)} findings"
        )
        for text in findings:
            self._tell(text)
        if not findings:
            shutil.rmtree(folder)
        return findings


def make_reference(launcher: str, folder: Path, shm: Path) -> tuple[States, Losses]:
    """Run the same job undisturbed and without checkpoints. This takes some seconds."""
    cluster = Cluster(folder, shm / "reference", NO_NODES, launcher)
    journals = Journals(folder, RANKS)
    try:
        cluster.start(
            [Orders(str(folder), 1, r, RANKS, STEPS, launcher, None, node=r) for r in range(RANKS)]
        )
        watch = Watch(cluster, journals, 1, journals.read)
        while not watch.over():
            watch.rest()
    finally:
        cluster.close()
    if not all(journals.of(rank, 1, "done") for rank in range(RANKS)):
        raise RuntimeError(f"the job fails by itself; its logs are in {folder}")
    states = [
        {x["version"]: x["digests"] for x in journals.of(rank, 1, "digests")}
        for rank in range(RANKS)
    ]
    losses = [{x["step"]: x["loss"] for x in journals.of(rank, 1, "loss")} for rank in range(RANKS)]
    shutil.rmtree(folder)
    return states, losses
