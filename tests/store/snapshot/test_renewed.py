"""A spent snapshot becomes that of a later version, unless somebody else still has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.late_copies import without_the_engine
from tierckpt.snapshot import Snapshot, find_engine
from tierckpt.testing import TinyJob

pytestmark = pytest.mark.usefixtures("inline_agent")

STEPS = 12


def run(path: Path, settings: dict[str, Any], keep: list[Snapshot]) -> list[int]:
    """Train; return the `id()` of each version's snapshot. Versions 5 and 6 go to `keep`."""
    numbers: list[int] = []

    def note(job: TinyJob) -> None:
        snapshot = job.checkpointer._active.snapshot
        assert snapshot is not None
        numbers.append(id(snapshot))
        if job.iteration in (5, 6):
            keep.append(snapshot)

    given = {"memory_every_steps": 1, "local_every_steps": 0, **settings}
    with TinyJob(path, on_step=note, **given) as job:
        job.run(STEPS)
        assert job.heard("failed") == []
        assert [e.version for e in job.heard("sealed")] == [*range(1, STEPS)]
    return numbers


@pytest.mark.skipif(find_engine() is None, reason="versions are copied by torch")
def test_two_snapshots_take_turns(path: Path, settings: dict[str, Any]) -> None:
    keep: list[Snapshot] = []
    numbers = run(path, settings, keep)
    assert keep[0].facts.id.version == 5, "what somebody has does not change"
    assert keep[1].facts.id.version == 6
    assert len({*numbers[8:]}) == 2
    assert numbers[8:10] == numbers[10:12]


def test_none_is_renewed_without_the_engine(
    path: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    without_the_engine(monkeypatch)
    keep: list[Snapshot] = []
    run(path, settings, keep)
    assert [each.facts.id.version for each in keep] == [5, 6]
