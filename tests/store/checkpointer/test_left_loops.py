"""A loop that is left within an epoch: a restart goes on with the next batch that was not trained
on, and with the random numbers that follow."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import tierckpt
from ddp_ckpt import Checkpointer

SAMPLES, BATCH, EPOCHS = 20, 4, 3
PER_EPOCH = SAMPLES // BATCH
Steps = list[tuple[int, float, float]]
"""Of each step its number, the sum of its batch, and its loss."""


class Noisy(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return index + torch.rand(1)


def train(path: Path | None, boundary: str, own_generator: bool, stop: tuple[str, int]) -> Steps:
    """Train until `stop`, after a step or with the next batch taken; returns what each step saw."""
    torch.manual_seed(1)
    generator = torch.Generator().manual_seed(5) if own_generator else None
    plain = DataLoader(Noisy(), batch_size=BATCH, shuffle=True, generator=generator)
    data = tierckpt.ResumableLoader(plain)
    model = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    ckpt = None
    if path is not None:
        objects = {"boundary": boundary, "extra_per_rank": {"data": data}}
        ckpt = Checkpointer(model, optimizer, path=path, **objects)
    done = ckpt.restore() if ckpt else 0
    count, seen = itertools.count(int(done) + 1), []

    def batches() -> Iterator[tuple[int, torch.Tensor]]:
        for _ in range(data.epoch, EPOCHS):
            for batch in data:
                yield next(count), batch

    for step, batch in batches():
        if stop == ("taken", step):
            break
        loss = model(batch).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append((step, batch.sum().item(), loss.item()))
        if ckpt and boundary == "explicit":
            ckpt.step()
        if stop == ("trained", step):
            break
    if ckpt:
        ckpt.save(now=True)
        ckpt.abandon()
    return seen


@pytest.fixture(autouse=True)
def this_machines_memory(shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERCKPT_SHM_DIR", str(shm_dir))
    monkeypatch.setenv("TIERCKPT_AGENT", "inline")


@pytest.mark.parametrize("own_generator", [False, True])
@pytest.mark.parametrize("boundary", ["explicit", "forward"])
@pytest.mark.parametrize("step", [PER_EPOCH - 2, PER_EPOCH])
@pytest.mark.parametrize("where", ["trained", "taken"])
def test_the_next_steps_are_those_of_the_undisturbed_loop(
    where: str, step: int, boundary: str, own_generator: bool, tmp_path: Path
) -> None:
    never, whole = ("never", 0), train(None, boundary, own_generator, ("never", 0))
    assert len(whole) == EPOCHS * PER_EPOCH
    # The second run takes the batch once more, and does not train on it either.
    ends = [("trained", step)] if where == "trained" else 2 * [("taken", step + 1)]
    parts = [train(tmp_path, boundary, own_generator, each) for each in (*ends, never)]
    assert len(parts[0]) == step
    assert [*itertools.chain(*parts)] == whole


def schedule_of(path: Path | None, boundary: str, until: str) -> tuple[int, float]:
    """Train two epochs with a sampler, or `until` the last batch of the first epoch is trained on,
    or its end is done; returns the epochs that the schedule counted, and the learning rate."""
    torch.manual_seed(1)
    samples = torch.arange(float(SAMPLES))[:, None]
    sampler = tierckpt.ResumableSampler(samples, BATCH, rank=0, ranks=1)
    data = DataLoader(TensorDataset(samples), batch_sampler=sampler)
    model = torch.nn.Linear(1, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    ckpt = None
    if path is not None:
        extra = {"schedule": schedule, "position": sampler.position}
        ckpt = Checkpointer(model, optimizer, path=path, boundary=boundary, extra=extra)
        ckpt.restore()

    def epochs() -> Iterator[int]:
        for epoch in range(sampler.epoch, 2):
            sampler.set_epoch(epoch)
            yield epoch

    for _ in epochs():
        for (batch,) in data:
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
            sampler.step()
            if ckpt and boundary == "explicit":
                ckpt.step()
        if until == "trained":
            break
        schedule.step()
        if until == "done":
            break
    if ckpt:
        ckpt.save(now=True)
        ckpt.abandon()
    return schedule.last_epoch, optimizer.param_groups[0]["lr"]


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # restored, then stepped
@pytest.mark.parametrize("boundary", ["explicit", "forward"])
@pytest.mark.parametrize("until", ["trained", "done"])
def test_the_work_at_the_end_of_an_epoch_is_done_once(
    until: str, boundary: str, tmp_path: Path
) -> None:
    schedule_of(tmp_path, boundary, until)
    assert schedule_of(tmp_path, boundary, "end") == schedule_of(None, boundary, "end")
