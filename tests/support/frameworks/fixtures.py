"""What the fixtures of all frameworks return: jobs on ranks that are forked from one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.crash.launcher import Zygote
from tests.support.frameworks.jobs import Job, Run
from tests.support.frameworks.scenario import Scenario

MakeJob = Callable[..., Job]
Undisturbed = Callable[..., Run]


def undisturbed_by(
    forks: Zygote, kind: type[Scenario], folders: pytest.TempPathFactory
) -> Undisturbed:
    """`undisturbed(**scenario)`: the run of a job without kills and without checkpoints."""
    known: dict[str, Run] = {}

    def run(**scenario: Any) -> Run:
        name = repr(sorted(scenario.items()))
        if name not in known:
            folder = folders.mktemp("plain") / "job"
            known[name] = Job(forks, kind(str(folder), settings=None, **scenario)).start()
            assert known[name].ended(), known[name].output()
        return known[name]

    return run


def jobs_of(forks: Zygote, kind: type[Scenario], folder: Path, shm_dir: Path) -> MakeJob:
    """`make_job(**scenario)`: a job with checkpoints. `settings` are added to its own."""
    numbers = itertools.count()

    def make(settings: dict[str, Any] | None = None, **scenario: Any) -> Job:
        place = folder / f"job{next(numbers)}"
        own = {"path": str(place / "ckpts"), "shm_dir": str(shm_dir), **(settings or {})}
        return Job(forks, kind(str(place), settings=own, **scenario))

    return make


__all__ = ["MakeJob", "Undisturbed", "jobs_of", "undisturbed_by"]
