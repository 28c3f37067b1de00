"""`tierckpt doctor` as users start it: one screen, JSON, and several nodes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.exported_job import wait_until
from tests.support.horovod_here import mpi_missing
from tests.support.thorough import points
from tests.support.warm_python.servers import PYTHON, THROUGHOUT

COLUMNS, LINES = 80, 40


def doctor(*arguments: str, program: Sequence[str], **environment: str) -> tuple[int, str]:
    """Exit status and standard output."""
    own = {"COLUMNS": str(COLUMNS), "PYTHONUTF8": "1", **THROUGHOUT}
    done = subprocess.run(
        [*program, "doctor", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **own, **environment},
    )
    return done.returncode, done.stdout


def test_everything_fits_on_one_screen(tmp_path: Path) -> None:
    """With a row for each check, and some crosses, on a terminal."""
    status, out = doctor(
        *("--path", str(tmp_path / "ckpts"), "--persistent-path", str(tmp_path / "a" / "b")),
        program=(PYTHON, "-m", "tierckpt"),
        TIERCKPT_PTH="/x",
        FORCE_COLOR="1",
    )
    lines = re.sub(r"\x1b\[[\d;]*m", "", out).splitlines()
    assert status == 1
    assert len(lines) <= LINES
    assert max(map(len, lines)) <= COLUMNS
    for name in ("Software", "torch", "copy engine", "horovod", "memory", "path", "interface"):
        assert any(name in line for line in lines), name
    (at,) = [number for number, line in enumerate(lines) if "TIERCKPT_PTH is no" in line]
    assert lines[at].startswith("✗ variables")
    assert "→ unset TIERCKPT_PTH, or do you mean TIERCKPT_PATH?" in lines[at + 1]
    assert lines[-1].startswith("2 (persistent, variables) to cure, ")


def probes(session: int) -> list[int]:
    """Processes of a session that try to import torch."""
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command, state = (each / "cmdline").read_bytes(), (each / "stat").read_text()
            fields = state.rpartition(")")[2].split()
            ours = fields[0] != "Z" and int(fields[3]) == session
            if ours and (b"doctor.probes" in command or b"horovod" in command):
                found.append(int(each.name))
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_doctor_leaves_no_process_and_no_file(
    number: signal.Signals, tmp_path: Path
) -> None:
    """The import of torch hangs, as on a dead file system."""
    for folder in (place := tmp_path / "place", marks := tmp_path / "marks"):
        folder.mkdir()
    mark = f"os.close(os.open(f'{marks}/{{os.getpid()}}', os.O_CREAT))"
    (tmp_path / "torch.py").write_text(f"import os, time\n{mark}\ntime.sleep(600)\n")
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    with subprocess.Popen(
        [sys.executable, "-m", "tierckpt", "doctor", "--path", str(place)],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        wait_until(lambda: len([*marks.iterdir()]) == 2, "the probes have not started")
        assert len(probes(process.pid)) == 2
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    wait_until(lambda: not probes(process.pid), "probes are left")
    wait_until(lambda: not [*place.iterdir()], "a file is left")
    assert "Traceback" not in said


LAUNCHERS = {
    "torchrun": (PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
    "mpirun": ("mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", PYTHON),
}
SCRIPT = """
import os, runpy
rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["RANK"]
os.environ["TIERCKPT_NODE"] = f"n{rank}"
if rank == "1":
    os.environ["TIERCKPT_PTH"] = "/x"
runpy.run_module("tierckpt", run_name="__main__")
"""


@pytest.mark.parametrize("launcher", points(LAUNCHERS, "torchrun"))
def test_nodes_of_a_launch_are_compared(launcher: str, tmp_path: Path) -> None:
    """The second rank calls itself another node, and has a wrong setting."""
    if launcher == "mpirun" and mpi_missing():
        pytest.skip(mpi_missing())
    (script := tmp_path / "script.py").write_text(SCRIPT)
    (shared := tmp_path / "shared").mkdir()
    places = ("--path", str(tmp_path / "ckpts-{node}"), "--persistent-path", str(shared))
    status, out = doctor(*places, "--json", program=(*LAUNCHERS[launcher], str(script)))
    assert status
    first, second = reports = json.loads(out)
    for report in reports:
        crosses = [each for each in report["findings"] if each["mark"] == "cross"]
        assert len(crosses) == report["crosses"]
        bad = [each for each in report["findings"] if each["mark"] in ("cross", "warning")]
        assert all(each["cure"] for each in bad)
    assert {each["section"] for each in second["findings"]} == {
        *("Software", "Machine", "Places", "Network", "Settings")
    }
    assert (first["node"], second["node"]) == ("n0", "n1")
    nodes = {each["name"]: each for each in first["findings"] if each["section"] == "Nodes"}
    assert nodes["nodes"]["text"] == "2: n0, n1"
    assert nodes["persistent"]["text"] == f"all nodes see the same {shared}"
    assert list(shared.iterdir()) == []
    assert nodes["clocks"]["text"].startswith("offsets: n1 ")
    (cross,) = [each for each in second["findings"] if each["name"] == "variables"][:1]
    assert cross["mark"] == "cross"
    assert cross["text"].startswith("TIERCKPT_PTH is no setting")
