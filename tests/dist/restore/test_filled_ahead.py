"""Ranks fill new tensors from all shards that they see, while others still verify them."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.training import (
    WIDTH,
    Place,
    attach,
    crash_after,
    make_job,
    rank,
    restored_into,
)
from tierckpt.format import Piece
from tierckpt.restore import Part, TensorPreallocator, verification

STEPS = 4


class Wide(nn.Module):
    """With one tensor that has a part on every rank."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(WIDTH, 256), nn.Tanh(), nn.Linear(256, 256), nn.Linear(256, 3)]
        self.body = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor, use_branch: bool = False) -> torch.Tensor:
        return self.body(x)


def leave_behind(place: Place) -> dict[int, str]:
    settings = {"local_every_steps": 1, "local_keep": 2, "when_busy": "wait"}
    job = make_job(Wide)
    return crash_after(job, attach(job, place, **settings), STEPS)


def come_back(place: Place) -> dict[str, Any]:
    ready: dict[int, int] = {}
    has = TensorPreallocator.has

    def note(new: TensorPreallocator, shard: int, piece: Piece) -> bool:
        there = has(new, shard, piece)
        ready[shard] = ready.get(shard, 0) + there
        return there

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TensorPreallocator, "has", note)
        job = make_job(Wide, seed=2)
        attached = attach(job, place, memory_every_steps=0)
        told = restored_into(job, attached)
        attached.ckpt.abandon()
    return {**told, "ready": ready, "rank": rank()}


def come_back_with_a_slow_share(place: Place) -> dict[str, Any]:
    """This rank's own share is read only after the other rank's share was filled in."""
    the_others = threading.Event()
    seen, sound = verification._seen_of_others, verification.Reads.sound

    def note(share: verification.ShareRead) -> Iterator[Part]:
        yield from seen(share)
        the_others.set()

    def late(reads: verification.Reads) -> Iterator[Part]:
        assert the_others.wait(120), "what others read waits for what this rank reads"
        yield from sound(reads)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verification, "_seen_of_others", note)
        patch.setattr(verification.Reads, "sound", late)
        return come_back(place)


@pytest.mark.parametrize(
    ("level", "now", "life"),
    [
        ("memory", 3, come_back),
        ("local", 1, come_back),
        ("local", 2, come_back_with_a_slow_share),
    ],
)
def test_new_optimizer_state_is_in_place_when_all_is_verified(
    level: str, now: int, life: Any, ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    place = Place.under(tmp_path, shm_dir)
    left = ranks(2).run(leave_behind, place)
    if level == "local":
        shutil.rmtree(next(shm_dir.iterdir()))
    for told in ranks(now).run(life, place):
        assert told["restored"] == (STEPS, {level: 2})
        if now == 2:
            assert told["digest"] == left[told["rank"]][STEPS]
        if told["rank"] < 2:  # a third rank reads nothing, and knows no header before it loads
            assert min(told["ready"][shard] for shard in (0, 1)) > 0, "its own share and the other"


def test_a_tensor_that_another_rank_finds_damaged_is_not_kept(
    ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    """Rank 0 has already filled its new tensors, also from rank 1's shards."""
    place = Place.under(tmp_path, shm_dir)
    left = ranks(2).run(leave_behind, place)
    shutil.rmtree(next(shm_dir.iterdir()))
    newest = place.shards()[-1]
    assert newest.name.startswith(f"v{STEPS:010d}"), newest
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    for told in ranks(2).run(come_back, place):
        assert told["restored"] == (STEPS - 1, {"local": 2})
        assert told["digest"] == left[told["rank"]][STEPS - 1]
        assert "differ from their checksum" in told["rejected"][0]
        assert min(told["ready"].values()) > 0
