"""One rank of a Lightning job, with a record of every step; a script, and a module for ranks
that are forked."""

from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric import Fabric
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.io import TorchCheckpointIO

import ddp_ckpt
import tierckpt
from tests.support.frameworks.own_generators import ARGUMENTS
from tests.support.frameworks.rank import Journal, be_forked, digest, random_state
from tests.support.frameworks.scenario import VARIABLE
from tests.support.frameworks.scenario import OfLightning as Scenario
from tests.support.lightning.models import loaders, make_model, net
from tierckpt.lightning import TierCheckpoint


def recorder(base: Any, journal: Journal) -> Any:
    """A callback that writes gradients, weights, rates and random states of every step."""

    class Recorder(base):  # type: ignore[misc,valid-type]
        def setup(self, trainer: Any, module: Any, stage: str) -> None:
            journal.rank = trainer.global_rank

        def on_fit_start(self, trainer: Any, module: Any) -> None:
            journal.reach("fit start", trainer.global_step)

        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            journal.write("epoch", number=trainer.current_epoch)

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
            leaves = torch.utils._pytree.tree_leaves(batch)
            facts: dict[str, Any] = {"samples": digest(leaves), "random": random_state()}
            if journal.scenario.data.startswith("numbered"):
                facts = {"numbers": batch[0][:, 0].tolist(), "step": trainer.global_step}
            journal.write("batch", index=index, **facts)

        def on_after_backward(self, trainer: Any, module: Any) -> None:
            journal.reach("backward", trainer.global_step)

        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            journal.write("gradients", them=digest(p.grad for p in module.parameters()))

        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            rates = [g["lr"] for o in trainer.optimizers for g in o.param_groups]
            weights = digest(module.state_dict().values())
            step = trainer.global_step
            journal.write("step", number=step, weights=weights, rates=rates, random=random_state())
            journal.reach("batch end", step)

        def on_validation_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            if not trainer.sanity_checking:
                journal.reach("validation", trainer.global_step)

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            if not trainer.sanity_checking:
                journal.write("validated", **numbers(trainer.callback_metrics))

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            journal.write("epoch end", **numbers(trainer.callback_metrics))
            journal.reach("epoch end", trainer.global_step)

        def on_train_end(self, trainer: Any, module: Any) -> None:
            journal.write("trained", step=trainer.global_step, epoch=trainer.current_epoch)

    return Recorder()


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}


class Logged(pl.loggers.logger.Logger):
    """Writes what Lightning logs to the journal."""

    name, version = "journal", 0

    def __init__(self, journal: Journal) -> None:
        super().__init__()
        self._journal = journal

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        self._journal.write("logged", step=step, **numbers(metrics))

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass


class MortalIO(TorchCheckpointIO):
    """Ends in the middle of Lightning's own save."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        self._journal.reach("model checkpoint", checkpoint["global_step"])
        super().save_checkpoint(checkpoint, path, storage_options)


def make_callbacks(package: Any, scenario: Scenario, journal: Journal) -> list[Any]:
    made = [recorder(package.Callback, journal)]
    kinds = package.callbacks
    for name in scenario.callbacks:
        if name == "ema":
            made.append(kinds.EMAWeightAveraging(decay=0.9))
        elif name == "swa":
            made.append(kinds.StochasticWeightAveraging(swa_lrs=0.005, swa_epoch_start=1))
        elif name == "stopping":
            made.append(kinds.EarlyStopping("val_loss", patience=1, min_delta=10.0))
        elif name == "model checkpoint":
            made.append(
                kinds.ModelCheckpoint(
                    scenario.folder, monitor="val_loss", save_last=True, every_n_train_steps=5
                )
            )
    if scenario.settings is not None:
        own = ARGUMENTS if scenario.data == "own generators" else {}
        made.append(TierCheckpoint(**scenario.settings, **own))
    return made


def make_plugins(scenario: Scenario, journal: Journal) -> list[Any]:
    made: list[Any] = []
    if "model checkpoint" in scenario.callbacks:
        made.append(MortalIO(journal))
    if (
        scenario.half
    ):  # Lightning would take bf16 on a CPU; the first steps overflow and are skipped
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=3)
        made.append(MixedPrecision("16-mixed", "cpu", scaler))
    return made


def fit(scenario: Scenario) -> Any:
    torch.set_num_threads(1)
    journal = Journal(scenario)
    package = importlib.import_module(scenario.package)
    package.seed_everything(7, verbose=False)
    handler = signal.getsignal(signal.SIGTERM)
    options: dict[str, Any] = {
        "max_epochs": 3,
        "val_check_interval": 4,
        "devices": scenario.ranks,
        "strategy": "ddp" if scenario.ranks > 1 else "auto",
        "enable_checkpointing": "model checkpoint" in scenario.callbacks,
    }
    trainer = package.Trainer(
        accelerator="cpu",
        callbacks=make_callbacks(package, scenario, journal),
        logger=[Logged(journal)] if scenario.package == "lightning.pytorch" else False,
        plugins=make_plugins(scenario, journal),
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{**options, **scenario.trainer},
    )
    model = make_model(package.LightningModule, scenario.model, scenario.workers, scenario.data)
    try:
        trainer.fit(model, **scenario.fit)
    except Exception as error:
        journal.write("raised", error=type(error).__name__, text=str(error))
        raise
    mended = signal.getsignal(signal.SIGTERM) is handler
    journal.write("done", weights=digest(model.state_dict().values()), mended=mended)
    return trainer


def fabric_loop(scenario: Scenario) -> None:
    """A loop of Fabric's. Its loaders number their passes themselves."""
    torch.set_num_threads(1)
    fabric = Fabric(accelerator="cpu", devices=scenario.ranks)
    fabric.launch()
    fabric.seed_everything(7, verbose=False)
    journal = Journal(scenario, fabric.global_rank)
    model = net()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    loader = loaders(scenario.data, scenario.workers, fabric.global_rank, scenario.ranks)
    data: Any = tierckpt.ResumableLoader(fabric.setup_dataloaders(loader))
    ckpt, step = None, 0
    with ExitStack() as stack:
        if scenario.settings is not None:
            made = ddp_ckpt.Checkpointer(
                model, optimizer, extra_per_rank={"data": data}, **scenario.settings
            )
            ckpt = stack.enter_context(made)
            step = int(ckpt.restore())
        for epoch in range(data.epoch, 3):
            for index, (x, y) in enumerate(data, data.start):
                state = random_state()
                journal.write("batch", index=index, samples=digest([x, y]), random=state)
                optimizer.zero_grad()
                fabric.backward(torch.nn.functional.cross_entropy(model(x), y))
                journal.reach("backward", step)
                optimizer.step()
                step += 1
                weights = digest(model.state_dict().values())
                journal.write("step", number=step, weights=weights, random=random_state())
                if ckpt is not None:
                    ckpt.step()
            journal.write("epoch end", number=epoch)
            journal.reach("epoch end", step)
    journal.write("done")


def work(variables: Mapping[str, str]) -> Any:
    scenario = Scenario.from_json(variables[VARIABLE])
    return fabric_loop(scenario) if scenario.model == "fabric" else fit(scenario)


def run(environment: Mapping[str, str]) -> None:
    """Be a rank that was forked; does not return."""
    be_forked(lambda: work(environment))


if __name__ == "__main__":
    work(os.environ)
