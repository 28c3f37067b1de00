"""Forks and parts of versions on several ranks and nodes: all ranks do the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.support.star_group import StarGroup, run_star
from tierckpt.lineage import tree_of
from tierckpt.testing import TinyJob

STEPS = 5


def _job(group: StarGroup, path: str, shm_dir: str, **settings: Any) -> TinyJob:
    return TinyJob(
        path,
        group=group,
        node=f"n{group.rank % 2}",
        shm_dir=shm_dir,
        agent="inline",
        local_keep=2,
        **settings,
    )


def _train(group: StarGroup, path: str, shm_dir: str, steps: int, fork_from: str = "") -> list[Any]:
    job = _job(group, path, shm_dir, fork_from=fork_from)
    started = job.restore()
    at_start = job.fingerprint()
    job.run(steps)
    job.checkpointer.wait()
    group.barrier()
    job.checkpointer.abandon()
    return [int(started), started.forked_from, at_start, job.fingerprint()]


def _weights(group: StarGroup, path: str, shm_dir: str, source: str) -> list[Any]:
    """The result of a partial fork on one rank, with a layer of another shape."""
    torch.manual_seed(7)
    model = torch.nn.Sequential(
        torch.nn.Linear(12, 24),
        torch.nn.BatchNorm1d(24),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.2),
        torch.nn.Linear(24, 3),
    )
    job = _job(group, path, shm_dir, model=model)
    started = job.checkpointer.restore(fork_from=source, only="model", strict=False)
    report, weight = started.partial, model[0].weight.detach().clone()
    job.checkpointer.abandon()
    assert report is not None
    return [int(started), report.loaded, report.other_shape, weight.tolist()]


def test_a_fork_on_other_nodes_and_more_ranks_is_exact(tmp_path: Path, shm_dir: Path) -> None:
    source, fork = f"{tmp_path}/a/{{node}}", f"{tmp_path}/b/{{node}}"
    first = [r.value for r in run_star(2, _train, source, str(shm_dir), STEPS)]
    with_same = [r.value for r in run_star(2, _train, fork, str(shm_dir), 0, source)]
    assert [each[0] for each in with_same] == [STEPS, STEPS]
    assert [each[2] for each in with_same] == [each[3] for each in first]
    holds = [f.name for node in ("n0", "n1") for f in (tmp_path / "a" / node).glob("*.hold")]
    assert len(holds) == 2, "each node keeps its own shards"
    assert len(set(holds)) == 1
    longer = f"{tmp_path}/c/{{node}}"
    others = [r.value for r in run_star(3, _train, longer, str(shm_dir), STEPS + 2, source)]
    assert [each[0] for each in others] == [STEPS] * 3
    again = [r.value for r in run_star(3, _train, longer, str(shm_dir), 0, source)]
    assert [each[:2] for each in again] == [[STEPS + 2, ""]] * 3, (
        "its own version, not the source's"
    )
    assert [each[2] for each in again] == [each[3] for each in others]
    job = tree_of(source)
    assert [(f.child.path, f.child.held) for f in job.runs[0].forks] == [
        (f"{tmp_path}/b/{{node}}", True),
        (f"{tmp_path}/c/{{node}}", False),
    ]


def test_nodes_of_other_names_see_the_source_if_one_of_them_does(
    tmp_path: Path, shm_dir: Path
) -> None:
    source, fork = f"{tmp_path}/a/{{node}}", f"{tmp_path}/b/{{node}}"
    first = [r.value for r in run_star(2, _train, source, str(shm_dir), STEPS)]
    (tmp_path / "a" / "n0").rename(tmp_path / "a" / "x0")
    (tmp_path / "a" / "n1").rename(tmp_path / "a" / "x1")
    others = [r.value for r in run_star(2, _train, fork, str(shm_dir), STEPS + 3, source)]
    assert [each[2] for each in others] == [each[3] for each in first]
    assert len([*(tmp_path / "a").glob("x?/*.fork")]) == 2
    assert not [*(tmp_path / "a").glob("x?/*.hold")]
    one = f"{tmp_path}/only/{{node}}"
    run_star(1, _train, one, str(shm_dir), STEPS)
    again = [r.value for r in run_star(2, _train, f"{tmp_path}/d/{{node}}", str(shm_dir), 0, one)]
    assert [each[0] for each in again] == [STEPS] * 2, "n1 has no folder there"


def test_all_ranks_take_the_same_parts(tmp_path: Path, shm_dir: Path) -> None:
    source = f"{tmp_path}/a/{{node}}"
    run_star(2, _train, source, str(shm_dir), STEPS)
    found = [r.value for r in run_star(3, _weights, f"{tmp_path}/b/{{node}}", str(shm_dir), source)]
    assert found[0] == found[1] == found[2]
    started, loaded, other, _ = found[0]
    assert started == 0
    assert "0.weight" in loaded
    assert "1.running_mean" in loaded
    assert other == [
        "4.weight is float32[4, 24] in the source, 4.weight is float32[3, 24] here",
        "4.bias is float32[4] in the source, 4.bias is float32[3] here",
    ]
