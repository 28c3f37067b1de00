"""What the fixtures of all frameworks return: jobs on ranks that are forked from one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.crash.launcher import Zygote
from tests.support.frameworks.jobs import Job, Run
from tests.support.frameworks.scenario import Scenario

MakeJob = Callable[..., Job]
Undisturbed = Callable[..., Run]


def fixtures_of(
    framework: str, kind: type[Scenario], environment: Mapping[str, str] | None = None
) -> tuple[Any, Any, Any]:
    """The fixtures `forks`, `undisturbed` and `make_job` of a module of tests."""

    @pytest.fixture(scope="module")
    def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
        """The process that has imported the framework."""
        pytest.importorskip(framework, exc_type=ImportError)
        log = tmp_path_factory.mktemp(framework) / "zygote.log"
        made = Zygote(log, f"tests.support.{framework}.job", "peft", environment=environment)
        yield made
        made.close()

    @pytest.fixture(scope="module")
    def undisturbed(forks: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
        """`undisturbed(**scenario)`: the run of a job without kills and without checkpoints."""
        known: dict[str, Run] = {}

        def run(**scenario: Any) -> Run:
            name = repr(sorted(scenario.items()))
            if name not in known:
                folder = tmp_path_factory.mktemp("plain") / "job"
                known[name] = Job(forks, kind(str(folder), settings=None, **scenario)).start()
                assert known[name].ended(), known[name].output()
            return known[name]

        return run

    @pytest.fixture
    def make_job(forks: Zygote, tmp_path: Path, shm_dir: Path) -> MakeJob:
        """`make_job(**scenario)`: a job with checkpoints. `settings` are added to its own."""
        numbers = itertools.count()

        def make(settings: dict[str, Any] | None = None, **scenario: Any) -> Job:
            place = tmp_path / f"job{next(numbers)}"
            own = {"path": str(place / "ckpts"), "shm_dir": str(shm_dir), **(settings or {})}
            return Job(forks, kind(str(place), settings=own, **scenario))

        return make

    return forks, undisturbed, make_job


__all__ = ["MakeJob", "Undisturbed", "fixtures_of"]
