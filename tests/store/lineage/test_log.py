"""`tierckpt log`: the tree for terminals, for programs, and as a picture."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tierckpt.cli.main import main
from tierckpt.lineage.annotations import command_hash
from tierckpt.testing.tiny_job import TinyJob


@pytest.fixture
def history(tmp_path: Path, shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job that went back to v4, with a fork of v4 that was forked again."""
    monkeypatch.setattr(sys, "argv", ["train.py", "--token", "s3cret"])
    monkeypatch.setenv("SECRET", "s3cret")
    places: dict[str, Any] = {"shm_dir": str(shm_dir), "local_keep_last": 9}

    def life(name: str, steps: int, restore: int | None = None, **settings: Any) -> None:
        with TinyJob(tmp_path / name, **{**places, **settings}) as job:
            job.restore(restore)
            while job.iteration < steps:
                job.train_one()
                job.iteration += 1
                job.checkpointer.step(metric=abs(job.iteration - 5))

    life("a", 6)
    life("b", 7, fork_from=f"{tmp_path / 'a'}@v4")
    assert main(["pin", str(tmp_path / "a"), "6"]) == 0
    life("a", 5, restore=4)
    assert main(["fork", str(tmp_path / "b"), str(tmp_path / "c")]) == 0
    assert main(["pin", str(tmp_path / "a"), "3"]) == 0
    return tmp_path


def test_the_tree_shows_runs_and_forks_below_their_versions(
    history: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["log", str(history / "a")]) == 0
    lines = capsys.readouterr().out.splitlines()
    shown = [line.partition(", 20")[0] for line in lines]
    assert shown == [
        f"{history}/a",
        "└── run 1, from the beginning",
        "    ├── v1 to v2, 2 versions",
        "    ├── v3 on local, metric 2, pinned",
        "    ├── v4 on local, metric 1",
        "    ├── v6 on local, metric 1, given up, pinned",
        f"    ├── fork of v4: {history}/b",
        f"    │   └── run 1, from {history}/a@v4",
        "    │       ├── v5 on local, metric 0, best",
        "    │       ├── v6 on local, metric 1",
        f"    │       ├── v7 on local, metric 2, a restart takes this, held for {history}/c",
        f"    │       └── fork of v7: {history}/c, has no version of its own yet",
        "    └── run 2, from v4",
        "        └── v5 on local, metric 0, a restart takes this, best",
    ]
    assert "1 rank, " in lines[1]
    assert f"command {command_hash(sys.argv)[:10]}" in lines[1]


def test_programs_get_everything_and_nothing_secret(
    history: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["log", str(history / "a"), "--json"]) == 0
    text = capsys.readouterr().out
    files = [each.read_text() for each in (history / "a" / "runs").iterdir()]
    assert len(files) == 2
    assert "s3cret" not in text + "".join(files)
    (first,) = json.loads(text)["runs"]
    assert first["command"] == command_hash(["train.py", "--token", "s3cret"])
    assert [first["software"][n] for n in ("tierckpt", "torch")]
    assert [v["version"] for v in first["versions"]] == [1, 2, 3, 4, 6]
    assert [r["began"] for r in first["runs"]] == [[1, 4]]
    fork = first["forks"][0]
    assert (fork["from"], fork["held"]) == ([1, 4], False)
    assert fork["job"]["origin"]["version"] == 4
    assert fork["job"]["runs"][0]["forks"][0]["held"]


def test_a_picture(history: Path) -> None:
    pytest.importorskip("matplotlib")
    command = [sys.executable, "-m", "tierckpt", "log", str(history / "a"), "--plot"]
    # In a process of its own: matplotlib keeps fonts open for as long as there is one.
    subprocess.run([*command, str(history / "tree.png")], check=True)
    assert (history / "tree.png").read_bytes().startswith(b"\x89PNG")


def test_runs_without_records_come_from_lineages(
    tmp_path: Path, shm_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Jobs that do not want records, and jobs of older releases."""
    for steps in (3, 5):
        with TinyJob(
            tmp_path / "a", shm_dir=str(shm_dir), local_keep_last=9, run_records=False
        ) as job:
            job.restore()
            job.run(steps)
    assert not (tmp_path / "a" / "runs").exists()
    assert main(["log", str(tmp_path / "a")]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "└── run 1, nothing noted",
        "    ├── v1 to v2, 2 versions",
        "    ├── v3 on local",
        "    └── run 2, from v3",
        "        ├── v4 on local",
        "        └── v5 on local, a restart takes this",
    ]


def test_records_outlive_their_versions(
    tmp_path: Path, shm_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    far = {"persistent_path": str(tmp_path / "far"), "persistent_every_steps": 2}
    for steps in (2, 4, 6, 8):
        with TinyJob(tmp_path / "a", shm_dir=str(shm_dir), local_keep_last=1, **far) as job:
            job.restore()
            job.run(steps)
    for place in ("a", "far"):
        capsys.readouterr()
        assert main(["log", str(tmp_path / place)]) == 0
        out = capsys.readouterr().out
        assert [f"run {n}, from v{2 * n - 2}" in out for n in (2, 3, 4)] == [True] * 3
