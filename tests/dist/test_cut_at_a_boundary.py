"""An interrupt (Ctrl-C, a bad sample) that meets ranks on both sides of a boundary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.dist.rankpool import HOROVODRUN
from tests.dist.training import Place, attach, make_horovod_job, make_job, rank, under_horovod

STEPS = 5


def cut(place: Place, behind: int, end: str) -> dict[str, Any]:
    """All have made the same steps, and only rank `behind` has not passed the last boundary."""

    def make(seed: int) -> Any:
        return make_horovod_job(seed=seed) if under_horovod() else make_job(seed=seed)

    job = make(1)
    attached = attach(job, place, local_every_steps=1, local_every_seconds=0, when_busy="wait")
    for iteration in range(STEPS):
        job.iterate(iteration)
        if iteration < STEPS - 1 or rank() != behind:
            attached.ckpt.step()
    if end == "close":
        attached.ckpt.close()
    else:
        attached.ckpt.save(now=True)
        attached.ckpt.abandon()
    again = make(2)
    ckpt = attach(again, place).ckpt
    restored = ckpt.restore()
    same = again.digest() == job.digest()
    ckpt.abandon()
    return {"restored": restored.version, "same": same}


@pytest.mark.parametrize("end", ["close", "save"])
@pytest.mark.parametrize("behind", [0, 1])
@pytest.mark.parametrize("launcher", ["", HOROVODRUN], ids=["ddp", "horovod"])
def test_ranks_on_both_sides_of_it_end_with_the_newest_version(
    launcher: Any, behind: int, end: str, ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    place = Place.under(tmp_path, shm_dir)
    pool = ranks(2, launcher) if launcher else ranks(2)
    for told in pool.run(cut, place, behind, end):
        assert told == {"restored": STEPS, "same": True}
