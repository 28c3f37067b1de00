"""`extra` objects as large as the model (an average of it, a hook's residues): copied block by
block, like the rest, and in memory once."""

from __future__ import annotations

import os
import shutil
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tierckpt
from tests.support import exact
from tierckpt.format import BLOCK_BYTES, decode_header
from tierckpt.snapshot import snapshot
from tierckpt.state import TAG, Arena, EncodedTree
from tierckpt.testing import injected

NUMBER = 700_000
"""Elements; a whole number of blocks for no dtype."""


class Residues:
    """State of many dtypes and memory orders; `turn` changes all of its tensors."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.tensors = {
            "floats": torch.randn(NUMBER),
            "columns": torch.randn(500, 300).t(),
            "none": torch.empty(0),
            "one": torch.tensor(0.0),
            "halves": torch.randn(NUMBER).to(torch.bfloat16),
            "flags": torch.rand(NUMBER) > 0.5,
        }
        self.array = np.random.default_rng(seed).normal(size=(3, NUMBER // 10))

    def turn(self) -> None:
        for name, tensor in self.tensors.items():
            self.tensors[name] = ~tensor if tensor.dtype is torch.bool else -tensor
        self.array = self.array + 1

    def state_dict(self) -> dict[str, Any]:
        return {**self.tensors, "array": self.array, "columns of it": self.array.T}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.array = state["array"]
        assert np.array_equal(state["columns of it"], self.array.T)
        self.tensors = {name: state[name] for name in self.tensors}

    def image(self) -> Any:
        return exact.image({**self.tensors, "array": self.array})


class Run:
    """A training with such an object."""

    def __init__(self, tmp_path: Path, shm_dir: Path, seed: int = 0, **settings: Any) -> None:
        self.residues = Residues(seed)
        self.model = torch.nn.Linear(40, 40)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.events: list[tierckpt.Event] = []
        self.ckpt = tierckpt.Checkpointer(
            self.model,
            self.optimizer,
            extra={"residues": self.residues},
            path=tmp_path / "c",
            shm_dir=shm_dir,
            on_event=self.events.append,
            agent="inline",
            **{"local_every_steps": 1, "local_every_seconds": 0, "when_busy": "wait", **settings},
        )

    def iterate(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(3, 40)).square().sum().backward()
        self.optimizer.step()
        self.residues.turn()

    def steps(self, number: int) -> Run:
        for _ in range(number):
            self.iterate()
            self.ckpt.step()
        return self

    def failures(self) -> list[str]:
        return [e.text() for e in self.events if e.name == "failed"]


@pytest.fixture
def run(tmp_path: Path, shm_dir: Path) -> Iterator[Callable[..., Run]]:
    made: list[Run] = []

    def make(**settings: Any) -> Run:
        made.append(Run(tmp_path, shm_dir, seed=len(made), **settings))
        return made[-1]

    yield make
    for each in made:
        each.ckpt.abandon()


@pytest.mark.parametrize("level", ["memory", "local"])
def test_it_comes_back_bit_for_bit(level: str, run: Callable[..., Run], shm_dir: Path) -> None:
    first = run().steps(3)
    expected = first.residues.image()
    first.iterate()
    first.ckpt.wait()
    first.ckpt.abandon()
    if level == "local":
        shutil.rmtree(shm_dir / f"tierckpt-{os.getuid()}")
    again = run()
    assert again.residues.image() != expected
    restored = again.ckpt.restore()
    assert (restored.version, restored.levels) == (3, {level: 1})
    assert again.residues.image() == expected
    assert first.failures() == again.failures() == []


def test_no_thread_is_held_for_longer_than_a_block_takes(
    run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the copier, which blocks Python while it hashes, nor the training thread, which helps
    it in the barrier, has more work at once."""
    hashed: list[int] = []
    copied: list[int] = []
    digest, copy = snapshot.digest, EncodedTree.copy

    def counted_digest(data: Any) -> bytes:
        hashed.append(len(data))
        return digest(data)

    def counted_copy(self: EncodedTree, low: int, target: torch.Tensor) -> None:
        copied.append(target.numel())
        copy(self, low, target)

    monkeypatch.setattr(snapshot, "digest", counted_digest)
    monkeypatch.setattr(EncodedTree, "copy", counted_copy)
    job = run().steps(3)
    job.iterate()
    job.ckpt.wait()
    assert job.failures() == []
    volatile_bytes = sum(t.nbytes for t in job.residues.tensors.values())
    assert sum(copied) >= 3 * volatile_bytes
    assert sum(hashed) >= sum(copied)
    assert max(hashed) == max(copied) == BLOCK_BYTES


def test_files_are_made_of_such_blocks(run: Callable[..., Run], tmp_path: Path) -> None:
    run().steps(1).ckpt.wait()
    (file,) = (tmp_path / "c").glob("v*.safetensors")
    header = decode_header(file.read_bytes())
    assert max(header.block_bytes) == BLOCK_BYTES
    assert header.header_bytes + sum(header.block_bytes) == file.stat().st_size


def test_extra_state_is_copied_after_the_boundary_where_there_is_time(
    run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[str] = set()
    copy = EncodedTree.copy

    def noted(self: EncodedTree, low: int, target: torch.Tensor) -> None:
        threads.add(threading.current_thread().name)
        copy(self, low, target)

    monkeypatch.setattr(EncodedTree, "copy", noted)
    job = run().steps(1)
    job.iterate()
    threads.clear()
    job.ckpt.step()
    taken = job.ckpt._active.snapshot
    assert taken is not None
    taken.wait_done()
    assert (taken.sealed, taken.clock.barrier) == (True, 0.0)
    assert threads == {"tierckpt-copier"}


@pytest.fixture
def clones(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Any]]:
    """A function for every clone of the boundary: True while its memory is in use."""
    found: list[weakref.ref[Any]] = []

    def keep(self: Arena, tensor: torch.Tensor, path: str) -> dict[str, Any]:
        if tensor.dtype is not torch.float32 or tensor.numel() < NUMBER:
            return plain(self, tensor, path)
        memory = tensor.numpy().copy()
        found.append(weakref.ref(memory))
        self.tensors.append(torch.from_numpy(memory))
        return {TAG: "tensor", "v": len(self.tensors) - 1}

    plain = Arena.keep
    monkeypatch.setattr(Arena, "keep", keep)
    return found


def test_an_early_copy_is_freed_once_it_is_in_the_slot(
    run: Callable[..., Run], clones: list[weakref.ref[Any]]
) -> None:
    job = run()
    clones.clear()  # clones of the trial at attach
    job.steps(2)
    taken = job.ckpt._active.snapshot
    assert taken is not None
    taken.wait_done()
    assert taken.sealed
    assert [ref() is None for ref in clones] == [True, True]


@pytest.mark.parametrize("rules", ["eio@tree:version=2,block=3", "eio@refill:version=2"])
def test_so_it_does_when_the_version_fails(
    rules: str, run: Callable[..., Run], clones: list[weakref.ref[Any]]
) -> None:
    job = run()
    clones.clear()
    with injected(rules):
        job.steps(2)
        taken = job.ckpt._active.snapshot
        assert taken is not None
        taken.wait_done()
    assert taken.failed
    assert [ref() is None for ref in clones] == [True, True]
    job.steps(2)
    expected = job.residues.image()
    job.iterate()
    job.ckpt.abandon()
    again = run()
    assert again.ckpt.restore() == 4
    assert again.residues.image() == expected
