"""Ranks move between nodes from run to run; files that they leave on a disk are still removed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.training import Place, attach, make_job, rank, restored_into, train
from tierckpt.storage import LocalStore

STEPS, LATER = 3, 9
KEEP = 2


def one_life(place: Place, nodes: list[str], steps: range) -> dict[str, Any]:
    """Restore, train with a version to disk at every step, and end as after a crash."""
    job = make_job(seed=1 + steps.start)
    attached = attach(
        job,
        place,
        node=nodes[rank()],
        peer_redundancy="partner",
        peer_interface="lo",
        memory_every_steps=1,
        local_every_steps=1,
        local_keep=KEEP,
        when_busy="wait",
    )
    told = restored_into(job, attached)
    for step in steps:
        train(job, attached.ckpt, [step])
        attached.ckpt.wait()  # so that the next vote can report it
        attached.ckpt._agent.wait(None, everything=True)
    attached.ckpt.close()
    store = LocalStore(attached.ckpt.config.directory)
    told["mine"] = {key for keys in (store.keys(), store.parities()) for key in keys}
    told["newest"] = job.digest()
    return told


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (["a", "a", "b", "b"], ["a", "b"]),  # fewer, so rank 0's old shard 2 of 4 is on b
        (["a", "b"], ["b", "a"]),  # as many, distributed differently
    ],
)
def test_nothing_of_the_previous_run_stays_when_it_is_no_longer_needed(
    first: list[str], then: list[str], ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    place = Place(str(tmp_path / "{node}" / "ckpts"), str(shm_dir))
    before = ranks(len(first)).run(one_life, place, first, range(STEPS))
    after = ranks(len(then)).run(one_life, place, then, range(STEPS, LATER))
    assert [told["restored"][0] for told in after] == [STEPS] * len(then)
    assert all(told["mine"] for told in before)
    for number, told in enumerate(after):
        old = {str(key) for key in told["mine"] if key.id.generation < 2}
        assert not old, f"on node {then[number]}"
        assert {key.shard for key in told["mine"]} == {number}
