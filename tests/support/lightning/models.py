"""Modules and data of the Lightning jobs. Dropout and noise in samples draw random numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torchmetrics
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from tests.support.frameworks.own_generators import Collate, Noisy
from tests.support.frameworks.rank import with_lora
from tests.support.frameworks.samples import CLASSES, WIDTH, Numbered, Samples

SAMPLES = 48


class Stream(IterableDataset[Any]):
    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __iter__(self) -> Iterator[Any]:
        for index in range(24):
            yield Samples(SAMPLES)[2 * index + self._rank]


def loaders(kind: str, workers: int, rank: int, ranks: int) -> Any:
    """The training loaders of a job."""
    if kind == "stream":
        return DataLoader(Stream(rank), batch_size=4)
    if kind in ("two", "combined"):
        long = DataLoader(Samples(SAMPLES), batch_size=4, shuffle=True)
        short = DataLoader(
            Samples(SAMPLES), batch_size=12, shuffle=True, generator=torch.Generator()
        )
        both = {"long": long, "short": short}
        return both if kind == "two" else CombinedLoader(both, "max_size")
    if kind == "stateful":
        from torchdata.stateful_dataloader import StatefulDataLoader

        sampler = DistributedSampler(Samples(SAMPLES), ranks, rank, shuffle=True)
        return StatefulDataLoader(
            Samples(SAMPLES), batch_size=4, sampler=sampler, num_workers=workers
        )
    if kind == "shuffled stateful":
        from torchdata.stateful_dataloader import StatefulDataLoader

        return StatefulDataLoader(Samples(SAMPLES), batch_size=4, shuffle=True, num_workers=workers)
    if kind == "numbered":
        sampler = DistributedSampler(Numbered(SAMPLES), ranks, rank, shuffle=True)
        return DataLoader(Numbered(SAMPLES), batch_size=4 * 2 // ranks, sampler=sampler)
    if kind == "own generators":
        return DataLoader(Noisy(Samples(SAMPLES)), 4, shuffle=True, collate_fn=Collate())
    return DataLoader(Samples(SAMPLES), batch_size=4, shuffle=True, num_workers=workers)


def net() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, CLASSES)
    )


def make_model(base: Any, kind: str, workers: int, data: str) -> Any:
    """A LightningModule; `base` is that class of one of the packages."""

    class Plain(base):  # type: ignore[misc,valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.body = net()
            if kind == "LoRA":
                self.body = with_lora(self.body, ["0", "4"])
            if kind == "compiled":
                self.body.compile(backend="aot_eager")
            self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=CLASSES)

        def loss(self, batch: Any) -> torch.Tensor:
            if isinstance(batch, dict):
                parts = [self.loss(each) for each in batch.values() if each is not None]
                return sum(parts, torch.zeros(()))
            x, y = batch
            out = self.body(x)
            if self.training:
                self.accuracy(out, y)
            loss: torch.Tensor = nn.functional.cross_entropy(out, y)
            return loss

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = self.loss(batch)
            self.log("loss", loss, on_step=True, on_epoch=True, batch_size=4)
            self.log("accuracy", self.accuracy, on_step=True, on_epoch=True, batch_size=4)
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            loss = self.loss(batch)
            self.log("val_loss", loss, on_step=True, on_epoch=True, sync_dist=True)

        def configure_optimizers(self) -> Any:
            trained = [each for each in self.parameters() if each.requires_grad]
            optimizer = torch.optim.AdamW(trained, lr=0.01)
            if kind == "cycle":
                cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=40)
                return [optimizer], [{"scheduler": cycle, "interval": "step"}]
            if kind == "averaged":
                return optimizer
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
            return [optimizer], [{"scheduler": plateau, "monitor": "val_loss"}]

        def train_dataloader(self) -> Any:
            return loaders(data, workers, self.global_rank, self.trainer.world_size)

        def val_dataloader(self) -> Any:
            own = data == "own generators"
            return DataLoader(Noisy(Samples(SAMPLES)) if own else Samples(SAMPLES), batch_size=8)

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["notes"] = {"steps": self.trainer.global_step}

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            assert checkpoint["notes"]["steps"] > 0

    class Manual(Plain):
        """Two optimizers that take turns, accumulated by hand."""

        def __init__(self) -> None:
            super().__init__()
            self.other = net()
            self.automatic_optimization = False

        def training_step(self, batch: Any, index: int) -> None:
            first, second = self.optimizers()
            x, y = batch
            for optimizer, part in ((first, self.body), (second, self.other)):
                self.toggle_optimizer(optimizer)
                loss = nn.functional.cross_entropy(part(x), y)
                self.manual_backward(loss + 0 * sum(p.sum() for p in self.parameters()))
                self.untoggle_optimizer(optimizer)
                if optimizer is first or index % 2:
                    optimizer.step()
                    optimizer.zero_grad()
                self.log(f"loss {part is self.body}", loss, on_step=True, on_epoch=True)
            self.lr_schedulers().step()

        def configure_optimizers(self) -> Any:
            first = torch.optim.Adam(self.body.parameters(), lr=0.01)
            second = torch.optim.SGD(self.other.parameters(), lr=0.1, momentum=0.9)
            return [first, second], [torch.optim.lr_scheduler.StepLR(first, 3)]

    return Manual() if kind == "manual" else Plain()
