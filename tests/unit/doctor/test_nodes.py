"""Clocks of ranks are compared with bounds that hold."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tierckpt.doctor.examination import Report, Section
from tierckpt.doctor.finding import Finding, Mark, good
from tierckpt.doctor.nodes import Offset, _compared, clock_offsets, is_launched

SHIFTS = (0.0, 3.0, -0.25)


def test_the_bounds_contain_the_offset_of_each_clock() -> None:
    barrier, values = threading.Barrier(len(SHIFTS)), [None] * len(SHIFTS)

    def found_by(rank: int) -> list[Offset]:
        def gather(value: Any) -> list[Any]:
            values[rank] = value
            barrier.wait()
            gathered = list(values)
            barrier.wait()
            return gathered

        return clock_offsets(gather, rank, lambda: time.time() + SHIFTS[rank])

    with ThreadPoolExecutor(len(SHIFTS)) as pool:
        for offsets in pool.map(found_by, range(len(SHIFTS))):
            for offset, shift in zip(offsets, SHIFTS, strict=True):
                assert offset.low <= shift <= offset.high
            assert offsets[1].least > 2.0


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
