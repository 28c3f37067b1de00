"""A case of each kind of the state matrix in jobs of two ranks: every tensor is split between them,
and is restored bit for bit.

Where DDP can, it reduces gradients of different data; otherwise both ranks do the same. A tensor
that fits into a unit of the layout goes to one rank whole, as all of these small tensors would, so
units are smaller here.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from itertools import chain, cycle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ddp_ckpt
import tierckpt
from tests.support.state_matrix.jobs import Case, Job
from tests.support.state_matrix.matrix import CASES, PRODUCT, TORCH_2_4_CANNOT
from tests.support.state_matrix.proof import Bench, restores_and_trains_on, seed_everything
from tierckpt.format import layout

RANKS = 2
UNIT_BYTES = 16

CUT_UP_IN_WAYS_OF_THEIR_OWN = (
    "channels_last",
    "column by column",
    "complex",
    "float8",
    "types",
    "lbfgs",
    "muon",
    "options of its own",
    "around another",
    "counter of its own",
    "odd shapes",
    "larger than a block",
    "largest norm",
    "outside the model",
    "several groups",
    "added while running",
    "frozen",
    "joins",
    "thrown away",
    "two optimizers",
    "generator",
    "average",
    "metrics",
    "scaler",
    "extra state",
)


def chosen() -> list[str]:
    """The first case of each kind for which layouts and ranks matter, and every sixth of the
    product."""
    kinds = chain(CUT_UP_IN_WAYS_OF_THEIR_OWN, ALIKE, NOT_BY_DDP)
    of_cases = dict.fromkeys(next(name for name in CASES if kind in name) for kind in kinds)
    return [*of_cases, *list(PRODUCT)[::6]]


ALIKE = {
    "lbfgs": "it takes decisions by the loss, which DDP does not reduce",
    "ReduceLROnPlateau": "so does it",
    "largest norm": "rows are scaled by the rank that looks them up",
    "scaler": "whether it steps is each rank's decision",
}
"""Cases with ranks that would diverge on different data, with or without checkpoints."""

NOT_BY_DDP = {
    "complex": "gloo reduces no complex numbers",
    "buffers of many types": "gloo broadcasts no flags",
    "float8": "nor numbers of eight bits",
    "outside the model": "it would not be reduced",
}


def says(reasons: dict[str, str], name: str) -> bool:
    return any(part in name for part in reasons)


@dataclass
class RanksBench(Bench):
    """One rank's."""

    by_ddp: bool = True
    alike: bool = False

    def make(self, case: Case, seed: int) -> Job:
        job = super().make(case, seed)
        if self.by_ddp:
            job.wrapper = DistributedDataParallel(job.model, find_unused_parameters=True)
        if not self.alike:
            seed_everything(1000 * seed + dist.get_rank())
        return job

    def attach(self, job: Job) -> tierckpt.Checkpointer:
        ckpt = super().attach(job)
        assert ckpt.group.size == RANKS
        return ckpt

    def lose_memory(self) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            for folder in self.shm.iterdir():
                shutil.rmtree(folder)
        dist.barrier()


def proved(name: str, path: Path, shm: Path, on_disk: bool) -> int:
    """Number of tensors in two parts."""
    by_ddp = not says(NOT_BY_DDP, name)
    alike = not by_ddp or says(ALIKE, name)
    bench = RanksBench(path, shm, on_disk, ddp_ckpt.Checkpointer, RANKS, by_ddp=by_ddp, alike=alike)
    cut: set[str] = set()
    plan_layout = layout.plan_layout

    def noted(*args: Any) -> layout.Layout:
        made = plan_layout(*args)
        cut.update(piece.spec.name for piece in made.pieces if not piece.whole)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "UNIT_BYTES", UNIT_BYTES)
        patch.setattr("tierckpt.snapshot.copy_plan.plan_layout", noted)
        restores_and_trains_on((CASES | PRODUCT)[name], bench)
    return len(cut)


@pytest.mark.parametrize(("name", "on_disk"), list(zip(chosen(), cycle([False, True]))))
def test_two_ranks_restore_and_train_on_bit_for_bit(
    name: str, on_disk: bool, ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    if name in TORCH_2_4_CANNOT and torch.__version__.startswith("2.4."):
        pytest.skip(f"torch 2.4's {name.split()[1]} {TORCH_2_4_CANNOT[name]}")
    told = ranks(RANKS).run(proved, name, tmp_path, shm_dir, on_disk)
    assert all(parts > 0 for parts in told), "some tensor is not one rank's alone"
