"""The account of a real job that SIGKILL ends twice, compared with the job's own journal."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.warm_python.servers import PYTHON, THROUGHOUT
from tierckpt.cli import run_command

ROOT = Path(__file__).resolve().parents[3]
STEPS = 30
KILLS = {1: 9, 2: 21}
"""The step after which rank 1 is killed, by attempt."""
SCRIPT = """
import os, sys, time
begin = time.time()
import torch, torch.distributed as dist
import ddp_ckpt
from tierckpt.goodput import heartbeat
heartbeat.PERIOD_SECONDS = 0
dist.init_process_group("gloo")
rank = dist.get_rank()
journal = open(f"journal-r{{rank}}", "a", buffering=1)
attempt = 1 + open(f"journal-r{{rank}}").read().count("begin")
journal.write(f"begin {{begin}}\\n")
kills = {kills}
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 16))
optimizer = torch.optim.Adam(model.parameters())
with ddp_ckpt.Checkpointer(model, optimizer, path="ckpts", memory_every_steps=4) as ckpt:
    for step in range(ckpt.restore(), {steps}):
        optimizer.zero_grad()
        model(torch.ones(2, 16)).sum().backward()
        optimizer.step()
        ckpt.step()
        time.sleep(0.02)
        journal.write(f"step {{step + 1}} {{time.time()}}\\n")
        if rank == 1 and kills.get(attempt) == step + 1:
            os.kill(os.getpid(), 9)
journal.write(f"end {{time.time()}}\\n")
dist.destroy_process_group()
"""
TORCHRUN = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def runs_of(journal: Path) -> list[list[int]]:
    """The steps of each run, as the script has counted them."""
    runs: list[list[int]] = []
    for line in journal.read_text().splitlines():
        word, number, *_ = line.split()
        if word == "begin":
            runs.append([])
        elif word == "step":
            runs[-1].append(int(number))
    return runs


def times_of(journal: Path, word: str) -> list[float]:
    lines = [line.split() for line in journal.read_text().splitlines()]
    return [float(line[-1]) for line in lines if line[0] == word]


def test_lost_steps_and_time_are_those_of_the_job(
    tmp_path: Path, shm_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(kills=KILLS, steps=STEPS))
    environment = {
        **os.environ,
        **THROUGHOUT,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'common'}",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "TIERCKPT_SHM_DIR": str(shm_dir),
        "TIERCKPT_EVENTS_DIR": str(tmp_path / "events"),
    }
    started = time.time()
    done = subprocess.run(
        [*TORCHRUN, "-m", "tierckpt.run", str(script)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    ended = time.time()
    assert run_command(["goodput", str(tmp_path / "events"), "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)

    journals = [tmp_path / f"journal-r{rank}" for rank in range(2)]
    by_rank = [runs_of(journal) for journal in journals]
    newest = [max(max(run) for run in runs) for runs in zip(*by_rank, strict=True)]
    starts = [min(min(run) for run in runs) - 1 for runs in zip(*by_rank, strict=True)]
    assert newest == [*KILLS.values(), STEPS]
    made = sum(end - start for start, end in zip(starts, newest, strict=True))
    assert report["failures"] == 2
    assert report["made_steps"] == made
    assert report["lost_steps"] == made - STEPS
    assert [run["from_version"] for run in report["runs"]] == starts

    first, *_ = times_of(journals[0], "begin")
    *_, last = times_of(journals[0], "step")
    elapsed = report["elapsed_seconds"]
    assert last - first <= elapsed <= ended - started
    shares = [each["seconds"] for each in report["categories"].values()]
    assert sum(shares) == pytest.approx(elapsed)
    assert min(shares) >= 0
    assert 0 < report["goodput"] < 1
