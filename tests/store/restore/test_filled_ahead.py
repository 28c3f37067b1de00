"""New tensors are filled while a version is still being verified, and dropped if it is damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tierckpt.format import Piece
from tierckpt.restore import TensorPreallocator, loader, shards
from tierckpt.storage import JobDirectory
from tierckpt.testing import TinyJob

STEPS = 3
WIDTH = 512  # a square of float32 is two blocks


def wide() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(12, WIDTH),
        torch.nn.Linear(WIDTH, WIDTH),
        torch.nn.ReLU(),
        torch.nn.Linear(WIDTH, 4),
    )


@pytest.fixture
def saved_work(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of pieces that the loader found in place already. Every block is a run."""
    monkeypatch.setattr(shards, "RUN_BYTES", 1)
    found: list[str] = []
    has = TensorPreallocator.has

    def note(new: TensorPreallocator, shard: int, piece: Piece) -> bool:
        if there := has(new, shard, piece):
            found.append(piece.spec.name)
        return there

    monkeypatch.setattr(TensorPreallocator, "has", note)
    return found


@pytest.fixture
def settings(shm_dir: Path) -> dict[str, Any]:
    return {"shm_dir": shm_dir, "job_id": "job", "agent": "inline", "local_keep": 2}


@pytest.fixture
def prints(tmp_path: Path, settings: dict[str, Any]) -> dict[int, str]:
    """Versions 2 and 3 on disk and in memory, left by a job of a dead process."""
    found: dict[int, str] = {}

    def note(job: TinyJob) -> None:
        found[job.iteration] = job.fingerprint()

    job = TinyJob(tmp_path / "ckpts", model=wide(), on_step=note, **settings)
    job.run(STEPS)
    job.checkpointer.save(now=True)
    job.checkpointer.abandon()
    return found


def come_back(path: Path, settings: dict[str, Any]) -> tuple[int, dict[str, int], str]:
    with TinyJob(path, seed=7, model=wide(), **settings) as job:
        restored = job.restore()
        return restored.version, restored.levels, job.fingerprint()


def forget_memory(shm_dir: Path) -> None:
    for slot in JobDirectory.at(shm_dir, "job").segments():
        slot.unlink()


LARGE = ["optimizer/1.weight/exp_avg", "optimizer/1.weight/exp_avg_sq"]


@pytest.mark.parametrize("level", ["memory", "local"])
def test_new_optimizer_state_is_in_place_when_all_is_verified(
    level: str,
    saved_work: list[str],
    prints: dict[int, str],
    settings: dict[str, Any],
    tmp_path: Path,
    shm_dir: Path,
) -> None:
    if level == "local":
        forget_memory(shm_dir)
    assert come_back(tmp_path / "ckpts", settings) == (STEPS, {level: 1}, prints[STEPS])
    assert sorted(saved_work) == LARGE


def test_values_filled_from_a_damaged_version_are_not_taken_for_the_next(
    saved_work: list[str],
    prints: dict[int, str],
    settings: dict[str, Any],
    tmp_path: Path,
    shm_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The damage is in the last block: all blocks before it had been filled."""
    forget_memory(shm_dir)
    (file,) = (tmp_path / "ckpts").glob(f"v{STEPS:010d}.*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    filled: list[dict[int, int]] = []
    """The time when each attempt starts, by the attempt before it."""
    start = TensorPreallocator.start

    def note(new: TensorPreallocator, wanted: bool) -> None:
        filled.append(dict(new._filled))
        start(new, wanted)

    monkeypatch.setattr(TensorPreallocator, "start", note)
    come = come_back(tmp_path / "ckpts", settings)
    assert come == (STEPS - 1, {"local": 1}, prints[STEPS - 1])
    assert filled[1][0] > 0, "of the damaged one"
    assert sorted(saved_work) == LARGE, "of the other one, filled anew"


def test_trouble_with_filling_is_not_the_restores(
    saved_work: list[str],
    prints: dict[int, str],
    settings: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The failure stays on this rank: the loader does all the work itself."""
    asked: list[int] = []

    class Failing(loader.PieceWriter):
        def take(self, shard: int, offset: int, window: memoryview) -> None:
            asked.append(offset)
            if len(asked) > 1:
                raise RuntimeError("nothing fits")
            super().take(shard, offset, window)

    plain = loader.PieceWriter

    def writer(place_of: Any) -> loader.PieceWriter:  # the loader's own one works
        is_ahead = isinstance(place_of.__self__, loader.TensorPreallocator)
        return (Failing if is_ahead else plain)(place_of)

    monkeypatch.setattr(loader, "PieceWriter", writer)
    assert come_back(tmp_path / "ckpts", settings) == (STEPS, {"memory": 1}, prints[STEPS])
    assert len(asked) == 2
    assert saved_work == []
