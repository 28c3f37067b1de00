"""SIGKILL at points of a copy, of a commit, and at random ones: the course stays the same.

After each kill: the mark proves that it happened; the next run resumes no older version than
promised (see `Life.promised`), and no version that the killed rank never sealed; and all losses, in
every run, and the final state are those of the undisturbed job.

A few real deaths; the simulator has one at each call of the system.
"""

from __future__ import annotations

import random

import pytest

from tests.support.crash.launcher import Job
from tests.support.crash.scenario import PHASES, RANKS, STEPS
from tests.support.thorough import points

VERSION = 12
BLOCKS = 9
"""Number of blocks that a rank copies for a version, and of passes of the point `copy`."""

TRAINER_POINTS = {
    "barrier": "kill@barrier:version=12",
    "refill": "kill@refill:version=12",
    "copy first": "kill@copy:version=12,hit=1",
    "copy middle": f"kill@copy:version=12,hit={BLOCKS // 2}",
    "copy last": f"kill@copy:version=12,hit={BLOCKS}",
    "tree": "kill@tree:version=12",
    "seal": "kill@seal:version=12",
    "sealed": "kill@sealed:version=12",
}

BOTH = [f"{point}-{rank}" for point in TRAINER_POINTS for rank in range(RANKS)]
FEW = ["barrier-0", "copy middle-1"]


@pytest.mark.parametrize("where", points(BOTH, *FEW))
def test_a_trainer_is_killed(where: str, job: Job) -> None:
    point, _, number = where.rpartition("-")
    rank = int(number)
    if rank == 1:  # by turns, the smallest allowed number and the usual one
        job.settings.update(slots=2, local_every_steps=0)
    rule = TRAINER_POINTS[point]
    killed = job.live({rank: rule})
    assert job.fired(rank, rule)
    resumed = job.live()
    # At many barriers nothing is left to copy: the copier has sealed already.
    newest = VERSION if point in ("barrier", "sealed") else VERSION - 1
    assert max(killed.promised(), VERSION - 2) <= resumed.start <= newest
    assert resumed.resumed()["levels"] == {"memory": 2}
    job.ended_as_undisturbed()
    assert job.journal(rank, blocks=BLOCKS), [x for x in job.journal(rank) if "blocks" in x]


def test_an_agent_is_killed_and_later_the_machine(job: Job) -> None:
    """Before the manifest of v8 has its name, in the second commit."""
    rank, rule = 0, "kill@file:op=rename,hit=4"
    job.settings.update(when_busy="wait", local_keep=1)
    crash = "kill@script:step=22,phase=backward"  # the boundary of v20 has waited for v16
    life = job.live({rank: rule, 1 - rank: crash})
    assert job.fired(rank, rule)
    assert job.fired(1 - rank, crash), "the agent's death did not stop the training"
    on_disk = job.both_have(job.committed)
    assert on_disk >= 12, "the agent was restarted, and later versions were committed"
    job.reboot()
    resumed = job.live()
    assert resumed.resumed()["levels"] == {"local": 2}
    assert resumed.resumed()["rejected"] == []
    assert on_disk <= resumed.start <= life.passed(rank)
    job.ended_as_undisturbed()


@pytest.mark.parametrize("seed", points("012345", "0"))
def test_a_trainer_is_killed_somewhere_in_its_loop(seed: str, job: Job) -> None:
    dice = random.Random(int(seed))
    rank, step = dice.randrange(RANKS), dice.randrange(1, STEPS)
    rule = f"kill@script:step={step},phase={dice.choice(PHASES)}"
    job.settings["slots"] = dice.choice((2, 3))
    killed = job.live({rank: rule})
    assert job.fired(rank, rule)
    resumed = job.live()
    if job.settings["slots"] == 3:
        assert resumed.start >= killed.promised()
    assert resumed.start >= job.both_have(lambda r: job.sealed(r, killed.number))
    assert resumed.start <= step + 1
    job.ended_as_undisturbed()


@pytest.mark.parametrize("seed", points("0123", "0"))
def test_a_trainer_is_killed_at_some_moment(seed: str, job: Job) -> None:
    dice = random.Random(100 + int(seed))
    rank, step = dice.randrange(RANKS), dice.randrange(1, STEPS - 2)
    killed = job.start(gates={"end": STEPS})  # it never ends by itself
    job.wait_for(lambda: killed.passed(rank) >= step, f"step {step}")
    killed.processes[rank].ended(dice.uniform(0, 0.03))
    killed.kill(rank)
    killed.kill()
    resumed = job.live()
    assert killed.promised() <= resumed.start
    job.ended_as_undisturbed()
