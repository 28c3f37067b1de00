"""Records of rollbacks on the nodes of a job: a node that lacks it gets it at the next start."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.star_group import StarGroup, run_star
from tierckpt.cli import run_command
from tierckpt.testing import TinyJob

NODES = ("n0", "n1")


def start(group: StarGroup, folder: str, shm_dir: str, rollback_to: int, steps: int) -> int:
    """Restore, train up to `steps`, and be killed; returns the restored version."""
    job = TinyJob(
        f"{folder}/{{node}}",
        seed=rollback_to,
        group=group,
        node=NODES[group.rank],
        shm_dir=shm_dir,
        local_keep=20,
        agent="inline",
        rollback_to=rollback_to,
    )
    began = int(job.restore())
    if steps > began:
        job.run(steps)
    job.checkpointer.wait()
    group.barrier()
    job.checkpointer.abandon()
    return began


def test_a_node_without_the_record_gets_it(tmp_path: Path, shm_dir: Path) -> None:
    """As a spare that came later, or a node of ranks killed before they stored it."""
    job = str(tmp_path), str(shm_dir)
    records = [tmp_path / node / "rollback.json" for node in NODES]
    requests = [tmp_path / node / "rollback-request.json" for node in NODES]

    def began(rollback_to: int, steps: int) -> list[int]:
        return [each.value for each in run_star(len(NODES), start, *job, rollback_to, steps)]

    assert began(0, 6) == [0, 0]
    assert run_command(["rollback", str(tmp_path / "n1"), "3"]) == 0
    request = requests[1].read_bytes()
    assert began(0, 5) == [3, 3]
    assert [each.exists() for each in (*records, *requests)] == [True, True, False, False]
    requests[1].write_bytes(request)
    records[1].unlink()
    assert began(0, 7) == [5, 5], "the other node has the record"
    assert [each.exists() for each in (*records, *requests)] == [True, True, False, False]
    records[0].unlink()
    assert began(0, 8) == [7, 7], "this one has it now"
    assert len({each.read_bytes() for each in records}) == 1
    assert json.loads(records[0].read_bytes().splitlines()[0])["version"] == 3


def test_the_setting_counts_once_on_nodes_that_came_later(tmp_path: Path, shm_dir: Path) -> None:
    job = str(tmp_path), str(shm_dir)
    records = [tmp_path / node / "rollback.json" for node in NODES]

    def began(rollback_to: int, steps: int) -> list[int]:
        return [each.value for each in run_star(len(NODES), start, *job, rollback_to, steps)]

    assert began(0, 6) == [0, 0]
    assert began(3, 5) == [3, 3]
    for lost in records:
        lost.unlink()
        assert began(3, 5) == [5, 5]
