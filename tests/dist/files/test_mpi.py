"""Files of ranks under mpirun, without torch: a rank is killed, a node is lost, ranks are fewer."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.rank_pool import LAUNCHERS, MPIRUN

PROGRAM = """
import os, sys
from pathlib import Path
from mpi4py import MPI
from tierckpt.files import Files

rank, root = MPI.COMM_WORLD.Get_rank(), Path(sys.argv[1])
steps, ranks = int(sys.argv[2]), eval(sys.argv[3])
node = f"n{rank}"
(root / node / "shm").mkdir(parents=True, exist_ok=True)

def content(step, rank):
    return b"%d of %d|" % (step, rank) * (100_000 + rank)

levels = {"local_every_steps": 1, "when_busy": "wait", "peer_redundancy": "partner"}
if MPI.COMM_WORLD.Get_size() == 1:
    levels.pop("peer_redundancy")
with Files(
    root / "{node}" / "ckpts", job_id="job", group=MPI.COMM_WORLD, node=node,
    shm_dir=root / node / "shm", **levels
) as files:
    found = files.restore(ranks=ranks)
    start = found.number if found else 0
    for name, path in (found or {}).items():
        assert Path(path).read_bytes() == content(start, int(name[-1])), name
    of = found and (sorted(found), found.levels)
    print(f"rank {rank} begins at {start} with {of}", flush=True)
    for step in range(start + 1, steps + 1):
        with files.version(step) as f:
            Path(f.route(f"fields/x{rank}")).write_bytes(content(step, rank))
        assert f.complete
assert "torch" not in sys.modules
"""

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def mpirun(tmp_path: Path, launchable: Callable[[str], None]) -> Run:
    """Runs a program on ranks of mpirun."""
    launchable(MPIRUN)

    def run(
        program: str, *arguments: object, size: int = 2, **environment: Any
    ) -> subprocess.CompletedProcess[str]:
        script = tmp_path / "program.py"
        script.write_text(program)
        return subprocess.run(
            [*LAUNCHERS[MPIRUN].format(size=size).split(), sys.executable, str(script)]
            + [str(each) for each in arguments],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, **environment},
            timeout=240,
        )

    return run


def test_a_killed_rank_a_lost_node_and_fewer_ranks(mpirun: Run, tmp_path: Path) -> None:
    faults = {
        "TIERCKPT_FAULTS": "kill@files.seal:rank=1,version=3",
        "TIERCKPT_FAULTS_DIR": tmp_path,
    }
    killed = mpirun(PROGRAM, tmp_path, 5, None, **{k: str(v) for k, v in faults.items()})
    assert killed.returncode != 0
    assert list(tmp_path.glob("kill*")), "the fault fired"

    again = mpirun(PROGRAM, tmp_path, 4, None)
    assert again.returncode == 0, again.stderr
    for rank in range(2):
        text = f"rank {rank} begins at 2 with (['fields/x{rank}'], {{'memory': 2}})"
        assert text in again.stdout, again.stdout + again.stderr

    for path in sorted((tmp_path / "n1").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    fewer = mpirun(PROGRAM, tmp_path, 6, [0, 1], size=1)
    assert fewer.returncode == 0, fewer.stderr
    text = "rank 0 begins at 4 with (['fields/x0', 'fields/x1'], {'local': 1, 'peer': 1})"
    assert text in fewer.stdout, fewer.stdout + fewer.stderr


def test_ranks_that_disagree_lose_the_version(mpirun: Run, tmp_path: Path) -> None:
    program = """
import sys
from pathlib import Path
from mpi4py import MPI
from tierckpt.files import Files

rank = MPI.COMM_WORLD.Get_rank()
with Files(sys.argv[1] + "/ckpts", group=MPI.COMM_WORLD, shm_dir=sys.argv[1]) as files:
    with files.version("a") as f:
        Path(f.route("x")).write_bytes(b"good")
    for name in ("b", f"c{rank}"):
        with files.version(name) as f:
            path = f.route("x")
            if rank == 0 or name != "b":
                Path(path).write_bytes(b"bad")
        assert f.complete is False
with Files(sys.argv[1] + "/ckpts", group=MPI.COMM_WORLD, shm_dir=sys.argv[1]) as files:
    found = files.restore()
    print(f"{rank} {found.name} {Path(found['x']).read_text()}", flush=True)
"""
    (tmp_path / "shm").mkdir()
    done = mpirun(program, tmp_path / "shm")
    assert done.returncode == 0, done.stderr
    assert all(text in done.stdout for text in ("0 a good", "1 a good")), done.stdout
    assert "rank 1 could not complete it: 'x' was routed and not written" in done.stderr
    assert "all ranks must give a version the same name" in done.stderr
