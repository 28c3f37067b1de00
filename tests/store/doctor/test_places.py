"""Directories on real file systems of several kinds; most need root, to mount them."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.persistent_shards import s3_options
from tests.support.rights import as_anybody
from tests.support.tmpfs import mount, read_only, unmount
from tierckpt import _faults
from tierckpt.config import Config, load_config
from tierckpt.doctor import Finding, Mark, Subject, machine
from tierckpt.storage import Need, try_directory


def local(path: Path | str, **more: object) -> list[Finding]:
    return [*machine.local(Subject(Config(path=str(path)), **more))]  # type: ignore[arg-type]


def persistent(path: Path | str, **settings: object) -> list[Finding]:
    given = {"persistent_path": str(path), **settings}
    return [*machine.persistent(Subject(load_config(given, {})))]


def only(found: list[Finding], mark: Mark) -> Finding:
    (one,) = [each for each in found if each.mark is mark]
    return one


def test_a_good_directory_is_left_as_it_was(tmp_path: Path) -> None:
    (good,) = local(tmp_path)
    assert good.mark is Mark.GOOD
    assert re.search(r"\w+, [\d.]+ \wiB free, (no )?O_DIRECT, locks, links, renames$", good.text)
    assert [*tmp_path.iterdir()] == []


def test_a_directory_is_not_made(tmp_path: Path) -> None:
    (good,) = local(tmp_path / "a" / "b")
    assert good.text.startswith(f"{tmp_path}/a/b (to be made): ")
    cross = only(persistent(tmp_path / "a" / "b"), Mark.CROSS)
    assert cross.text.endswith("its parent is missing; is it mounted?")
    assert [*tmp_path.iterdir()] == []
    subprocess.run(cross.cure.split(), check=True)
    assert only(persistent(tmp_path / "a" / "b"), Mark.GOOD)


def test_memory_is_a_warning_for_the_local_level(small_tmpfs: Path) -> None:
    warning = only(local(small_tmpfs / "ckpts"), Mark.WARNING)
    assert warning.text == f"{small_tmpfs} is tmpfs: versions survive a process, not the machine"
    assert only(persistent(small_tmpfs), Mark.WARNING)


@pytest.fixture
def overlay(tmp_path: Path) -> Iterator[Path]:
    """The root of a container, as Docker makes it."""
    base = tmp_path / "base"
    base.mkdir()
    mount("-t", "tmpfs", "-o", "size=8m", "tmpfs", str(base))
    names = {name: base / name for name in ("lower", "upper", "work", "merged")}
    for folder in names.values():
        folder.mkdir()
    layers = f"lowerdir={names['lower']},upperdir={names['upper']},workdir={names['work']}"
    try:
        mount("-t", "overlay", "-o", layers, "overlay", str(names["merged"]))
        yield names["merged"]
        unmount(names["merged"])
    finally:
        unmount(base)


def test_the_layer_of_a_container_is_a_warning(overlay: Path) -> None:
    warning = only(local(overlay / "ckpts"), Mark.WARNING)
    assert "the container's own layer (overlay)" in warning.text
    assert "docker run -v" in warning.cure


def test_a_read_only_file_system_is_a_cross_until_it_is_mounted_again(tmp_path: Path) -> None:
    with read_only(tmp_path):
        cross = only(local(tmp_path), Mark.CROSS)
        assert cross.text == f"{tmp_path}: it is mounted read-only"
        assert cross.cure.startswith("mount -o remount,rw ")
        subprocess.run(["mount", "-o", "remount,bind,rw", str(tmp_path)], check=True)
        assert only(local(tmp_path), Mark.GOOD)


@pytest.mark.parametrize(
    ("made", "environment", "cure"),
    [
        (".dockerenv", {}, "docker run -v /scratch:/scratch"),
        ("run/.containerenv", {}, "podman run -v /scratch:/scratch"),
        ("x", {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "a hostPath volume"),
        ("x", {}, "mount -o remount,rw"),
    ],
)
def test_a_read_only_root_of_a_container_needs_a_volume(
    made: str,
    environment: dict[str, str],
    cure: str,
    overlay: Path,
    tmp_path: Path,
) -> None:
    """A user without rights cannot mount it again."""
    (root := tmp_path / "root" / made).parent.mkdir(parents=True)
    root.touch()
    subject = Subject(Config(path=f"{overlay}/ckpts"), environment, root=tmp_path / "root")
    with read_only(overlay):
        cross = only([*machine.local(subject)], Mark.CROSS)
    assert cross.text == f"{overlay}: it is mounted read-only"
    assert cure in cross.cure


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_without_permission_is_a_cross_and_the_cure_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In this thread, which gives the rights of root up; a child would have them again.
    monkeypatch.setattr(machine, "of_directory", lambda need, seconds: try_directory(need))
    os.chown(tmp_path, 65534, 65534)
    with as_anybody():
        cross = only(local(tmp_path), Mark.CROSS)
    assert cross.text == f"{tmp_path}: this user may not write there"
    subprocess.run(cross.cure.partition(",")[0].split(), check=True)
    with as_anybody():
        assert only(local(tmp_path), Mark.GOOD)


def test_a_full_file_system_is_a_cross(small_tmpfs: Path) -> None:
    found = local(small_tmpfs, state_bytes=2**40)
    cross = only(found, Mark.CROSS)
    assert cross.text.endswith(" needed")
    assert cross.cure.startswith("free space there, ")


def test_a_file_system_that_hangs_is_a_cross(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, marks: Path
) -> None:
    monkeypatch.setenv(_faults.FAULTS_VARIABLE, "stop@health:op=write")
    monkeypatch.setenv(_faults.FIRED_VARIABLE, str(marks))
    monkeypatch.setattr(machine, "PLACE_SECONDS", 3.0)
    folder = tmp_path / "there"
    folder.mkdir()
    cross = only(local(folder), Mark.CROSS)
    assert cross.text == f"{folder} did not answer within 3 s; its file system hangs"
    assert [*marks.iterdir()]


# --- guarantees ----------------------------------------------------------------------------------


def refuse(*_: object, **__: object) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


def test_a_file_system_without_locks_is_a_cross(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "lockf", refuse)
    found = try_directory(Need(str(tmp_path)))
    assert found.broken == {"locks": "No locks available"}
    monkeypatch.setattr(machine, "of_directory", lambda need, seconds: found)
    cross = only(local(tmp_path), Mark.CROSS)
    assert "no locks (No locks available)" in cross.text
    assert only(persistent(tmp_path), Mark.GOOD), "it needs no locks"


@pytest.mark.parametrize(
    ("name", "guarantee", "mark"),
    [("link", "links", Mark.GOOD), ("rename", "renames", Mark.CROSS)],
)
def test_a_file_system_without_links_serves_the_local_level_alone(
    name: str, guarantee: str, mark: Mark, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, name, refuse)
    found = try_directory(Need(str(tmp_path)))
    monkeypatch.undo()
    assert [*found.broken] == [guarantee]
    monkeypatch.setattr(machine, "of_directory", lambda need, seconds: found)
    assert only(local(tmp_path), mark)
    assert only(persistent(tmp_path), Mark.CROSS)


# --- /dev/shm ------------------------------------------------------------------------------------


@pytest.fixture
def dockers_shm(tmp_path: Path) -> Iterator[Path]:
    """/dev/shm of a container with Docker's default size."""
    folder = tmp_path / "shm"
    folder.mkdir()
    mount("-t", "tmpfs", "-o", "size=64m", "shm", str(folder))
    try:
        yield folder
    finally:
        unmount(folder)


def test_dockers_shared_memory_is_a_cross_and_the_cure_works(
    dockers_shm: Path, tmp_path: Path
) -> None:
    subject = Subject(Config(shm_dir=str(dockers_shm)), {}, state_bytes=2**30, root=tmp_path)
    (cross,) = machine.shared_memory(subject)
    assert cross.mark is Mark.CROSS
    assert cross.text == f"{dockers_shm}: 64 MiB of 64 MiB free; 2 slots of the state need 2 GiB"
    command = ",".join(cross.cure.split(",")[:2])
    assert command == f"mount -o remount,size=3g {dockers_shm}"
    subprocess.run(command.split(), check=True)
    (good,) = machine.shared_memory(subject)
    assert good.mark is Mark.GOOD
    (tmp_path / ".dockerenv").touch()
    subprocess.run(["mount", "-o", "remount,size=64m", str(dockers_shm)], check=True)
    (cross,) = machine.shared_memory(Subject(Config(shm_dir=str(dockers_shm)), {}, root=tmp_path))
    assert cross.mark is Mark.CROSS
    assert "--shm-size=" in cross.cure


# --- stores --------------------------------------------------------------------------------------


def test_a_store_is_written_to_and_left_as_it_was(
    endpoint: str, served: Path, tmp_path: Path
) -> None:
    url = f"s3://{tmp_path.relative_to(served)}"
    options = s3_options(endpoint)
    (good,) = persistent(url, persistent_storage_options=options)
    assert (good.mark, good.text) == (
        Mark.GOOD,
        f"{url}: written, read and deleted; conditional writes",
    )
    assert not tmp_path.exists() or not [*tmp_path.iterdir()]
    (cross,) = persistent("s3://nobucket/x", persistent_storage_options=options)
    assert cross.mark is Mark.CROSS
    assert "bucket" in cross.text
