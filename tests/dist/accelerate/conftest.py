"""Jobs that use Accelerate, on two ranks, forked from a process that has imported it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.accelerate.scenario import Scenario
from tests.support.crash.launcher import Zygote
from tests.support.frameworks.fixtures import MakeJob, Undisturbed, jobs_of, undisturbed_by


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    pytest.importorskip("accelerate", exc_type=ImportError)
    log = tmp_path_factory.mktemp("accelerate") / "zygote.log"
    made = Zygote(log, "tests.support.accelerate.job", "peft")
    yield made
    made.close()


@pytest.fixture(scope="module")
def undisturbed(forks: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return undisturbed_by(forks, Scenario, tmp_path_factory)


@pytest.fixture
def make_job(forks: Zygote, tmp_path: Path, shm_dir: Path) -> MakeJob:
    return jobs_of(forks, Scenario, tmp_path, shm_dir)
