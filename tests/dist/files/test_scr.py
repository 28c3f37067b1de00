"""A program with SCR's calls: it restarts, passes over an invalid checkpoint, writes output."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.rank_pool import LAUNCHERS, MPIRUN

PROGRAM = """
import sys
from pathlib import Path
from mpi4py import MPI
import tierckpt.scr as scr

rank, bad = MPI.COMM_WORLD.Get_rank(), sys.argv[1]

def fails(call, *arguments):
    try:
        call(*arguments)
    except RuntimeError as error:
        return str(error)
    raise AssertionError(f"{call} passed")

assert "before init()" in fails(scr.need_checkpoint)
assert scr.config("SCR_CHECKPOINT_INTERVAL") == "0"
assert scr.config("SCR_CHECKPOINT_INTERVAL=2") is None
assert scr.config("SCR_CHECKPOINT_INTERVAL") == "2"
scr.init()
assert "after init()" in fails(scr.config, "SCR_FLUSH=1")
assert scr.route_file("anything") == "anything"
assert "belongs between start_output()" in fails(scr.complete_output)
step = 0
while scr.have_restart():
    name = scr.start_restart()
    path = scr.route_file(f"ckpt/{name}_{rank}.txt")
    assert path == scr.route_file(f"{name}_{rank}.txt"), "a name alone is enough"
    assert "is no file of this rank" in fails(scr.route_file, "missing")
    text = Path(path).read_text()
    assert text == f"{name} {rank}\\n" * 1000
    if scr.complete_restart(not (rank == 0 and name == bad)):
        step = int(name.split("_")[1])
        break
    print(f"{rank} refuses {name}", flush=True)
print(f"{rank} begins at {step}", flush=True)
for step in range(step + 1, step + 5):
    if not scr.need_checkpoint():
        continue
    name = f"step_{step}"
    scr.start_output(name, scr.FLAG_CHECKPOINT)
    assert "is not in SCR_PREFIX" in fails(scr.route_file, "/elsewhere/x")
    path = scr.route_file(f"ckpt/{name}_{rank}.txt")
    Path(path).write_text(f"{name} {rank}\\n" * 1000)
    assert not Path(f"ckpt/{name}_{rank}.txt").exists()
    assert scr.complete_output(True)
    assert not scr.should_exit()
scr.start_output("void", scr.FLAG_CHECKPOINT)
assert scr.complete_output(rank == 0) is False
for flags, name in ((scr.FLAG_OUTPUT, "plot"), (scr.FLAG_OUTPUT | scr.FLAG_CHECKPOINT, "step_99")):
    scr.start_output(name, flags)
    Path(scr.route_file(f"{name}/{name}_{rank}.txt")).write_text(name)
    assert scr.complete_output()
    assert Path(f"{name}/{name}_{rank}.txt").read_text() == name
    if flags == scr.FLAG_OUTPUT and bad == "none":
        break
assert "SCR_CACHE_SIZE" in fails(scr.delete, "step_2")
scr.finalize()
assert "after finalize()" in fails(scr.finalize)
assert "torch" not in sys.modules
"""


@pytest.fixture
def run(
    tmp_path: Path, shm_dir: Path, launchable: Callable[[str], None]
) -> Callable[[str], subprocess.CompletedProcess[str]]:
    launchable(MPIRUN)
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "cache").mkdir()

    def launch(bad: str) -> subprocess.CompletedProcess[str]:
        command = [*LAUNCHERS[MPIRUN].format(size=2).split(), sys.executable, "program.py", bad]
        places = {"SCR_CACHE_BASE": str(tmp_path / "cache"), "TIERCKPT_SHM_DIR": str(shm_dir)}
        env = {**os.environ, **places, "SCR_FLUSH": "1", "SCR_COPY_TYPE": "SINGLE"}
        return subprocess.run(
            command, capture_output=True, text=True, cwd=tmp_path, env=env, timeout=240
        )

    return launch


def test_a_program_of_scr_runs_with_another_import(
    run: Callable[[str], subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    first = run("none")
    assert first.returncode == 0, first.stderr
    assert all(f"{rank} begins at 0" in first.stdout for rank in (0, 1)), first.stdout
    # The nodes are lost: what was flushed to SCR_PREFIX is left.
    for path in sorted((tmp_path / "cache").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    second = run("step_4")
    assert second.returncode == 0, second.stdout + second.stderr
    for rank in (0, 1):  # mpirun may join lines of ranks
        assert f"{rank} refuses step_4" in second.stdout
        assert f"{rank} begins at 2" in second.stdout
