"""A restore that fails in mid-run, and the script ignores it: the training continues."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tierckpt
from tests.support.training import Place, attach, make_job, train


def with_a_restore_that_fails(place: Place) -> dict[str, list[int]]:
    job = make_job()
    attached = attach(job, place, memory_every_steps=1, local_every_steps=0)
    train(job, attached.ckpt, range(6))
    with pytest.raises(tierckpt.RestoreError):
        attached.ckpt.restore(version=999)
    train(job, attached.ckpt, range(6, 20))
    attached.ckpt.complete()
    told = {name: attached.versions(name, "memory") for name in ("sealed", "failed", "skipped")}
    attached.ckpt.close()
    return told


def test_it_costs_no_version(ranks: Any, tmp_path: Path, shm_dir: Path) -> None:
    """The version being copied is not lost either: no optimizer had started its step."""
    place = Place.under(tmp_path, shm_dir)
    one, other = ranks(2).run(with_a_restore_that_fails, place)
    assert one == other
    assert one["sealed"] == list(range(1, 21))
    assert (one["failed"], one["skipped"]) == ([], [])
