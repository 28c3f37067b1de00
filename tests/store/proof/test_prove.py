"""`tierckpt prove` on an exact script, and on scripts inexact in one way each.

The runs are separate processes and are killed as such; they come from the fork server, which has
imported torch already.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import re
import runpy
import subprocess
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import pytest

from tierckpt.cli import run_command
from tierckpt.proof import runs

STEPS = ("--steps", "4")
SCRIPT = str(Path(__file__).resolve().parents[2] / "support" / "prove_script.py")


class Forked:
    """Replaces `subprocess.Popen` for a Python script."""

    returncode: int | None = None

    def __init__(
        self, command: Sequence[str], stdout: IO[bytes], env: Mapping[str, str], **_: Any
    ) -> None:
        if command[0] != "python":
            raise FileNotFoundError(2, "No such file or directory", command[0])
        context = multiprocessing.get_context("forkserver")
        what = ([*command[1:]], dict(env), stdout.name, os.getcwd())
        self._process = context.Process(target=run_script, args=what)
        self._process.start()
        self.pid = self._process.pid

    def wait(self, seconds: float | None = None) -> int:
        self._process.join(seconds)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("script", seconds or 0.0)
        self.returncode = self._process.exitcode
        self._process.close()
        return self.returncode


def run_script(arguments: list[str], environment: dict[str, str], log: str, folder: str) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    with open(log, "ab") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERCKPT_SHM_DIR", str(shm_dir))
    played = types.SimpleNamespace(**{**vars(subprocess), "Popen": Forked})
    monkeypatch.setattr(runs, "subprocess", played)
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "HOROVOD_RANK"):
        monkeypatch.delenv(name, raising=False)


def prove(*arguments: object, kind: str = "exact", steps: int = 100) -> int:
    script = ("--", "python", SCRIPT, kind, steps)
    return run_command(["prove", "--dir", "proof", *map(str, (*STEPS, *arguments, *script))])


def test_an_exact_script(tmp_path: Path, shm_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The script is reported as exact, and no file remains in memory or in the script's own
    checkpoint folder."""
    assert prove() == 0
    out = capsys.readouterr().out
    assert "exact: killed with SIGKILL at step 5, resumed from " in out
    assert "to 9 are bit for bit as in the run that was not killed (1 rank, 11 tensors" in out
    assert "not witnessed: no loader gave its newest batch once more" in out
    assert not (tmp_path / "ckpts").exists()
    assert [*shm_dir.rglob("r0*")] == []
    # `tierckpt diff` can compare the last versions.
    places = [next((tmp_path / "proof" / run).glob("ckpts-*")) for run in ("undisturbed", "killed")]
    assert run_command(["diff", *map(str, places)]) == 0
    assert prove() == 2
    assert "is not empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("position", "All random streams are equal, and yet the step differs"),
        ("schedule", "Only options of an optimizer (a learning rate) differ"),
        ("counts", "the loop counts batches, from 0 after a restart in the middle of an epoch"),
        ("draws", "other augmentation: the samples have the same indices, and the batch differs"),
        ("python", "The random stream of python is at another place"),
        ("urandom", "not deterministic: step "),
        ("afresh", "not exact: The restarted job started from scratch"),
    ],
)
def test_each_way_to_be_inexact_is_named(
    kind: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prove(kind=kind) == 1
    out = capsys.readouterr().out
    assert said in out
    assert "exact: killed" not in out


def test_steps_of_a_journal_are_proven(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The versions in memory are not used, so that the journal has to lead to the kill."""
    monkeypatch.setenv("TIERCKPT_LOCAL_JOURNAL_STEPS", "100")
    assert prove("--kill-after", 8) == 0
    out = capsys.readouterr().out
    repeated = re.search(
        r"exact: killed with SIGKILL at step 8, resumed from 8 \((\d) iterations repeated from the "
        r"journal\), steps 9 to 12 are bit for bit",
        out,
    )
    assert repeated is not None, out
    assert int(repeated[1]) >= 5


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("clamps", "could not be made again exactly: rank 0: v4: parameters or optimizer state"),
        ("expands", "the journal ends at v2: the gradient of 0.weight has gaps in its memory"),
    ],
)
def test_a_journal_that_leads_nowhere_is_not_exact(
    kind: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TIERCKPT_LOCAL_JOURNAL_STEPS", "100")
    assert prove(kind=kind) == 1
    out = capsys.readouterr().out
    assert "not exact, killed with SIGKILL at step 5, resumed from " in out
    assert said in out
    monkeypatch.delenv("TIERCKPT_LOCAL_JOURNAL_STEPS")
    assert run_command(["prove", *STEPS, "--", "python", SCRIPT, kind, "100"]) == 0, "the remedy"


def test_untested_parts_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    """A scheduler that was not given steps at the end of an epoch, and these steps contain none."""
    assert prove(kind="epochs") == 0
    out = capsys.readouterr().out
    assert "exact: killed with SIGKILL at step 5" in out
    assert "not compared: no epoch ended in these steps." in out
    assert "not compared: no learning rate changed in these steps" in out
    assert "not in the checkpoints: LambdaLR sets the learning rate of optimizer" in out
    assert "Give it, too: extra={'schedule': schedule}" in out
    (how,) = re.findall(r"give --epochs, or (--kill-after \d+ --steps \d+)\n", out)
    assert prove("--epochs", "--dir", "other", kind="epochs") == 1
    out = capsys.readouterr().out
    assert f"for an epoch to end before the kill and one after it: {how}\n" in out
    assert "options/optimizer[0]/lr (0.03" in out
    assert "not in the checkpoints: LambdaLR sets the learning rate of optimizer" in out


def test_epochs_are_chosen_in_a_script_that_ends_before_the_default_numbers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A short one has 24 steps, and its first epoch ends after the 16th; another has one epoch."""
    assert prove("--epochs", "--steps", 30, kind="epochs", steps=24) == 0
    out = capsys.readouterr().out
    assert "the kill and one after it: --kill-after 19 --steps 5\n" in out
    assert any(f"steps {first} to 24 are bit for bit" in out for first in (18, 19, 20))
    assert prove("--epochs", "--dir", "other", kind="epochs", steps=8) == 2
    assert "the script ended by itself at version 8, and an epoch" in capsys.readouterr().err


def test_from_a_version_of_the_job_which_is_not_touched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (tmp_path / "log").open("ab") as log:
        environment = {**os.environ, "TIERCKPT_AGENT": "inline"}
        assert Forked(["python", SCRIPT, "exact", "8"], log, environment).wait() == 0
    before = images(tmp_path / "ckpts")
    assert before
    assert prove("--from", 8, "--kill-after", 3) == 0
    assert "killed with SIGKILL at step 11" in capsys.readouterr().out
    assert images(tmp_path / "ckpts") == before
    assert prove("--from", "ckpts@3", "--dir", "other") == 2
    assert "no v3 is complete and sound; there are shards of v8" in capsys.readouterr().err


def images(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize(
    ("kind", "steps", "said"),
    [
        ("fails", 100, "and made no Checkpointer"),
        ("exact", 7, "the script ended by itself at version 7, but the test needs version 9"),
        ("hangs", 100, "made no step for 1 s and was given up"),
    ],
)
def test_a_case_without_a_verdict_names_the_remedy(
    kind: str, steps: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    patience = ("--patience", 1) if kind == "hangs" else ()
    assert prove(*patience, kind=kind, steps=steps) == 2
    assert said in capsys.readouterr().err
