"""Actions between a boundary and the next step: evaluations, and forward passes that change
weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support import exact
from tests.support.rank_pool import GLOO, HOROVODRUN
from tests.support.training import (
    Job,
    Net,
    Place,
    attach,
    make_horovod_job,
    make_job,
    through_a_crash,
    train,
    under_horovod,
)
from tierckpt.errors import ConfigError

STEPS = 6


def job_here(**options: Any) -> Job:
    return make_horovod_job(**options) if under_horovod() else make_job(**options)


def evaluated(place: Place) -> dict[str, Any]:
    """Train, evaluate until the version is sealed, and train on; then restore."""
    job = job_here()
    plain = [job.iterate(i) for i in range(STEPS)]
    job = job_here()
    attached = attach(job, place, release="backward", slots=2)
    course = train(job, attached.ckpt, range(STEPS - 1))
    taken = attached.ckpt._active.snapshot
    assert taken is not None
    taken.wait_done()  # in place of an evaluation: the checkpointer is not called
    told = {"sealed": taken.sealed, "barrier": taken.clock.barrier}
    gradients = job.iterate(STEPS - 1)
    attached.ckpt.abandon()
    job = job_here(seed=2)
    attached = attach(job, place)
    restored = attached.ckpt.restore()
    told["restored"] = restored.version == STEPS - 1 and job.digest() == course[STEPS - 1]
    told["goes on"] = [gradients, job.iterate(STEPS - 1)] == [plain[-1]] * 2
    attached.ckpt.abandon()
    return told


@pytest.mark.parametrize("kind", [GLOO, HOROVODRUN])
def test_a_version_is_sealed_on_all_ranks_while_they_evaluate(
    kind: str, ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    for told in ranks(2, kind).run(evaluated, Place.under(tmp_path, shm_dir)):
        assert told == {"sealed": True, "barrier": 0.0, "restored": True, "goes on": True}


class Renormed(Net):
    """Each rank's forward pass scales the rows that its own batch uses."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5000, 24, max_norm=0.3)

    def forward(self, x: torch.Tensor, use_branch: bool = False) -> torch.Tensor:
        return super().forward(self.table((900 * x.abs()).long() % 5000).mean(1))


def renormed(place: Place) -> dict[str, Any]:
    optimizer = partial(torch.optim.Adam, weight_decay=0.1)
    job = job_here(net=Renormed, optimizer=optimizer)
    attached = attach(job, place, release="backward")
    train(job, attached.ckpt, range(STEPS))
    expected, replicated = job.image(), job.replicated()
    job.iterate(STEPS)
    after = job.digest()
    attached.ckpt.abandon()
    repeated_errors = [e.text() for e in attached.events if e.name == "failed"]
    job = job_here(net=Renormed, optimizer=optimizer, seed=2)
    attached = attach(job, place)
    restored = attached.ckpt.restore()
    told = {
        "complaints": repeated_errors,
        "version": restored.version,
        "differences": exact.differences(expected, job.image()),
    }
    job.iterate(STEPS)
    told["goes on"] = job.digest() == after
    attached.ckpt.abandon()
    return {**told, "digests": {name: exact.digest(each) for name, each in replicated.items()}}


def test_weights_that_the_forward_pass_scales_come_back_on_each_rank_as_they_were_there(
    ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    first, second = ranks(2).run(renormed, Place.under(tmp_path, shm_dir))
    for told in (first, second):
        assert told["complaints"] == []
        assert told["version"] == STEPS
        assert told["differences"] == []
        assert told["goes on"]
    one, other = first["digests"], second["digests"]
    unlike = [name for name in one if one[name] != other[name]]
    assert len(unlike) == 3, "the weight and, by its decay, what Adam keeps for it"


class Normalised(nn.Linear):
    """Each forward pass normalises its weights in place, as EDM2 does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.copy_(nn.functional.normalize(self.weight))
        return super().forward(x)


class UnitNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Normalised(24, 24), Normalised(24, 24)

    def forward(self, x: torch.Tensor, use_branch: bool = False) -> torch.Tensor:
        return super().forward(self.second(self.first(x)))


def normalised(setting: str, place: Place) -> dict[str, Any]:
    settings = {"release": "backward", "forward_changes": setting}
    make = partial(job_here, net=UnitNet)
    return through_a_crash(lambda seed: make(seed=seed), place, STEPS, STEPS + 1, **settings)


def test_weights_that_the_forward_pass_normalises_are_taken_where_they_are_named(
    ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    place, pool = Place.under(tmp_path, shm_dir), ranks(2, HOROVODRUN)
    for told in pool.run(normalised, "first.weight, sec*.weight", place):
        assert told["failed"] == []
        assert told["restored"][0] == STEPS
        assert told["course"] == told["plain"]


def test_unnamed_optimizers_are_an_event_that_names_the_setting(
    ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    for told in ranks(2).run(normalised, "", Place.under(tmp_path, shm_dir)):
        assert told["restored"][0] == 0
        named = [text for text in told["complaints"] if "(the version counters moved)" in text]
        assert named
        assert all("forward_changes='first.weight, second.weight'" in text for text in named)


def misnamed(place: Place) -> str:
    with pytest.raises(ConfigError) as caught:
        attach(job_here(), place, forward_changes="head.weight, haed.bias")
    return str(caught.value)


def test_a_name_that_no_parameter_has_is_refused(ranks: Any, tmp_path: Path, shm_dir: Path) -> None:
    for text in ranks(2).run(misnamed, Place.under(tmp_path, shm_dir)):
        assert "forward_changes: no parameter has the name 'haed.bias'" in text
