"""The nodes of one job share a directory; another job there is refused on all of its ranks."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.training import Place, attach, make_job, rank
from tests.support.warm_python.servers import PYTHON, THROUGHOUT
from tierckpt.errors import ConfigError
from tierckpt.storage import (
    CLAIM_PREFIX,
    DirectoryClaim,
    JobBusyError,
    JobDirectory,
    claims,
    job_id_of,
)

NODES = "ab"


def refusal(place: Place) -> tuple[str, list[str]]:
    """The notices, and the claims that exist then."""
    claims.HERE_SECONDS = 0.2
    with pytest.raises(JobBusyError) as caught:
        attach(make_job(), place, node=NODES[rank()], local_every_steps=1)
    return str(caught.value), marks(Path(place.path))


def stay(place: Place) -> list[str]:
    attached = attach(make_job(), place, node=NODES[rank()], local_every_steps=1)
    there = marks(Path(place.path))
    attached.ckpt.close()
    return there


def marks(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir() if p.name.startswith(CLAIM_PREFIX))


def test_a_job_of_two_nodes_is_refused_where_another_one_is(
    ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    place = Place.under(tmp_path, shm_dir)
    other = DirectoryClaim(place.path, "0ther", 0, lambda *_: None)
    assert other.stake() == ""
    pool = ranks(len(NODES))
    try:
        told = pool.run(refusal, place)
    finally:
        other.release()
    assert [text for text, _ in told] == [told[0][0]] * len(NODES)
    assert "another job uses" in told[0][0]
    assert [there for _, there in told] == [[f"{CLAIM_PREFIX}0ther.0"]] * len(NODES)
    for there in pool.run(stay, place):
        tokens = {name.split(".")[2] for name in there}
        assert (len(there), len(tokens)) == (len(NODES), 1)
    assert marks(Path(place.path)) == []


LAUNCH = """
import os
from tierckpt.storage.claims import launch_of, process_mark
launch = launch_of(os.environ)
print(launch.name, launch.starters == (process_mark("self"), process_mark(os.getppid())))
"""


def test_torchruns_name_and_agent_are_found(tmp_path: Path) -> None:
    """The real one; what follows from them is proved in tests/store, with claims made up."""
    script = tmp_path / "script.py"
    script.write_text(LAUNCH)
    command = [PYTHON, "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=1"]
    command += ["--rdzv-id=same", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    told = subprocess.check_output([*command, str(script)], env={**os.environ, **THROUGHOUT})
    assert told == b"torchrun same True\n"


# --- what is in the way in memory ----------------------------------------------------------------

OBSTACLES: dict[str, Callable[[Path], object]] = {
    "a directory": lambda path: path.mkdir(),
    "a link to itself": lambda path: path.symlink_to(path),
}


def told(place: Place) -> str:
    with pytest.raises(ConfigError) as caught:
        attach(make_job(), place, local_every_steps=1)
    return str(caught.value)


@pytest.mark.parametrize(
    ("obstacle", "name"), [("a directory", "r00001.0"), ("a link to itself", "r00001.lock")]
)
def test_an_obstacle_of_one_rank_is_reported_by_all(
    obstacle: str, name: str, ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    place = Place.under(tmp_path, shm_dir)
    job = JobDirectory.at(place.shm, job_id_of(place.path))
    job.create()
    OBSTACLES[obstacle](job.path / name)
    texts = ranks(2).run(told, place)
    assert texts[0] == texts[1]
    assert texts[0].startswith("rank 1 cannot use its place")
    assert str(job.path / name) in texts[0]
    assert [path.name for path in job.path.iterdir()] == [name]
