"""Jobs of Hugging Face's Trainer on two ranks, forked from a process that has imported it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.crash.launcher import Zygote
from tests.support.frameworks.fixtures import MakeJob, Undisturbed, jobs_of, undisturbed_by
from tests.support.transformers.scenario import Scenario
from tests.support.warm_python.servers import TRANSFORMERS


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    pytest.importorskip("transformers", exc_type=ImportError)
    pytest.importorskip("accelerate", exc_type=ImportError)
    log = tmp_path_factory.mktemp("transformers") / "zygote.log"
    made = Zygote(log, "tests.support.transformers.job", "peft", environment=TRANSFORMERS)
    yield made
    made.close()


@pytest.fixture(scope="session")
def undisturbed(forks: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return undisturbed_by(forks, Scenario, tmp_path_factory)


@pytest.fixture
def make_job(forks: Zygote, tmp_path: Path, shm_dir: Path) -> MakeJob:
    return jobs_of(forks, Scenario, tmp_path, shm_dir)
