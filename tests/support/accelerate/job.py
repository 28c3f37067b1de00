"""One rank of a job that uses Accelerate, with a record of every step; a script, and a module
for ranks that are forked."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler

from tests.support.frameworks.own_generators import ARGUMENTS, Collate, Noisy
from tests.support.frameworks.rank import Journal, be_forked, digest, random_state, with_lora
from tests.support.frameworks.samples import CLASSES, WIDTH, Numbered, Samples
from tests.support.frameworks.scenario import VARIABLE
from tests.support.frameworks.scenario import OfAccelerate as Scenario
from tierckpt.accelerate import attach

SAMPLES, EPOCHS = 52, 3


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for index in torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(3)):
            yield Samples(SAMPLES)[int(index)]


def make_loader(scenario: Scenario) -> Any:
    options: dict[str, Any] = {"batch_size": 4, "num_workers": scenario.workers}
    if scenario.loading.get("split_batches"):
        options["batch_size"] = 8
    if scenario.data == "numbered":
        return DataLoader(Numbered(SAMPLES), batch_size=scenario.batch_size, shuffle=True)
    if scenario.data == "stream":
        return DataLoader(Stream(), **options)
    if scenario.data == "weighted":
        weights = torch.arange(1.0, SAMPLES + 1)
        sampler = WeightedRandomSampler(weights, SAMPLES, generator=torch.Generator())
        return DataLoader(Samples(SAMPLES), sampler=sampler, **options)
    if scenario.data == "own generators":
        return DataLoader(Noisy(Samples(SAMPLES)), shuffle=True, collate_fn=Collate(), **options)
    if scenario.data == "drop last":
        options["drop_last"] = True
    return DataLoader(Samples(SAMPLES), shuffle=True, **options)


def net() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, CLASSES)
    )


class Average:
    """A registered object: averaged weights, and the number of updates."""

    def __init__(self, model: nn.Module) -> None:
        self.updates = 0
        self.weights = [each.detach().clone() for each in model.parameters()]

    def update(self, model: nn.Module) -> None:
        self.updates += 1
        for mine, new in zip(self.weights, model.parameters(), strict=True):
            mine.lerp_(new.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights, "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights, self.updates = state["weights"], state["updates"]


class Training:
    """The prepared objects of one rank, and what the script counts."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        loading = {"use_seedable_sampler": scenario.seedable, **scenario.loading}
        self.accelerator = accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=scenario.accumulation,
            dataloader_config=DataLoaderConfiguration(**loading),
            **scenario.accelerator,
        )
        if scenario.half:
            accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=3)
        set_seed(scenario.seed)
        models: list[Any] = [net() for _ in range(min(scenario.optimizers, 2))]
        if scenario.lora:
            models = [with_lora(each, ["0", "4"]) for each in models]
        trained = [[p for p in each.parameters() if p.requires_grad] for each in models]
        optimizers = [torch.optim.AdamW(each, lr=0.01) for each in trained]
        schedules = [torch.optim.lr_scheduler.StepLR(each, 3, 0.9) for each in optimizers]
        self.models = [accelerator.prepare(each) for each in models]
        self.optimizers = [accelerator.prepare(each) for each in optimizers]
        self.schedules = [accelerator.prepare(each) for each in schedules]
        self.loader = accelerator.prepare(make_loader(scenario))
        self.other = accelerator.prepare(make_loader(scenario))
        self.average = Average(models[0])
        accelerator.register_for_checkpointing(self.average)
        self.journal = Journal(scenario, accelerator.process_index)

    @property
    def steps(self) -> int:
        return self.average.updates

    @property
    def params(self) -> list[nn.Parameter]:
        return [param for model in self.models for param in model.parameters()]

    def write_step(self) -> None:
        rates = [group["lr"] for each in self.optimizers for group in each.param_groups]
        states = [value for model in self.models for value in model.state_dict().values()]
        weights = digest([*states, *self.average.weights])
        random = random_state()
        self.journal.write("step", number=self.steps, weights=weights, rates=rates, random=random)

    def train(self, batch: Any, index: int) -> None:
        accelerator, (x, y) = self.accelerator, batch
        numbers = x[:, 0].tolist() if self.scenario.data == "numbered" else []
        samples = digest([x, y.float()])
        self.journal.write("batch", index=index, step=self.steps, samples=samples, numbers=numbers)
        with accelerator.accumulate(*self.models):
            for number, (model, optimizer) in enumerate(
                zip(self.models, self.optimizers, strict=True)
            ):
                with accelerator.autocast():
                    loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if self.scenario.optimizers == 3 and number and index % 2 == 0:
                    continue
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    them = digest(each.grad for each in model.parameters())
                    self.journal.write("gradients", them=them, norm=float(norm))
                self.journal.reach("backward", self.steps)
                optimizer.step()
                self.schedules[number].step()
                optimizer.zero_grad()
        if accelerator.sync_gradients:
            self.average.update(self.models[0])
            self.write_step()


def joined(first: Any, second: Any) -> Any:
    return [torch.cat(parts) for parts in zip(first, second, strict=True)]


def train(scenario: Scenario) -> Training:
    torch.set_num_threads(1)
    training = Training(scenario)
    journal, ckpt = training.journal, None
    data, other = training.loader, training.other
    with contextlib.ExitStack() as stack:
        if scenario.settings is not None:
            own: dict[str, Any] = {}
            if scenario.data == "own generators":
                own = {"extra_per_rank": ARGUMENTS["extra_per_rank"]}
            ckpt = stack.enter_context(attach(training.accelerator, **scenario.settings, **own))
            if scenario.data == "two":
                data, other = ckpt.resume(training.loader, training.other)
            else:
                given = ARGUMENTS["generators"] if own else ()
                data = ckpt.resume(training.loader, generators=given)
        for epoch in range(data.epoch if ckpt else 0, EPOCHS):
            if scenario.sets_epoch:
                data.set_epoch(epoch)
            first = data._place.batches if ckpt and data._resuming else 0
            batches = map(joined, data, other) if scenario.data == "two" else data
            for index, batch in enumerate(batches, first):
                if scenario.batches and index >= scenario.batches:
                    break
                training.train(batch, index)
                if ckpt is not None:
                    ckpt.step()
                    if ckpt.should_exit():
                        break
                journal.reach("batch end", training.steps)
            if ckpt is not None and ckpt.should_exit():
                break
            torch.rand(())  # work at the end of an epoch
            journal.write("epoch end", number=epoch)
            if scenario.saves:
                training.accelerator.save_state(f"{scenario.folder}/state{epoch}")
            journal.reach("epoch end", training.steps)
    journal.write("done")
    training.accelerator.end_training()
    return training


def run(environment: Mapping[str, str]) -> None:
    """Be a rank that was forked; does not return."""
    be_forked(lambda: train(Scenario.from_json(environment[VARIABLE])))


if __name__ == "__main__":
    train(Scenario.from_json(os.environ[VARIABLE]))
