"""The replica check's arithmetic: slices, digests, votes, and the ranks that differ."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest
import torch
from torch import nn

from tierckpt.replicas import NONE, Finding, Look, ReplicatedState, weighted_sum
from tierckpt.replicas.replica_check import (
    BUCKETS,
    UNIT_BYTES,
    UNIT_OVERHEAD_BYTES,
    buckets_of,
    cut,
    find,
    fold_runs,
    odd_ranks,
    stride_of,
    unlike,
)
from tierckpt.state import TrainingState


@pytest.mark.parametrize("slices", [1, 3, 50])
@pytest.mark.parametrize(
    "sizes", [[], [0, 4], [5 * UNIT_BYTES + 3, 0, 17], [40] * 3000, [8 << 20, *[4] * 500, 9 << 20]]
)
def test_each_byte_is_in_one_slice_and_none_is_long(sizes: list[int], slices: int) -> None:
    dealt = cut(sizes, slices)
    assert len(dealt) == slices
    seen = {number: 0 for number in range(len(sizes))}
    for unit in (unit for units in dealt for unit in units):
        assert unit.low == seen[unit.tensor], "in order, without holes"
        assert 0 < unit.high - unit.low <= UNIT_BYTES
        seen[unit.tensor] = unit.high
    assert list(seen.values()) == sizes
    costs = [sum(u.high - u.low + UNIT_OVERHEAD_BYTES for u in units) for units in dealt]
    assert max(costs) <= sum(costs) / slices + UNIT_BYTES + UNIT_OVERHEAD_BYTES


def test_small_slices_are_compared_in_one_check() -> None:
    assert stride_of([100], 50) == 50
    assert stride_of([1 << 30], 50) == 1
    assert stride_of([6 << 20], 50) == 5  # some 126 KB a slice
    assert stride_of([20 << 20], 50) == 2
    assert stride_of([], 7) == 7
    assert stride_of([100] * 3600, 50) == 1, "to come to so many is work, too"


def test_buckets_are_few_and_locate_the_difference() -> None:
    for count in (0, 1, 63, 64, 65, 20_000):
        runs = buckets_of(count)
        assert len(runs) <= BUCKETS
        assert [i for run in runs for i in run] == list(range(count))
    one = list(range(1000))
    other = [*one[:700], 5, *one[701:]]
    runs = buckets_of(1000)
    (bucket,) = unlike([fold_runs(one, runs), fold_runs(one, runs), fold_runs(other, runs)])
    assert 700 in runs[bucket]
    longer = buckets_of(1001)
    assert unlike([fold_runs(one, longer), fold_runs([*one, 7], longer)]) == [62]
    assert unlike([["a"], ["a", "b"]]) == [1]


def test_the_odd_ranks_are_those_outside_a_majority() -> None:
    assert odd_ranks("aab") == (2,)
    assert odd_ranks("abaca") == (1, 3)
    assert odd_ranks("ab") is None
    assert odd_ranks("aabb") is None
    names, odd = find(["w", "b"], [("b", "aab"), ("w", "aaa"), ("w", "aba")])
    assert (names, odd) == (("w", "b"), (1, 2))
    assert find(["w"], [("w", "abc"), ("w", "aab")]) == (("w",), None)


def test_the_report_names_tensors_and_ranks() -> None:
    text = Finding(("model/w", "model/b"), (3,), 8, 120, 70).text()
    assert text == (
        "model/w, model/b: rank 3 differs from the other 7. First seen at v120; at v70 all "
        "ranks were equal"
    )
    assert "ranks 1, 2 differ from the other 6" in Finding((), (1, 2), 8, 1).text()
    assert "the 4 ranks differ" in Finding((), None, 4, 1).text()


# --- live tensors --------------------------------------------------------------------------------


class Odd(nn.Module):
    """Parameters of many kinds, one of them with gaps, one in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = nn.Parameter(torch.randn(300).bfloat16())
        self.gaps = nn.Parameter(torch.randn(40, 60)[:, ::3])
        self.channels = nn.Parameter(torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last))
        self.imaginary = nn.Parameter(torch.randn(9, dtype=torch.complex64))
        self.large = nn.Parameter(torch.randn(UNIT_BYTES // 4 + 1000))
        self.empty = nn.Parameter(torch.empty(0))


def state_of(model: nn.Module, **optimizers: torch.optim.Optimizer) -> TrainingState:
    return TrainingState(model, optimizers, None, None, None)


def digest_of(replicated: ReplicatedState, number: int = 0) -> int:
    """The digest of a slice; NONE if it is outdated."""
    look = Look(replicated, range(number, number + 1), 0, 0)
    look.finish()
    return look.fetch()


def digests(state: TrainingState, slices: int = 4) -> list[int]:
    replicated = ReplicatedState(state, slices)
    return [digest_of(replicated, number) for number in range(slices)]


def test_any_bit_of_any_parameter_is_in_one_digest() -> None:
    torch.manual_seed(0)
    model = Odd()
    state = state_of(model)
    before = digests(state)
    source = random.Random(2)
    for param in [p for p in model.parameters() if p.numel()]:
        data = torch.view_as_real(param.detach()) if param.is_complex() else param.detach()
        place = tuple(source.randrange(size) for size in data.shape)
        kept = data[place].clone()
        data[place] = torch.nextafter(kept, kept + 1)
        assert sum(a != b for a, b in zip(before, digests(state), strict=True)) == 1
        data[place] = kept
    assert digests(state) == before


def trained(**more: Any) -> tuple[TrainingState, dict[str, Any], Any]:
    """Return a state, its optimizer's entries for the weight, and the digest of all of it; NONE if
    the digest is outdated."""
    model = nn.Linear(5, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(5)).sum().backward()
    optimizer.step()
    held = optimizer.state[model.weight]
    held.update(more)
    state = state_of(model, optimizer=optimizer)
    replicated = ReplicatedState(state, 1)

    def look(anew: bool = False) -> int:
        nonlocal replicated
        if anew:
            assert not replicated.stands(state)
            replicated = ReplicatedState(state, 1)
            assert replicated.stands(state)
        return digest_of(replicated)

    return state, held, look


def test_a_check_follows_tensors_that_an_optimizer_replaces() -> None:
    _, held, look = trained()
    before = look()
    held["momentum_buffer"] = held["momentum_buffer"].clone()
    assert look() == before
    held["momentum_buffer"] = held["momentum_buffer"] + 1
    assert look() not in (before, NONE)
    held["momentum_buffer"] = torch.ones(7)
    assert look() == NONE, "another shape is another structure"
    held["more"] = torch.ones(1)
    assert look(anew=True) != NONE


def test_a_check_follows_another_dict_around_the_same_state() -> None:
    state, held, look = trained()
    before, optimizer = look(), state.optimizers["optimizer"]
    optimizer.load_state_dict(optimizer.state_dict())
    (weight,) = [p for p in optimizer.state if p.ndim == 2]
    assert optimizer.state[weight] is not held
    assert look() == before
    optimizer.state[weight]["momentum_buffer"][0, 0] += 1
    assert look() not in (before, NONE)
    optimizer.state.clear()
    assert look() == NONE
    assert look(anew=True) != NONE


def test_a_look_follows_a_replaced_parameter() -> None:
    state, _, look = trained()
    before = look()
    state.model.bias = nn.Parameter(state.model.bias + 1)
    assert look() not in (before, NONE)


@pytest.mark.parametrize("kind", [list, tuple, deque, lambda pair: {"a": pair[0], "b": pair[1]}])
def test_a_look_finds_tensors_within_lists(kind: Any) -> None:
    pair = [torch.ones(3), torch.zeros(2)]
    _, held, look = trained(past=kind(pair), late=None)
    before = look()
    held["past"] = kind([each.clone() for each in pair])
    assert look() == before
    pair[1][1] = 7
    held["past"] = kind(pair)
    assert look() not in (before, NONE)
    held["past"] = kind([pair[0], torch.zeros(3)])
    assert look() == NONE, "of another length"
    assert look(anew=True) != NONE
    held["late"] = torch.ones(1)
    assert look(anew=True) != NONE, "a key that had nothing has a tensor"


def test_a_list_that_grew_is_another_structure() -> None:
    _, held, look = trained(past=[torch.ones(3)])
    assert look() != NONE
    held["past"].append(torch.ones(3))
    assert look() == NONE
    assert look(anew=True) != NONE
    held["past"] = torch.ones(3)
    assert look(anew=True) != NONE


def test_little_is_hashed_at_the_boundary_itself() -> None:
    model = nn.Linear(5, 5)
    replicated, found = ReplicatedState(state_of(model), 1), []
    for _ in range(2):
        look = Look(replicated, range(1), 0, 0)
        with torch.no_grad():
            model.weight.mul_(2)
        look.finish()
        found.append(look.fetch())
    assert NONE not in found
    assert found[0] != found[1]


def test_a_tensor_that_changes_during_a_check_has_no_digest() -> None:
    model = nn.Linear(512, 600)
    look = Look(ReplicatedState(state_of(model), 1), range(1), 0, 0)
    with torch.no_grad():
        model.weight.mul_(1)
    look.finish()
    assert look.fetch() == NONE


def test_a_copier_and_the_barrier_share_a_large_look() -> None:
    model = nn.Linear(1024, 1024)
    replicated, started = ReplicatedState(state_of(model), 1), []
    look = Look(replicated, range(1), 0, 0)
    look.submit = started.append
    look.wake()
    look.wake()
    assert started == [look]
    started[0].run()
    look.finish()
    assert look.fetch() == digest_of(replicated) != NONE


def test_a_state_in_part_on_a_gpu_is_hashed_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU that stands in for one."""
    torch.manual_seed(0)
    model = nn.Linear(300, 200)
    replicated = ReplicatedState(state_of(model), 1)
    (only,) = replicated.slices
    weight = replicated.names.index("model/weight")
    monkeypatch.setattr(only, "on_host", [u.tensor != weight for u in only.units])

    before = digest_of(replicated)
    for param in model.parameters():
        bits = param.detach().view(torch.int32).view(-1)
        bits[7] ^= 1
        assert digest_of(replicated) not in (before, NONE)
        bits[7] ^= 1
    assert digest_of(replicated) == before


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.complex64, torch.bool],
)
def test_a_gpus_sum_has_every_bit(dtype: torch.dtype) -> None:
    """Computed as on the device, but on a CPU."""
    torch.manual_seed(0)
    values: Any = torch.randn(1000, dtype=torch.float64) * 9
    values = values.to(dtype) if not dtype.is_complex else torch.randn(1000, dtype=dtype)
    before = weighted_sum(values)
    nbytes = values.element_size()
    for bit in range(8 * nbytes if dtype is not torch.bool else 1):
        other = values.clone()
        bits = other.view(torch.uint8)
        bits[617 * nbytes + bit // 8] ^= 1 << bit % 8
        assert weighted_sum(other) != before
    swapped = values.clone()
    swapped[[3, 4]] = swapped[[4, 3]]
    assert (weighted_sum(swapped) == before) == bool(values[3] == values[4])
