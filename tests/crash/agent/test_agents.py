"""Agents of a job of two nodes, with all levels on, die in mid-flush and mid-exchange.

The training continues, and the next commit starts another agent. It flushes the version that was
being flushed. The version that was being protected is reported as lost, and later ones are
protected.
"""

from __future__ import annotations

import shutil

import pytest

from tests.support.crash.launcher import PATIENCE_SECONDS, Job, Life, Process
from tests.support.crash.scenario import RANKS, STEPS
from tierckpt.storage import LocalStore
from tierckpt.storage.persistent import PersistentStore

EARLIEST, FLUSHED, VICTIM = 4, 16, 1

# A file a node.
SHARD_WRITTEN = "file:op=open,target=s00001-00001.shards"


@pytest.fixture
def job(job: Job) -> Job:
    """Nodes with a disk each, protected by each other, and a persistent store for v16 and the last
    version."""
    job.settings.update(
        path=str(job.folder / "{node}" / "ckpts"),
        local_keep=1,
        peer_redundancy="partner",
        peer_interface="lo",
        persistent_path=str(job.folder / "shared"),
        persistent_every_steps=FLUSHED,
        persistent_every_seconds=0,
        persistent_storage_options={"shared_writes": False},
        when_busy="wait",
    )
    return job


def lose(job: Job, *nodes: int) -> None:
    """Remove the nodes' disks, and the memory of all, as if all machines were switched off."""
    job.reboot()
    for node in nodes:
        shutil.rmtree(job.folder / f"node{node}")


def place(job: Job) -> PersistentStore:
    return PersistentStore(str(job.folder / "shared"))


def flushed(job: Job) -> list[int]:
    return [name.id.version for name in place(job).versions()]


def start(job: Job, rule: str, version: int, **settings: object) -> Life:
    """A run stopped, or with one gate left, when the rule has fired for `version`: it still
    has training to do then, however slow the agents are."""
    steps = range(version + 1, STEPS)
    gates = {f"before {step}": step for step in steps}
    life = job.start({VICTIM: rule}, gates=gates, settings=settings).waiting(f"before {steps[0]}")
    disks = [LocalStore(job.folder / f"node{rank}" / "ckpts") for rank in range(RANKS)]
    job.wait_for(
        lambda: all(version in [k.id.version for k in disk.keys()] for disk in disks),  # noqa: SIM118
        f"v{version} on both disks",
    )
    for step in steps[:-1]:
        if job.fired(VICTIM, rule):
            break
        life.open(f"before {step}").waiting(f"before {step + 1}")
    job.wait_fired(VICTIM, rule)
    return life


def resume(life: Life) -> None:
    """Run to the end, without another stop."""
    for gate in life.scenario.gates:
        life.open(gate)
    assert life.until_over().survived


def live_on_after_a_kill(job: Job, rule: str, version: int) -> None:
    """The agent is dead before the training continues to its end."""
    life = start(job, rule, version)
    (mark,) = job.scenario.marks(VICTIM).iterdir()
    job.wait_for(mark.read_text, "the agent's number")
    assert Process(int(mark.read_text())).ended(PATIENCE_SECONDS)
    resume(life)


def said(job: Job, rank: int, event: str, level: str | None = None) -> list[tuple[int, str]]:
    wanted = {"event": event} | ({} if level is None else {"level": level})
    return [(x["version"], x["message"]) for x in job.journal(rank, **wanted)]


def protected(job: Job, rank: int) -> list[int]:
    return [version for version, _ in said(job, rank, "committed", "peer")]


def check_that_it_was_replaced(job: Job) -> None:
    """The victim's agent was replaced once; no process of either is left."""
    texts = [text for kind in ("notice", "failed") for _, text in said(job, VICTIM, kind)]
    assert any("agent ended unexpectedly" in text for text in texts), texts
    job.agents_end()


def check_that_nothing_is_left(job: Job) -> None:
    """No unfinished file on any level; the place is free for the next job."""
    assert place(job).incomplete() == []
    assert not list((job.folder / "shared").glob("lease.*"))
    assert not list((job.folder / "shared").rglob(".*"))
    for rank in range(RANKS):
        assert not list(job.folder.glob(f"node{rank}/ckpts/.*.tmp"))


def test_an_agent_killed_in_mid_flush_leaves_it_to_the_next(job: Job) -> None:
    live_on_after_a_kill(job, f"kill@{SHARD_WRITTEN}", FLUSHED)
    check_that_it_was_replaced(job)
    assert flushed(job) == [FLUSHED, STEPS]
    for rank in range(RANKS):
        assert [v for v, _ in said(job, rank, "committed", "persistent")] == [FLUSHED, STEPS]
        assert said(job, rank, "failed", "persistent") == []
    check_that_nothing_is_left(job)
    store = place(job)
    assert store.retire(store.versions()[-1])
    lose(job, *range(RANKS))
    resumed = job.live()
    assert resumed.resumed()["levels"] == {"persistent": RANKS}
    assert resumed.start == FLUSHED
    job.ended_as_undisturbed()


def test_an_agent_killed_in_mid_exchange_costs_that_version_there(job: Job) -> None:
    live_on_after_a_kill(job, "kill@peer:op=send", EARLIEST)
    check_that_it_was_replaced(job)
    lost = [v for v, text in said(job, VICTIM, "failed", "peer") if "ended unexpectedly" in text]
    assert lost, "the one under way, and those that waited"
    assert not set(lost) & set(protected(job, VICTIM))
    assert all(protected(job, rank)[-1] == STEPS for rank in range(RANKS))
    assert flushed(job)[-1] == STEPS, "the other levels do not suffer"
    check_that_nothing_is_left(job)
    lose(job, VICTIM)
    resumed = job.live()
    assert resumed.resumed()["levels"] == {"local": 1, "peer": 1}
    assert resumed.start == STEPS
    job.ended_as_undisturbed()


def test_a_full_persistent_place_costs_that_version_there(job: Job) -> None:
    rule = f"enospc@{SHARD_WRITTEN}"
    assert job.live({VICTIM: rule}).survived
    assert job.fired(VICTIM, rule)
    ((version, text),) = said(job, VICTIM, "failed", "persistent")
    assert version == FLUSHED
    assert "No space left on device" in text
    assert "training continues" in text
    assert flushed(job) == [STEPS]
    check_that_nothing_is_left(job)
    for rank in range(RANKS):
        assert protected(job, rank)[-1] == STEPS, "the levels before it do not suffer"
    job.ended_as_undisturbed()
