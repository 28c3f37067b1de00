"""An interrupt (Ctrl-C, a bad sample) that meets ranks on both sides of a boundary."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from tests.support.rank_pool import GLOO, HOROVODRUN
from tests.support.training import Place, attach, make_horovod_job, make_job, rank, under_horovod

STEPS = 5


class Interrupted:
    """State that takes some time, so that Ctrl-C interrupts it on one rank."""

    is_due = False

    def state_dict(self) -> dict[str, int]:
        if self.is_due:
            self.is_due = False
            raise KeyboardInterrupt
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def cut(place: Place, behind: int, end: str, inside: bool) -> dict[str, Any]:
    """All ranks have made the same steps, and only rank `behind` has not passed the last boundary,
    or is inside it."""

    def make(seed: int) -> Any:
        return make_horovod_job(seed=seed) if under_horovod() else make_job(seed=seed)

    job = make(1)
    attached = attach(job, place, local_every_steps=1, local_every_seconds=0, when_busy="wait")
    slow = Interrupted()
    attached.ckpt.register("slow", slow, per_rank=True)
    for iteration in range(STEPS):
        job.iterate(iteration)
        slow.is_due = inside and rank() == behind and iteration == STEPS - 1
        if inside or iteration < STEPS - 1 or rank() != behind:
            with contextlib.suppress(KeyboardInterrupt):
                attached.ckpt.step()
    if end == "close":
        attached.ckpt.close()
    else:
        attached.ckpt.save(now=True)
        attached.ckpt.abandon()
    again = make(2)
    ckpt = attach(again, place).ckpt
    ckpt.register("slow", Interrupted(), per_rank=True)
    restored = ckpt.restore()
    same = again.digest() == job.digest()
    ckpt.abandon()
    return {"restored": restored.version, "same": same}


@pytest.mark.parametrize(
    ("launcher", "behind", "inside", "end"),
    [
        (GLOO, 0, False, "save"),
        (GLOO, 1, True, "close"),
        (HOROVODRUN, 1, False, "close"),
        (HOROVODRUN, 1, True, "save"),
    ],
)
def test_ranks_on_both_sides_of_it_end_with_the_newest_version(
    launcher: str,
    behind: int,
    inside: bool,
    end: str,
    ranks: Any,
    tmp_path: Path,
    shm_dir: Path,
) -> None:
    place = Place.under(tmp_path, shm_dir)
    for told in ranks(2, launcher).run(cut, place, behind, end, inside):
        assert told == {"restored": STEPS, "same": True}
