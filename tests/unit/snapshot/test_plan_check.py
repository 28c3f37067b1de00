"""Kinds of tensors: every change in place is seen, with torch's guards and without them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tierckpt.snapshot import copy_plan
from tierckpt.snapshot.copy_plan import Kinds


def set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    tensor.data = data


CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "transposed": lambda t: t.t_(),
    "transposed data": lambda t: set_data(t, t.data.t()),
    "shape": lambda t: set_data(t, t.data.view(2, 8)),
    "flat": lambda t: set_data(t, t.data.view(-1)),
    "one more dimension": lambda t: set_data(t, t.data[None]),
    "type": lambda t: set_data(t, t.data.view(torch.int32)),
    "shorter": lambda t: set_data(t, t.data[:2]),
    "resized": lambda t: t.resize_(2, 2),
}


@pytest.fixture(params=["guards", "no guards"])
def _guards(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "no guards":
        monkeypatch.setattr(copy_plan, "_guards", lambda: None)
    elif copy_plan._guards() is None:
        pytest.skip("this torch has no guards that see all changes")


@pytest.mark.usefixtures("_guards")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("looks", [0, 1, 3])
def test_a_change_in_place_is_seen(change: str, looks: int) -> None:
    tensors = [torch.zeros(4, 4) for _ in range(5)]
    kinds = Kinds(tensors)
    assert all(kinds.stand() for _ in range(looks))
    CHANGES[change](tensors[3])
    assert not kinds.stand()
    assert not kinds.stand()


@pytest.mark.usefixtures("_guards")
def test_what_is_no_kind_may_change() -> None:
    """torch's guards see more: then the kinds themselves are compared."""
    tensors = [torch.zeros(4, 4) for _ in range(5)]
    kinds = Kinds(tensors)
    assert kinds.stand()
    tensors[1].requires_grad_()
    assert kinds.stand()
    tensors[2].add_(1)
    tensors[0].data = torch.ones(4, 4)
    assert kinds.stand()
    tensors[1].data = tensors[1].data.t()
    assert not kinds.stand()


def test_torch_has_guards() -> None:
    """Where it is missing, thousands of tensors take longer: see whether torch has a new name."""
    assert copy_plan._guards() is not None


def test_guards_that_miss_a_change_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class Blind:
        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def check(self, tensor: torch.Tensor) -> bool:
            return tensor.dtype is torch.float32

    monkeypatch.setattr(torch._C._dynamo.guards, "TensorGuards", Blind)
    assert copy_plan._guards.__wrapped__() is None
