"""A loop left within an epoch: a restart continues with the next batch that was not trained on, and
with the random numbers that follow."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import tierckpt
from ddp_ckpt import Checkpointer

SAMPLES, BATCH, EPOCHS = 16, 2, 2
PER_EPOCH = SAMPLES // BATCH
Batches = list[tuple[int, float, float]]
"""Of each batch its number in the job, its sum, and its loss."""


class Noisy(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return index + torch.rand(1)


def train(
    path: Path | None, boundary: str, own_generator: bool, passes: int, stop: tuple[str, int]
) -> Batches:
    """Train until that batch of the job is "taken", or its gradients are "made"; `passes` batches
    make a step. Returns what the steps were made from."""
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
    count, seen = itertools.count(int(done) * passes + 1), []

    def batches() -> Iterator[tuple[int, torch.Tensor]]:
        for _ in range(data.epoch, EPOCHS):
            for batch in data:
                yield next(count), batch

    for number, batch in batches():
        if stop == ("taken", number):
            break
        loss = model(batch).sum()
        loss.backward()
        seen.append((number, batch.sum().item(), loss.item()))
        if number % passes == 0:
            optimizer.step()
            optimizer.zero_grad()
            if ckpt and boundary == "explicit":
                ckpt.step()
        if stop == ("made", number):
            break
    if ckpt:
        ckpt.save(now=True)
        ckpt.abandon()
    return seen[: len(seen) // passes * passes]


@pytest.fixture(autouse=True)
def this_machines_memory(shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERCKPT_SHM_DIR", str(shm_dir))
    monkeypatch.setenv("TIERCKPT_AGENT", "inline")


@pytest.mark.parametrize(("boundary", "own_generator"), [("explicit", True), ("forward", False)])
@pytest.mark.parametrize(
    ("passes", "where", "number"),
    [
        (1, "made", 3),
        (1, "made", PER_EPOCH),
        (1, "taken", 4),
        (1, "taken", PER_EPOCH + 1),
        (4, "made", 5),
        (4, "taken", 7),
        (4, "made", 7),
        (4, "made", PER_EPOCH + 2),
    ],
)
def test_the_next_steps_are_those_of_the_undisturbed_loop(
    passes: int, where: str, number: int, boundary: str, own_generator: bool, tmp_path: Path
) -> None:
    about, never = (boundary, own_generator, passes), ("never", 0)
    whole = train(None, *about, never)
    assert len(whole) == EPOCHS * PER_EPOCH
    # Where its last batches make no step, the second run ends as the first one.
    ends = 1 if where == "made" and number % passes == 0 else 2
    parts = [train(tmp_path, *about, each) for each in (*ends * [(where, number)], never)]
    assert 0 < len(parts[0]) < len(whole)
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
