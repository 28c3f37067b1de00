"""`tierckpt prove` under launchers, with a user's own command."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.horovod_here import horovod_missing
from tests.support.thorough import on_demand
from tests.support.warm_python.servers import PYTHON, THROUGHOUT
from tierckpt.proof import end_survivors

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = str(ROOT / "tests" / "support" / "prove_script.py")
ACCELERATE = str(ROOT / "tests" / "support" / "prove_accelerate.py")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
LO = ("--gloo", "--disable-cache", "--network-interfaces", "lo")
HOROVODRUN = ("-m", "horovod.runner.launch", "-np", "2", *LO)


def prove(
    command: tuple[str, ...],
    folder: Path,
    shm_dir: Path,
    *options: str,
    **variables: str,
) -> str:
    """Its output."""
    line = [PYTHON, "-m", "tierckpt", "prove", "--steps", "3", *options, "--", *command]
    own = {"TIERCKPT_SHM_DIR": str(shm_dir), "TMPDIR": str(folder)}
    own["XDG_CACHE_HOME"] = str(folder / "cache")
    environment = {**os.environ, **THROUGHOUT, **own, **variables}
    done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True)
    logs = [f"{log}:\n{log.read_text()}" for log in folder.rglob("log")]
    assert done.returncode == 0, "\n".join([done.stdout, done.stderr, *logs])
    return done.stdout


def test_torchrun_with_a_loop_that_nobody_touched(tmp_path: Path, shm_dir: Path) -> None:
    """torchrun itself restarts the killed processes, and no file remains.

    The scheduler was not given, and steps at the end of an epoch. These steps contain no end of an
    epoch: the output says so.
    """
    command = (PYTHON, *TORCHRUN, "--max-restarts", "3", SCRIPT, "wrap")
    out = prove(command, tmp_path, shm_dir)
    assert "exact: killed with SIGKILL at step 5, resumed from " in out
    assert "to 8 are bit for bit as in the run that was not killed (2 ranks, 11 tensors" in out
    assert "not in the checkpoints: LambdaLR sets the learning rate of optimizer 'opti" in out
    assert "Give it, too: extra={'schedule': schedule}" in out
    assert "not compared: no epoch ended before the kill" in out
    assert re.search(r"give --epochs, or --kill-after \d+ --steps \d+\n", out)
    assert [*tmp_path.glob("tierckpt-*")] == []
    assert [*shm_dir.rglob("r0*")] == []


def test_a_script_that_uses_accelerate(tmp_path: Path, shm_dir: Path) -> None:
    """An epoch ends before the kill, and one after it. The shims start the next attempt: one launch
    is enough, and no process of either is left."""
    pytest.importorskip("accelerate", exc_type=ImportError)
    command = (PYTHON, *TORCHRUN, "-m", "tierckpt.run", ACCELERATE)
    options = ("--kill-after", "7", "--steps", "7", "--dir", str(tmp_path / "proof"))
    said = prove(command, tmp_path, shm_dir, *options)
    assert "exact: killed with SIGKILL at step 7, resumed from 6, steps 7 to 14 are bit" in said
    log = (tmp_path / "proof" / "killed" / "log").read_text()
    assert "was killed by SIGKILL; attempt 2 of 4 starts" in log
    assert end_survivors(tmp_path / "proof" / "killed") == 0


@on_demand("a minute each")
@pytest.mark.parametrize("framework", ["lightning", "transformers"])
def test_scripts_of_frameworks(framework: str, tmp_path: Path, shm_dir: Path) -> None:
    """The script gives its path to the integration; both runs have others."""
    pytest.importorskip(framework, exc_type=ImportError)
    (tmp_path / "job").mkdir()
    settings = {"path": str(tmp_path / "job" / "ckpts")}
    scenario = json.dumps({"folder": str(tmp_path / "job"), "settings": settings})
    script = str(ROOT / "tests" / "support" / framework / "job.py")
    command = (PYTHON, *TORCHRUN, "-m", "tierckpt.run", script)
    out = prove(command, tmp_path, shm_dir, FRAMEWORK_SCENARIO=scenario)
    assert "exact: killed with SIGKILL at step 5, resumed from " in out
    assert [*(tmp_path / "job").glob("ckpts")] == []


@on_demand("half a minute; a job that is started again after a kill is in tests/store, too")
@pytest.mark.skipif(bool(horovod_missing()), reason=horovod_missing())
@pytest.mark.parametrize("shim", [(), ("-m", "tierckpt.run")], ids=["alone", "shim"])
def test_horovodrun(shim: tuple[str, ...], tmp_path: Path, shm_dir: Path) -> None:
    """It ends with the killed rank, and is started again; with the shim it stays."""
    out = prove((sys.executable, *HOROVODRUN, PYTHON, *shim, SCRIPT, "exact"), tmp_path, shm_dir)
    assert "(2 ranks, 11 tensors" in out
    assert [*tmp_path.glob("tierckpt-*")] == []
