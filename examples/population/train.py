"""Population-based training: 8 small models, of which the worst copy the best every few steps.

    python examples/population/train.py population

Each member is a job of its own, with versions in memory alone. `load_from` copies weights and the
optimizer's state out of the memory of the best one, in milliseconds and without a disk. Then the
learning rate is changed at random. After Jaderberg et al., Population Based Training of Neural
Networks, 2017 (arXiv:1711.09846).
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path

import torch

import tierckpt

MEMBERS, WORST, ROUNDS, STEPS = 8, 2, 5, 10


class Member:
    """A model, its learning rate, and its checkpoints."""

    def __init__(self, path: Path, seed: int) -> None:
        torch.manual_seed(seed)
        self.path = path
        self.net = torch.nn.Sequential(
            torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)
        )
        rate = 10.0 ** random.uniform(-4, -1)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=rate)
        self.ckpt = tierckpt.Checkpointer(
            self.net,
            self.optimizer,
            path=path,
            memory_every_steps=1,
            local_every_seconds=0,  # no version goes to a disk
            replicas="off",
        )
        self.loss = float("inf")

    def train(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        """One round; the last version is in memory afterwards."""
        for _ in range(STEPS):
            self.optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(self.net(inputs), targets)
            loss.backward()
            self.optimizer.step()
            self.ckpt.step(metric=loss.item())
            self.loss = loss.item()
        self.ckpt.complete()

    def copy(self, best: Member) -> float:
        """Take the state of the best member, and explore from there; returns milliseconds."""
        begin = time.perf_counter()
        self.ckpt.load_from(best.path, only=("model", "optimizer"))
        took = 1000 * (time.perf_counter() - begin)
        for group in self.optimizer.param_groups:
            group["lr"] *= random.choice((0.8, 1.25))
        return took


def main() -> None:
    """Train the population; the best loss falls, and copies are quick."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    random.seed(0)
    torch.manual_seed(0)
    inputs = torch.randn(256, 16)
    targets = torch.sin(inputs.sum(1, keepdim=True))
    members = [Member(folder / f"member{number}", number) for number in range(MEMBERS)]
    times = []
    for number in range(ROUNDS):
        for member in members:
            member.train(inputs, targets)
        ranked = sorted(members, key=lambda each: each.loss)
        times += [loser.copy(ranked[0]) for loser in ranked[-WORST:]]
        best, worst = ranked[0].loss, ranked[-1].loss
        print(f"round {number}: loss {best:.4f} (best) to {worst:.4f}; copied {WORST} members")
    print(f"a copy took {statistics.median(times):.1f} ms (median of {len(times)})")
    for member in members:
        member.ckpt.close()


if __name__ == "__main__":
    main()
