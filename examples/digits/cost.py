"""The cost of the checkpoints in `train.py`, on two ranks under torchrun; the demo runs it.

Two equal models train in the same processes, in turns of some steps: one without checkpoints, one
with a checkpoint at every step, as in `train.py`. So other load of the machine affects both.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
from digits import Batches, Journal, build_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_ckpt

LOCAL_EVERY_STEPS = 10
TURN_STEPS = 2 * LOCAL_EVERY_STEPS
"""Steps of a turn. Those versions that go to disk are in the middle of it: they are written before
its end."""


class Side:
    """One of the two models, with its optimizer and schedule."""

    def __init__(self, batches: Batches) -> None:
        self.batches, self.made = batches, 0
        self.model = DistributedDataParallel(build_model())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 3e-3, total_steps=10**6)
        self.ckpt: ddp_ckpt.Checkpointer | None = None

    def train(self, steps: int) -> None:
        """Make so many steps, as in `train.py`."""
        for _ in range(steps):
            images, labels = self.batches.of_step(self.made)
            loss = nn.functional.cross_entropy(self.model(images), labels)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
            if self.ckpt is not None:
                self.ckpt.step()
            self.made += 1

    def turn(self) -> tuple[float, float]:
        """Return the seconds, and the CPU seconds of this process, of a step in one turn."""
        if self.ckpt is not None:
            self.ckpt.wait()
        dist.barrier()
        begin, cpu = time.perf_counter(), time.process_time()
        self.train(TURN_STEPS)
        seconds = time.perf_counter() - begin, time.process_time() - cpu
        if self.ckpt is not None:
            self.ckpt.wait()  # what is still written must not slow down the other side's turn
        return seconds[0] / TURN_STEPS, seconds[1] / TURN_STEPS


def agent_cpu_seconds() -> float:
    """Return the CPU seconds so far of the agent, if this process started it: its only child."""
    total = 0
    for children in Path("/proc/self/task").glob("*/children"):
        for pid in children.read_text().split():
            tasks = Path(f"/proc/{pid}/task").iterdir()
            total += sum(int((task / "schedstat").read_text().split()[0]) for task in tasks)
    return total / 1e9


def main() -> None:
    """Train in turns, and write the times to the journal."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--steps", type=int, default=480, help="of both sides together")
    parser.add_argument("--path", default="ckpts", help="where checkpoints go")
    parser.add_argument("--journal", type=Path, help="folder for a JSON line per turn")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    journal = Journal(args.journal, dist.get_rank)
    torch.manual_seed(1234 + rank)
    plain, saved = (Side(Batches(rank, dist.get_world_size())) for _ in range(2))
    saved.ckpt = ddp_ckpt.Checkpointer(
        saved.model,
        saved.optimizer,
        path=args.path,
        extra={"schedule": saved.schedule},
        memory_every_steps=1,
        local_every_steps=LOCAL_EVERY_STEPS,
        slots=3,
    )
    saved.ckpt.restore()
    plain.train(TURN_STEPS)
    saved.train(TURN_STEPS + LOCAL_EVERY_STEPS // 2)
    for number in range(args.steps // (2 * TURN_STEPS)):
        spent = {}
        agent = agent_cpu_seconds()
        for name, side in (("plain", plain), ("saved", saved))[:: 1 if number % 2 else -1]:
            spent[name] = side.turn()
        agent = (agent_cpu_seconds() - agent) / TURN_STEPS
        steps = 2 * TURN_STEPS * (number + 1)
        journal.write(step=steps - 1, turn=spent, agent_cpu_seconds=agent, at=time.time())
    saved.ckpt.close()
    journal.write(done=True, at=time.time())
    dist.barrier()
    time.sleep(0.1)  # as in train.py
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
