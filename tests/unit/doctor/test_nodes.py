"""Clocks of ranks are compared with bounds that hold."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tierckpt.config import Config
from tierckpt.coordination import settings_check
from tierckpt.doctor import Finding, Mark, Report, Section, Subject, good
from tierckpt.doctor.examination import (
    Gather,
    Offset,
    _apart,
    _compared,
    clock_offsets,
    is_launched,
    sees_probe,
)

SHIFTS = (0.0, 3.0, -0.25)


def on_ranks(run: Callable[[Gather, int], Any]) -> list[Any]:
    """Results of ranks that are threads."""
    barrier, values = threading.Barrier(len(SHIFTS)), [None] * len(SHIFTS)

    def rank_of(rank: int) -> Any:
        def gather(value: Any) -> list[Any]:
            values[rank] = value
            barrier.wait()
            gathered = list(values)
            barrier.wait()
            return gathered

        return run(gather, rank)

    with ThreadPoolExecutor(len(SHIFTS)) as pool:
        return list(pool.map(rank_of, range(len(SHIFTS))))


def test_the_bounds_contain_the_offset_of_each_clock() -> None:
    for offsets in on_ranks(
        lambda gather, rank: clock_offsets(gather, rank, lambda: time.time() + SHIFTS[rank])
    ):
        for offset, shift in zip(offsets, SHIFTS, strict=True):
            assert offset.low <= shift <= offset.high
        assert offsets[1].least > 2.0


def test_a_node_without_the_mount_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file system of rank 2, a thread, is replaced by an empty one."""
    mounted = threading.local()
    exists = os.path.exists
    monkeypatch.setattr(
        os.path, "exists", lambda path: exists(path) and getattr(mounted, "here", True)
    )

    def run(gather: Gather, rank: int) -> list[bool]:
        mounted.here = rank != 2
        return sees_probe(gather, rank, str(tmp_path))

    assert on_ranks(run) == [[True, True, False]] * 3
    assert list(tmp_path.iterdir()) == []
    assert on_ranks(lambda gather, rank: sees_probe(gather, rank, "/no/such")) == [[True] * 3] * 3


def test_containers_of_one_name_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of rank 2, a thread, is another one."""
    own = threading.local()
    monkeypatch.setattr(settings_check, "device_of", lambda folder: own.device)

    def run(gather: Gather, rank: int, node: str = "") -> list[Finding]:
        own.device = 7 if rank == 2 else 5
        return [*_apart(Subject(Config(node=node and f"{node}{rank}")), gather)]

    for (found,) in on_ranks(run):
        assert found.mark is Mark.CROSS
        assert found.text.startswith("ranks 0 and 2 are on one node by its name, ")
        assert found.cure.startswith("give the ranks of each container a node name of their own ")
    assert on_ranks(lambda gather, rank: run(gather, rank, "n")) == [[]] * 3, "the cure"


def report(node: str, torch: str) -> Report:
    return Report(node, (Section("Software", (good("torch", torch),)),))


def test_nodes_that_differ_are_named() -> None:
    reports = [report("n0", "2.13.0"), report("n1", "2.13.0"), report("n2", "2.12.0")]
    offsets = {"n0": Offset(0, 0), "n1": Offset(-2.0, -1.999), "n2": Offset(-0.001, 0.001)}
    found: list[Finding] = [*_compared(reports, offsets)]
    warnings = [each for each in found if each.mark is Mark.WARNING]
    assert warnings[0].text == "torch on n2: 2.12.0; on n0: 2.13.0"
    assert warnings[1].text.startswith("n1 differs from n0 by -2e+03 ms")
    assert "on n1: chronyc makestep" in warnings[1].cure


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2"}, True),
        ({"RANK": "0", "WORLD_SIZE": "1"}, False),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, True),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}, False),
        ({}, False),
    ],
)
def test_ranks_meet_under_launchers(environment: dict[str, str], expected: bool) -> None:
    assert is_launched(environment) is expected
