"""Stages after the local level: a mirror on a second disk, and stages of somebody else's."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from logging import WARNING
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny_course import fingerprints
from tierckpt import ConfigError
from tierckpt.agent import Hosted, HostedOrder, Mirror, ShardGuard, StageFailed
from tierckpt.config import load_config
from tierckpt.format import VersionId
from tierckpt.stages import LocalVersion, Named, Stage, mirrors, parse
from tierckpt.storage import LocalStore
from tierckpt.testing import StageConformance, TinyJob

PATIENCE_SECONDS = 60.0
Start = Callable[..., TinyJob]
INDEX = """
import os, signal
from pathlib import Path

class Index:
    def __init__(self, folder):
        self.folder = Path(folder)

    def accept(self, version):
        number = version.id.version
        if number == 2:
            raise ValueError("two is not wanted")
        if number == 3 and not (self.folder / "killed").exists():
            (self.folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        with version.open(version.shards[0]) as (image, manifest):
            (self.folder / f"v{number}").write_text(f"{os.getpid()} {len(image)}")
            version.advance(len(image))
"""


class TestMirror(StageConformance):
    def make_stage(self, directory: Path) -> Stage:
        return Mirror(str(directory))


@pytest.fixture
def start(tmp_path: Path, shm_dir: Path) -> Start:
    def start(**settings: Any) -> TinyJob:
        given = {"shm_dir": str(shm_dir), "stages": f"mirror {tmp_path / 'disk2'}"}
        return TinyJob(tmp_path / "disk1", **{"agent": "inline", **given, **settings})

    return start


def mirrored(tmp_path: Path) -> list[int]:
    (folder,) = (tmp_path / "disk2").iterdir()
    return versions_in(folder)


def versions_in(folder: Path) -> list[int]:
    keys = LocalStore(folder).keys()
    return [key.id.version for key in keys]


def steps(job: TinyJob, until: int) -> None:
    """Train, and wait after each step until the agent has no work."""
    while job.iteration < until:
        job.run(job.iteration + 1)
        assert job.checkpointer._agent.wait(PATIENCE_SECONDS, everything=True)


def test_a_lost_disk_costs_nothing(start: Start, tmp_path: Path, shm_dir: Path) -> None:
    course = fingerprints()
    with start() as job:
        job.run(4)
    shutil.rmtree(tmp_path / "disk1")
    shutil.rmtree(shm_dir)
    shm_dir.mkdir()
    with start() as job:
        assert job.restore() == 4
        assert job.heard("restored")[0].level == "mirror"
        (said,) = [event.message for event in job.heard("notice") if event.severity == WARNING]
        assert said.startswith(f"v4 was restored from mirror ({tmp_path / 'disk2'}/")
        assert "If it was emptied for a fresh start: end this job and remove all of them" in said
        assert job.fingerprint() == course[4]
        job.run(6)
        assert job.fingerprint() == course[6]


def test_a_damaged_file_is_read_from_the_mirror(
    start: Start, tmp_path: Path, shm_dir: Path
) -> None:
    with start() as job:
        job.run(3)
    store = LocalStore(tmp_path / "disk1")
    newest = store.keys()[-1]
    file = store.directory / f"{newest.stem}.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    shutil.rmtree(shm_dir)
    shm_dir.mkdir()
    with start() as job:
        assert job.restore() == 3
        assert job.heard("restored")[0].level == "mirror"
        assert job.fingerprint() == fingerprints()[3]


def test_a_mirror_that_hangs_does_not_keep_a_job_from_its_start(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    with start() as job:
        job.run(3)

    def hang(folder: str, seconds: float, say: Any) -> None:
        raise TimeoutError(f"{folder}: it does not answer")

    monkeypatch.setattr("tierckpt.storage.answers.ensure", hang)
    with start() as job:
        assert job.restore() == 3
        assert job.heard("restored")[0].level == "local"
        assert any("disk2: it does not answer" in event.message for event in job.events)


def test_the_mirror_keeps_what_the_disk_keeps_and_two(start: Start, tmp_path: Path) -> None:
    with start(local_keep="2, every 4") as job:
        steps(job, 10)
    kept = mirrored(tmp_path)
    assert kept[-1] == 10  # v9 may have been given up for it
    assert {4, 8} <= {*kept}
    on_disk = {*versions_in(tmp_path / "disk1")}
    assert {*kept} <= on_disk | {*kept[-2:]}
    assert len(kept) < 6


def test_a_mirror_that_cannot_be_written_costs_the_mirror_alone(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "disk2").write_text("no folder")
    with start() as job:
        steps(job, 4)
    failures = job.heard("failed")
    assert {event.level for event in failures} == {"mirror"}
    assert f"mirror {tmp_path / 'disk2'}: " in failures[0].message
    assert "training continues, without this version there" in failures[0].message
    assert {1, 2, 3} <= {event.version for event in job.heard("committed", "local")}


def test_a_stage_of_somebody_elses_runs_in_the_agent(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its error costs one version, and so does an agent that it takes down."""
    info = tmp_path / "modules" / "mine-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[tierckpt.stages]\nindex = mine_index:Index\n")
    (tmp_path / "modules" / "mine_index.py").write_text(INDEX)
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    with start(stages=f"index {tmp_path}", agent="process") as job:
        steps(job, 6)
    done = {event.version for event in job.heard("committed", "index")}
    failed = {event.version: event.message for event in job.heard("failed", "index")}
    assert {file.name for file in tmp_path.glob("v*")} == {f"v{version}" for version in done}
    assert "ValueError: two is not wanted" in failed[2]
    assert "ended" in failed[3]
    assert {1, 4, 5, 6} <= done
    assert job.heard("committed", "index")[0].nbytes > 0


# --- the queue -----------------------------------------------------------------------------------


class Slow:
    """A stage that waits to be let go."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Semaphore(0), threading.Semaphore(0)
        self.got: list[int] = []

    def accept(self, version: LocalVersion) -> None:
        self.got.append(version.id.version)
        self.begun.release()
        assert self.go.acquire(timeout=PATIENCE_SECONDS)
        if version.id.version == 9:
            raise SystemExit(3)
        version.advance(1)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    made = Slow()
    monkeypatch.setattr(Named, "make", lambda named: made)
    yield made
    made.go.release(100)


def order(version: int) -> HostedOrder:
    return HostedOrder("/disk", VersionId(1, version), 2, (0, 1))


def test_the_newest_that_waits_replaces_the_others(slow: Slow) -> None:
    idle, said, held = threading.Event(), list[Any](), ShardGuard()
    stage = Hosted("slow", held, idle.set)
    stage.accept(order(1), said.append)
    assert slow.begun.acquire(timeout=PATIENCE_SECONDS)
    for version in (2, 3, 4):
        stage.accept(order(version), said.append)
    assert all(key in held for version in (1, 4) for key in order(version).keys)
    assert not any(key in held for version in (2, 3) for key in order(version).keys)
    assert [(each.id.version, each.superseded) for each in said] == [(2, True), (3, True)]
    slow.go.release(2)
    assert idle.wait(PATIENCE_SECONDS)
    assert slow.got == [1, 4]
    assert not any(key in held for version in (1, 4) for key in order(version).keys)


def test_a_stage_that_would_end_the_agent_does_not(slow: Slow) -> None:
    idle, said = threading.Event(), list[Any]()
    stage = Hosted("slow", ShardGuard(), idle.set)
    stage.accept(order(9), said.append)
    slow.go.release(1)
    assert idle.wait(PATIENCE_SECONDS)
    assert said == [StageFailed(VersionId(1, 9), "slow", "SystemExit: 3")]
    assert not stage.busy()


def test_a_cancelled_stage_ends_at_its_next_bytes(slow: Slow) -> None:
    idle, said = threading.Event(), list[Any]()
    stage = Hosted("slow", ShardGuard(), idle.set)
    stage.accept(order(1), said.append)
    assert slow.begun.acquire(timeout=PATIENCE_SECONDS)
    stage.accept(order(2), said.append)
    assert stage.cancel() == [1, 2]
    with pytest.raises(RuntimeError, match="later run's agent"):
        stage.accept(order(3), said.append)
    slow.go.release(1)
    assert idle.wait(PATIENCE_SECONDS)
    assert [(each.id.version, each.superseded) for each in said] == [(1, True)]


# --- the setting ---------------------------------------------------------------------------------


def test_the_setting_names_stages_and_their_texts() -> None:
    assert parse(" index , mirror /a b ,") == [Named("index", ""), Named("mirror", "/a b")]
    assert mirrors("index, mirror /a", "job") == [Path("/a/job")]
    assert load_config({"stages": "mirror /a/{node}", "node": "n1"}, {}).stages_here == (
        "mirror /a/n1"
    )


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"stages": "nonsense"}, "the stage 'nonsense' is unknown; known are: mirror"),
        ({"stages": "mirror disk2"}, "mirror takes an absolute path"),
        ({"stages": "mirror"}, "mirror takes an absolute path"),
        ({"stages": "peer"}, "peer is a level, with settings of its own"),
        ({"stages": "mirror /a, mirror /a"}, "it names 'mirror /a' twice"),
        ({"stages": "mirror /a", "path": "/a"}, "/a is in use already as a level"),
        ({"stages": "mirror /a", "local_every_seconds": 0}, "no version goes to the local level"),
    ],
)
def test_a_wrong_one_is_refused_at_the_start(settings: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(settings, {})
    assert str(refused.value).startswith("stages is ")
    assert error in str(refused.value)


def test_a_mirror_does_not_keep_in_the_clear_what_the_disk_encrypts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TIERCKPT_ENCRYPTION_KEY", "ab" * 32)
    load_config({"stages": "mirror /a", "local_codecs": "incremental"}, {})
    with pytest.raises(ConfigError, match="the second disk would have in the clear"):
        load_config({"stages": "mirror /a", "local_codecs": "aes-gcm"}, {})
