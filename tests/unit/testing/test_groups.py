"""The Group contract, kept by one process and by threads as ranks."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tierckpt._process import host_id
from tierckpt.group import Group, SingleGroup
from tierckpt.testing import GroupAbortedError, GroupConformance, ThreadGroup, run_ranks


class TestSingleGroup(GroupConformance):
    sizes = (1,)

    def run(self, size: int, program: Callable[[Group], Any]) -> list[Any]:
        return [program(SingleGroup())]


class TestThreadGroup(GroupConformance):
    sizes = (1, 2, 3, 5)

    def run(self, size: int, program: Callable[[Group], Any]) -> list[Any]:
        return run_ranks(size, program)


def test_a_failing_rank_fails_the_job_and_frees_the_others() -> None:
    freed: dict[int, str] = {}

    def program(group: ThreadGroup) -> None:
        if group.rank == 1:
            raise ZeroDivisionError("rank 1 has its reasons")
        try:
            group.all_reduce_min([1]).wait()
        except GroupAbortedError as error:
            freed[group.rank] = str(error)
            raise

    with pytest.raises(ZeroDivisionError, match="its reasons"):
        run_ranks(3, program)
    assert sorted(freed) == [0, 2]
    assert all("rank 1 failed" in why for why in freed.values())


def test_a_rank_that_never_comes_ends_the_wait_with_its_stack() -> None:
    gone, came = threading.Event(), []

    def program(group: ThreadGroup) -> None:
        if group.rank == 1:
            came.append(gone.wait(300))
        else:
            group.barrier()

    with pytest.raises(TimeoutError, match="rank1"):
        run_ranks(2, program, timeout_seconds=0.2)
    assert not came, "the rank itself was waited for"
    gone.set()


def test_ranks_that_call_different_collectives_get_an_error() -> None:
    def program(group: ThreadGroup) -> None:
        if group.rank == 0:
            group.barrier()
        else:
            group.broadcast(torch.zeros(1, dtype=torch.uint8), 0)

    with pytest.raises(RuntimeError, match=r"calls .* where another calls"):
        run_ranks(2, program)


def test_a_rank_that_calls_once_less_is_noticed() -> None:
    def program(group: ThreadGroup) -> None:
        if group.rank == 0:
            group.barrier()

    with pytest.raises((TimeoutError, GroupAbortedError)):
        run_ranks(2, program, timeout_seconds=0.2)


def test_a_host_is_known_by_name_and_boot() -> None:
    name, boot = host_id().split("/")
    assert name
    assert boot or not Path("/proc/sys/kernel/random/boot_id").exists()
