"""Simulated histories that the gate repeats, and faults that they must find."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PLANTED = ["a rank votes before it is done", "the safe version is retired"]


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "0"}
    command = [sys.executable, "-m", "tests.simulator", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def test_every_restart_finds_what_it_must_and_a_seed_repeats_exactly() -> None:
    done = simulate("--seed", "1", "--count", "12", "--twice")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("plant", PLANTED)
def test_a_planted_fault_is_found(plant: str) -> None:
    done = simulate("--seed", "1", "--count", "60", "--plant", plant)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "WRONG: " in done.stdout
