"""Simulated histories that the gate repeats, and faults that they must find."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "0"}
    command = [sys.executable, "-m", "tests.simulator", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    "histories",
    [
        "--seed 3 --count 12",
        "--sweep rank --every 61",
        "--sweep node --every 97",
        "--sweep agent --every 97",
    ],
)
def test_every_restart_finds_what_it_must(histories: str) -> None:
    done = simulate(*histories.split())
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_seed_is_the_same_history_each_time() -> None:
    done = simulate("--seed", "5", "--count", "3", "--twice")
    assert done.returncode == 0, done.stdout + done.stderr


# A change of the product changes what happens at a seed: then take another one.
@pytest.mark.parametrize(
    ("plant", "seed"),
    [("the manifest is not synchronised", 15), ("the safe version is retired", 5)],
)
def test_a_planted_fault_is_found(plant: str, seed: int) -> None:
    done = simulate("--seed", str(seed), "--count", "40", "--plant", plant)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "WRONG: " in done.stdout
