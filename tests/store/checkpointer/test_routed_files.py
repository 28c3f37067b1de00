"""Files beside a training state: a restart has tensors and files of the same boundary."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import tierckpt
from tierckpt.errors import TierckptError
from tierckpt.format import Manifest
from tierckpt.proof import state_of


class Job:
    """A tiny training with files that name their step."""

    def __init__(self, path: Path, shm_dir: Path, **settings: Any) -> None:
        self.model = torch.nn.Linear(3, 3)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        place: dict[str, Any] = {"path": path, "shm_dir": shm_dir, "agent": "inline", **settings}
        self.ckpt = tierckpt.Checkpointer(self.model, self.optimizer, **place)

    def step(self, **contents: bytes) -> None:
        self.model(torch.ones(3)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if contents:
            with self.ckpt.files() as f:
                for name, content in contents.items():
                    Path(f.route(f"a/{name}")).write_bytes(content)
        self.ckpt.step()

    def read(self) -> dict[str, bytes]:
        return {n: Path(p).read_bytes() for n, p in self.ckpt.restored_files.items()}


def test_they_stay_part_of_every_version_until_replaced(tmp_path: Path, shm_dir: Path) -> None:
    first = Job(tmp_path, shm_dir)
    first.ckpt.restore()
    assert first.read() == {}
    big = os.urandom(3_000_000)
    first.step(big=big, empty=b"")
    first.step()
    with pytest.raises(ZeroDivisionError):
        fails(first)
    assert not [path for path in shm_dir.rglob("half") if path.is_file()]
    first.step()
    weight = first.model.weight.detach().clone()
    first.ckpt.complete()
    first.ckpt.abandon()

    again = Job(tmp_path, shm_dir)
    assert again.ckpt.restore() == 3
    assert torch.equal(again.model.weight, weight)
    assert again.read() == {"a/big": big, "a/empty": b""}
    again.step()
    again.ckpt.close()

    third = Job(tmp_path, shm_dir)
    assert third.ckpt.restore() == 4
    third.step(other=b"1")
    third.ckpt.close()

    last = Job(tmp_path, shm_dir)
    assert last.ckpt.restore() == 5
    assert last.read() == {"a/other": b"1"}
    last.ckpt.close()
    assert not any(shm_dir.iterdir()), "no routed or restored file is left"


def test_a_path_is_void_after_the_block(tmp_path: Path, shm_dir: Path) -> None:
    job = Job(tmp_path, shm_dir)
    with job.ckpt.files() as f:
        path = Path(f.route("x"))
        path.write_bytes(b"1")
    with pytest.raises(FileNotFoundError):
        path.write_bytes(b"late")
    with pytest.raises(TierckptError, match="has ended"):
        f.route("y")
    job.ckpt.abandon()


def test_prove_compares_them(tmp_path: Path, shm_dir: Path) -> None:
    def of(content: bytes) -> str:
        path = tmp_path / content.hex()
        job = Job(path, shm_dir)
        job.step(x=content)
        job.ckpt.close()
        (shard,) = path.glob("*.safetensors")
        manifest = Manifest.decode(shard.with_suffix(".manifest").read_bytes())
        return state_of(memoryview(shard.read_bytes()), manifest)["file/a/x"]

    assert of(b"1") != of(b"2")


def fails(job: Job) -> None:
    with job.ckpt.files() as f:
        Path(f.route("half")).write_bytes(b"half")
        raise ZeroDivisionError


def test_a_file_that_was_not_written_is_refused_and_the_others_stay(
    tmp_path: Path, shm_dir: Path
) -> None:
    job = Job(tmp_path, shm_dir)
    job.step(x=b"1")
    with (
        pytest.raises(TierckptError, match="'y' was routed and not written"),
        job.ckpt.files() as f,
    ):
        f.route("y")
    job.step()
    job.ckpt.close()
    again = Job(tmp_path, shm_dir)
    again.ckpt.restore()
    assert again.read() == {"a/x": b"1"}
    again.ckpt.abandon()


def test_a_version_without_files_is_restored_as_ever(tmp_path: Path, shm_dir: Path) -> None:
    job = Job(tmp_path, shm_dir)
    job.step()
    job.ckpt.close()
    again = Job(tmp_path, shm_dir)
    with again.ckpt.files() as f:
        Path(f.route("mine")).write_bytes(b"before the restore")
    assert again.ckpt.restore() == 1
    assert again.read() == {}
    again.ckpt.abandon()
