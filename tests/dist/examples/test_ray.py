"""The example of Ray Train, on a Ray cluster of its own on this machine. Ray is in no extra: it is
large."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.metadata_server import Aws, serving

pytest.importorskip("ray.train", reason="needs Ray: pip install 'ray[default,train]'")

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "ray"
RANKS, STEPS = 2, 60
PATIENCE_SECONDS = 300


@pytest.fixture
def sessions() -> Iterator[str]:
    """Ray's folder for sessions; a socket's path must be short."""
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder:
        yield folder


def run(folder: Path, shm_dir: Path, sessions: str, *options: str, **more: str) -> str:
    """Run the example to its end in a cluster of its own; returns the output."""
    command = [sys.executable, "train.py", "--steps", str(STEPS), "--journal", str(folder)]
    command += ["--path", str(folder / "ckpts"), "--storage", str(folder / "ray"), *options]
    environment = {
        **os.environ,
        "TIERCKPT_SHM_DIR": str(shm_dir),
        "RAY_TMPDIR": sessions,
        "RAY_USAGE_STATS_ENABLED": "0",
        "GLOO_SOCKET_IFNAME": "lo",
        **more,
    }
    done = subprocess.run(
        command,
        cwd=EXAMPLE,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    return done.stdout


def lines(folder: Path, rank: int) -> list[dict[str, Any]]:
    return [json.loads(x) for x in (folder / f"journal-r{rank}.jsonl").read_text().splitlines()]


def curve(folder: Path, rank: int) -> dict[int, tuple[str, str]]:
    """Loss and weights by step; a repeated step must have had the same."""
    found: dict[int, tuple[str, str]] = {}
    for line in lines(folder, rank):
        if "step" in line:
            values = line["loss"], line["digest"]
            assert found.setdefault(line["step"], values) == values
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, shm_root: Path) -> Path:
    """Journals of the same job without a failure."""
    folder, shm_dir = tmp_path_factory.mktemp("plain"), shm_root / "plain"
    shm_dir.mkdir()
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as sessions:
        run(folder, shm_dir, sessions)
    shm_dir.rmdir()
    assert all(len(curve(folder, rank)) == STEPS for rank in range(RANKS))
    return folder


def continued(folder: Path, undisturbed: Path, level: str) -> None:
    """Check that the job started again from this level, without a trace in the curves."""
    for rank in range(RANKS):
        starts = [x for x in lines(folder, rank) if "start" in x]
        assert starts[0]["start"] == 0
        assert starts[-1]["start"] > 0
        assert starts[-1]["levels"] == {level: RANKS}
        assert curve(folder, rank) == curve(undisturbed, rank)


def test_a_worker_is_killed(
    tmp_path: Path, shm_dir: Path, sessions: str, undisturbed: Path
) -> None:
    run(tmp_path, shm_dir, sessions, "--kill-at", "30")
    continued(tmp_path, undisturbed, "memory")
    assert not list(shm_dir.iterdir())


def test_a_cloud_takes_a_node_away(
    tmp_path: Path, shm_dir: Path, sessions: str, undisturbed: Path
) -> None:
    """Ray runs a worker's loop outside of its main thread, where no signal reaches it."""
    cloud = Aws()
    cloud.announce(60)

    def withdraw_later(*request: Any) -> tuple[int, str]:
        journal = tmp_path / "journal-r1.jsonl"
        if journal.exists() and len(lines(tmp_path, 1)) > 3:
            server.reply = Aws()  # the next workers are on another node
        return cloud(*request)

    with serving(withdraw_later) as server:
        notices = {"TIERCKPT_HALT_NOTICES": f"aws {server.endpoint}"}
        output = run(tmp_path, shm_dir, sessions, **notices)
    assert "the cloud takes a node away: the job goes on in other workers" in output
    continued(tmp_path, undisturbed, "local")
    assert not list(shm_dir.iterdir())
