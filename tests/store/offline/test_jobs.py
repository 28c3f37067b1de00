"""The folder above several jobs: none of its versions is the newest, and each job can be named."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

import tierckpt
from tests.support.forgotten_ends import Forgotten
from tierckpt.checkpointer import shutdown
from tierckpt.cli import run_command
from tierckpt.errors import ConfigError
from tierckpt.offline import rows_of, survey_of
from tierckpt.storage import JobDirectory
from tierckpt.testing import TinyJob

pytestmark = pytest.mark.usefixtures("inline_agent")


def trained(path: Path, steps: int, **settings: object) -> None:
    given = {"agent": "inline", "local_every_steps": 1, "local_keep": 1}
    with TinyJob(path, **given, **settings) as job:
        job.restore()
        job.run(steps)


@pytest.fixture(scope="module")
def two_jobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two jobs with different numbers of restarts, of which retention has left one run each: no
    run of the one has the number of a run of the other."""
    folder = tmp_path_factory.mktemp("jobs")
    with pytest.MonkeyPatch.context() as patch:  # a fixture of a module precedes that of a test
        patch.setattr(shutdown, "_ends", Forgotten())
        for steps in (1, 2, 3):
            trained(folder / "a", steps)
    trained(folder / "b", 4)
    return folder


@pytest.fixture
def above(two_jobs: Path, tmp_path: Path) -> Path:
    """A copy of the two jobs."""
    return Path(shutil.copytree(two_jobs, tmp_path / "jobs"))


def test_the_folder_above_two_jobs_is_no_job(
    above: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    several = f"{above}: 2 jobs are here: {above}/a, {above}/b. Give the path of one of them"
    for read in (tierckpt.load, tierckpt.latest, tierckpt.history):
        with pytest.raises(ConfigError, match=re.escape(several)):
            read(str(above))
    out = str(tmp_path / "out.safetensors")
    read_all = (
        ["watch"],
        ["report", "-o", out],
        ["export", out],
        ["fork", out],
        ["list", "--files"],
    )
    for command in (*read_all, ["pin", "4"], ["unpin", "4"], ["unpin", "4", "--forks"]):
        assert run_command([command[0], str(above), *command[1:]]) == 1
        assert several in capsys.readouterr().err
    sentence = several.partition(": ")[2]
    for command in (["halt", "--now"], ["rollback", "3"], ["takeover"], ["fork", "--cancel"]):
        assert run_command([command[0], str(above), *command[1:]]) == 1
        assert sentence in capsys.readouterr().err
    assert run_command(["fork", str(above / "a"), str(above)]) == 1
    assert f"{sentence}, or another path" in capsys.readouterr().err
    with TinyJob(tmp_path / "new") as job, pytest.raises(ConfigError, match=re.escape(several)):
        job.checkpointer.restore(fork_from=str(above))


def test_a_folder_of_persistent_paths_is_one_of_jobs_and_so_is_the_folder_above_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    far = tmp_path / "store" / "far"
    far.mkdir(parents=True)
    for name, steps in (("a", 2), ("b", 3)):
        own = {"persistent_path": str(far / name), "persistent_every_steps": 1}
        trained(tmp_path / f"job {name}", steps, **own)
    capsys.readouterr()
    several = f"{far}: 2 jobs are here: {far}/a, {far}/b. Give the path of one of them"
    assert run_command(["pin", str(far), "2"]) == 1
    assert several in capsys.readouterr().err
    assert run_command(["list", str(far)]) == 0
    assert f"for one of them: tierckpt list {far}/a" in capsys.readouterr().out
    rows = [row for row in rows_of(survey_of(far / "b")) if row.next]
    assert all(row.created_seconds for row in rows), "its manifest has the time"
    below = f"there are folders below it: {far}; give one of them"
    for command in (
        ["list"],
        ["log"],
        ["pin", "2"],
        ["halt", "--now"],
        ["verify"],
        ["watch", "--once"],
    ):
        run_command([command[0], str(far.parent), *command[1:]])
        assert below in "".join(capsys.readouterr()), command
    assert run_command(["list", str(tmp_path / "job a")]) == 0
    assert "persistent" not in capsys.readouterr().out, "a job's path is its own"


def test_jobs_in_memory_alone_are_in_the_list_of_a_folder(
    above: Path,
    shm_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One has made no version yet. The folder is given relative to the working directory."""
    monkeypatch.setenv("TIERCKPT_SHM_DIR", str(shm_dir))
    for name, steps in (("mem", 3), ("new", 0)):
        with TinyJob(above / name, local_every_steps=1000) as job:
            job.restore()
            job.run(steps)
            job.checkpointer.abandon()
    monkeypatch.setattr(JobDirectory, "trains", lambda self: True)
    monkeypatch.chdir(above)
    capsys.readouterr()
    assert run_command(["list", "--json", "."]) == 0
    listed = json.loads(capsys.readouterr().out)["jobs"]
    assert [job["places"] for job in listed] == [["a"], ["b"], ["mem"], ["new"]]
    assert [len(job["versions"]) > 0 for job in listed] == [True, True, True, False]
    assert run_command(["list", "."]) == 0
    assert re.search(r"mem +3 .* v3 from memory .*running", capsys.readouterr().out)


def test_pins_reach_all_nodes_of_one_job_that_are_visible(
    two_jobs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = [Path(shutil.copytree(two_jobs / "a", tmp_path / "ckpts" / name)) for name in "xy"]
    for path in (tmp_path / "ckpts", tmp_path / "ckpts" / "{node}"):
        assert run_command(["pin", str(path), "3"]) == 0
        assert all([*node.glob("*.pin")] for node in nodes)
        assert run_command(["unpin", str(path), "3"]) == 0
        assert not any([*node.glob("*.pin")] for node in nodes)
    assert run_command(["pin", str(tmp_path / "ckpts"), "2"]) == 1
    assert "there is no such version as v2; there: v3" in capsys.readouterr().err


def test_verify_judges_each_job(above: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["verify", str(above), "--version", "4"]) == 0
    assert f"{above}/a\n  no v4\n{above}/b\nv4 " in capsys.readouterr().out
    (shard,) = (above / "b").glob("*.safetensors")
    damaged = bytearray(shard.read_bytes())
    damaged[-1] ^= 1
    shard.write_bytes(damaged)
    assert run_command(["verify", str(above)]) == 1
    out, err = capsys.readouterr()
    assert f"1 of 2 jobs: {above}/b" in err
    assert "no other version is complete here" in out, "a version of the other job is no help"


def test_list_has_a_line_for_each_job(above: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(above / "c", 6, fork_from=str(above / "b"))
    capsys.readouterr()
    assert run_command(["list", str(above)]) == 0
    titles, *lines, remedy = capsys.readouterr().out.splitlines()
    assert titles.split()[:2] == ["job", "versions"]
    assert [line.split()[0] for line in lines] == [f"{above}/{name}" for name in "abc"]
    assert ["v3 from local" in lines[0], "v4 from local" in lines[1]] == [True, True]
    assert lines[2].endswith(f"a fork of {above}/b@v4")
    assert remedy.endswith(f"for one of them: tierckpt list {above}/a, tierckpt log {above}/a")
    assert run_command(remedy.partition(": tierckpt ")[2].partition(",")[0].split()) == 0
    assert "a restart takes this" in capsys.readouterr().out
    assert run_command(["list", str(above), "--json"]) == 0
    jobs = json.loads(capsys.readouterr().out)["jobs"]
    assert [job["places"] for job in jobs] == [[f"{above}/{name}"] for name in "abc"]
    assert [[row["version"] for row in job["versions"] if row["next"]] for job in jobs] == [
        [3],
        [4],
        [6],
    ]


def test_log_has_a_tree_for_each_job_but_no_fork_of_another(
    above: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(above / "a fork", 6, fork_from=str(above / "b"))
    capsys.readouterr()
    assert run_command(["log", str(above)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "── " not in line] == [f"{above}/a", f"{above}/b"]
    assert sum(f"fork of v4: {above}/a fork" in line for line in lines) == 1
    assert run_command(["log", str(above), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [job["path"] for job in found["jobs"]] == [f"{above}/a", f"{above}/b"]


def test_the_folder_of_a_job_that_was_copied_has_two_jobs(above: Path) -> None:
    shutil.rmtree(above / "b")
    shutil.copytree(above / "a", above / "copy")
    assert tierckpt.latest(str(above)) is not None, "two places of one job until they differ"
    for name in ("a", "copy"):
        trained(above / name, 5)
    with pytest.raises(ConfigError, match=r"2 jobs are here: .*/a, .*/copy"):
        tierckpt.latest(str(above))


def test_a_version_after_the_path_is_answered_with_the_path(
    above: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("log", "list", "watch"):
        assert run_command([command, f"{above}/a@v3"]) == 1
        assert f"{above}/a. (Only a fork's source takes @v3 after it)" in capsys.readouterr().err


def test_a_hold_that_stays_as_its_source_was_moved_is_named_with_the_command_that_ends_it(
    above: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fork, moved = above / "fork", above / "moved"
    assert run_command(["fork", str(above / "b"), str(fork)]) == 0
    (above / "b").rename(moved)
    ends = f"tierckpt unpin {moved} 4 --forks"
    capsys.readouterr()
    assert run_command(["list", str(moved)]) == 0
    assert ends not in capsys.readouterr().out, "the fork still needs it"
    trained(fork, 5)
    capsys.readouterr()
    for command, text in (("list", ends), ("log", "does not need the hold any more")):
        assert run_command([command, str(moved)]) == 0
        assert text in capsys.readouterr().out
    assert run_command(ends.split()[1:]) == 0
    capsys.readouterr()
    assert run_command(["list", str(moved)]) == 0
    assert "held" not in capsys.readouterr().out
