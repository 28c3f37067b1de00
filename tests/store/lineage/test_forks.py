"""Forks of jobs of one rank: exact, with a life of their own, and kept by their source."""

from __future__ import annotations

import errno
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tierckpt import latest
from tierckpt.cli import run_command
from tierckpt.errors import RestoreError, StateMismatchError
from tierckpt.storage import ForkMarks, OriginFile
from tierckpt.testing import TinyJob, tiny_model

pytestmark = pytest.mark.usefixtures("inline_agent")

STEPS = 6


class Places:
    """Paths of a source and its forks."""

    def __init__(self, folder: Path, shm_dir: Path) -> None:
        self.folder, self.settings = folder, {"shm_dir": str(shm_dir), "local_keep": 2}

    def __getitem__(self, name: str) -> str:
        return str(self.folder / name)

    def job(self, name: str, seed: int = 99, **settings: Any) -> TinyJob:
        return TinyJob(self[name], seed=seed, **{**self.settings, **settings})

    def train(self, name: str, steps: int = STEPS, **settings: Any) -> str:
        with self.job(name, 0, **settings) as job:
            job.restore()
            return job.run(steps).fingerprint()

    def marks(self, name: str) -> list[str]:
        found = [each.suffix for each in (self.folder / name).iterdir()]
        return sorted({"hold", "fork"} & {each.lstrip(".") for each in found})


@pytest.fixture
def places(tmp_path: Path, shm_dir: Path) -> Places:
    return Places(tmp_path, shm_dir)


def test_a_fork_starts_exactly_there_and_restarts_take_its_own_versions(places: Places) -> None:
    state = places.train("a")
    setting = {"fork_from": f"{places['a']}@v{STEPS}"}
    with places.job("b", **setting) as job:
        restored = job.restore()
        assert (int(restored), restored.forked_from) == (STEPS, f"{places['a']}@v{STEPS}")
        assert job.fingerprint() == state
        job.checkpointer.abandon()
    assert places.marks("a") == ["hold"], "it has no version of its own"
    places.train("a", STEPS + 3)
    with places.job("b", 98, **setting) as job:
        assert job.restore() == STEPS, "retention would have removed it"
        assert job.fingerprint() == state
        course = job.run(STEPS + 2).fingerprint()
    assert places.marks("a") == ["fork"]
    shutil.rmtree(places["a"])
    with places.job("b", 97, **setting) as job:
        assert job.restore() == STEPS + 2, "the setting may stay, and the source may go"
        assert job.fingerprint() == course
        assert job.checkpointer.restored.forked_from == ""
    for path, unused in ((places["a"], 0), (places["elsewhere"], 1)):
        with places.job("b", fork_from=path) as job:
            job.restore()
            told = [event.message for event in job.events]
        assert sum("has no effect: this job has versions" in text for text in told) == unused


def test_no_step_waits_for_a_source_that_hangs(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hold ends when the source answers; here not before the training has ended."""
    places.train("a")
    came, resume, release = threading.Event(), threading.Event(), ForkMarks.release

    def hang(self: ForkMarks, *mark: Any) -> bool:
        came.set()
        assert resume.wait(60)
        return release(self, *mark)

    monkeypatch.setattr(ForkMarks, "release", hang)
    with places.job("b", fork_from=places["a"]) as job:
        job.restore()
        while not came.is_set():
            job.run(job.iteration + 1)
            came.wait(0.05)
        job.run(job.iteration + 5)
        assert places.marks("a") == ["hold"]
        resume.set()
    assert places.marks("a") == ["fork"]


def test_the_newest_version_of_a_source_is_fixed_by_the_first_start(places: Places) -> None:
    state = places.train("a")
    for _ in range(2):
        with places.job("b", fork_from=places["a"]) as job:
            assert job.restore() == STEPS
            assert job.fingerprint() == state
            job.checkpointer.abandon()
        places.train("a", STEPS + 3)


def test_a_job_that_ends_without_a_step_has_a_version_of_its_own(places: Places) -> None:
    state = places.train("a")
    with places.job("b") as job:
        job.checkpointer.restore(fork_from=places["a"])
    assert places.marks("a") == ["fork"]
    assert latest(places["b"]).version == STEPS  # type: ignore[union-attr]
    with places.job("b") as job:
        job.restore()
        assert job.fingerprint() == state


def test_the_persistent_level_alone_is_a_source_too(places: Places) -> None:
    far = {"persistent_path": places["far"], "persistent_every_steps": 2, "persistent_keep": 1}
    state = places.train("a", **far)
    shutil.rmtree(places["a"])
    with places.job("b") as job:
        assert job.checkpointer.restore(fork_from=places["far"]) == STEPS
        assert job.fingerprint() == state
        job.checkpointer.abandon()
    assert places.marks("far") == ["hold"]
    with places.job("a", 0, **far) as job:
        assert job.restore() == STEPS
        job.run(STEPS + 4)
    with places.job("b") as job:
        assert job.checkpointer.restore(fork_from=places["far"]) == STEPS
        assert job.fingerprint() == state
    assert places.marks("far") == ["fork"]


def test_a_damaged_order_is_shown_and_the_command_that_removes_it_works(
    places: Places, capsys: pytest.CaptureFixture[str]
) -> None:
    places.train("a")
    assert run_command(["fork", places["a"], places["b"]]) == 0
    record, source = Path(places["b"]) / "fork.json", Path(places["a"])
    record.write_text("x")
    for command in ("list", "log"):
        assert run_command([command, places["b"]]) == 0
        out = capsys.readouterr().out
        assert out.count("fork.json is truncated or damaged") == 1, "as one place"
    with places.job("b") as job, pytest.raises(RestoreError, match=f"{places['b']}: .*") as error:
        job.restore()
    cancel = f"tierckpt fork --cancel {places['b']}"
    assert cancel in str(error.value)
    assert run_command(cancel.split()[1:]) == 0
    assert not record.exists()
    (mark,) = source.glob("*.hold")
    mark.write_text("x")
    assert run_command(["log", places["a"]]) == 0
    assert "unknown, as its mark cannot be read" in capsys.readouterr().out
    assert run_command(["unpin", places["a"], str(STEPS), "--forks"]) == 0
    with places.job("b") as job:
        assert job.restore() == 0


def test_a_fork_of_a_job_without_a_folder_is_in_both_histories(
    places: Places,
    shm_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The folder of a job in memory has the notes; they go with it."""
    monkeypatch.setenv("TIERCKPT_SHM_DIR", str(shm_dir))
    alone = {"local_every_steps": 0, "local_every_seconds": 0.0}
    with places.job("a", 0, **alone) as source:
        state = source.run(STEPS).fingerprint()
        source.checkpointer.complete()
        own = {**alone, "local_every_steps": 1, "fork_from": places["a"]}
        fork = places.job("b", **own)
        fork.restore()
        assert fork.fingerprint() == state
        course = fork.run(STEPS + 4).fingerprint()
        fork.checkpointer.abandon()
        assert not Path(places["a"]).exists()
        again = places.job("b", 98, **own)
        assert again.restore() == STEPS + 4
        assert again.fingerprint() == course
        assert not [e.text() for e in again.events if "has no effect" in e.text()]
        capsys.readouterr()
        assert run_command(["log", places["a"]]) == 0
        assert f"fork of v{STEPS}: {places['b']}" in capsys.readouterr().out
        assert run_command(["log", places["b"]]) == 0
        first, *_ = capsys.readouterr().out.splitlines()
        assert first == f"{places['b']}, a fork of {places['a']}@v{STEPS}"
        again.checkpointer.close()
    assert not [*shm_dir.rglob("*.fork"), *shm_dir.rglob("fork.json")]


def test_the_memory_of_a_running_job_is_a_source(
    places: Places, capsys: pytest.CaptureFixture[str]
) -> None:
    with places.job("a", 0, local_every_steps=100) as source:
        source.run(STEPS)
        source.settle()
        with places.job("b") as job:
            assert job.checkpointer.restore(fork_from=places["a"]) == STEPS
            assert job.checkpointer.restored.levels == {"memory": 1}
            assert job.fingerprint() == source.fingerprint()
            job.checkpointer.abandon()
        assert not (Path(places["b"]) / "fork.json").exists()
        source.run(STEPS + 4)
        source.settle()
        with places.job("b") as job:
            assert job.checkpointer.restore(fork_from=places["a"]) == STEPS + 4, "the newest then"
            assert places.marks("a") == [], "it is no fork before it has a version of its own"
            job.run(STEPS + 5)
        capsys.readouterr()
        assert run_command(["log", places["a"]]) == 0
        assert f"fork of v{STEPS + 4}: {places['b']}\n" in capsys.readouterr().out
    assert OriginFile(places["b"]).read().id.version == STEPS + 4  # type: ignore[union-attr]
    assert places.marks("a") == ["fork"], "a note: there was nothing to hold"


def test_what_cannot_be_done_is_refused_with_a_remedy_that_works(
    places: Places, capsys: pytest.CaptureFixture[str]
) -> None:
    places.train("a")
    with places.job("b") as job:
        with pytest.raises(RestoreError, match=f"no complete v3 .*ones there are v5, v{STEPS}"):
            job.checkpointer.restore(fork_from=f"{places['a']}@3")
        with pytest.raises(RestoreError, match="this job's own place"):
            job.checkpointer.restore(fork_from=places["b"])
        with pytest.raises(ValueError, match="names two versions"):
            job.checkpointer.restore(5, fork_from=places["a"])
        assert job.checkpointer.restore(fork_from=places["a"]) == STEPS
        job.checkpointer.abandon()
    places.train("c")
    with places.job("b") as job:
        with pytest.raises(RestoreError, match="tierckpt fork --cancel"):
            job.checkpointer.restore(fork_from=places["c"])
        job.checkpointer.abandon()
    assert run_command(["fork", "--cancel", places["b"]]) == 0
    assert places.marks("a") == []
    with places.job("b") as job:
        assert job.checkpointer.restore(fork_from=places["c"]) == STEPS


def test_a_version_that_does_not_fit_changes_nothing(places: Places) -> None:
    places.train("a")
    model = tiny_model()
    model[0] = torch.nn.Linear(12, 24, bias=False)
    with TinyJob(places["b"], model=model, **places.settings) as job:
        before = job.fingerprint()
        with pytest.raises(
            StateMismatchError, match=rf"{places['a']}@v{STEPS} does not fit [^$]*0\.bias"
        ):
            job.checkpointer.restore(fork_from=places["a"])
        assert job.fingerprint() == before
        job.checkpointer.abandon()
    assert places.marks("a") == []
    assert not (Path(places["b"]) / "fork.json").exists()


def no_link(*paths: Any) -> None:
    raise OSError(errno.EXDEV, "another file system")


def test_the_source_may_be_deleted_if_its_files_have_second_names(
    places: Places, capsys: pytest.CaptureFixture[str]
) -> None:
    far = {"persistent_path": places["far"], "persistent_every_steps": STEPS}
    state = places.train("a", **far)
    assert run_command(["fork", places["a"], places["b"]]) == 0
    assert "the source may be deleted" in capsys.readouterr().out
    shutil.rmtree(places["a"])
    for _ in range(2):
        with places.job("b") as job:
            assert job.restore() == STEPS
            assert job.fingerprint() == state
            job.checkpointer.abandon()
    assert run_command(["list", places["b"]]) == 0
    assert "no checkpoints here" in capsys.readouterr().out, "these are another job's"
    with places.job("b") as job:
        assert job.restore() == STEPS
        job.run(STEPS + 1)
    assert not [*Path(places["b"]).glob("*.kept")]
    assert run_command(["fork", f"{places['far']}@{STEPS}", places["c"]]) == 0
    shutil.rmtree(places["far"])
    with places.job("c") as job:
        assert job.restore() == STEPS
        assert job.fingerprint() == state


def test_files_with_second_names_serve_a_job_without_the_local_level(places: Places) -> None:
    state = places.train("a")
    assert run_command(["fork", places["a"], places["b"]]) == 0
    shutil.rmtree(places["a"])
    with places.job("b", local_every_steps=0, local_every_seconds=0) as job:
        assert job.restore() == STEPS
        assert job.fingerprint() == state


@pytest.mark.parametrize("links", [True, False])
def test_another_job_under_the_path_of_the_source_is_not_taken_for_it(
    places: Places, links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not links:
        monkeypatch.setattr("tierckpt.storage.notes.os.link", no_link)
    state = places.train("a")
    assert run_command(["fork", places["a"], places["b"]]) == 0
    shutil.rmtree(places["a"])
    with places.job("a", 1) as job:
        assert job.run(STEPS).fingerprint() != state
    with places.job("b") as job:
        if links:
            assert job.restore() == STEPS
            assert job.fingerprint() == state
        else:
            with pytest.raises(RestoreError, match="not there any more"):
                job.restore()
        job.checkpointer.abandon()


def test_the_command_takes_paths_with_the_name_of_the_node(
    places: Places, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERCKPT_NODE", "n3")
    state = places.train("a/{node}")
    assert run_command(["fork", places["a/{node}"], places["b/{node}"]]) == 0
    assert sorted(each.suffix for each in Path(places["b/n3"]).iterdir()) == [".json", ".kept"]
    with places.job("b/{node}") as job:
        assert job.restore() == STEPS
        assert job.fingerprint() == state
        job.checkpointer.abandon()
    shutil.rmtree(places["b/n3"])
    assert run_command(["fork", places["a/{node}"], places["b/{node}"]]) == 0
    assert run_command(["fork", "--cancel", places["b/{node}"]]) == 0
    assert [*Path(places["b/n3"]).iterdir()] == []


def damage(folder: str, version: int) -> None:
    path = next(Path(folder).glob(f"v{version:010d}*.safetensors"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_a_lost_or_damaged_source_is_refused_with_a_remedy_that_works(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierckpt.storage.notes.os.link", no_link)
    places.train("a")
    with places.job("b") as job:
        with pytest.raises(
            RestoreError, match=r"nothing to start from: .* not a directory.*number"
        ):
            job.checkpointer.restore(fork_from=f"{places['a']}@latest")
        assert job.checkpointer.restore(fork_from=places["a"]) == STEPS
        job.checkpointer.abandon()
    moved = Path(places["a"]).rename(places["moved"])
    with places.job("b", fork_from=str(moved)) as job:
        with pytest.raises(RestoreError, match="To take the first one back: tierckpt fork --can"):
            job.restore()
        job.checkpointer.abandon()
    with places.job("b") as job:
        with pytest.raises(RestoreError, match=r"Bring it back; or, .*: tierckpt fork --cancel"):
            job.restore()
        job.checkpointer.abandon()
    assert run_command(["fork", "--cancel", places["b"]]) == 0
    damage(places["moved"], STEPS)
    with places.job("b", fork_from=str(moved)) as job:
        with pytest.raises(RestoreError, match=f"another version: {moved}@v5 is complete"):
            job.restore()
        assert job.checkpointer.restore(fork_from=f"{moved}@v5") == 5


def test_the_command_orders_a_fork_and_takes_the_order_back(
    places: Places, capsys: pytest.CaptureFixture[str]
) -> None:
    state = places.train("a")
    order = ["fork", f"{places['a']}@v{STEPS}", places["b"]]
    assert [run_command(order), run_command(order)] == [0, 0], "twice is once"
    assert places.marks("a") == ["hold"]
    assert run_command(["list", places["b"]]) == 0
    assert f"the next run starts from {places['a']}@v{STEPS}" in capsys.readouterr().out
    assert run_command(["list", places["a"]]) == 0
    assert f"held for the fork {places['b']}" in capsys.readouterr().out
    assert run_command(["fork", "--cancel", places["b"]]) == 0
    assert run_command(["fork", "--cancel", places["b"]]) == 1
    assert places.marks("a") == []
    assert run_command(order) == 0
    places.train("a", STEPS + 3)
    with places.job("b") as job:
        assert job.restore() == STEPS
        assert job.fingerprint() == state
        job.run(STEPS + 1)
    assert places.marks("a") == ["fork"]
    assert run_command(order) == 1
    assert "has checkpoints already" in capsys.readouterr().err
    assert run_command(["fork", f"{places['a']}@3", places["c"]]) == 1
    assert not Path(places["c"]).exists()


def test_holds_of_forks_that_are_gone_end_by_hand(
    places: Places, capsys: pytest.CaptureFixture[str]
) -> None:
    places.train("a")
    assert run_command(["fork", places["a"], places["b"]]) == 0
    shutil.rmtree(places["b"])
    assert run_command(["unpin", places["a"], str(STEPS)]) == 1, "it is no pin"
    assert run_command(["unpin", places["a"], "4", "--forks"]) == 1
    assert f"versions that are held: v{STEPS}" in capsys.readouterr().err
    assert run_command(["unpin", places["a"], str(STEPS), "--forks"]) == 0
    assert places.marks("a") == ["fork"]
