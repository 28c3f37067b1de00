"""Tensors and dicts seen through their memory: the same changes are found as by their methods."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

from tierckpt.snapshot import copy_plan, describe_engine, find_engine, tensor_memory
from tierckpt.snapshot.tensor_memory import CHANGES, FLAGS, KINDS, MOVES, SAME

WAYS = ["memory", "methods"]
MANY = 700
"""Tensors of a test: more than `plan_check` looks into together."""


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param != "memory":
        monkeypatch.setattr(tensor_memory, "find", lambda: None)
    elif tensor_memory.find() is None:
        pytest.skip("the copy engine is not built, or this torch has other objects")
    return str(request.param)


def test_torch_has_the_objects_and_python_the_tags() -> None:
    """Where they are missing, thousands of tensors take longer: see what has changed."""
    if find_engine() is None:
        pytest.skip(describe_engine())
    assert tensor_memory.find() is not None
    assert tensor_memory.find_tag() is not None


def view_of(tensors: list[torch.Tensor]) -> tuple[Any, list[torch.Tensor]]:
    aliases = [tensor.detach() for tensor in tensors]
    return copy_plan._view_of(tensors, aliases), aliases


@pytest.mark.parametrize("change", [*KINDS, *MOVES])
@pytest.mark.parametrize("number", [0, MANY - 1])
def test_every_change_is_seen(way: str, change: str, number: int) -> None:
    tensors = [torch.zeros(4, 4) for _ in range(MANY)]
    view, _aliases = view_of(tensors)
    assert view.stand() is not None
    {**KINDS, **MOVES}[change](tensors[number])
    assert view.stand() is None
    assert view.stand() is None


@pytest.mark.parametrize("change", ["transposed data", "shape", "shorter", "new data", "shared"])
def test_every_change_of_a_parameter_is_seen(way: str, change: str) -> None:
    tensors = [torch.nn.Parameter(torch.zeros(4, 4)) for _ in range(MANY)]
    view, _aliases = view_of(tensors)  # type: ignore[arg-type]
    assert view.stand() is not None
    {**KINDS, **MOVES}[change](tensors[600])
    assert view.stand() is None


@pytest.mark.parametrize("change", SAME)
def test_other_changes_are_none(way: str, change: str) -> None:
    tensors = [torch.zeros(4, 4) for _ in range(MANY)]
    view, _aliases = view_of(tensors)
    SAME[change](tensors[3])
    assert view.stand() is not None


@pytest.mark.parametrize("change", FLAGS)
@pytest.mark.parametrize("wrap", [torch.nn.Parameter, torch.Tensor.clone])
def test_frozen_and_trained_tensors_are_told_apart(way: str, change: str, wrap: Any) -> None:
    tensors = [wrap(torch.zeros(4, 4)) for _ in range(MANY)]
    view, _aliases = view_of(tensors)
    before = view.trained
    assert view.stand() is not None
    assert view.trained is before
    for number in (3, 600):
        FLAGS[change](tensors[number])
        assert view.stand() is not None
        assert view.trained == bytes(t.requires_grad for t in tensors)


def test_version_counters_are_those_of_torch(way: str) -> None:
    tensors = [torch.zeros(3) for _ in range(MANY)]
    with torch.inference_mode():
        tensors[5] = torch.zeros(3)
    view, _aliases = view_of(tensors)
    for number in (7, 7, 600):
        tensors[number].add_(1)
    wanted = [0 if t.is_inference() else t._version for t in tensors]
    assert np.frombuffer(view.stand(), np.uint32).tolist() == wanted
    assert view.counters() == view.stand()


@pytest.mark.parametrize(
    "move", ["resized", "storage resized", "storage freed", "shared", "new data", "set"]
)
def test_memory_that_a_copy_reads_is_seen_to_move(way: str, move: str) -> None:
    """New data and `set_` give the tensor another storage: the alias keeps the first one."""
    tensors = [torch.zeros(4, 4) for _ in range(MANY)]
    view, _aliases = view_of(tensors)
    with torch.no_grad():
        MOVES[move](tensors[600])
    moved = move not in ("new data", "set")
    assert (view.counters() == b"") == moved
    assert view.moved() == [600] * moved


def test_a_difference_that_does_not_matter_is_judged_by_the_methods(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if tensor_memory.find() is None:
        pytest.skip("this torch has other objects")
    tensors = [torch.zeros(4, 4) for _ in range(3)]
    view, _aliases = view_of(tensors)
    found = [1]
    look = tensor_memory.TensorRecords.look
    monkeypatch.setattr(
        tensor_memory.TensorRecords, "look", lambda self: found.pop() if found else look(self)
    )
    assert view.stand() == bytes(12)
    assert found == []


def test_tensors_of_many_dimensions_are_left_to_the_methods() -> None:
    tensors = [torch.zeros(4), torch.zeros(1, 1, 1, 1, 2, 2)]
    assert tensor_memory.records_of(tensors) is None
    view, _aliases = view_of(tensors)
    tensors[1].transpose_(1, 4)
    assert view.stand() is None


# --- dicts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("tags", [True, False])
@pytest.mark.parametrize("size", [2, 5])
def test_every_change_of_a_dict_is_seen(
    size: int, tags: bool, change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not tags:
        monkeypatch.setattr(tensor_memory, "find_tag", lambda: None)
    held: list[dict[Any, Any]] = [{n: [n] for n in range(size)} for _ in range(MANY)]
    dicts = copy_plan._Dicts(held, MANY)
    assert (dicts._tags is not None) == (tags and tensor_memory.library() is not None)
    assert dicts.stand()
    change(held[600])
    assert not dicts.stand()
    assert not dicts.stand()


def test_a_value_that_was_put_back_is_none() -> None:
    held: list[dict[Any, Any]] = [{0: "a"} for _ in range(MANY)]
    dicts = copy_plan._Dicts(held, MANY)
    held[3][0], held[600]["new"] = "b", "c"
    held[3][0] = "a"
    del held[600]["new"]
    assert dicts.stand()


def test_filling_an_empty_dict_is_seen() -> None:
    held: list[dict[Any, Any]] = [{} for _ in range(MANY)]
    dicts = copy_plan._Dicts(held, MANY)
    held[9]["new"] = 1
    assert not dicts.stand()


def test_dicts_that_may_be_reordered_have_no_tags() -> None:
    held: list[dict[Any, Any]] = [{}, OrderedDict(a=1, b=2)]
    assert tensor_memory.tags_of(held) is None
    dicts = copy_plan._Dicts(held, 2)
    held[1].move_to_end("a")  # type: ignore[attr-defined]
    assert not dicts.stand()
