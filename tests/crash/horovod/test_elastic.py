"""Elastic Horovod loses processes, hosts and memory, and gets new hosts; every bit is compared."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.crash.elastic_launcher import ElasticJob, Line, Moment
from tests.support.crash.launcher import ROOT, quiet_environment
from tests.support.horovod_here import horovod_missing
from tests.support.thorough import points
from tests.support.warm_python.servers import PYTHON
from tierckpt.storage import LocalStore
from tierckpt.storage.persistent import PersistentStore

pytestmark = pytest.mark.skipif(bool(horovod_missing()), reason=horovod_missing())

STEPS = 20
EPOCH_SAMPLES, EPOCH_STEPS = 64, 8
MakeJob = Callable[..., ElasticJob]
Run = tuple[dict[Moment, dict[str, str]], dict[tuple[int, int], str]]
"""A job's states and losses."""

# (place, step, rank); each starts a new run of the job. Epochs end after 8 and 16 steps.
KILLS: dict[str, list[tuple[str, int, int]]] = {
    "rank 1 first": [
        ("backward", 3, 1),
        ("synchronized", 6, 0),
        ("updated", 8, 1),
        ("commit", 12, 0),
    ],
    "rank 0 first": [
        ("commit", 3, 1),
        ("loading", -1, 0),  # the survivor, while it recovers from that loss
        ("backward", 9, 0),
        ("epoch", 15, 1),
        ("synchronized", 18, 1),
    ],
}

MAY_RESUME = {"updated": {0}, "commit": {0, 1}, "epoch": {1}}
"""By place, if not {-1, 0}: the number of steps that may be repeated, beyond those since the killed
rank's start."""


@pytest.fixture
def make_job(tmp_path: Path, shm_dir: Path) -> Iterator[MakeJob]:
    jobs = []

    def make(**how: str) -> ElasticJob:
        jobs.append(ElasticJob(tmp_path, shm_dir, **how))
        return jobs[-1]

    yield make
    for job in jobs:
        job.kill_everything()
        print(job.output())  # shown with a test that failed


@pytest.fixture(scope="module")
def undisturbed(shm_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The states and losses of the undisturbed job."""
    shm_dir = shm_root / "undisturbed"
    shm_dir.mkdir()
    job = ElasticJob(tmp_path_factory.mktemp("undisturbed"), shm_dir)
    try:
        job.start(min_np=2, steps=STEPS).until_over()
        job.left_nothing()
    finally:
        job.kill_everything()
        shutil.rmtree(shm_dir)
    assert len(job.losses()) == 2 * STEPS
    return job.course(), job.losses()


@pytest.mark.parametrize("who", points(KILLS, "rank 1 first"))
def test_workers_are_killed(who: str, make_job: MakeJob, undisturbed: Run) -> None:
    """Again and again, at every point of a step; another worker takes over, and the result is the
    same."""
    job = make_job()
    kills = KILLS[who]
    job.start(min_np=2, spares=len(kills), steps=STEPS, rules=[rule(*kill) for kill in kills])
    job.until_over()
    assert job.fired() == len(kills), job.output()
    assert (job.course(), job.losses()) == undisturbed
    resumed = [x for x in job.journal(began=True) if x["step"] > 0]
    assert {x["size"] for x in resumed} == {2}
    assert {tuple(x["levels"].items()) for x in resumed} == {(("memory", 2),)}
    lives = [x for x in resumed if x["rank"] == 0]
    started = [kill for kill in kills if kill[0] != "loading"]  # a worker killed there never starts
    for (place, step, _), life in zip(started, lives, strict=True):
        # At most the commit in progress is lost, and none once the next step has changed anything.
        assert life["step"] - step in MAY_RESUME.get(place, {-1, 0}), (place, step)
        if (place, step) == ("updated", 8):
            assert life["epoch"] == 1, "a commit of values alone was lost"
    job.left_nothing()


def test_a_worker_is_asked_to_end(make_job: MakeJob, undisturbed: Run) -> None:
    """SIGTERM, as when its node is taken away, ends that worker and not the job."""
    job = make_job()
    job.start(min_np=2, spares=1, steps=STEPS, gates={"6": "taken"})
    stand_at(job, "taken")
    (asked,) = job.journal(waiting="taken", rank=1)
    os.kill(asked["pid"], signal.SIGTERM)
    job.open("taken")
    job.until_over()
    assert (job.course(), job.losses()) == undisturbed
    lives = job.journal(began=True)[2:]
    assert [(x["size"], x["levels"]) for x in lives] == [(2, {"memory": 2})] * 2
    assert asked["pid"] not in {x["pid"] for x in lives}
    assert {x["step"] for x in lives} <= {5, 6}
    job.left_nothing()


def test_everybody_is_killed(make_job: MakeJob, undisturbed: Run, tmp_path: Path) -> None:
    """The launcher, too; the new job finds memory, the second time only the disk, and the third
    time only the shared level."""
    shared = PersistentStore(str(tmp_path / "persistent"))
    often = {"persistent_every_steps": "4", "persistent_every_seconds": "0"}
    job = make_job(persistent_path=shared.url, **often)
    gates = {"6": "one", "14": "two", "16": "three", "19": "four"}
    job.start(min_np=2, steps=STEPS, gates=gates)
    stand_at(job, "one")
    job.kill()
    slots = [p.name for p in job.shm_dir.rglob("r*")]
    assert all(re.fullmatch(r"r0000[01]\.([012]|lock)", name) for name in slots), slots
    job.open("one")

    job.start(min_np=2, steps=STEPS, gates=gates)
    stand_at(job, "two")
    assert began(job) in (("memory", 5), ("memory", 6))
    store = LocalStore(job.path)
    job.wait_for(lambda: complete_on_disk(store) >= 8, "a version on disk")
    job.kill()
    job.lose_memory()
    newest = complete_on_disk(store)
    job.open("two")

    job.start(min_np=2, steps=STEPS, gates=gates)
    stand_at(job, "three")
    assert began(job) == ("local", steps_of(newest))
    job.wait_for(lambda: complete_on_disk(store) >= 16, "the next version on disk")
    job.open("three")
    stand_at(job, "four")  # the boundaries up to there agreed that it is complete: it is sent on
    job.wait_for(lambda: newest_of(shared) >= 8, "a version on the persistent level")
    job.kill()
    job.lose_memory()
    shutil.rmtree(job.path)
    newest = newest_of(shared)
    job.open("four")

    job.start(min_np=2, steps=STEPS, gates=gates).until_over()
    assert began(job) == ("persistent", steps_of(newest))
    assert (job.course(), job.losses()) == undisturbed
    job.left_nothing()


def test_hosts_come_and_go(make_job: MakeJob) -> None:
    """A script without calls for checkpoints: a worker dies and is not replaced, a host joins, and
    leaves.

    No sample of the epoch is left out or repeated, by Horovod's sampler and by ours.
    """
    job = make_job(hvd="horovod_ckpt.torch")
    job.start(min_np=1, steps=STEPS, rules=[rule("backward", 3, 1)], joins=[8, 10])
    wait_for_hosts(job, 8)
    newcomer = job.add_host()
    wait_for_hosts(job, 10)
    job.remove_host(newcomer)
    job.until_over()
    assert job.fired() == 1

    lives = job.journal(began=True, rank=0)
    assert [x["size"] for x in lives] == [2, 1, 2, 1]
    _, alone, together, again = lives
    assert (alone["levels"], alone["step"] in (2, 3)) == ({"memory": 2}, True)
    # No rank failed: the live state is carried on, though ranks have new numbers.
    # One rank is notified with the commit of step 8, and all know it at the next one at the latest.
    assert [(x["levels"], x["step"] in (at, at + 1)) for x, at in ((together, 8), (again, 10))] == [
        (None, True)
    ] * 2
    lines = job.journal()
    for life in (alone, together, again):
        committed = [x for x in lines[: lines.index(life)] if "commit" in x and x["rank"] == 0]
        assert life["digests"] == next(
            x["digests"] for x in reversed(committed) if x["step"] == life["step"]
        )
    (joined,) = job.journal(began=True, rank=1, step=together["step"])
    assert shared_by_ranks(joined) == shared_by_ranks(together)
    survivor = together["pid"]
    assert [x["size"] for x in job.journal(reset=True, pid=survivor)] == [1, 2, 1]

    began_alone = lines.index(alone)
    before = [x for x in lines[:began_alone] if "loss" in x and x["step"] <= alone["step"]]
    after = [x for x in lines[began_alone:] if "loss" in x]
    # Every step once on every rank of that time.
    assert [x["step"] for x in after if x["rank"] == 0] == list(range(alone["step"] + 1, STEPS + 1))
    shared = range(together["step"] + 1, again["step"] + 1)
    assert [x["step"] for x in after if x["rank"] == 1] == list(shared)
    epoch = [x for x in (*before, *after) if x["epoch"] == 0]
    assert {(x["step"] > alone["step"], x["size"]) for x in epoch} >= {(False, 2), (True, 1)}
    for sampler in ("indices", "dealt"):
        seen = [i for x in epoch for i in x[sampler]]
        assert sorted(seen) == list(range(EPOCH_SAMPLES)), sampler
    job.left_nothing()


def test_memory_is_lost_with_its_machine(make_job: MakeJob) -> None:
    """No version is complete where the others can reach it: they continue from their live state."""
    job = make_job()
    job.start(min_np=2, spares=1, steps=8, rules=[rule("backward", 5, 1)], machines=True)
    job.until_over()
    assert job.fired() == 1
    (before,) = job.journal(commit="commit", rank=0, step=5)
    after = job.journal(began=True, step=5)
    assert [x["size"] for x in after] == [2, 2]
    assert {tuple(shared_by_ranks(x).items()) for x in after} == {
        tuple(shared_by_ranks(before).items())
    }
    assert any("no level has a complete version" in x["message"] for x in job.events("notice"))
    assert len(job.journal(done=True, step=8)) == 2


def test_commits_of_one_process(tmp_path: Path, shm_dir: Path) -> None:
    """One process, without a launcher: the refused cases, and the meaning of a commit."""
    done = subprocess.run(
        [PYTHON, "-m", "tests.support.crash.elastic_alone", str(tmp_path), str(shm_dir)],
        cwd=ROOT,
        env=quiet_environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_rollback_is_made_once_and_never_by_a_restore_of_the_script(
    tmp_path: Path, shm_dir: Path
) -> None:
    """One process, killed four times; from the second start on the variable is set."""
    wish = {"TIERCKPT_ROLLBACK_TO": "3", "TIERCKPT_AGENT_LINGER_SECONDS": "0"}
    for batches, more, started in ((6, {}, 0), (0, wish, 3), (2, wish, 3), (1, wish, 5)):
        done = subprocess.run(
            [
                *(PYTHON, "-m", "tests.support.crash.elastic_rollback"),
                *(str(tmp_path), str(shm_dir), str(batches)),
            ],
            cwd=ROOT,
            env={**quiet_environment(), **more},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert f"begun {started}, restored {started + batches}\n" in done.stdout, done.stderr


# --- details -------------------------------------------------------------------------------------


def rule(place: str, step: int, rank: int) -> str:
    at = f"step={step}," if step >= 0 else ""
    return f"kill@elastic:place={place},{at}rank={rank}"


def stand_at(job: ElasticJob, gate: str) -> None:
    job.wait_for(
        lambda: {x["rank"] for x in job.journal(waiting=gate)} == {0, 1}, f"both at gate {gate}"
    )


def wait_for_hosts(job: ElasticJob, step: int) -> None:
    job.wait_for(lambda: job.journal(waiting="hosts", step=step), f"rank 0 after {step} steps")


def began(job: ElasticJob) -> tuple[str, int]:
    """Level and step from which both ranks of the newest run continued."""
    one, other = job.journal(began=True)[-2:]
    assert (one["levels"], one["step"]) == (other["levels"], other["step"])
    ((level, shards),) = one["levels"].items()
    assert shards == one["size"] == 2
    return level, one["step"]


def complete_on_disk(store: LocalStore) -> int:
    """The newest version that both ranks have on disk."""
    keys = store.keys()
    held = [{k.id.version for k in keys if k.shard == rank} for rank in (0, 1)]
    return max(set.intersection(*held), default=0)


def newest_of(store: PersistentStore) -> int:
    """The newest version on the persistent level; nothing makes its folder before the first."""
    try:
        return max((name.id.version for name in store.versions()), default=0)
    except FileNotFoundError:
        return 0


def steps_of(version: int) -> int:
    """The number of steps of a version: a commit that ends an epoch is a version, too."""
    return version - sum(version > ended for ended in (EPOCH_STEPS, 2 * EPOCH_STEPS + 1))


def shared_by_ranks(line: Line) -> dict[str, str]:
    """The state equal on all ranks; not the generators, nor the modules' own state."""
    own = ("python", "numpy", "torch", "buffer", "metered")
    return {k: v for k, v in line["digests"].items() if not k.startswith(own)}
