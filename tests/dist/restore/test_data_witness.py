"""Other data on one rank after a restart: all ranks stop before their first step, or are warned."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import tierckpt
from tests.support.rank_pool import GLOO, HOROVODRUN
from tests.support.training import (
    WIDTH,
    Place,
    attach,
    make_horovod_job,
    make_job,
    rank,
    under_horovod,
)


class Shifted(Dataset[torch.Tensor]):
    """The same samples with another augmentation, if `shift` is another one."""

    def __init__(self, shift: float) -> None:
        self.shift = shift

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((WIDTH,), index / 24 + self.shift)


def resumed(place: Place, mode: str, boundary: str) -> dict[str, Any]:
    """Two steps, a restart with other data on rank 1, and the rest of the epoch."""
    told: dict[str, Any] = {"error": ""}
    for shift in (0.0, float(rank())):
        job = make_horovod_job() if under_horovod() else make_job()
        data: Any = tierckpt.ResumableLoader(DataLoader(Shifted(shift), 4, shuffle=True))
        settings = {"agent": "inline", "data_witness": mode, "boundary": boundary}
        attached = attach(job, place, extra_per_rank={"data": data}, **settings)
        restored = attached.ckpt.restore().version
        try:
            for number, rows in enumerate(data, data.start):
                for optimizer in job.optimizers:
                    optimizer.zero_grad()
                job.model(rows).square().mean().backward()
                for optimizer in job.optimizers:
                    optimizer.step()
                if boundary == "explicit":
                    attached.ckpt.step()
                if number == 3 and not restored:
                    break
        except tierckpt.RestoreError as error:
            told["error"] = str(error)
        finally:
            attached.ckpt.abandon()
        told |= {"restored": restored, "made": attached.ckpt.version - restored}
    warned = [e.message for e in attached.said("its data after the restore")]
    told["warned"] = [] if rank() else warned
    told["severity"] = {e.severity for e in attached.said("its data after")} or {logging.WARNING}
    return told


@pytest.mark.parametrize(
    ("mode", "boundary", "launcher"),
    [("error", "explicit", HOROVODRUN), ("warn", "forward", GLOO)],
)
def test_other_data_on_one_rank(
    mode: str, boundary: str, launcher: str, ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    place = Place.under(tmp_path, shm_dir)
    results = ranks(2, launcher).run(resumed, place, mode, boundary)
    for told in results:
        assert told["restored"] >= 2
        if mode == "warn":
            assert (told["error"], told["made"] > 0) == ("", True)
            continue
        assert told["made"] == 0
        assert told["error"].startswith(
            f"data on rank 1 of 2: its data after the restore of v{told['restored']} are not those "
            "that the job had. other augmentation: the samples have the same indices, and the "
            "batch differs. Usual causes, the likeliest first: (1) the data set, the sampler or "
        )
        assert told["error"].endswith('If they are as you want them: data_witness="warn"')
    assert len(results[0]["warned"]) == (mode == "warn")
