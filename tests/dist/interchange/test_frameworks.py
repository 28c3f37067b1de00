"""Lightning's and Hugging Face's Trainer open exported versions, and their own checkpoints are
imported."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tqdm import tqdm

import tierckpt
from tests.support import exact
from tests.support.rank_pool import ALONE, RankPool
from tierckpt import Checkpointer
from tierckpt.cli import run_command

lightning = pytest.importorskip("lightning.pytorch")
transformers = pytest.importorskip("transformers")
tqdm.monitor_interval = 0  # no thread
SAMPLES, BATCH = 24, 4
AT, END = 4, 9
"""Steps: of the checkpoint, in the middle of an epoch, and of the end, in the next epoch."""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """A process that may keep what the frameworks leave in it."""
    pool = RankPool(1, tmp_path_factory.mktemp("alone-"), [{}], ALONE)
    pool.run(begin)  # it is not left behind by a test
    yield pool
    pool.kill()


def begin() -> None:
    """Import this module."""


@pytest.mark.parametrize(
    "name",
    [
        "lightning_continues_from_an_exported_file",
        "a_plain_job_and_lightning_exchange_files",
        "an_imported_version_is_refused_by_the_callback_with_advice",
        "a_trainer_continues_from_an_exported_folder",
        "a_folder_of_a_trainer_becomes_a_version_of_a_plain_job",
        "accelerate_takes_an_imported_version",
    ],
)
def test_frameworks(name: str, alone: RankPool, tmp_path: Path, shm_dir: Path) -> None:
    alone.run(globals()[name], tmp_path, str(shm_dir))


def image(model: Any, *optimizers: Any) -> Any:
    states = [optimizer.state_dict()["state"] for optimizer in optimizers]
    kept = [[tensors(each) for each in state.values()] for state in states]
    return tensors(model.state_dict()), kept


def tensors(named: Any) -> dict[str, Any]:
    return {name: exact.image(tensor) for name, tensor in named.items()}


# --- Lightning -----------------------------------------------------------------------------------


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)
        )
        self.seen: list[tuple[int, int]] = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        self.seen.append((self.global_step, index))
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def fit(folder: Path, steps: int, callbacks: Any = (), **given: Any) -> Any:
    from lightning.pytorch.plugins.environments import LightningEnvironment

    data = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), BATCH)
    trainer = lightning.Trainer(
        max_steps=steps,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=any("ModelCheckpoint" in type(c).__name__ for c in callbacks),
        default_root_dir=folder,
        callbacks=[*callbacks],
        plugins=[LightningEnvironment()],  # not MPI's, which it would start
    )
    module = Module()
    trainer.fit(module, loader, **given)
    return trainer, module


def lightning_continues_from_an_exported_file(tmp_path: Path, shm: str) -> None:
    """As it continues from its own file: the same steps, at the same places in the epoch."""
    os.environ["TIERCKPT_SHM_DIR"] = shm
    from lightning.pytorch.callbacks import ModelCheckpoint

    from tierckpt.lightning import TierCheckpoint

    fit(tmp_path, AT, [ModelCheckpoint(tmp_path, "theirs", every_n_train_steps=AT)])
    theirs = str(tmp_path / "theirs.ckpt")
    trainer, module = fit(tmp_path, END, ckpt_path=theirs, weights_only=True)
    wanted = image(module, *trainer.optimizers), module.seen
    settings = {"agent": "inline", "local_every_steps": 1}
    fit(tmp_path, AT, [TierCheckpoint(path=str(tmp_path / "ckpts"), **settings)])
    out = tmp_path / "exported.ckpt"
    assert run_command(["export", str(tmp_path / "ckpts"), str(out)]) == 0
    trainer, module = fit(tmp_path, END, ckpt_path=str(out), weights_only=True)
    assert (image(module, *trainer.optimizers), module.seen) == wanted
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 1


def a_plain_job_and_lightning_exchange_files(tmp_path: Path, shm: str) -> None:
    """A .ckpt becomes a version of a plain job, and that a .ckpt again."""
    os.environ["TIERCKPT_SHM_DIR"] = shm
    from lightning.pytorch.callbacks import ModelCheckpoint

    saving = ModelCheckpoint(tmp_path, "theirs", every_n_train_steps=AT)
    trainer, module = fit(tmp_path, AT, [saving])
    arguments = ["import", str(tmp_path / "theirs.ckpt"), str(tmp_path / "ckpts")]
    assert run_command([*arguments, "--prefix", "net."]) == 0
    again = Module()
    optimizer = torch.optim.Adam(again.net.parameters(), lr=3.0)
    given = {"path": str(tmp_path / "ckpts"), "agent": "inline"}
    with Checkpointer(again.net, optimizer, **given) as ckpt:
        assert ckpt.restore() == AT
        assert image(again, optimizer) == image(module, *trainer.optimizers)
    out = tmp_path / "ours.ckpt"
    assert run_command(["export", str(tmp_path / "ckpts"), str(out), "--prefix", "net."]) == 0
    content = torch.load(out, weights_only=True)
    assert content["global_step"] == AT
    content["lr_schedulers"] = [trainer.lr_scheduler_configs[0].scheduler.state_dict()]
    torch.save(content, out)
    trainer, module = fit(tmp_path, AT + 1, ckpt_path=str(out), weights_only=True)
    assert module.seen == [(AT, 0)]


def an_imported_version_is_refused_by_the_callback_with_advice(tmp_path: Path, shm: str) -> None:
    os.environ["TIERCKPT_SHM_DIR"] = shm
    from tierckpt.lightning import TierCheckpoint

    torch.save(Module().state_dict(), tmp_path / "weights.pt")
    assert run_command(["import", str(tmp_path / "weights.pt"), str(tmp_path / "ckpts")]) == 0
    ours = TierCheckpoint(path=str(tmp_path / "ckpts"), agent="inline")
    with pytest.raises(tierckpt.RestoreError, match=r"Give Lightning the file itself"):
        fit(tmp_path, 1, [ours])


# --- Transformers --------------------------------------------------------------------------------


class Sentences(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        if index >= SAMPLES:
            raise IndexError(index)
        tokens = torch.randint(20, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def model_of(seed: int = 0) -> Any:
    """Its head is tied to its embedding, and it has no dropout."""
    torch.manual_seed(seed)
    config = transformers.GPT2Config(
        vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return transformers.GPT2LMHeadModel(config)


def train(folder: Path, steps: int, kind: Any = None, resume: Any = None, **given: Any) -> Any:
    arguments = transformers.TrainingArguments(
        str(folder / "out"),
        max_steps=END,
        per_device_train_batch_size=BATCH,
        logging_steps=1,
        save_strategy="steps" if kind is None else "no",
        save_steps=AT,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = (kind or transformers.Trainer)(
        model_of(), arguments, train_dataset=Sentences(), callbacks=[End(steps)], **given
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


class End(transformers.TrainerCallback):
    """Ends the training after a step, as if it were killed."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


def losses(trainer: Any) -> dict[int, float]:
    return {e["step"]: e["loss"] for e in trainer.state.log_history if "loss" in e}


def a_trainer_continues_from_an_exported_folder(tmp_path: Path, shm: str) -> None:
    os.environ["TIERCKPT_SHM_DIR"] = shm
    from tierckpt.transformers import TierTrainer

    undisturbed = train(tmp_path, END)
    settings = {"path": str(tmp_path / "ckpts"), "agent": "inline", "local_every_steps": 1}
    train(tmp_path, AT, TierTrainer, tierckpt=settings)
    out = tmp_path / f"checkpoint-{AT}"
    assert (
        run_command(["export", str(tmp_path / "ckpts"), str(out), "--format", "transformers"]) == 0
    )
    resumed = train(tmp_path, END, resume=str(out))
    assert image(resumed.model) == image(undisturbed.model)
    assert losses(resumed) == losses(undisturbed)
    undisturbed.model.config.save_pretrained(out)  # the advice of the text
    alone = transformers.GPT2LMHeadModel.from_pretrained(out)
    saved = tierckpt.load(tmp_path / "ckpts")
    assert exact.image(alone.lm_head.weight) == exact.image(saved.model["lm_head.weight"])
    assert len(alone.state_dict()) == len(saved.model)


def a_folder_of_a_trainer_becomes_a_version_of_a_plain_job(tmp_path: Path, shm: str) -> None:
    os.environ["TIERCKPT_SHM_DIR"] = shm
    theirs = train(tmp_path, AT)
    folder = tmp_path / "out" / f"checkpoint-{AT}"
    assert run_command(["import", str(folder), str(tmp_path / "ckpts")]) == 0
    model = model_of(seed=5)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    other = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": other, "weight_decay": 0.0}])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    given = {"path": str(tmp_path / "ckpts"), "agent": "inline"}
    with Checkpointer(model, optimizer, extra={"schedule": schedule}, **given) as ckpt:
        assert ckpt.restore() == AT
        assert image(model, optimizer) == image(theirs.model, theirs.optimizer.optimizer)
        assert schedule.last_epoch == AT


# --- Accelerate ----------------------------------------------------------------------------------


def accelerate_takes_an_imported_version(tmp_path: Path, shm: str) -> None:
    os.environ["TIERCKPT_SHM_DIR"] = shm
    from accelerate import Accelerator

    from tierckpt.accelerate import attach

    before = Module().net
    with torch.no_grad():
        before[0].weight.add_(1.0)
    torch.save({"model": before.state_dict(), "iteration": AT}, tmp_path / "source.pt")
    assert run_command(["import", str(tmp_path / "source.pt"), str(tmp_path / "ckpts")]) == 0
    data = torch.utils.data.TensorDataset(torch.randn(SAMPLES, 4))
    accelerator = Accelerator(cpu=True)
    net = Module().net
    optimizer = torch.optim.Adam(net.parameters())
    net, optimizer, loader = accelerator.prepare(
        net, optimizer, torch.utils.data.DataLoader(data, BATCH)
    )
    with attach(accelerator, path=str(tmp_path / "ckpts"), agent="inline") as ckpt:
        loader = ckpt.resume(loader)
        assert int(ckpt.restored) == AT
        assert image(net) == image(before)
        assert len(list(loader)) == SAMPLES // BATCH
