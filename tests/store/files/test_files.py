"""Files of one process: what is written comes back, or is refused with a text."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
import torch

import tierckpt
from tierckpt.checkpointer import node_resources
from tierckpt.cli import run_command
from tierckpt.core import HaltRequest
from tierckpt.errors import ConfigError, RestoreError, TierckptError
from tierckpt.events import Event
from tierckpt.files import Files, VersionFiles
from tierckpt.halt import clear_request, write_request
from tierckpt.lineage import run_notes
from tierckpt.storage import JobBusyError, Mount, routed
from tierckpt.testing import ThreadGroup, run_ranks

Make = Callable[..., Files]


@pytest.fixture
def make(tmp_path: Path, shm_dir: Path) -> Iterator[Make]:
    """Makes the files of one run after the other, each with its events in `files.events`."""
    with ExitStack() as stack:

        def files(**settings: Any) -> Files:
            events: list[Event] = []
            given = {"local_every_steps": 1, "when_busy": "wait", "agent": "inline", **settings}
            made = Files(tmp_path / "ckpts", shm_dir=shm_dir, on_event=events.append, **given)
            made.events = events  # type: ignore[attr-defined]
            stack.callback(made.abandon)
            return made

        yield files


def write(files: Files, number: int | None = None, **contents: bytes) -> bool | None:
    with files.version(number) as f:
        put(f, contents)
    return f.complete


def put(f: VersionFiles, contents: dict[str, bytes]) -> None:
    """Write files, which their owner alone may execute."""
    for name, content in contents.items():
        path = Path(f.route(name))
        path.write_bytes(content)
        path.chmod(0o750)


def read(files: Files, **options: Any) -> dict[str, bytes] | None:
    found = files.restore(**options)
    return None if found is None else {name: Path(p).read_bytes() for name, p in found.items()}


def said(files: Files, name: str = "failed") -> str:
    events: list[Event] = files.events  # type: ignore[attr-defined]
    return "; ".join(event.message for event in events if event.name == name)


def test_files_come_back_with_names_bytes_and_permissions(make: Make) -> None:
    first = make()
    assert first.restore() is None
    contents = {
        "a/b/x.bin": os.urandom(1_300_000),
        "empty": b"",
        "small": b"1",
        "y": bytes(524_288),
    }
    with first.version("one") as f:
        for name, content in contents.items():
            Path(f.route(name)).write_bytes(content)
        os.chmod(f.route("small"), 0o750)
    assert f.complete
    first.abandon()
    again = make()
    assert again.latest() == "one"
    found = again.restore()
    assert found is not None
    assert (found.name, found.number, dict(found.levels)) == ("one", 1, {"memory": 1})
    assert {name: Path(path).read_bytes() for name, path in found.items()} == contents
    assert stat.S_IMODE(os.stat(found["small"]).st_mode) == 0o750
    assert found.by_rank[0]["y"] == found["y"]
    Path(found["y"]).write_bytes(b"a copy: the version stays as it is")
    again.abandon()
    third = make()
    assert read(third) == contents


def test_a_closed_job_is_on_disk_alone(make: Make, shm_dir: Path) -> None:
    with make() as files:
        write(files, x=b"1")
        write(files, x=b"2")
    assert not any(shm_dir.iterdir()), "neither slots nor routed files"
    again = make()
    assert read(again) == {"x": b"2"}
    with pytest.raises(TierckptError, match="after close"):
        files.need_checkpoint()


def test_a_version_without_local_stays_in_memory(make: Make, shm_dir: Path) -> None:
    files = make(local_every_steps=0, local_every_seconds=0)
    write(files, x=b"1")
    files.close()
    again = make(local_every_steps=0, local_every_seconds=0)
    assert read(again) == {"x": b"1"}


def test_from_the_persistent_level(make: Make, tmp_path: Path) -> None:
    far = {"persistent_path": tmp_path / "far", "persistent_every_steps": 1}
    with make(**far) as files:
        write(files, x=b"1" * 9000)
    shutil.rmtree(tmp_path / "ckpts")
    again = make(**far)
    assert read(again) == {"x": b"1" * 9000}


def test_an_error_ends_the_version_and_the_last_one_stays(make: Make) -> None:
    files = make()
    write(files, x=b"1")
    started = []

    def fail() -> None:
        with files.version() as f:
            started.append(f)
            Path(f.route("x")).write_bytes(b"2")
            raise ZeroDivisionError("on purpose")

    with pytest.raises(ZeroDivisionError):
        fail()
    (f,) = started
    assert f.complete is False
    assert "rank 0 could not complete it: ZeroDivisionError: on purpose" in said(files)
    with pytest.raises(TierckptError, match="has ended"):
        f.route("y")
    with pytest.raises(FileNotFoundError):
        Path(f.routed["x"]).write_bytes(b"late")
    files.abandon()
    again = make()
    assert read(again) == {"x": b"1"}
    assert write(again, x=b"3")


half_written: list[IO[bytes]] = []


def stays_open(path: Path) -> None:
    half_written.append(path.open("wb"))  # noqa: SIM115: the mistake


def leads_elsewhere(path: Path) -> None:
    """Replace the file's folder by a link to another one, and write there."""
    other = path.parents[3] / "other"
    other.mkdir()
    path.parent.rmdir()
    path.parent.symlink_to(other)
    path.write_bytes(b"1")


def test_a_file_mapped_for_writing_is_not_complete(make: Make) -> None:
    files = make()
    with files.version() as f:
        view = np.memmap(f.route("x"), np.uint8, "w+", shape=(9,))
    assert f.complete is False
    assert "delete the memory map" in said(files)
    del view
    with files.version() as f:
        np.memmap(f.route("x"), np.uint8, "w+", shape=(9,))[:] = 1
    assert f.complete


def test_a_file_system_that_cannot_tell_stores_what_is_there(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routed, "mount_of", lambda path: Mount("/home", "nfs4"))
    files = make()
    f = files.begin()
    with Path(f.route("x")).open("wb", buffering=0) as file:
        file.write(b"1")
        assert files.end()


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda path: None, "was routed and not written"),
        (os.mkdir, "is no plain file"),
        (lambda path: os.symlink("/etc/passwd", path), "is no plain file"),
        (lambda path: leads_elsewhere(Path(path)), "is no plain file in the folder that route()"),
        (lambda path: stays_open(Path(path)), "is still open for writing"),
    ],
)
def test_what_cannot_be_stored_costs_the_version(
    spoil: Callable[[str], None], why: str, make: Make
) -> None:
    files = make()
    write(files, x=b"1")
    with files.version() as f:
        spoil(f.route("a/x"))
    assert f.complete is False
    assert why in said(files)
    while half_written:
        half_written.pop().close()
    assert write(files, x=b"2"), "the program goes on"


def test_a_file_without_route_is_named(make: Make) -> None:
    files = make()
    with files.version() as f:
        path = Path(f.route("x"))
        path.write_bytes(b"1")
        path.with_name("stray").write_bytes(b"2")
    assert f.complete
    assert "stray: written without route()" in said(files, "notice")


@pytest.mark.parametrize("name", ["/x", "../x", "a/../../x", "", ".", "a\0b", "x" * 1025])
def test_names_stay_inside(name: str, make: Make) -> None:
    files = make()
    with files.version() as f, pytest.raises(TierckptError, match=r"name|too long"):
        f.route(name)


def test_wrong_orders_are_refused(make: Make) -> None:
    files = make()
    write(files, 5, x=b"1")
    with pytest.raises(TierckptError, match="the last version is 5, and numbers must grow"):
        files.begin(5)
    with pytest.raises(RestoreError, match="before the first version"):
        files.restore()
    with pytest.raises(TierckptError, match=r"version\(6\.5\): give a whole number"):
        files.begin(6.5)  # type: ignore[arg-type]
    files.begin()
    with pytest.raises(TierckptError, match="inside version 6"):
        files.begin()
    with pytest.raises(RestoreError, match="end it first"):
        files.restore()
    assert files.end()
    with pytest.raises(TierckptError, match=r"without begin\(\)"):
        files.end()
    with pytest.raises(TierckptError, match=r"without load\(\)"):
        files.accept()


def test_settings_that_need_a_training_are_refused(make: Make) -> None:
    with pytest.raises(ConfigError, match="for files give a number, or local_every_seconds"):
        make(local_every_steps="auto")
    make(local_every_steps=0, local_every_seconds=1.0)


def test_a_group_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"group is a int; give a communicator of mpi4py"):
        Files(tmp_path, group=3)


def test_only_files_that_ranks_name_for_another_number_of_ranks(make: Make) -> None:
    files = make()
    write(files, x=b"1")
    files.abandon()
    again = make()
    with pytest.raises(RestoreError, match="files of ranks 0 to 0, and none of rank 1"):
        again.restore(ranks=[1])
    assert read(again, ranks=[0]) == {"x": b"1"}


def test_a_refused_version_is_not_offered_again(make: Make) -> None:
    files = make(local_keep=3)
    for number in (1, 2, 3):
        write(files, x=b"%d" % number)
        files.wait()
        files.need_checkpoint()
    files.abandon()
    again = make(local_keep=3)
    for number in (3, 2):
        found = again.load()
        assert found is not None
        assert found.number == number
        if number == 3:
            again.refuse()
    again.accept()
    again.abandon()  # as killed before its first version
    third = make(local_keep=3)
    assert read(third) == {"x": b"2"}
    assert write(third, x=b"4")
    third.abandon()
    fourth = make(local_keep=3)
    while fourth.load() is not None:
        fourth.refuse()
    assert "the program refused all versions in" in said(fourth, "restored")
    fourth.abandon()  # as killed again: nothing has replaced them, so they are offered again
    fifth = make(local_keep=3)
    assert read(fifth) == {"x": b"4"}


def test_a_damaged_copy_is_replaced_by_another(make: Make, tmp_path: Path) -> None:
    files = make()
    write(files, x=b"1" * 100_000)
    files.wait()
    slot = next(path for path in files._job.resources.job.segments())
    files.abandon()
    with slot.open("r+b") as segment:
        segment.seek(-60_000, os.SEEK_END)
        segment.write(b"damage")
    again = make()
    found = again.restore()
    assert found is not None
    assert Path(found["x"]).read_bytes() == b"1" * 100_000
    assert dict(found.levels) == {"local": 1}
    assert "differ from their checksum" in said(again, "rejected")


def test_need_checkpoint_follows_the_intervals(make: Make) -> None:
    files = make(memory_every_steps=3, local_every_steps=0, local_every_seconds=0)
    assert [files.need_checkpoint() for _ in range(6)] == [False, False, True, True, True, True]
    write(files, x=b"1")
    assert [files.need_checkpoint() for _ in range(3)] == [False, False, True]


def test_a_halt_request_asks_for_a_last_version(make: Make, tmp_path: Path) -> None:
    (tmp_path / "ckpts").mkdir()
    write_request(tmp_path / "ckpts", HaltRequest(now=True))
    files = make(memory_every_steps=100, local_every_steps=100, local_every_seconds=0)
    while not files.should_exit():
        time.sleep(0.001)
    assert files.need_checkpoint()
    assert write(files, x=b"1"), "the program ends by itself"


def test_a_program_that_never_asks_is_ended_after_a_last_version(
    make: Make, tmp_path: Path
) -> None:
    (tmp_path / "ckpts").mkdir()
    write_request(tmp_path / "ckpts", HaltRequest(now=True))
    files = make(memory_every_steps=100, local_every_steps=100, local_every_seconds=0)
    while not files.need_checkpoint():
        time.sleep(0.001)
    with pytest.raises(SystemExit) as ended:
        write(files, x=b"1")
    assert ended.value.code == 0
    assert files.closed
    clear_request(tmp_path / "ckpts")
    assert read(make()) == {"x": b"1"}


def test_ranks_without_a_group_are_told_so(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    make()
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(JobBusyError, match=r"each as a job of its own: give group=MPI\.COMM_WORLD"):
        make()


def test_the_shard_is_a_plain_safetensors_file(make: Make, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    with make() as files:
        write(files, **{"a/x": b"abc"})
    (path,) = (tmp_path / "ckpts").glob("*.safetensors")
    assert safetensors.load_file(path)["file/a/x"].tobytes() == b"abc"


@pytest.mark.parametrize("named", ["files", "beside a training"])
def test_the_files_without_the_job(
    named: str, make: Make, tmp_path: Path, shm_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    contents = {"a/x": os.urandom(9_000_000), "empty": b""}
    if named == "files":
        with make() as files:
            write(files, **contents)
        with pytest.raises(RestoreError, match="a version of files, not the state of a training"):
            tierckpt.load(tmp_path / "ckpts")
    else:
        train(tmp_path / "ckpts", shm_dir, contents)
    out = tmp_path / "out"
    assert run_command(["export", str(tmp_path / "ckpts"), str(out), "--format", "files"]) == 0
    assert run_command(["export", str(tmp_path / "ckpts"), str(out), "--format", "files"]) == 1
    assert "--force replaces it" in capsys.readouterr().err
    (out / "00000" / "a" / "x").write_bytes(b"old")
    again = ["export", str(tmp_path / "ckpts"), str(out), "--format", "files", "--force"]
    assert run_command(again) == 0
    assert stat.S_IMODE((out / "00000" / "a" / "x").stat().st_mode) == 0o750
    there = (path for path in out.rglob("*") if path.is_file())
    found = {str(path.relative_to(out / "00000")): path.read_bytes() for path in there}
    assert found == contents
    capsys.readouterr()
    assert run_command(["list", str(tmp_path / "ckpts"), "--files"]) == 0
    *_, first, second = capsys.readouterr().out.splitlines()
    assert (first.split(), second.split()) == (["0", "9", "MB", "a/x"], ["0", "0", "B", "empty"])
    assert run_command(["list", str(tmp_path / "ckpts"), "--files", "v1", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["files"]
    assert listed["version"] == 1
    assert listed["name"] == ("1" if named == "files" else "")
    assert listed["files"][0] == {"rank": 0, "nbytes": 9_000_000, "name": "a/x"}
    assert run_command(["list", str(tmp_path / "ckpts"), "--files", "7"]) == 1
    assert "no v7 is complete and sound; there are shards of v1" in capsys.readouterr().err


def train(path: Path, shm_dir: Path, contents: dict[str, bytes]) -> None:
    """One step of a training, with these files beside the state."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    place: dict[str, Any] = {"path": path, "shm_dir": shm_dir}
    with tierckpt.Checkpointer(model, optimizer, agent="inline", **place) as ckpt:
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        with ckpt.files() as f:
            put(f, contents)
        ckpt.step()


def test_a_dead_job_leaves_no_routed_files(make: Make, shm_dir: Path) -> None:
    left = shm_dir / f"tierckpt-files-{os.getuid()}" / "gone-123" / "r00000" / "routed"
    left.mkdir(parents=True)
    (left / "big").write_bytes(bytes(1000))
    make()
    assert not left.exists()


def test_callbacks_know_the_job_before_its_first_event(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Watch(tierckpt.Callbacks):
        seen: list[str] = []  # noqa: RUF012

        def on_attached(self, job: tierckpt.callbacks.Job) -> None:
            self.seen.append(job.job_id)

        def on_event(self, event: Event) -> None:
            self.seen.append(event.message)

    dead = make(job_id="dead")
    assert write(dead, a=b"a")
    dead.abandon()
    monkeypatch.setattr(node_resources, "DEAD_JOB_SECONDS", 0.0)
    make(job_id="next", callbacks=[Watch()])  # removes the dead one
    first, second, *_ = Watch.seen
    assert first == "next"
    assert "removed shared memory of the dead job dead" in second


def test_an_end_that_cannot_be_noted_is_reported(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a thread of its own, while the job ends."""
    files = make()
    assert write(files, a=b"a")

    def full(place: Any, record: Any, end: Any) -> None:
        raise OSError("the disk is full")

    files.wait()
    monkeypatch.setattr(run_notes, "_add", full)
    files.close()
    assert "the end of this run could not be noted" in said(files, "notice")


def test_a_version_of_a_training_is_no_version_of_files(
    make: Make, tmp_path: Path, shm_dir: Path
) -> None:
    train(tmp_path / "ckpts", shm_dir, {})
    files = make()
    with pytest.raises(RestoreError, match="is the state of a training, not a version of files"):
        files.restore()
    files.abandon()


def test_ranks_that_make_different_calls_are_told_which(tmp_path: Path, shm_dir: Path) -> None:
    """As `if rank == 0 and files.should_exit():` does. One would take the answer of the other."""

    def rank(group: ThreadGroup) -> None:
        files = Files(tmp_path / "ckpts", group=group, shm_dir=shm_dir, agent="inline")
        try:
            different = "should_exit() on rank 0, need_checkpoint() on rank 1. All ranks must"
            with pytest.raises(TierckptError, match=re.escape(different)):
                files.should_exit() if group.rank == 0 else files.need_checkpoint()
        finally:
            files.abandon()

    run_ranks(2, rank)
