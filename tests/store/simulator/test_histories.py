"""Simulated histories that the gate repeats, and faults that they must find."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "0"}
    command = [sys.executable, "-m", "tests.simulator", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def test_every_restart_finds_what_it_must() -> None:
    done = simulate("--seed", "1", "--count", "8")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_planted_fault_is_found() -> None:
    done = simulate("--seed", "1", "--count", "100", "--plant", "the safe version is retired")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "WRONG: " in done.stdout
