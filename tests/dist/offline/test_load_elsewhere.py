"""Versions of several ranks, read by one process outside the job."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import tierckpt
from tests.dist.peer.test_peer_level import place_of, protected_at, settings
from tests.support import exact
from tests.support.training import Place, attach, make_job, train

STEPS, RANKS = 4, 3


def leave_behind(place: Place, scheme: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Each rank is a node, and the job ends as by a crash. Returns torch's states of model and
    optimizer."""
    job = make_job()
    attached = attach(job, place, **settings(scheme))
    train(job, attached.ckpt, range(STEPS))
    protected_at(STEPS, attached)
    attached.ckpt.abandon()
    return job.bare.state_dict(), job.optimizer.state_dict()


def images(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors in row-major order."""
    return {name: exact.image(tensor) for name, tensor in tensors.items()}


@pytest.mark.parametrize("lost", [(), (1,)])
def test_all_nodes_folders_make_the_whole(
    lost: tuple[int, ...],
    ranks: Any,
    tmp_path: Path,
    shm_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All nodes but a lost one suffice: its shard is rebuilt from the others' parity."""
    monkeypatch.setenv("TIERCKPT_SHM_DIR", str(tmp_path))  # nothing of the job is in memory here
    place = place_of(tmp_path, shm_dir)
    model, optimizer = ranks(RANKS).run(leave_behind, place, "xor")[0]
    for node in lost:
        shutil.rmtree(tmp_path / f"node{node}")
    saved = tierckpt.load(place.path)
    levels = {"local": RANKS - len(lost)} | ({"peer": len(lost)} if lost else {})
    assert (saved.version, saved.levels) == (STEPS, levels)
    state = saved.optimizers["optimizer"]["state"]
    assert images(saved.model) == images(model)
    assert {n: images(kept) for n, kept in state.items()} == {
        n: images(kept) for n, kept in optimizer["state"].items()
    }
    assert saved.optimizers["optimizer"]["param_groups"] == optimizer["param_groups"]
    assert all(isinstance(value, torch.Tensor) for value in saved.model.values())
    with pytest.raises(tierckpt.RestoreError, match="no version is complete and sound"):
        tierckpt.load(tmp_path / "node0" / "ckpts")
