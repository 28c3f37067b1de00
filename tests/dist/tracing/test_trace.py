"""Traces of real jobs: they contain all events, in a possible order."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.support.training import Place, attach, make_job, only_layers_release, train
from tierckpt.tracing import Span, Timeline, load_traces, size_buckets, summarize

STEPS = 6
PARAMETERS = 5 * 2
"""Tensors of `Net`: four layers and the head, a weight and a bias each."""


@only_layers_release()
@mock.patch("tierckpt.tracing.recorder.STEPS", STEPS)
def traced(place: Place, folder: str) -> None:
    # Buckets small enough for several of them.
    job = make_job(bucket_cap_mb=0.003)
    # Waiting instead of skipping: every version is recorded.
    attached = attach(
        job,
        place,
        release="backward",
        when_busy="wait",
        local_every_steps=3,
        trace_dir=folder,
    )
    train(job, attached.ckpt, range(STEPS + 2))
    attached.ckpt.close()


def of(timeline: Timeline, rank: int, version: int, kind: str) -> list[Span]:
    return timeline.of(kind, rank=rank, version=version)


def check_order(timeline: Timeline, ranks: int, steps: int) -> None:
    """release <= copy's start < its end <= barrier's end <= next update, for every version."""
    assert timeline.ranks() == list(range(ranks))
    for rank in range(ranks):
        updates = timeline.of("update", rank=rank)
        assert [s.version for s in timeline.of("boundary", rank=rank)] == list(range(1, steps + 1))
        for version in range(1, steps):
            (boundary,) = of(timeline, rank, version, "boundary")
            (barrier,) = of(timeline, rank, version, "barrier")
            releases = of(timeline, rank, version, "release")
            copies = of(timeline, rank, version, "copy")
            next_update = min(u.start_us for u in updates if u.start_us >= boundary.start_us)
            released = {layer: s.start_us for s in releases for layer in s.layers}
            assert len(released) == PARAMETERS
            assert copies
            for copy in copies:
                # Layers that share a block are copied when one of them is released, and without a
                # release at the barrier.
                earliest = min(released[layer] for layer in copy.layers)
                assert boundary.start_us <= min(earliest, barrier.start_us) <= copy.start_us
                assert copy.start_us <= copy.end_us <= barrier.end_us
            assert barrier.end_us <= next_update


def test_a_ddp_job_is_recorded(ranks: Any, tmp_path: Path, shm_dir: Path) -> None:
    folder = tmp_path / "traces"
    ranks(2).run(traced, Place.under(tmp_path, shm_dir), str(folder))
    timeline = load_traces(sorted(folder.glob("trace-r*.json")), None)
    check_order(timeline, ranks=2, steps=STEPS)
    found = summarize(timeline)
    assert found.steps == STEPS
    assert found.gaps.count == 2 * (STEPS - 1)
    assert 0 < found.hidden.backward_us <= found.hidden.computing_us <= found.hidden.copy_us
    for rank in (0, 1):
        for version in range(1, STEPS):
            launches = of(timeline, rank, version, "release")
            reductions = of(timeline, rank, version, "allreduce")
            assert len(launches) == len(reductions) > 1
            assert [s.layers for s in reductions] == [s.layers for s in launches]
            assert [s.start_us for s in reductions] == [s.start_us for s in launches]
        (write,) = of(timeline, rank, 3, "write")
        (seal,) = of(timeline, rank, 3, "seal")
        assert write.start_us == seal.end_us
        assert write.nbytes > 0
    check_report(timeline, tmp_path)


def check_report(timeline: Timeline, folder: Path) -> None:
    """The page has the figures of the trace, and counts each rank's allreduces by size."""
    pytest.importorskip("matplotlib")
    command = [
        sys.executable,
        "-m",
        "tierckpt",
        "report",
        str(folder),
        "-o",
        str(folder / "a.html"),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=200)
    text = (folder / "a.html").read_text()
    for title in ("Time of an allreduce by its size: mean, shortest and longest", "A step of"):
        assert f'<svg role="img" aria-label="{title}' in text
    row = r'<tr><td class="number">(\d)</td><td>([^<]+)</td><td class="number">(\d+)<'
    counted = {(int(rank), size): int(count) for rank, size, count in re.findall(row, text)}
    assert counted == {
        (rank, bucket.size): bucket.latency.count
        for rank in timeline.ranks()
        for bucket in size_buckets(timeline.of("allreduce", rank=rank))
    }
