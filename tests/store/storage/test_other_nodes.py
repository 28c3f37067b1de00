"""A node with another name than before: its folder is another one, and a notice says so."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tierckpt.cli import run_command
from tierckpt.storage import DirectoryClaim, is_claimed, job_id_of, node_named
from tierckpt.testing import TinyJob, run_in_child


@pytest.fixture
def start(tmp_path: Path, shm_dir: Path) -> Callable[..., TinyJob]:
    def start(node: str, name: str = "{node}", **settings: Any) -> TinyJob:
        return TinyJob(
            tmp_path / "ckpts" / name, shm_dir=str(shm_dir), node=node, agent="inline", **settings
        )

    return start


def said(job: TinyJob) -> list[str]:
    warnings = [e for e in job.heard("notice") if e.severity == logging.WARNING]
    return [e.message for e in warnings if "no node of this run" in e.message]


def test_a_pod_with_a_new_name_is_shown_the_versions_of_the_old_one(
    start: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = tmp_path / "ckpts"
    with start("pod-a") as first:
        first.run(3)
        fingerprint = first.fingerprint()
    assert run_command(["list", str(folders / "pod-b")]) == 1
    error = capsys.readouterr().err
    assert f"{folders / 'pod-a'} has v3 of the same job" in error
    assert f"'{folders / '{node}'}'" in error
    with start("pod-b") as second:
        assert second.restore() == 0
        (text,) = said(second)
        assert text.startswith(f"{folders / 'pod-a'} has v3 of this job, and no node of this run")
        assert "stands for 'pod-b', and this run starts from the beginning" in text
        second.run(1)
    assert run_command(["list", str(folders / "pod-b")]) == 0
    assert f"{folders / 'pod-a'} has v3 of the same job" in capsys.readouterr().out
    with start("pod-b", seed=1) as again:
        assert again.restore() == 1
        (text,) = said(again)
        assert "this run continues from v1" in text
        assert text.count("node='pod-a'") == 1
    with start("pod-a", seed=1) as found:
        assert found.restore() == 3, "as it was told"
        assert found.fingerprint() == fingerprint
        assert said(found) == [], "what the other one has is older"
    assert run_command(["list", str(folders / "{node}")]) == 0
    assert "of the same job" not in capsys.readouterr().out


@pytest.mark.parametrize("why", ["another job's", "a living one's", "no node in path"])
def test_versions_outside_this_jobs_past_are_not_reported(
    why: str, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with start("pod-a", job_id="theirs" if why == "another job's" else "") as first:
        first.run(2)
    name = "pod-b" if why == "no node in path" else "{node}"
    if why == "a living one's":
        monkeypatch.setattr("tierckpt.storage.claims.is_claimed", lambda directory: True)
    with start("pod-b", name) as second:
        assert second.restore() == 0
        assert said(second) == []


def test_a_folder_is_claimed_while_its_job_runs(tmp_path: Path) -> None:
    assert not is_claimed(tmp_path)
    made = DirectoryClaim(tmp_path, "00", 0, lambda *_: None)
    assert made.stake() == ""
    try:
        assert run_in_child(expect_claimed, tmp_path) == 0
    finally:
        made.release()
    (tmp_path / ".claim.11.0").touch()
    assert not is_claimed(tmp_path), "a dead one's"


def expect_claimed(directory: Path) -> None:
    assert is_claimed(directory)


@pytest.mark.parametrize(
    ("template", "name", "found"),
    [
        ("/a/{node}", "x", ("x", "/a/x")),
        ("/a/c-{node}.d/{node}/e", "c-x.d", ("x", "/a/c-x.d/x/e")),
        ("/a/{node}-{node}", "x-x", ("x", "/a/x-x")),
        ("/a/{node}-{node}", "x-y", None),
        ("/a/c-{node}", "d-x", None),
    ],
)
def test_the_owner_of_a_folder_follows_from_its_name(
    template: str, name: str, found: tuple[str, str] | None
) -> None:
    expected = [] if found is None else [(found[0], Path(found[1]))]
    assert list(node_named(template, [name])) == expected
    assert job_id_of(template)
