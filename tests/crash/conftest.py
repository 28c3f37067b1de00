"""Jobs to kill."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.crash.launcher import Expected, Job, Zygote
from tests.support.crash.scenario import RANKS


@pytest.fixture(scope="session", autouse=True)
def _warm(warm_python: None) -> None:
    """Started before the first test, as it starts processes that last."""


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """The process that has imported torch once and forks ranks."""
    made = Zygote(tmp_path_factory.mktemp("zygote") / "zygote.log")
    yield made
    made.close()


@pytest.fixture(scope="session")
def undisturbed(
    zygote: Zygote, shm_root: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, Expected]:
    """The course of the same job without kills and without checkpoints."""
    plain = Job(zygote, tmp_path_factory.mktemp("undisturbed"), shm_root, None)
    plain.start(settings=None).until_over()
    finals = [[x["done"] for x in plain.journal(r) if "done" in x] for r in range(RANKS)]
    assert all(len(x) == 1 for x in finals), plain.output()
    return {rank: (plain.losses(rank), finals[rank][0]) for rank in range(RANKS)}


@pytest.fixture
def make_job(
    zygote: Zygote, undisturbed: dict[int, Expected], tmp_path: Path, shm_dir: Path
) -> Iterator[Callable[[str], Job]]:
    """`make_job("name")`: a job of its own; all jobs of one test share its shared memory."""
    jobs = []

    def make(name: str) -> Job:
        folder = tmp_path / name
        folder.mkdir()
        jobs.append(Job(zygote, folder, shm_dir, undisturbed))
        return jobs[-1]

    yield make
    for job in jobs:
        job.kill_everything()


@pytest.fixture
def job(make_job: Callable[[str], Job]) -> Job:
    """A job that checkpoints to memory at every step, and to disk at every fourth."""
    return make_job("job")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Show the output of its ranks for a test that failed."""
    report = yield
    if report.failed:
        for value in getattr(item, "funcargs", {}).values():
            if isinstance(value, Job):
                report.sections.append((f"ranks of {value.folder.name}", value.output()))
    return report
