"""Recursive stages: a model's weights for N children, theirs for N more, S levels deep.

    python examples/stages/train.py stages
    tierckpt log stages/all

The first stage is trained on all data. Each child starts with the weights of its parent and is
trained on one part of the parent's data, as in studies of the worth of parts of the data (the
recursive stages of CANDLE). Each stage is a job of its own: a killed one starts again by itself,
and `tierckpt log` shows all of them as one tree.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import tierckpt

CHILDREN, LEVELS, STEPS = 2, 3, 20


def train(path: Path, parent: Path | None, inputs: torch.Tensor, targets: torch.Tensor) -> float:
    """Train one stage, from its parent's weights; returns the loss. Finished stages are not trained
    again."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    with tierckpt.Checkpointer(net, optimizer, path=path) as ckpt:
        begun = ckpt.restore() if parent is None else ckpt.restore(fork_from=parent, only="model")
        for _ in range(begun, STEPS):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(net(inputs), targets)
            loss.backward()
            optimizer.step()
            ckpt.step(metric=loss.item())
    with torch.no_grad():
        return torch.nn.functional.mse_loss(net(inputs), targets).item()


def descend(
    path: Path, parent: Path | None, inputs: torch.Tensor, targets: torch.Tensor, level: int
) -> None:
    """Train a stage and all below it."""
    loss = train(path, parent, inputs, targets)
    print(f"{'  ' * level}{path.name}: {len(inputs)} samples, loss {loss:.4f}", flush=True)
    if level + 1 == LEVELS:
        return
    parts = zip(inputs.chunk(CHILDREN), targets.chunk(CHILDREN), strict=True)
    for number, (some, wanted) in enumerate(parts):
        descend(path.with_name(f"{path.name}.{number}"), path, some, wanted, level + 1)


def main() -> None:
    """Train all stages in a folder."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    torch.manual_seed(1)
    inputs = torch.randn(256, 16)
    descend(folder / "all", None, inputs, torch.sin(inputs.sum(1, keepdim=True)), 0)


if __name__ == "__main__":
    main()
