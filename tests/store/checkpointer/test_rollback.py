"""Rollback of one rank: at the persistent level alone, without notes, and beside other settings."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tierckpt import latest, load
from tierckpt.cli import run_command
from tierckpt.errors import RestoreError
from tierckpt.testing import TinyJob

pytestmark = pytest.mark.usefixtures("inline_agent")

STEPS = 9


@pytest.fixture
def places(tmp_path: Path, shm_dir: Path) -> dict[str, Any]:
    return {
        "path": tmp_path / "ckpts",
        "shm_dir": str(shm_dir),
        "local_keep": 20,
        "persistent_path": str(tmp_path / "far"),
        "persistent_every_steps": 3,
        "persistent_keep": 20,
    }


def messages(job: TinyJob, severity: int = 0) -> list[str]:
    return [e.message for e in job.events if e.name == "notice" and e.severity >= severity]


def test_a_disk_that_was_lost_in_between_changes_nothing(places: dict[str, Any]) -> None:
    """The request and the record are on the persistent level as well."""
    with TinyJob(**places) as job:
        job.run(STEPS)
    far = places["persistent_path"]
    shutil.rmtree(places["path"])
    assert run_command(["rollback", far, "6"]) == 0
    assert latest(far).version == 6  # type: ignore[union-attr]
    assert load(far).version == 6
    with TinyJob(seed=99, **places) as job:
        assert job.restore() == 6
        course = job.fingerprint()
        job.checkpointer.abandon()
    shutil.rmtree(places["path"])
    with TinyJob(seed=98, **places) as job:
        assert job.restore() == 6, "not v9, although the run had no version"
        assert job.fingerprint() == course
        job.run(8)
    assert latest([places["path"], far]).version == 8  # type: ignore[union-attr]


def test_a_close_without_a_step_leaves_the_versions_that_were_given_up(
    places: dict[str, Any],
) -> None:
    with TinyJob(**places) as job:
        job.run(STEPS)
    for _ in range(2):
        with TinyJob(seed=99, rollback_to=3, **places) as job:
            assert job.restore() == 3
    assert load(places["path"], version=9).version == 9
    assert run_command(["rollback", str(places["path"]), "9"]) == 0
    with TinyJob(seed=99, **places) as job:
        assert job.restore() == 9


def test_the_setting_is_carried_out_once_whatever_the_command_does_later(
    places: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(places["path"])
    with TinyJob(**places) as job:
        job.run(STEPS)
    assert run_command(["pin", path, "9"]) == 0
    with TinyJob(seed=99, rollback_to=6, **places) as job:
        assert job.restore() == 6
        assert "as the setting rollback_to (TIERCKPT_ROLLBACK_TO=6) asks" in messages(job)[-1]
        job.run(8)
        assert job.restore() == 8, "once in this run, too"
    assert run_command(["list", path]) == 0
    assert "abandoned: the job went back to an older version" in capsys.readouterr().out
    assert run_command(["rollback", path, "4"]) == 0
    for expected in (4, 5, 6):
        with TinyJob(seed=99, rollback_to=6, **places) as job:
            assert job.restore() == expected
            job.run(expected + 1)
    assert any("an earlier run has gone back to v6" in text for text in messages(job))
    assert run_command(["rollback", path, "9"]) == 1
    assert "v9 was given up before" in capsys.readouterr().err
    assert load(path, version=9).version == 9, "a pin keeps it"


def test_requests_that_contradict_each_other_end_the_start(places: dict[str, Any]) -> None:
    with TinyJob(**places) as job:
        job.run(STEPS)
    assert run_command(["rollback", str(places["path"]), "3"]) == 0
    assert run_command(["rollback", places["persistent_path"], "6"]) == 0
    with TinyJob(seed=99, **places) as job:
        with pytest.raises(RestoreError, match=r"different versions: v3 in .*v6 in"):
            job.restore()
        assert run_command(["rollback", places["persistent_path"], "--cancel"]) == 0
        assert job.restore() == 3


def test_a_record_that_cannot_be_stored_is_reported(
    places: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with TinyJob(**places) as job:
        job.run(STEPS)
    places["path"].joinpath("rollback.json").mkdir()
    with TinyJob(seed=99, rollback_to=6, **places) as job:
        assert job.restore() == 6
        texts = [text for text in messages(job) if "could not be noted in" in text]
        assert len(texts) == 1
        job.run(8)
    with TinyJob(seed=99, rollback_to=6, **places) as job:
        assert job.restore() == 8, "the persistent level has the record"


def test_a_folder_above_the_nodes_is_refused(
    places: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """No start would look there, although `tierckpt list` shows the versions of all nodes."""
    above = places["path"]
    del places["persistent_path"]
    with TinyJob(**{**places, "path": str(above / "{node}"), "node": "n1"}) as job:
        job.run(STEPS)
    for arguments in (["6"], ["--cancel"]):
        assert run_command(["rollback", str(above), *arguments]) == 1
        told = capsys.readouterr().err
        assert f"the versions of a job are in {above / 'n1'}. Give that path" in told
    above.joinpath("empty").mkdir()
    assert run_command(["rollback", str(above / "empty"), "6"]) == 1
    assert "no job has written to" in capsys.readouterr().err
    assert not [*above.rglob("rollback-request.json")]
    assert run_command(["rollback", str(above / "n1"), "6"]) == 0


def test_a_running_job_may_remove_the_version(places: dict[str, Any]) -> None:
    path = str(places["path"])
    del places["persistent_path"]

    def asked() -> str:
        command = [sys.executable, "-m", "tierckpt", "rollback", path, "6"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    with TinyJob(**places) as job:
        job.run(STEPS)
        assert f"tierckpt pin {path} 6 keeps it on disk" in asked()
        assert run_command(["pin", path, "6"]) == 0
        assert "--now ends it (--clear before the next start)" in (told := asked())
        assert "keeps it on disk" not in told
    assert run_command(["halt", path, "--now"]) == 0
    assert "a request to halt is there, at which the next start would end" in asked()


def test_a_damaged_request_hides_neither_the_record_nor_versions(
    places: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    path, far = places["path"], Path(places["persistent_path"])
    with TinyJob(**places) as job:
        job.run(STEPS)
    with TinyJob(seed=99, rollback_to=6, **places) as job:
        assert job.restore() == 6
        job.checkpointer.abandon()
    for place in (path, far):
        place.joinpath("rollback-request.json").write_text("{}")
    assert latest([path, far]).version == 6  # type: ignore[union-attr]
    shutil.rmtree(path)
    with TinyJob(seed=99, **places) as job:
        assert job.restore() == 6, "by the record and the versions of the persistent level"
        assert any("rollback-request.json is truncated" in e.message for e in job.events)
    assert run_command(["rollback", str(far), "--cancel"]) == 0
    assert "the request, which was damaged, is removed" in capsys.readouterr().out
    assert not far.joinpath("rollback-request.json").exists()
