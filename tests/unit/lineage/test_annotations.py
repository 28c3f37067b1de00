"""Facts of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tierckpt.lineage import command_hash, facts_here, git_commit, launcher

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_the_commit_of_a_clone_a_worktree_and_packed_refs(tmp_path: Path) -> None:
    git = tmp_path / "clone" / ".git"
    (git / "refs" / "heads").mkdir(parents=True)
    (tmp_path / "clone" / "deep" / "er").mkdir(parents=True)
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    (git / "packed-refs").write_text(f"# pack-refs\n{COMMIT} refs/heads/main\n^{COMMIT}\n")
    assert git_commit(tmp_path / "clone" / "deep" / "er") == COMMIT
    (git / "refs" / "heads" / "main").write_text(f"{COMMIT[::-1]}\n")
    assert git_commit(tmp_path / "clone") == COMMIT[::-1]
    own = git / "worktrees" / "other"
    own.mkdir(parents=True)
    (own / "HEAD").write_text(f"{COMMIT}\n")
    (own / "commondir").write_text("../..\n")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / ".git").write_text(f"gitdir: {own}\n")
    assert git_commit(tmp_path / "other") == COMMIT
    (own / "HEAD").write_text("ref: refs/heads/main\n")
    assert git_commit(tmp_path / "other") == COMMIT[::-1]


@pytest.mark.parametrize("head", ["", "ref: refs/heads/none\n", "not a commit\n"])
def test_a_repository_without_a_commit(tmp_path: Path, head: str) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "HEAD").write_text(head)
    assert git_commit(tmp_path) == ""


def test_the_launcher_and_nothing_else_of_the_environment() -> None:
    assert launcher({}) == ""
    assert launcher({"TORCHELASTIC_RUN_ID": "none", "TOKEN": "x"}) == "torchrun"
    assert launcher({"TORCHELASTIC_RUN_ID": "tuesday"}) == "torchrun tuesday"
    assert launcher({"SLURM_PROCID": "0", "SLURM_JOB_ID": "7"}) == "srun, Slurm job 7"


def test_command_lines_are_told_apart_and_not_shown() -> None:
    assert command_hash(["a b"]) != command_hash(["a", "b"])
    assert len(command_hash(["train.py", "--password", "x"])) == 64
    assert set(facts_here("n1")) == {"host", "user", "launcher", "command", "git", "software"}
    assert facts_here("n1")["host"] == "n1"
