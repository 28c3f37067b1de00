"""A checkpoint and a model of another structure: refused by name, or the matching part is
loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tierckpt
from tierckpt.errors import StateMismatchError
from tierckpt.testing import TinyJob, tiny_model

pytestmark = pytest.mark.usefixtures("inline_agent")


@pytest.fixture
def closed(path: Path, settings: Any) -> Path:
    with TinyJob(path, **settings) as job:
        job.run(3)
    return path


def widened() -> torch.nn.Module:
    model = tiny_model()
    model[4] = torch.nn.Linear(24, 5)
    model.add_module("extra", torch.nn.Identity())
    return model


def test_another_structure_is_refused_difference_by_difference(closed: Path, settings: Any) -> None:
    torch.manual_seed(1)
    with TinyJob(closed, model=widened(), **settings) as job:
        before = job.fingerprint()
        with pytest.raises(StateMismatchError) as caught:
            job.restore()
        assert job.fingerprint() == before
        assert caught.value.differences == (
            "model/4.bias is float32[4] in the checkpoint, float32[5] live",
            "model/4.weight is float32[4, 24] in the checkpoint, float32[5, 24] live",
        )
        assert "nothing was changed" in str(caught.value)
        assert "strict=False" in str(caught.value)


def test_missing_and_surplus_parts_are_named(closed: Path, settings: Any) -> None:
    model = tiny_model()
    model[0] = torch.nn.Linear(12, 24, bias=False)
    model.add_module("new", torch.nn.BatchNorm1d(3))
    with (
        TinyJob(closed, model=model, **settings) as job,
        pytest.raises(StateMismatchError) as caught,
    ):
        job.restore()
    said = "\n".join(caught.value.differences)
    assert "model/0.bias float32[24] is in the checkpoint, not in the model" in said
    assert "model/new.weight is in the model, not in the checkpoint" in said
    assert "buffer/new.running_mean is in the model" in said
    assert "optimizer group 0: without 0.bias with new new.bias, new.weight" in said


def test_not_strict_loads_the_fitting_tensors_and_keeps_the_rest(
    closed: Path, settings: Any
) -> None:
    with TinyJob(closed, seed=99, **settings) as reference:
        reference.restore()
        saved = {n: t.clone() for n, t in reference.model.state_dict().items()}
    torch.manual_seed(1)
    model = widened()
    own_head = model[4].weight.detach().clone()
    with TinyJob(closed, model=model, **settings) as job:
        restored = job.restore(strict=False)
        assert restored == 3
        for name, tensor in job.model.state_dict().items():
            if name.startswith("4."):
                continue
            assert torch.equal(tensor, saved[name])
        assert torch.equal(job.model[4].weight, own_head)
        accepted = [e.message for e in job.heard("notice") if "accepted" in e.message]
        assert len(accepted) == 2
        job.run(6)


Make = Callable[[Any], torch.optim.Optimizer]
MAKERS: dict[str, Make] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.1),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.5),
}


@pytest.mark.parametrize(
    ("before", "after", "taken"),
    [("SGD", "Adam", False), ("Adam", "SGD", False), ("Adam", "AdamW", True)],
)
def test_another_optimizers_state_is_taken_where_it_can_step_with_it(
    before: str, after: str, taken: bool, path: Path, settings: Any
) -> None:
    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 2)).square().sum().backward()
        optimizer.step()

    given = {"agent": "inline", **settings}
    model = torch.nn.Linear(2, 2)
    optimizer = MAKERS[before](model.parameters())
    with tierckpt.Checkpointer(model, optimizer, path=path, **given) as ckpt:
        step(model, optimizer)
        ckpt.step()
    events: list[tierckpt.Event] = []
    again = torch.nn.Linear(2, 2)
    other = MAKERS[after](again.parameters())
    options = set(other.param_groups[0])
    with tierckpt.Checkpointer(again, other, path=path, on_event=events.append, **given) as ckpt:
        assert ckpt.restore(strict=False).version == 1
        assert torch.equal(again.weight, model.weight)
        assert bool(other.state[again.weight]) is taken
        assert set(other.param_groups[0]) == options
        said = [e for e in events if "its state and options were left out" in e.message]
        assert len(said) == (not taken)
        step(again, other)
        ckpt.step()
