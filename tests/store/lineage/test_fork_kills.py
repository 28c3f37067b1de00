"""SIGKILL on the way of a fork: the next run starts from the same version, or continues from its
own; the source keeps the version as long as it is needed, and not for ever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tierckpt.testing import TinyJob, fired, run_in_child

STEPS = 4
FORK_KILLS = [f"kill@fork:op={op}" for op in ("hold", "loaded", "record", "own", "settled")]
OWN_VERSION = "kill@file:op=rename,target=v0000000005.g000001.s00000of00001.manifest"
"""Before the fork's first own version exists."""


def _fork(path: str, settings: dict[str, Any]) -> None:
    with TinyJob(path, seed=9, **settings) as job:
        job.restore()
        job.run(STEPS + 3)


@pytest.mark.parametrize("point", [*FORK_KILLS, OWN_VERSION])
def test_a_killed_fork_is_nothing_or_whole(point: str, tmp_path: Path, shm_dir: Path) -> None:
    places = {"shm_dir": str(shm_dir), "local_keep": 1, "agent": "inline"}
    with TinyJob(tmp_path / "a", **places) as job:
        at_fork = job.run(STEPS).fingerprint()
        expected = job.run(STEPS + 3).fingerprint()
    with TinyJob(tmp_path / "source", **places) as job:
        job.run(STEPS)
    (marks := tmp_path / "fired").mkdir()
    settings = {**places, "fork_from": str(tmp_path / "source")}
    rules = {"rules": point, "marks": marks}
    assert run_in_child(_fork, str(tmp_path / "b"), settings, **rules) == -9
    assert len(fired(marks)) == 1
    started = [*(tmp_path / "b").glob("fork.json")]
    with TinyJob(tmp_path / "source", **places) as job:
        job.restore()
        job.run(STEPS + 2)
    if not started:  # the source is free, and its newest version is another one now
        settings["fork_from"] += f"@{STEPS}"
    with TinyJob(tmp_path / "b", seed=8, **settings) as job:
        if job.restore() == STEPS:
            assert job.fingerprint() == at_fork
        assert job.run(STEPS + 3).fingerprint() == expected
    held = [each.suffix for each in (tmp_path / "source").iterdir() if "of" not in each.name]
    assert held.count(".hold") == 0
    assert held.count(".fork") == 1
    assert not [*(tmp_path / "b").glob("*.kept")]
    with TinyJob(tmp_path / "source", **places) as job:
        job.restore()
        job.run(STEPS + 4)
    assert not [*(tmp_path / "source").glob(f"v{STEPS:010d}*.manifest")], "nothing keeps it now"
