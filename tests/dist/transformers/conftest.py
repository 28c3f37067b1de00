"""Jobs of Hugging Face's Trainer on two ranks, forked from a process that has imported it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.crash.launcher import Zygote
from tests.support.lightning.jobs import LightningJob, Run
from tests.support.transformers.scenario import Scenario


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    pytest.importorskip("transformers", exc_type=ImportError)
    pytest.importorskip("accelerate", exc_type=ImportError)
    log = tmp_path_factory.mktemp("transformers") / "zygote.log"
    made = Zygote(log, "tests.support.transformers.job")
    yield made
    made.close()


@pytest.fixture(scope="session")
def undisturbed(forks: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """`undisturbed(**scenario)`: the run of a job without kills and without checkpoints."""
    known: dict[str, Run] = {}

    def run(**scenario: Any) -> Run:
        name = repr(sorted(scenario.items()))
        if name not in known:
            folder = str(tmp_path_factory.mktemp("plain") / "job")
            known[name] = LightningJob(forks, Scenario(folder, settings=None, **scenario)).start()
            assert known[name].ended(), known[name].output()
        return known[name]

    return run


@pytest.fixture
def make_job(forks: Zygote, tmp_path: Path, shm_dir: Path) -> Callable[..., LightningJob]:
    """`make_job(**scenario)`: a job with checkpoints. `settings` are added to its own."""
    numbers = itertools.count()

    def make(settings: dict[str, Any] | None = None, **scenario: Any) -> LightningJob:
        folder = tmp_path / f"job{next(numbers)}"
        own = {"path": str(folder / "ckpts"), "shm_dir": str(shm_dir), **(settings or {})}
        return LightningJob(forks, Scenario(str(folder), settings=own, **scenario))

    return make
