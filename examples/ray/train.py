"""A job of Ray Train that continues after a worker was killed, from the memory of its node.

Run it in an environment with Tierckpt and Ray:

    pip install "ray[default,train]"
    python train.py --kill-at 30

Ray starts two workers on this machine. Worker 1 kills itself once, as a lost machine or the kernel
would; Ray starts all workers again, and restore() finds the newest version in memory.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import ray.train
import torch
import torch.distributed as dist
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn

import ddp_ckpt

WIDTH = 64
BATCH = 32


def build_model() -> nn.Module:
    """Make a net with BatchNorm and dropout, which make an exact restart difficult."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH),
        nn.BatchNorm1d(WIDTH),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(WIDTH, 2),
    )


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the data of a rank in a step, the same in every run."""
    source = torch.Generator().manual_seed(1_000_003 * rank + step)
    x = torch.randn(BATCH, WIDTH, generator=source)
    return x, (x[:, :8].sum(1) > 0).long()


def digest(model: nn.Module) -> str:
    """Return a hash of the weights."""
    hashed = hashlib.sha256()
    for weights in model.parameters():
        hashed.update(weights.detach().numpy().tobytes())
    return hashed.hexdigest()[:16]


def train_loop(config: dict[str, Any]) -> None:
    """Train in one worker. Ray calls it again in a new process after a failure."""
    rank = ray.train.get_context().get_world_rank()
    model = prepare_model(build_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1000 + rank)
    # The path is absolute: Ray gives workers a working directory of their own.
    with ddp_ckpt.Checkpointer(model, optimizer, path=config["path"]) as ckpt:
        start = ckpt.restore()
        write(config, rank, start=int(start), levels=ckpt.restored.levels)
        for step in range(start, config["steps"]):
            x, y = batch(step, rank)
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ckpt.step()
            write(config, rank, step=step, loss=loss.item().hex(), digest=digest(model))
            if rank == 1 and step == config["kill_at"] and start == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            if ckpt.should_exit():  # a cloud takes a node away; the same on all ranks
                break
            time.sleep(config["step_seconds"])
    dist.barrier()  # Ray ends all workers when one raises, and others may still store their part
    if ckpt.interrupted:  # Ray takes a return for the end of the training
        raise RuntimeError(f"{ckpt.exit_reason}: the job goes on in other workers")
    ray.train.report({"steps": ckpt.iteration})


def write(config: dict[str, Any], rank: int, **values: object) -> None:
    """Add a line to this rank's journal, to compare the job with an undisturbed one."""
    if config["journal"]:
        with open(f"{config['journal']}/journal-r{rank}.jsonl", "a") as file:
            file.write(json.dumps(values) + "\n")


def options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--path", type=Path, default=Path("ckpts"), help="on the node's own disk")
    parser.add_argument("--storage", type=Path, default=Path("ray_results"), help="Ray's own files")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--step-seconds", type=float, default=0.02, help="pause after a step")
    parser.add_argument("--kill-at", type=int, default=-1, help="step after which worker 1 dies")
    parser.add_argument("--journal", type=Path, help="folder for a JSON line per step and rank")
    return parser.parse_args()


def main() -> None:
    """Run the job."""
    args = options()
    if args.journal:
        args.journal.mkdir(parents=True, exist_ok=True)
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={
            "path": str(args.path.absolute()),
            "steps": args.steps,
            "step_seconds": args.step_seconds,
            "kill_at": args.kill_at,
            "journal": str(args.journal.absolute()) if args.journal else "",
        },
        scaling_config=ScalingConfig(num_workers=args.workers),
        run_config=RunConfig(
            storage_path=str(args.storage.absolute()),
            failure_config=FailureConfig(max_failures=3),
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
