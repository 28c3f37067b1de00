"""A loop of Accelerate, left while it accumulates gradients, gives its batches again."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

pytest.importorskip("accelerate")
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

from tierckpt.accelerate import attach

SAMPLES, BATCH, EPOCHS, PASSES = 32, 2, 2, 4
Step = tuple[tuple[float, float], ...]
"""The sum and the loss of each batch of a step."""


class Noisy(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return index + torch.rand(1)


@pytest.fixture(autouse=True)
def own_state(shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TIERCKPT_SHM_DIR", str(shm_dir))
    monkeypatch.setenv("TIERCKPT_AGENT", "inline")
    yield
    _forget()


def _forget() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def train(path: Path | None, end: int) -> list[Step]:
    """Train until that batch of the run; returns its complete steps."""
    _forget()
    torch.manual_seed(1)
    accelerator = Accelerator(gradient_accumulation_steps=PASSES, cpu=True)
    net = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.Dropout(0.5))
    loader = DataLoader(Noisy(), batch_size=BATCH, shuffle=True)
    model, optimizer, loader = accelerator.prepare(
        net, torch.optim.SGD(net.parameters(), lr=1e-4), loader
    )
    ckpt = None if path is None else attach(accelerator, path=path)
    data = loader if ckpt is None else ckpt.resume(loader)
    steps: list[Step] = []
    seen: list[tuple[float, float]] = []
    batches = (
        batch for _ in range(data.epoch if ckpt is not None else 0, EPOCHS) for batch in data
    )
    for batch in itertools.islice(batches, end):
        with accelerator.accumulate(model):
            loss = model(batch).sum()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        seen.append((batch.sum().item(), loss.item()))
        if accelerator.sync_gradients:
            steps.append(tuple(seen))
            seen.clear()
        if ckpt is not None:
            ckpt.step()
    if ckpt is not None:
        ckpt.save(now=True)
        ckpt.abandon()
    return steps


@pytest.mark.parametrize("left", [0, 1, 3])
def test_the_next_steps_are_those_of_the_undisturbed_loop(left: int, tmp_path: Path) -> None:
    all_batches = EPOCHS * SAMPLES // BATCH
    whole = train(None, all_batches)
    assert [len(step) for step in whole] == [PASSES] * (all_batches // PASSES)
    parts = [train(tmp_path, end) for end in (PASSES + left, PASSES + left, all_batches)]
    assert [len(part) for part in parts[:2]] == [1, 1]
    assert [*itertools.chain(*parts)] == whole
