"""`tierckpt log`: the tree for terminals and for programs."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tierckpt.cli import run_command
from tierckpt.cli.versions import PLAIN_TREE_LINES, TREE_LINES, _drawn
from tierckpt.format import RunEnd, RunRecord, VersionId
from tierckpt.lineage import Branch, command_hash
from tierckpt.storage import RunRecords
from tierckpt.testing import TinyJob

pytestmark = pytest.mark.usefixtures("inline_agent")


@pytest.fixture
def history(tmp_path: Path, shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job that went back to v4, with a fork of v4 that was forked again."""
    monkeypatch.setattr(sys, "argv", ["train.py", "--token", "s3cret"])
    monkeypatch.setenv("SECRET", "s3cret")
    places: dict[str, Any] = {"shm_dir": str(shm_dir), "local_keep": 9}

    def life(name: str, steps: int, restore: int | None = None, **settings: Any) -> None:
        with TinyJob(tmp_path / name, **{**places, **settings}) as job:
            job.restore(restore)
            while job.iteration < steps:
                job.train_one()
                job.iteration += 1
                job.checkpointer.step(metric=abs(job.iteration - 5))

    life("a", 6)
    monkeypatch.chdir(tmp_path)
    life("b", 7, fork_from="a@v4")
    assert run_command(["pin", str(tmp_path / "a"), "6"]) == 0
    life("a", 5, restore=4)
    assert run_command(["fork", str(tmp_path / "b"), str(tmp_path / "c")]) == 0
    assert run_command(["pin", str(tmp_path / "a"), "3"]) == 0
    return tmp_path


def shown(text: str) -> list[str]:
    """Lines of a tree up to the time."""
    return [line.partition(", 20")[0] for line in text.splitlines()]


def test_the_tree_shows_runs_and_forks_below_their_versions(
    history: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert run_command(["log", str(history / "a")]) == 0
    out = capsys.readouterr().out
    assert shown(out) == [
        f"{history}/a",
        "├── run 1, from the beginning to v6",
        "│   ├── v1 to v2, 2 versions, the last one on local, metric 3",
        "│   ├── v3 on local, metric 2, pinned",
        "│   ├── v4 on local, metric 1",
        "│   ├── v6 on local, metric 1, given up, pinned",
        f"│   └── fork of v4: {history}/b",
        f"│       └── run 1, from {history}/a@v4 to v7",
        "│           ├── v5 on local, metric 0, best",
        "│           ├── v6 on local, metric 1",
        f"│           ├── v7 on local, metric 2, a restart takes this, held for {history}/c",
        f"│           └── fork of v7: {history}/c, has no version of its own yet",
        "└── run 2, from v4 to v5",
        "    └── v5 on local, metric 0, a restart takes this, best",
    ]
    first, *_, last = [line for line in out.splitlines() if "── run " in line]
    assert ", the training's end, " in first
    assert "1 rank, " in first
    assert f"command {command_hash(sys.argv)[:10]}" in first
    assert last.endswith(", the training's end"), "facts that did not change are not repeated"
    assert run_command(["log", str(history / "a"), "--all"]) == 0
    assert capsys.readouterr().out.count(f"command {command_hash(sys.argv)[:10]}") == 3


def test_programs_get_everything_and_nothing_secret(
    history: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert run_command(["log", str(history / "a"), "--json"]) == 0
    text = capsys.readouterr().out
    files = [each.read_text() for each in (history / "a" / "runs").iterdir()]
    assert len(files) == 4
    assert "s3cret" not in text + "".join(files)
    first, second = json.loads(text)["runs"]
    assert first["command"] == command_hash(["train.py", "--token", "s3cret"])
    assert [first["software"][n] for n in ("tierckpt", "torch")]
    assert [v["version"] for v in first["versions"]] == [1, 2, 3, 4, 6]
    assert (first["began"], second["began"]) == (None, [1, 4])
    assert [first["newest"], second["newest"]] == [6, 5]
    assert [run["end"]["reason"] for run in (first, second)] == ["the training's end"] * 2
    fork = first["forks"][0]
    assert (fork["from"], fork["held"]) == ([1, 4], False)
    assert fork["job"]["origin"]["version"] == 4
    assert fork["job"]["runs"][0]["forks"][0]["held"]


def test_every_start_is_there_also_those_that_left_no_version(
    tmp_path: Path,
    shm_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """They share their generation. An error is noted by its type."""
    path, places = tmp_path / "a", {"shm_dir": str(shm_dir)}
    monkeypatch.setenv("TIERCKPT_SHM_DIR", str(shm_dir))
    with TinyJob(path, **places) as job:
        job.restore()
        job.run(2)

    def fail(error: BaseException) -> None:
        with TinyJob(path, **places) as job:
            job.restore()
            raise error

    for error in (KeyError("s3cret"), KeyError("s3cret"), SystemExit(3)):
        with pytest.raises(type(error)):
            fail(error)
    with TinyJob(path, **places) as job:
        job.restore()
        job.checkpointer._levels.run_notes.close()  # waits for the record
        assert run_command(["log", str(path)]) == 0
        assert ", running" in capsys.readouterr().out.splitlines()[-1]
        job.run(3)
    assert run_command(["log", str(path)]) == 0
    out = capsys.readouterr().out
    assert shown(out)[1:] == [
        "├── run 1, from the beginning to v2",
        "│   ├── v2 on local",
        "│   └── run 2, from v2: 3 starts that left no version",
        "└── run 2, from v2 to v3",
        "    └── v3 on local, a restart takes this",
    ]
    assert out.splitlines()[3].endswith(", KeyError on rank 0 (2), sys.exit(3) on rank 0 (1)")
    assert "s3cret" not in "".join(each.read_text() for each in (path / "runs").iterdir())
    assert run_command(["log", str(path), "--all"]) == 0
    assert capsys.readouterr().out.count("run 2, from v2") == 4


def test_a_damaged_record_is_named_and_the_others_are_shown(
    tmp_path: Path, shm_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for steps in (2, 4):
        with TinyJob(tmp_path / "a", shm_dir=str(shm_dir), local_keep=9) as job:
            job.restore()
            job.run(steps)
    files = (tmp_path / "a" / "runs").glob("g000001.*.json")
    (first,) = [each for each in files if not each.name.endswith(".end.json")]
    first.write_bytes(first.read_bytes()[:-9])
    assert run_command(["log", str(tmp_path / "a")]) == 0
    out = capsys.readouterr().out
    assert shown(out)[1] == "├── run 1, nothing noted"
    assert "└── run 2, from v2 to v4, 20" in out
    assert f"{tmp_path}/a: the file runs/{first.name} is truncated or damaged" in out


def test_a_run_that_took_its_last_version_once_more_is_one_run(
    tmp_path: Path, shm_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second one has a generation of its own. Lightning's end often takes it."""
    for steps in (2, 3):
        with TinyJob(tmp_path / "a", shm_dir=str(shm_dir), local_keep=9) as job:
            job.restore()
            job.run(steps)
            job.scheduler.step()
    assert run_command(["log", str(tmp_path / "a")]) == 0
    assert shown(capsys.readouterr().out)[1:] == [
        "├── run 1, from the beginning to v2",
        "│   └── v1 to v2, 2 versions, the last one on local",
        "└── run 3, from v2 to v3",
        "    └── v3 on local, a restart takes this",
    ]


def test_many_restarts_are_a_list_and_their_facts_are_shown_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not a line indented 600 times, which neither people nor JSON could read."""
    monkeypatch.setattr("os.fsync", lambda fd: None)
    records = RunRecords(tmp_path)
    for n in range(1, 601):
        started = VersionId(n - 1, n - 1) if n > 1 else None
        facts = {"host": "n1", "git": "ab" * 20, "launcher": "torchrun x"}
        record = RunRecord(f"{n:016x}", n, started, started_seconds=float(n), **facts)
        records.add(record)
        records.add_end(record, RunEnd(record.run_id, n + 0.5, "the training's end", version=n))
    assert len([*(tmp_path / "runs").iterdir()]) == 2 * 512, "the newest 512, with their ends"
    assert run_command(["log", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 513
    assert max(map(len, lines[2:])) < 90
    assert run_command(["log", str(tmp_path), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["runs"]) == 512


def test_the_best_version_is_as_the_job_measures_it(
    tmp_path: Path, shm_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its setting is in the script; the command has only the record."""
    far = {"persistent_path": str(tmp_path / "far"), "persistent_every_steps": 1}
    with TinyJob(
        tmp_path / "a", shm_dir=str(shm_dir), local_keep="9, best 1 highest", **far
    ) as job:
        for metric in (0.1, 0.9, 0.5):
            job.train_one()
            job.iteration += 1
            job.checkpointer.step(metric=metric)
    for place in ("a", "far"):
        assert run_command(["log", str(tmp_path / place)]) == 0
        (best,) = [line for line in capsys.readouterr().out.splitlines() if ", best" in line]
        assert "metric 0.9" in best


def test_in_a_narrow_terminal_and_without_unicode_it_stays_a_tree() -> None:
    branches = [Branch("one two three four five six", [Branch("seven")]), Branch("eight")]
    assert [*_drawn(branches, TREE_LINES, 26)] == [
        "├── one two three four five",
        "│   │   six",
        "│   └── seven",
        "└── eight",
    ]
    assert [*_drawn(branches, PLAIN_TREE_LINES, None)] == [
        "|-- one two three four five six",
        "|   `-- seven",
        "`-- eight",
    ]


def test_runs_without_records_come_from_lineages(
    tmp_path: Path, shm_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The records may be lost."""
    for steps in (3, 5):
        with TinyJob(tmp_path / "a", shm_dir=str(shm_dir), local_keep=9) as job:
            job.restore()
            job.run(steps)
        shutil.rmtree(tmp_path / "a" / "runs")
    assert run_command(["log", str(tmp_path / "a")]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "├── run 1, nothing noted",
        "│   └── v1 to v3, 3 versions, the last one on local",
        "└── run 2, from v3 to v5",
        "    ├── v4 on local",
        "    └── v5 on local, a restart takes this",
    ]


def test_records_outlive_their_versions(
    tmp_path: Path, shm_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    far = {"persistent_path": str(tmp_path / "far"), "persistent_every_steps": 2}
    for steps in (2, 4, 6, 8):
        with TinyJob(tmp_path / "a", shm_dir=str(shm_dir), local_keep=1, **far) as job:
            job.restore()
            job.run(steps)
    for place in ("a", "far"):
        capsys.readouterr()
        assert run_command(["log", str(tmp_path / place)]) == 0
        out = capsys.readouterr().out
        for n in (2, 3, 4):
            assert f"run {n}, from v{2 * n - 2} to v{2 * n}, 20" in out
        assert out.count(", the training's end") == 4
