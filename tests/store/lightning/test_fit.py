"""Fits in this process: hooks of the script, copies of a Trainer, refusals and warnings."""

from __future__ import annotations

import copy
import logging
import multiprocessing
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils import parametrizations, prune
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

import ddp_ckpt
import tierckpt
from tierckpt.errors import RestoreError, UnsupportedStateError

pl = pytest.importorskip("lightning.pytorch", exc_type=ImportError)

from lightning.fabric.plugins.environments import LightningEnvironment  # noqa: E402
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset  # noqa: E402

from tierckpt.lightning import TierCheckpoint  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
BATCHES = 4
Fit = Callable[..., Any]


class Said(list[str]):
    """What the fits say, from warnings on."""

    def __call__(self, event: tierckpt.Event) -> None:
        if event.severity >= logging.WARNING:
            self.append(event.message)


@pytest.fixture
def said() -> Said:
    return Said()


@pytest.fixture
def fit(path: Path, settings: dict[str, Any], said: Said) -> Fit:
    """Run a fit of three epochs, with our callback unless the name is empty."""

    def run(*callbacks: Any, module: Any = None, name: str = "a", **given: Any) -> Any:
        options = {"agent": "inline", "on_event": said, **settings}
        ours = [TierCheckpoint(path=path / name, **options)] if name else []
        trainer = pl.Trainer(
            accelerator="cpu",
            callbacks=[*callbacks, *ours],
            default_root_dir=path,
            enable_checkpointing=any(isinstance(c, pl.callbacks.Checkpoint) for c in callbacks),
            enable_model_summary=False,
            enable_progress_bar=False,
            limit_val_batches=0,
            logger=False,
            max_epochs=3,
            plugins=[LightningEnvironment()],  # others are looked for, and MPI started
        )
        given = given or {"train_dataloaders": loader()}
        trainer.fit(module or BoringModel(), **given)
        return trainer

    return run


def loader(workers: int = 0, batch_size: int = 1) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(3)  # the same samples in every run
        data = RandomDataset(32, BATCHES * batch_size)
        return DataLoader(data, batch_size=batch_size, num_workers=workers)


class At(pl.Callback):  # type: ignore[misc,name-defined]
    """Calls a function of Trainer and module after a step."""

    def __init__(self, step: int, call: Callable[[Any, Any], Any]) -> None:
        self._step, self._call = step, call

    def __reduce__(self) -> Any:
        return At, (0, fail)

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_step == self._step:
            self._call(trainer, module)


def fail(*_: Any) -> None:
    raise KeyError("the end of this run")


class Best(pl.Callback):  # type: ignore[misc,name-defined]
    """Has its state from the start of the training on, under a key as in Lightning 1."""

    @property
    def state_key(self) -> Any:
        return type(self)

    def on_train_start(self, *_: Any) -> None:
        self.best = getattr(self, "best", 0)

    def on_train_batch_end(self, *_: Any) -> None:
        self.best += 1

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best = state["best"]


class Data(pl.LightningDataModule):  # type: ignore[misc,name-defined]
    """Has its state from the loader on."""

    loaded: Any = None

    def train_dataloader(self) -> Any:
        self.loader = loader()
        return self.loader

    def state_dict(self) -> dict[str, Any]:
        return {"length": len(self.loader)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state


class Partial(BoringModel):  # type: ignore[misc]
    """Saves some of its weights, as for LoRA, and notes of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"width": 2})
        self.saved: list[set[str]] = []
        self.got: Any = None

    def on_train_start(self) -> None:
        self.seen = self.trainer.global_step

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.saved.append({*checkpoint})
        bias = checkpoint["state_dict"]["layer.bias"] + checkpoint["epoch"]
        checkpoint["state_dict"] = {"bias": bias}
        checkpoint["hyper_parameters"]["seen"] = self.seen
        checkpoint["step"] = checkpoint["global_step"]
        checkpoint.pop("optimizer_states")

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.got = checkpoint


def test_hooks_are_called_as_by_lightnings_own_saves(fit: Fit, path: Path) -> None:
    """From the first step on, with the same dict; and get back what they made of it."""
    best, data, module = Best(), Data(), Partial()
    own = pl.callbacks.ModelCheckpoint(path / "own", every_n_train_steps=1, save_top_k=-1)
    with pytest.raises(KeyError):
        fit(own, best, At(6, fail), module=module, datamodule=data)
    assert {frozenset(keys) for keys in module.saved} == {frozenset(module.saved[0])}
    assert len(module.saved) == 6 + 5  # Lightning's, and ours of all steps but the last one
    best, data, module = Best(), Data(), Partial()
    trainer = fit(own, best, module=module, datamodule=data)
    assert best.best == trainer.global_step == 3 * BATCHES
    assert data.loaded == {"length": BATCHES}
    file = torch.load(path / "own" / "epoch=1-step=5.ckpt", weights_only=False)
    assert module.got.keys() == file.keys() - {"optimizer_states"}
    assert module.got["hyper_parameters"] == {"width": 2, "seen": 0}
    assert (module.got["epoch"], module.got["step"]) == (1, 5)
    assert torch.equal(module.got["state_dict"]["bias"], file["state_dict"]["bias"])


def test_a_hook_with_later_state_costs_versions_and_not_the_job(fit: Fit, said: list[str]) -> None:
    best = Best()
    best.on_train_start = lambda *_: None  # type: ignore[method-assign]
    best.on_train_batch_end = lambda *_: None  # type: ignore[method-assign]
    trainer = fit(best, At(3, lambda *_: setattr(best, "best", 7)))
    assert trainer.callbacks[0].checkpointer.restored == 0
    assert "Best.state_dict() raised AttributeError" in said[0]


def test_a_state_that_no_version_can_store_is_refused_after_the_first_batch(fit: Fit) -> None:
    best = Best()
    best.state_dict = lambda: {"it": object()}  # type: ignore[method-assign]
    steps: list[int] = []
    with pytest.raises(UnsupportedStateError, match=r"Best'>\"\]\['state'\]\['it'\] is a"):
        fit(best, At(2, lambda *_: steps.append(2)))
    assert not steps


def test_a_training_step_that_fetches_its_batches_is_refused(fit: Fit) -> None:
    class Fetching(BoringModel):  # type: ignore[misc]
        def training_step(self, dataloader_iter: Any) -> Any:
            return super().training_step(next(dataloader_iter)[0], 0)

    with pytest.raises(UnsupportedStateError, match="has an argument dataloader_iter"):
        fit(module=Fetching())


def test_another_batch_size_within_an_epoch_is_refused(fit: Fit) -> None:
    steps: list[int] = []
    with pytest.raises(KeyError):
        fit(At(6, fail))
    with pytest.raises(RestoreError, match="Set batch_size=1"):
        fit(At(6, lambda *_: steps.append(6)), train_dataloaders=loader(batch_size=2))
    assert not steps


def test_a_trainer_is_copied_in_a_fit(fit: Fit) -> None:
    """The copy trains on its own, without checkpoints; nor does the fit see its steps."""
    results: list[list[torch.Tensor]] = []

    def train_a_copy(trainer: Any, module: Any) -> None:
        copied = copy.deepcopy(trainer)
        copied.callbacks = [c for c in copied.callbacks if not isinstance(c, At)]
        copied.fit(copied.lightning_module, loader())
        results.append([*copied.lightning_module.parameters()])
        assert copied.global_step > trainer.global_step
        assert pickle.loads(pickle.dumps(trainer)).global_step == trainer.global_step

    for name in ("", "ours"):
        torch.manual_seed(1)
        trainer = fit(At(2, train_a_copy), At(6, train_a_copy), name=name)
        results.append([*trainer.lightning_module.parameters()])
    assert trainer.callbacks[0].checkpointer.version == trainer.global_step == 3 * BATCHES
    for plain, ours in zip(results[:3], results[3:], strict=True):
        assert all(map(torch.equal, plain, ours))


def test_workers_end_with_the_fit(fit: Fit) -> None:
    before = multiprocessing.active_children()
    trainer = fit(train_dataloaders=loader(workers=1))
    assert multiprocessing.active_children() == before
    assert trainer


def test_pruning_in_the_middle_of_the_training_is_refused(fit: Fit) -> None:
    with pytest.raises(UnsupportedStateError, match="Prune the model before fit"):
        fit(pl.callbacks.ModelPruning("l1_unstructured"))


def test_a_model_pruned_before_continues(fit: Fit) -> None:
    """As the refusal advises."""

    def pruned() -> Any:
        torch.manual_seed(1)
        model = BoringModel()
        prune.l1_unstructured(model.layer, "weight", 0.5)
        return model

    masks = dict(pruned().named_buffers())
    with pytest.raises(KeyError):
        fit(At(6, fail), module=pruned())
    again = fit(module=pruned()).callbacks[0].checkpointer
    assert again.restored == 5
    assert all(torch.equal(again._state.model.get_buffer(k), v) for k, v in masks.items())


@pytest.mark.parametrize(
    "rename", [lambda m: prune.l1_unstructured(m, "weight", 0.5), parametrizations.spectral_norm]
)
def test_other_names_of_parameters_are_warned_of(
    rename: Callable[[Any], Any], fit: Fit, said: list[str]
) -> None:
    fit(At(2, lambda _, module: rename(module.layer)))
    (text,) = said
    assert text.startswith("layer.weight (now layer.")
    assert "Make the change before the checkpointer" in text


def test_an_epochs_omitted_start_is_named(fit: Fit, said: list[str]) -> None:
    class Counting(pl.Callback):  # type: ignore[misc,name-defined]
        epochs = 0

        def on_train_epoch_start(self, *_: Any) -> None:
            self.epochs += 1

    own = pl.callbacks.GradientAccumulationScheduler({0: 1})  # Lightning's own are harmless
    with pytest.raises(KeyError):
        fit(Counting(), own, At(6, fail))
    assert not said
    counting = Counting()
    fit(counting, own)
    assert counting.epochs == 1
    (text,) = said
    assert text.startswith("on_train_epoch_start of Counting is not called in this epoch")


@pytest.mark.parametrize("earlier", ["plain", "ours"])
def test_objects_of_an_earlier_fit_are_not_warned_of(
    earlier: str, fit: Fit, said: list[str]
) -> None:
    class Average(pl.Callback):  # type: ignore[misc,name-defined]
        def on_fit_start(self, trainer: Any, module: Any) -> None:
            self.mean = AveragedModel(module)

    kept = fit(Average(), name="" if earlier == "plain" else "first")
    said.clear()
    fit(name="second")
    assert not said
    assert kept


def test_a_checkpointer_by_hand_is_shown_the_callback(
    fit: Fit, said: Said, path: Path, settings: dict[str, Any]
) -> None:
    class ByHand(pl.Callback):  # type: ignore[misc,name-defined]
        def on_fit_start(self, trainer: Any, module: Any) -> None:
            given = {"path": path, "agent": "inline", **settings}
            self.ckpt = ddp_ckpt.Checkpointer(module, trainer.optimizers, on_event=said, **given)

        def on_train_batch_end(self, *_: Any) -> None:
            self.ckpt.step()

        def on_fit_end(self, *_: Any) -> None:
            self.ckpt.close()

    fit(ByHand(), name="")
    (text,) = (each for each in said if "by hand" in each)
    assert text.startswith("this training belongs to lightning's Trainer")
    assert "Trainer(callbacks=[tierckpt.lightning.TierCheckpoint(path=" in text
