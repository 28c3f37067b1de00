"""Any rank may receive the request to end; all ranks end at the same boundary, with one version."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ddp_ckpt
from tests.support.rank_pool import HOROVODRUN
from tests.support.training import Job, Place, attach, make_horovod_job, make_job, rank, sgd

DURABLE = {"local_every_steps": 1000}
"""Without a halt, no version would go to disk."""
STATUS = 75
TOLD_AT = 5
"""Steps that are done when a rank receives the signal."""
LAST = TOLD_AT + 2
"""The last step: the rank votes after its current step, and all know after the next one."""


@contextmanager
def handlers_kept() -> Iterator[None]:
    """After a signal its handler stays until the process ends; these ranks live longer."""
    before = signal.getsignal(signal.SIGUSR1)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def tell_oneself(iteration: int) -> None:
    if rank() == 1 and iteration == TOLD_AT:
        os.kill(os.getpid(), signal.SIGUSR1)


def restored(place: Place, job: Job, **settings: Any) -> tuple[int, dict[str, int], str]:
    attached = attach(job, place, **settings)
    found = attached.ckpt.restore()
    digest = job.digest()
    attached.ckpt.close() if settings else attached.ckpt.abandon()
    return int(found), found.levels, digest


# --- a loop that asks ----------------------------------------------------------------------------


def asking(place: Place, settings: dict[str, Any]) -> dict[str, Any]:
    """An ordinary loop, which makes one more step after it was told to end."""
    with handlers_kept():
        job = make_job()
        attached = attach(job, place, **settings)
        answers = []
        for iteration in range(10):
            job.iterate(iteration)
            tell_oneself(iteration)
            attached.ckpt.step()
            answers.append(attached.ckpt.should_exit())
            if attached.ckpt.version == LAST + 1:
                break
        told = [e.message for e in attached.said("the job ends early")]
        digest = job.digest()
        attached.ckpt.close()
    at = (attached.ckpt.version, attached.versions("committed", "local"))
    again = restored(place, make_job(seed=2), **settings)
    return {"answers": answers, "at": at, "told": told, "again": again, "digest": digest}


def test_should_exit_says_the_same_on_all_ranks(ranks: Any, tmp_path: Path, shm_dir: Path) -> None:
    place = Place.under(tmp_path, shm_dir)
    zero, one = ranks(2).run(asking, place, DURABLE)
    for told in (zero, one):
        assert told["answers"] == [False] * (LAST - 1) + [True, True]
        # At once, without the script; and the effects of the script's own end.
        assert told["at"] == (LAST + 1, [LAST, LAST + 1])
        assert told["again"] == (LAST + 1, {"local": 2}, told["digest"])
        assert len(told["told"]) == 1
        assert "a rank received a signal to stop" in told["told"][0]
        assert "should_exit() is true from now on" in told["told"][0]
    assert place.segments() == []


def test_of_a_job_without_a_level_on_disk_the_last_version_goes_there_nevertheless(
    ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    """Memory stays as it is, for a successor on these nodes."""
    place = Place.under(tmp_path, shm_dir)
    for told in ranks(2).run(asking, place, {}):
        assert told["at"] == (LAST + 1, [LAST])
        assert told["again"] == (LAST + 1, {"memory": 2}, told["digest"])
    assert place.segments() != []


# --- a loop that does not ------------------------------------------------------------------------


def never_asking(place: Place) -> dict[str, Any]:
    with handlers_kept():
        job = make_horovod_job()
        attached = attach(job, place, requeue_exit_status=STATUS, **DURABLE)
        ended = None
        try:
            for iteration in range(10):
                job.iterate(iteration)
                tell_oneself(iteration)
                attached.ckpt.step()
        except SystemExit as end:
            ended = end.code
        digest = job.digest()
    again = restored(place, make_horovod_job(seed=2), **DURABLE)
    return {"ended": ended, "at": attached.ckpt.version, "again": again, "digest": digest}


def test_a_loop_that_never_asks_is_ended_on_all_ranks_at_once(
    ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    """Under Horovod; tests/crash/halt has such a loop under DDP."""
    place = Place.under(tmp_path, shm_dir)
    for told in ranks(2, HOROVODRUN).run(never_asking, place):
        assert (told["ended"], told["at"]) == (STATUS, LAST)
        assert told["again"] == (LAST, {"local": 2}, told["digest"])
    assert place.segments() == []


def wrapped(place: Place) -> dict[str, Any]:
    """Only the forward pass is a boundary; the loop has no line for Tierckpt."""
    with handlers_kept():
        job = make_job(optimizer=sgd)
        optimizer = ddp_ckpt.wrap(
            job.optimizer,
            job.model,
            path=place.path,
            shm_dir=place.shm,
            close_at_exit=False,
            **DURABLE,
        )
        ended, course = None, {}
        try:
            for iteration in range(10):
                job.iterate(iteration)
                course[iteration + 1] = job.digest()
                tell_oneself(iteration)
        except SystemExit as end:
            ended = end.code
        at = optimizer.checkpointer.version
    again = restored(place, make_job(optimizer=sgd, seed=2), **DURABLE)
    return {"ended": ended, "at": at, "again": again, "expected": (at, {"local": 2}, course[at])}


def test_a_script_that_cannot_be_touched_is_ended_too(
    ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    zero, one = ranks(2).run(wrapped, Place.under(tmp_path, shm_dir))
    for told in (zero, one):
        assert told["ended"] == 0
        assert told["at"] == zero["at"]
        assert told["again"] == told["expected"]
