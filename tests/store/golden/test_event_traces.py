"""Jobs report what they reported under an earlier Tierckpt, event by event."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.golden.traces import JOBS, RECORD, Place

TRACES = json.loads(RECORD.read_text())


def test_each_job_has_a_trace() -> None:
    assert JOBS.keys() == TRACES.keys()


@pytest.mark.parametrize("name", JOBS)
def test_the_events_are_the_same(name: str, tmp_path: Path, shm_dir: Path) -> None:
    assert JOBS[name](Place(tmp_path, shm_dir)) == TRACES[name]
