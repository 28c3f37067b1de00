"""The Group over torch.distributed fulfils the contract of Group."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddp_ckpt.checkpointer import SHARED_STORE
from ddp_ckpt.torch_group import BROADCAST_COST_BYTES, HEAD_BYTES, TorchGroup
from tests.support.rank_pool import RankPool
from tests.support.training import Place, attach, make_job
from tierckpt.testing import GroupConformance, Program


def with_group(program: Program) -> Any:
    group = TorchGroup()
    group.barrier()  # or a rank hangs up while another connects
    try:
        return program(group)
    finally:
        group.close()


class TestTorchGroup(GroupConformance):
    sizes = (1, 3)

    @pytest.fixture(autouse=True)
    def use_pools(self, ranks: Any) -> None:
        self.ranks = ranks

    def run(self, size: int, program: Program) -> list[Any]:
        return self.ranks(size).run(with_group, program)


def limits(hours: float) -> list[float]:
    """In hours: the timeouts of a user's group, and of ours over its members."""
    users = dist.new_group(timeout=timedelta(hours=hours))
    ours = TorchGroup(users)
    dist.barrier(users)
    ours.barrier()
    try:
        backends = [g._get_backend(torch.device("cpu")) for g in (users, ours._group)]
        return [b.options._timeout.total_seconds() / 3600 for b in backends]
    finally:
        ours.close()
        dist.destroy_process_group(users)


@pytest.mark.parametrize(("given", "ours"), [(3, 3), (0.01, 0.5)])
def test_it_is_as_patient_as_the_training(given: float, ours: float, pool: RankPool) -> None:
    """While rank 0 evaluates for an hour, the votes of the others are in progress."""
    assert pool.run(limits, given) == [[given, ours]] * 2


def one_has_much_to_say() -> tuple[bool, int]:
    """Whether all objects arrived, and the number of bytes that this rank gathered."""
    group = TorchGroup()
    gathered, plain = [0], group._all_gather

    def counted(tensor: torch.Tensor) -> list[torch.Tensor]:
        into = plain(tensor)
        gathered[0] += sum(t.nbytes for t in into)
        return into

    group._all_gather = counted  # type: ignore[method-assign]
    try:
        long = BROADCAST_COST_BYTES
        said = [bytes([rank]) * (long if rank == 1 else rank) for rank in range(group.size)]
        same = group.all_gather_object(said[group.rank]) == said
        nothing = group.all_gather_object(None) == [None] * group.size
    finally:
        group.close()
    return same and nothing, gathered[0]


def test_a_value_given_by_one_rank_is_not_multiplied_by_the_ranks(ranks: Any) -> None:
    """gloo pads all objects to the longest: with 10,000 ranks 100 KB would become a gigabyte on
    each."""
    for understood, nbytes in ranks(3).run(one_has_much_to_say):
        assert understood
        assert nbytes == 2 * 3 * HEAD_BYTES  # one collective for each of the two


def told_at_attach(place: Place, restarts: str) -> list[str]:
    """The warnings about torchrun's options, and their rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        patch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
        attached = attach(make_job(), place)
    attached.ckpt.abandon()
    return [e.message for e in attached.events if e.severity >= logging.WARNING]


@pytest.mark.parametrize("restarts", ["0", "3"])
def test_restarts_that_may_not_meet_are_warned_of_once(
    restarts: str, pool: RankPool, place: Place
) -> None:
    first, second = pool.run(told_at_attach, place, restarts)
    assert first == ([SHARED_STORE] if restarts == "3" else [])
    assert second == []
