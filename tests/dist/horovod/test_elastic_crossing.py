"""A checkpoint of an elastic job restores in a job not elastic, and the other way round;
plain values that only one side has are reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support import exact
from tests.support.elastic_script import Script, distributed, elastic
from tests.support.rank_pool import GLOO, RankPool
from tests.support.training import Net, Place, attach, make_horovod_job, make_job, under_horovod

VERSION = 3
SETTINGS = {"local_every_steps": 1, "memory_every_steps": 1}


class Plain(Script):
    """A state with plain values only, of any names."""

    def __init__(self, place: Place, seed: int, **values: Any) -> None:
        self.values = values
        super().__init__(place, seed, **SETTINGS)

    def make(self) -> Any:
        model = Net(norm=nn.BatchNorm1d)
        optimizer = distributed(model, "")
        return elastic().TorchState(model, optimizer, tierckpt=self.settings, **self.values)

    def update(self, loss: Any) -> None:
        loss.backward()
        self.state.optimizer.step()

    def train_to(self, end: int) -> dict[int, dict[str, str]]:
        while self.state.batch < end:
            self.update(self.forward())
            self.state.batch += 1
            self.state.commit()
        return {}

    def warnings(self) -> list[str]:
        return [event.text() for event in self.told if event.severity > 20]


def elastic_leaves(place: Place, values: dict[str, Any]) -> str:
    script = Plain(place, 1, batch=0, **values).start()
    script.train_to(VERSION)
    script.state.checkpointer.save(now=True)
    told = exact.digest(script.replicated())
    script.end()
    return told


def elastic_takes_up(place: Place, values: dict[str, Any]) -> tuple[Any, ...]:
    script = Plain(place, 2, batch=7, **values).start()
    restored = script.state.restored
    told = exact.digest(script.replicated()), int(restored), script.state.batch
    left = {name: getattr(script.state, name) for name in values}
    warnings, gone = script.warnings(), hasattr(script.state, "seen")
    script.train_to(script.state.batch + 1)
    script.end()
    return *told, left, gone, warnings


def elastic_forks(place: Place, fork_from: str) -> tuple[Any, ...]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIERCKPT_FORK_FROM", fork_from)
        return elastic_takes_up(place, {"epoch": 5})


def plain_job(seed: int) -> Any:
    make = make_horovod_job if under_horovod() else make_job
    ddp = {} if under_horovod() else {"broadcast_buffers": False}
    return make(lambda: Net(norm=nn.BatchNorm1d), optimizer=torch.optim.AdamW, seed=seed, **ddp)


def plain_leaves(place: Place) -> str:
    job = plain_job(1)
    ckpt = attach(job, place, **SETTINGS).ckpt
    for iteration in range(VERSION):
        job.iterate(iteration)
        ckpt.step()
    ckpt.save(now=True)
    told = exact.digest(job.replicated())
    ckpt.close()
    return told


def plain_takes_up(place: Place) -> tuple[str, int, list[str]]:
    job = plain_job(2)
    attached = attach(job, place, **SETTINGS)
    restored = attached.ckpt.restore()
    told = exact.digest(job.replicated())
    said = [e.text() for e in attached.events if e.severity > 20]
    attached.ckpt.close()
    return told, int(restored), said


def test_an_elastic_job_continues_where_another_was(
    ranks: Any, pool: RankPool, place: Place
) -> None:
    """Its plain values stay, which is reported once."""
    made = ranks(2, GLOO).run(plain_leaves, place)
    first, second = pool.run(elastic_takes_up, place, {"epoch": 5})
    for told in (first, second):
        assert told[:5] == (made[0], VERSION, 7, {"epoch": 5}, False)
    (said,) = first[5]
    assert "plain values stay as they are (batch, epoch)" in said
    assert f"of iteration {VERSION}, was not written by an elastic job" in said
    assert second[5] == []


def test_another_job_continues_where_an_elastic_one_was(pool: RankPool, place: Place) -> None:
    made = pool.run(elastic_leaves, place, {"epoch": 0})
    first, second = pool.run(plain_takes_up, place)
    assert first[:2] == second[:2] == (made[0], VERSION)
    (said,) = first[2]
    assert f"of iteration {VERSION}, are not loaded (batch, epoch): this job is not elastic" in said
    assert second[2] == []


def test_values_come_and_go_with_the_script(pool: RankPool, place: Place) -> None:
    """Values that only one side has are reported; the others are restored."""
    made = pool.run(elastic_leaves, place, {"seen": [1]})
    first, second = pool.run(elastic_takes_up, place, {"epoch": 5})
    for told in (first, second):
        assert told[:5] == (made[0], VERSION, VERSION, {"epoch": 5}, False)
    kept, gone = first[5]
    assert "plain values stay as they are (epoch): " in kept
    assert "was made without them" in kept
    assert "are not loaded (seen): TorchState was not given them" in gone
    assert second[5] == []


def test_an_elastic_job_starts_from_another_ones_version(
    tmp_path: Path, shm_dir: Path, pool: RankPool
) -> None:
    source, fork = tmp_path / "source", Place(str(tmp_path / "fork"), str(shm_dir))
    made = pool.run(elastic_leaves, Place(str(source), str(shm_dir)), {"epoch": 0})
    for told in pool.run(elastic_forks, fork, f"{source}@v{VERSION}"):
        assert told == (made[0], VERSION, VERSION, {"epoch": 0}, False, [])
    again = pool.run(elastic_takes_up, fork, {"epoch": 5})
    assert [told[1] for told in again] == [VERSION + 1] * 2, "its own version"
