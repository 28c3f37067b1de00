"""Leaves of a rank tree: equal if the states are equal bit for bit, whatever contains them."""

from __future__ import annotations

import collections
import enum
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tierckpt.offline import fingerprint, leaves_of, shown_leaf
from tierckpt.state import Arena, EncodedTree, ForeignValue, decode_tree, pack_tree

LONG = 2000
"""More elements than a tensor's `repr` shows."""


class Coded(torch.Tensor):
    """Libraries' form of 8-bit state: two plain tensors, without anything unusual."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Coded:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)  # type: ignore[attr-defined]

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], list[Any]]:
        return ["codes", "scale"], []

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Coded:
        return cls(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, function: Any, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(function)


class Same(enum.Enum):
    """Its members look equal."""

    ONE, TWO = 1, 2

    def __repr__(self) -> str:
        return "Same"


def counted(at: int) -> torch.Tensor:
    values = torch.zeros(LONG, dtype=torch.uint8)
    values[LONG // 2] = at
    return values


def quantized(at: int, zero_point: int = 0) -> torch.Tensor:
    return torch._make_per_tensor_quantized_tensor(counted(at), 0.5, zero_point)  # type: ignore[attr-defined]


def prints(value: Any) -> dict[str, str]:
    """The records of two processes: stored, then decoded."""
    arena = Arena()
    node = pack_tree({"extra": value}, "", arena.keep)
    encoded = EncodedTree(node, arena)
    data = torch.empty(encoded.nbytes, dtype=torch.uint8)
    encoded.copy(0, data)
    decoded = decode_tree(data.numpy().tobytes())
    return {name: fingerprint(leaf) for name, leaf in leaves_of(decoded).items()}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(
    "kept",
    [
        lambda at: collections.deque([counted(at)]),
        lambda at: Coded(counted(at), torch.ones(())),
        lambda at: [Coded(torch.zeros(3), counted(at))],
        lambda at: quantized(at),
        lambda at: quantized(0, zero_point=at),
        lambda at: {"mode": Same(at)},
        lambda at: collections.deque([{at}]),
    ],
)
def test_a_difference_in_one_element_is_found(kept: Callable[[int], Any]) -> None:
    assert prints(kept(1)) == prints(kept(1))
    assert prints(kept(1)) != prints(kept(2))


def test_a_class_not_imported_hides_no_difference() -> None:
    one, other = (
        leaves_of({"extra": ForeignValue("far:State", {"codes": counted(at)})}) for at in (1, 2)
    )
    assert {"extra", "extra.codes"} <= one.keys()
    assert fingerprint(one["extra"]) == fingerprint(other["extra"])
    assert fingerprint(one["extra.codes"]) != fingerprint(other["extra.codes"])
    assert shown_leaf(one["extra"]) == "State"


@pytest.mark.parametrize("kind", [set, frozenset])
def test_the_order_of_a_sets_members_is_no_difference(kind: Callable[[Any], Any]) -> None:
    """The order differs between processes, as strings have another hash in each."""
    ones, others = kind([0, 8]), kind([8, 0])
    assert repr(ones) != repr(others)
    for wrapped in (lambda v: v, lambda v: {(frozenset(v), 1)}, lambda v: {frozenset(v): 1}):
        one, other = leaves_of({"extra": wrapped(ones)}), leaves_of({"extra": wrapped(others)})
        assert {n: fingerprint(v) for n, v in one.items()} == {
            n: fingerprint(v) for n, v in other.items()
        }
