"""A rank that skips optimizer steps alone: no rank waits, and no version mixes iterations."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Any

import pytest

import tierckpt
from tests.support.rank_pool import GLOO, HOROVODRUN
from tests.support.training import (
    HorovodJob,
    Job,
    Net,
    Place,
    import_adapter,
    make_horovod_job,
    make_job,
    rank,
    under_horovod,
)
from tierckpt.coordination import agreement

ITERATIONS = 11
FIRST = 3
"""The first iteration with a skipped step; v3 is the last version before it."""
ALONE = [(FIRST,), (FIRST, 4), (FIRST, 4, 5), (FIRST, 5), (FIRST, 8)]


class Small(Net):
    """A model of one layer."""

    def __init__(self) -> None:
        super().__init__(layers=1)


def new_job(seed: int = 1) -> Job:
    return make_horovod_job(Small, seed=seed) if under_horovod() else make_job(Small, seed=seed)


def attach(job: Job, place: Place, events: list[tierckpt.Event], **settings: Any) -> Any:
    adapter = import_adapter() if under_horovod() else __import__("ddp_ckpt")
    settings = {"agent": "inline", "local_every_steps": 1, "replicas": "warn every 2", **settings}
    where = {"path": place.path, "shm_dir": place.shm}
    return adapter.Checkpointer(
        job.model, job.optimizers, **where, **settings, on_event=events.append
    )


def iterate(job: Job, iteration: int, skips: bool) -> None:
    """Skip as `if isfinite(loss): optimizer.step()`."""
    if isinstance(job, HorovodJob):
        job.zero_grad()
        job.backward(iteration)
        (optimizer,) = job.optimizers
        optimizer.synchronize()  # type: ignore[attr-defined]
        if not skips:
            with optimizer.skip_synchronize():  # type: ignore[attr-defined]
                optimizer.step()
        return
    job.optimizer.zero_grad()
    job.loss(iteration).backward()
    if not skips:
        job.optimizer.step()


def skipping(
    place: Place, cases: list[tuple[int, ...]], together: bool, **settings: Any
) -> list[dict[str, Any]]:
    """In each case rank 1, or all ranks `together`, skip the steps of these iterations."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "VOTE_PATIENCE_SECONDS", 0.5)
        patch.setattr(agreement, "VOTE_PATIENCE_APART_SECONDS", 0.5)
        found = []
        for number, skips in enumerate(cases):
            where = Place(f"{place.path}/{number}", place.shm)
            found.append(_skipping(where, skips if together or rank() == 1 else (), **settings))
        return found


def _skipping(place: Place, skips: tuple[int, ...], **settings: Any) -> dict[str, Any]:
    if settings.pop("nodes", False):
        settings["node"] = f"node{rank()}"
    events: list[tierckpt.Event] = []
    job = new_job()
    ckpt = attach(job, place, events, **settings)
    digests: dict[int, str] = {}
    for iteration in range(ITERATIONS):
        iterate(job, iteration, iteration in skips)
        if settings.get("boundary") != "forward":
            ckpt.step()
        digests.setdefault(ckpt._live.steps_made, job.digest())
        if "node" in settings and iteration == ITERATIONS - 2:
            ckpt.save(now=True)
            with contextlib.suppress(tierckpt.PinError):  # it may have been retired
                ckpt.unpin(1)
    ckpt.close()
    again = new_job(seed=2)
    other = attach(again, place, [], **settings)
    restored = other.restore()
    exact = again.digest() == digests.get(restored.version)
    other.abandon()
    loud = [e.message for e in events if e.name == "drifted" and e.severity >= logging.ERROR]
    return {"loud": loud, "version": restored.version, "exact": exact}


@pytest.mark.parametrize(("kind", "nodes"), [(GLOO, False), (HOROVODRUN, True)])
def test_a_rank_that_skips_alone_keeps_nobody(
    kind: str, nodes: bool, ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    place = Place.under(tmp_path, shm_dir)
    told = ranks(2, kind).run(skipping, place, ALONE, False, nodes=nodes, timeout_seconds=90)
    for skips, *both in zip(ALONE, *told, strict=True):
        assert both[0]["version"] == both[1]["version"] <= FIRST, skips
        assert all(each["exact"] for each in both), skips
        assert both[0]["loud"], skips
        assert not both[1]["loud"], "rank 0 says it"
        text = both[0]["loud"][-1]
        assert "No further version is taken" in text
        assert "all_reduce the value that decides" in text
        if skips == (FIRST, 4):
            who = "some rank has" if nodes else "rank 1 has"
            assert f"rank 0 is at v5 in iteration 5, and {who} not come to the boundary" in text


def test_also_where_the_forward_pass_is_the_boundary(
    ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    place, cases = Place.under(tmp_path, shm_dir), [(FIRST, 4)]
    told = ranks(2).run(
        skipping, place, cases, False, nodes=True, boundary="forward", timeout_seconds=90
    )
    for rank_, ((each,),) in enumerate(zip(told, strict=True)):
        assert each["version"] <= FIRST
        assert each["exact"]
        assert bool(each["loud"]) == (rank_ == 0)


def test_ranks_that_skip_the_same_steps_lose_nothing(
    ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    """As a GradScaler does, and loops that accumulate gradients; also from the first step on."""
    place, cases = Place.under(tmp_path, shm_dir), [(0, 1), (FIRST, 4, 8)]
    pool = ranks(2, HOROVODRUN)
    told = pool.run(skipping, place, cases, True, nodes=True, timeout_seconds=90)
    for each in told:
        for skips, found in zip(cases, each, strict=True):
            expected = {"loud": [], "version": ITERATIONS - len(skips), "exact": True}
            assert found == expected, skips


def test_skipped_steps_lose_nothing_where_training_waits_for_a_busy_level(
    ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    place, cases = Place.under(tmp_path, shm_dir), [(FIRST,), (FIRST, 4)]
    told = ranks(2).run(skipping, place, cases, False, when_busy="wait", timeout_seconds=90)
    for each in (case for cases in told for case in cases):
        assert each["version"] <= FIRST
        assert each["exact"]


def test_the_first_step_may_be_skipped_alone(ranks: Any, tmp_path: Path, shm_dir: Path) -> None:
    """A run starts with a collective, which all ranks must join."""
    place = Place.under(tmp_path, shm_dir)
    for (each,) in ranks(2).run(skipping, place, [(0,)], False, timeout_seconds=90):
        assert each["version"] <= 1
