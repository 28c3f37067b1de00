"""The Horovod that `make horovod` made, under its two launchers: two ranks that sum."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.horovod_here import horovod_missing, mpi_missing

RANK = """\
import pathlib, sys
import torch
import horovod.torch as hvd

hvd.init()
over = "mpi" if hvd.mpi_enabled() else "gloo"
total = hvd.allreduce(torch.tensor([1.0 + hvd.rank()]), op=hvd.Sum).item()
pathlib.Path(sys.argv[1], str(hvd.rank())).write_text(f"{hvd.size()} over {over}: {total}")
hvd.barrier()
hvd.shutdown()
"""
HOROVODRUN = ("-m", "horovod.runner.launch", "-np", "2", "--gloo", "--network-interfaces", "lo")
MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2")


@pytest.mark.parametrize(
    ("launcher", "over"),
    [
        pytest.param(
            (sys.executable, *HOROVODRUN),
            "gloo",
            marks=pytest.mark.skipif(bool(horovod_missing()), reason=horovod_missing()),
        ),
        pytest.param(
            MPIRUN,
            "mpi",
            marks=pytest.mark.skipif(bool(mpi_missing()), reason=mpi_missing()),
        ),
    ],
    ids=["horovodrun", "mpirun"],
)
def test_two_ranks_sum(launcher: tuple[str, ...], over: str, tmp_path: Path) -> None:
    command = [*launcher, sys.executable, "-c", RANK, str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    # Not two jobs of one rank, which is what a Horovod without MPI makes of mpirun.
    said = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert said == {rank: f"2 over {over}: 3.0" for rank in "01"}
