"""`tierckpt run` on a GPU: forked processes make CUDA contexts of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

STEPS = 9
SCRIPT = """
import os, sys
import torch, torch.distributed as dist
sys.path.insert(0, {root!r})
import ddp_ckpt

dist.init_process_group({backend!r})
rank, attempt = dist.get_rank(), int(os.environ["TIERCKPT_ATTEMPT"])
torch.cuda.set_device(0)
torch.manual_seed(9)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.5)).cuda()
model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[0])
optimizer = torch.optim.Adam(model.parameters(), fused=True)
torch.cuda.manual_seed(rank)
with ddp_ckpt.Checkpointer(model, optimizer, path="ckpts", shm_dir=os.environ["SHM"]) as ckpt:
    start = int(ckpt.restore())
    print(f"attempt {{attempt}} rank {{rank}} starts at {{start}}", flush=True)
    for step in range(start, {steps}):
        optimizer.zero_grad()
        model(torch.rand(8, 64, device="cuda")).square().sum().backward()
        if (step, rank, attempt) == (6, dist.get_world_size() - 1, {killed}):
            ckpt.wait(60)  # on a GPU a version is sealed after the barrier of its step
            os.kill(os.getpid(), 9)
        optimizer.step()
        ckpt.step()
    total = sum(p.double().sum() for p in model.parameters()).item().hex()
    print(f"rank {{rank}} ends at {{ckpt.iteration}} with {{total}}", flush=True)
dist.barrier()
"""


def ends(folder: Path, shm_dir: Path, backend: str, world: int, killed: int) -> tuple[str, str]:
    """Run the job; returns its lines about ends, sorted, and all of its output."""
    folder.mkdir()
    (shm_dir / folder.name).mkdir()
    script = folder / "train.py"
    script.write_text(SCRIPT.format(root=os.getcwd(), backend=backend, steps=STEPS, killed=killed))
    shim = ["-m", "tierckpt.run", "--times", str(folder / "times")]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    env = {
        **os.environ,
        "XDG_CACHE_HOME": str(folder / "cache"),
        "OMP_NUM_THREADS": "1",
        "SHM": str(shm_dir / folder.name),
        "TIERCKPT_AGENT_LINGER_SECONDS": "0",
    }
    done = subprocess.run(
        [sys.executable, *launcher, *shim, str(script)],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=200,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    lines = output.splitlines()
    return "\n".join(
        sorted(line[line.find("rank") :] for line in lines if "ends at" in line)
    ), output


@pytest.mark.parametrize(("backend", "world"), [("nccl", 1), ("gloo", 2)])
def test_a_rank_killed_on_the_gpu_is_forked_again_and_resumes(
    backend: str, world: int, tmp_path: Path, shm_dir: Path
) -> None:
    back, output = ends(tmp_path / "killed", shm_dir, backend, world, killed=1)
    undisturbed, _ = ends(tmp_path / "undisturbed", shm_dir, backend, world, killed=0)
    for rank in range(world):
        assert f"attempt 2 rank {rank} starts at 6" in output
    assert back == undisturbed != ""
    assert (tmp_path / "killed" / "times").read_text()  # a fork, no new start by the launcher
