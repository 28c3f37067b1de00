"""All ranks take, skip, void and keep the same versions, whatever happens to one of them."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import tierckpt
import tierckpt.coordination.agreement
from tests.support.training import Attached, Job, Place, attach, make_job, rank, train
from tierckpt.coordination import SharedBallots


def taken(attached: Attached) -> dict[str, list[int]]:
    """Versions by their outcome, as one rank reports it."""
    return {
        "sealed": attached.versions("sealed", "memory"),
        "committed": sorted(attached.versions("committed", "local")),
        "skipped": attached.versions("skipped", "local"),
        "failed": attached.versions("failed", "local"),
    }


# --- busy levels ---------------------------------------------------------------------------------


def with_a_stopped_agent(when_busy: str, place: Place) -> tuple[Any, ...]:
    """Rank 1's agent is stopped: with "skip" for eight steps, with "wait" until a rank waits."""
    job = make_job()
    node = f"node{rank()}"
    attached = attach(job, place, local_every_steps=1, slots=3, when_busy=when_busy, node=node)
    attached.ckpt.save(now=True)
    pid = attached.ckpt._agent.pid
    assert pid is not None
    waited = []
    wait = attached.ckpt._agent.wait

    def wait_and_wake(*args: Any, **more: Any) -> bool:
        waited.append(attached.ckpt.version)
        os.kill(pid, signal.SIGCONT)
        return wait(*args, **more)

    attached.ckpt._agent.wait = wait_and_wake  # type: ignore[method-assign]
    if rank() == 1:
        os.kill(pid, signal.SIGSTOP)
    train(job, attached.ckpt, range(8))
    os.kill(pid, signal.SIGCONT)
    attached.ckpt._agent.wait = wait  # type: ignore[method-assign]
    attached.ckpt.close()
    return taken(attached), waited


def test_a_slow_agent_on_one_rank_makes_all_ranks_skip(
    ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    place = Place.under(tmp_path, shm_dir)
    (one, waited), (other, _) = ranks(2).run(with_a_stopped_agent, "skip", place)
    for told in ("committed", "skipped", "failed"):
        assert one[told] == other[told]
    assert waited == []
    assert one["committed"][-1] == 8, "the final one"
    assert len(one["committed"]) < 8
    assert one["skipped"]
    assert one["failed"] == []


def test_or_all_ranks_wait_if_the_user_prefers_that(
    ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    place = Place.under(tmp_path, shm_dir)
    (one, waited), (other, too) = ranks(2).run(with_a_stopped_agent, "wait", place)
    assert one == other
    assert waited == too != []
    assert one["skipped"] == one["failed"] == []
    assert one["committed"] == list(range(0, 9))


# --- time ----------------------------------------------------------------------------------------


class Clock:
    """Replaces the time module: monotonic time as this rank's clock shows it."""

    perf_counter = staticmethod(time.perf_counter)
    time = staticmethod(time.time)

    def __init__(self) -> None:
        self.now = 1e6 * rank()

    def monotonic(self) -> float:
        return self.now


def with_skewed_clocks(place: Place) -> tuple[list[int], list[int]]:
    """Rank 1's clock shows another time, and runs three times as fast."""
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock()
        patch.setattr(tierckpt.coordination.agreement, "time", clock)
        job = make_job()
        attached = attach(job, place, memory_every_steps=0, memory_every_seconds=30)
        for iteration in range(20):
            job.iterate(iteration)
            clock.now += 10 if rank() == 1 else 10 / 3
            attached.ckpt.step()
        attached.ckpt.close()
    return attached.versions("sealed", "memory"), attached.versions("skipped", "memory")


def test_intervals_in_seconds_are_agreed_on(ranks: Any, tmp_path: Path, shm_dir: Path) -> None:
    one, other = ranks(2).run(with_skewed_clocks, Place.under(tmp_path, shm_dir))
    assert one == other
    sealed, skipped = one
    # Due by the faster clock after three steps, known to all ranks one or two boundaries later.
    assert 4 <= len(sealed) <= 6
    assert all(3 <= b - a <= 5 for a, b in itertools.pairwise(sealed))
    assert skipped == []


# --- requests ------------------------------------------------------------------------------------


def saved_by(asker: int, place: Place) -> tuple[Any, ...]:
    job = make_job()
    attached = attach(job, place, memory_every_steps=0)
    train(job, attached.ckpt, range(3))
    if rank() == asker:
        attached.ckpt.save()
    train(job, attached.ckpt, range(3, 7))
    attached.ckpt.close()
    return taken(attached), [p.name.split(".")[0] for p in place.shards()]


def test_a_request_of_one_rank_is_taken_by_all_ranks(
    ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    place = Place.under(tmp_path, shm_dir)
    told = ranks(3).run(saved_by, 2, place)
    assert told[0][0] == told[1][0] == told[2][0]
    # Requested at the boundary of version 4, taken at the next.
    assert told[0][0]["sealed"] == told[0][0]["committed"] == [5]
    assert len(place.shards()) == 3


# --- failures of one rank ------------------------------------------------------------------------


def trained_past_a_failure(place: Place) -> tuple[Any, ...]:
    plain = make_job()
    expected = {}
    for iteration in range(7):
        plain.iterate(iteration)
        expected[iteration + 1] = plain.digest()

    job = make_job()
    attached = attach(job, place)
    course = train(job, attached.ckpt, range(3))
    job.iterate(3)  # version 3 fails on rank 1, is sealed on rank 0, and here the job crashes
    attached.ckpt.abandon()
    job = make_job(seed=2)
    second = attach(job, place)
    after_crash = second.ckpt.restore()
    was_sound = job.digest() == expected[after_crash.version]
    course.update(train(job, second.ckpt, range(after_crash, 7)))
    second.ckpt.close()
    return course == expected, after_crash.version, was_sound, taken(attached)


def test_a_snapshot_that_fails_on_one_rank_is_void_on_all(
    own_ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    fault = {"TIERCKPT_FAULTS": "eio@copy:version=3", "TIERCKPT_FAULTS_DIR": str(tmp_path)}
    place = Place.under(tmp_path, shm_dir)
    zero, one = own_ranks([{}, fault]).run(trained_past_a_failure, place)
    assert list(tmp_path.glob("eio_copy*")), "the fault fired"
    assert zero[:3] == one[:3] == (True, 2, True)
    assert zero[3]["sealed"] == [1, 2, 3]
    assert one[3]["sealed"] == [1, 2]


def told_of_a_failure(place: Place) -> tuple[Any, ...]:
    job = make_job()
    attached = attach(job, place)
    train(job, attached.ckpt, range(6))
    attached.ckpt.abandon()
    void = [(e.version, e.behind_since) for e in attached.said("void on all")]
    cause = [e.version for e in attached.said("injected")]
    return void, cause


def test_all_ranks_learn_of_a_failed_version(own_ranks: Any, tmp_path: Path, shm_dir: Path) -> None:
    fault = {"TIERCKPT_FAULTS": "eio@copy:version=3"}
    zero, one = own_ranks([{}, fault]).run(told_of_a_failure, Place.under(tmp_path, shm_dir))
    assert zero == ([(5, 2)], []) or zero == ([(3, 2)], [])
    assert one[1] == [3]
    assert one[0] == zero[0]


def no_thread_talks(nodes: int, place: Place) -> tuple[list[str], bool]:
    """Return the threads that launch the checkpointer's collectives during training, and whether
    votes were cast without any."""
    job: Job = make_job()
    attached = attach(job, place, node=f"node{rank() % nodes}")
    group = attached.ckpt.group
    launch = group.all_reduce_min
    threads: set[str] = set()

    def watched(values: list[int]) -> Any:
        threads.add(threading.current_thread().name)
        return launch(values)

    group.all_reduce_min = watched
    train(job, attached.ckpt, range(4))
    ballots = attached.ckpt._agreement._ballots
    shared = isinstance(ballots, SharedBallots) and ballots.turn == 4
    attached.ckpt.abandon()
    return sorted(threads), shared


@pytest.mark.parametrize(("nodes", "expected"), [(2, (["MainThread"], False)), (1, ([], True))])
def test_only_the_training_thread_launches_collectives(
    nodes: int, expected: tuple[list[str], bool], ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    """A group on one node launches none: it votes through shared memory."""
    for threads in ranks(2).run(no_thread_talks, nodes, Place.under(tmp_path, shm_dir)):
        assert threads == expected


# --- retention -----------------------------------------------------------------------------------


def kept(place: Place, shard: int) -> list[int]:
    """Versions of which this shard is on disk."""
    return [int(p.name[1:11]) for p in place.shards() if f".s{shard:05d}of" in p.name]


def with_commits_that_fail_on_rank_one(bad: list[int], place: Place) -> dict[str, Any]:
    """A version to disk at every step; those in `bad` do not reach it on rank 1."""
    with pytest.MonkeyPatch.context() as patch:
        faults = ";".join(f"enospc@agent:version={version},shard=1" for version in bad)
        patch.setenv("TIERCKPT_FAULTS", faults)
        job = make_job()
        # One agent for each rank: a node's agent is started by its first rank.
        # Without the replica check, which keeps a version of its own.
        alone = {"node": f"node{rank()}", "replicas": "off"}
        attached = attach(job, place, local_every_steps=1000, **alone)
        course = {}
        for version in range(1, 7):
            course.update(train(job, attached.ckpt, range(version - 1, version)))
            attached.ckpt.save(now=True)
        attached.ckpt.abandon()
    return {"course": course, "failed": attached.versions("failed", "local")}


@pytest.mark.parametrize(("bad", "left"), [([4, 5], [3, 6]), ([1, 2, 3, 4, 5, 6], [])])
def test_an_incomplete_version_does_not_count_in_retention(
    bad: list[int], left: list[int], ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    """Two versions that can be restored stay; those that never complete fill no other disk."""
    place = Place.under(tmp_path, shm_dir)
    zero, one = ranks(2).run(with_commits_that_fail_on_rank_one, bad, place)
    assert (zero["failed"], one["failed"]) == ([], bad)
    assert kept(place, 0) == kept(place, 1) == left


def resume(place: Place) -> int:
    """Resume from memory, and write one more version to disk."""
    job = make_job(seed=2)
    alone = {"node": f"node{rank()}", "replicas": "off"}
    attached = attach(job, place, local_every_steps=1000, **alone)
    restored = attached.ckpt.restore()
    train(job, attached.ckpt, range(restored, restored + 1))
    attached.ckpt.save(now=True)
    attached.ckpt.abandon()
    return restored.version


def test_an_incomplete_version_of_the_previous_run_does_not_fill_them_either(
    ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    place = Place.under(tmp_path, shm_dir)
    ranks(2).run(with_commits_that_fail_on_rank_one, [], place)
    assert kept(place, 0) == [5, 6]
    for file in Path(place.path).glob("v0000000006.*.s00001of*"):
        file.unlink()  # as if rank 1 had been killed before it was written
    assert ranks(2).run(resume, place) == [6, 6]
    assert kept(place, 0) == kept(place, 1) == [5, 7]


# --- what is removed -----------------------------------------------------------------------------


# --- state without a version ---------------------------------------------------------------------


def close_one_step_apart(place: Place) -> tuple[dict[int, str], list[str]]:
    """Rank 1 was interrupted after its backward pass, and rank 0 after its step."""
    job = make_job()
    attached = attach(job, place, local_every_steps=100)
    digests = train(job, attached.ckpt, range(3))
    job.loss(3).backward()
    if rank() == 0:
        job.optimizers[0].step()
    attached.ckpt.close()
    return digests, [event.message for event in attached.events if event.name == "notice"]


def find_again(place: Place) -> tuple[int, str]:
    job = make_job(seed=2)
    attached = attach(job, place)
    restored = attached.ckpt.restore()
    digest = job.digest()
    attached.ckpt.close()
    return restored.version, digest


def test_shards_of_different_steps_are_no_version(
    ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    place = Place.under(tmp_path, shm_dir)
    told = ranks(2).run(close_one_step_apart, place)
    for _, notices in told:
        assert any("rank 0 has made 4 steps, and rank 1 3" in text for text in notices)
    found = ranks(2).run(find_again, place)
    assert found == [(3, digests[3]) for digests, _ in told]
