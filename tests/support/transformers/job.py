"""One rank of a job of Hugging Face's Trainer, with a record of every step; a script, and a
module for ranks that are forked."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.utils.data import Dataset, IterableDataset
from transformers import GPT2Config, GPT2LMHeadModel, Seq2SeqTrainer, Trainer

from tests.support.frameworks.own_generators import ARGUMENTS, Hidden
from tests.support.frameworks.rank import Journal, be_forked, digest, random_state, with_lora
from tests.support.frameworks.scenario import VARIABLE
from tests.support.frameworks.scenario import OfTransformers as Scenario
from tierckpt.transformers import TierTrainerMixin

WORDS, LENGTH, SAMPLES = 50, 16, 52


def without_clock(logs: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in logs.items() if "runtime" not in k and "per_second" not in k}


class Plain(Dataset[Any]):
    """Tokens, for evaluation."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        if index >= SAMPLES:  # ends a loop over all samples
            raise IndexError(index)
        tokens = torch.randint(WORDS, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


class Sentences(Plain):
    """With noise, which is drawn again whenever a sample is loaded."""

    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index)
        sample["input_ids"][torch.randint(LENGTH, ())] = torch.randint(WORDS, ())
        return sample


class Numbered(Plain):
    """Samples that start with their number, in two tokens."""

    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index)
        sample["input_ids"][:2] = torch.tensor([index // WORDS, index % WORDS])
        return sample


class Noisy(Sentences):
    """Draws from generators: one of its own, and those that arguments of the checkpointer name."""

    def __init__(self) -> None:
        self.source = torch.Generator()

    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index)
        noise = torch.rand((), generator=self.source) + Hidden.noise()
        sample["input_ids"][1] = int(noise * WORDS) % WORDS
        return sample


class Tokenizer:
    """What the collator for masked words needs."""

    mask_token, mask_token_id, pad_token_id = "m", 3, 0

    def __len__(self) -> int:
        return WORDS

    def convert_tokens_to_ids(self, token: str) -> int:
        return 3

    def get_special_tokens_mask(self, values: Any, **_: Any) -> list[int]:
        return [0] * len(values)

    def pad(self, examples: Any, **_: Any) -> Any:
        return transformers.BatchEncoding(torch.utils.data.default_collate(examples))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from (Sentences()[index] for index in range(SAMPLES))


DATA: dict[str, Any] = {
    "plain": Sentences,
    "stream": Stream,
    "numbered": Numbered,
    "own generators": Noisy,
}


class Recorder(transformers.TrainerCallback):
    """Writes gradients, weights, rates, random states and logs of every step."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal

    def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
        self.journal.write("gradients", them=digest(p.grad for p in model.parameters()))

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        weights = digest(given["model"].state_dict().values())
        rates = [group["lr"] for group in given["optimizer"].param_groups]
        step = state.global_step
        self.journal.write("step", number=step, weights=weights, rates=rates, random=random_state())
        self.journal.reach("step end", step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **_: Any) -> None:
        self.journal.write("logged", step=state.global_step, **without_clock(logs))

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.journal.reach("evaluation", state.global_step)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.journal.write("epoch end", epoch=state.epoch, random=random_state())
        self.journal.reach("epoch end", state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.journal.write("trained")

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.journal.reach("begin", state.global_step)


class Recorded:
    """A Trainer that writes its batches, and may end in the middle of a step or of a save."""

    journal: Journal
    state: Any

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        numbers = (inputs["input_ids"][:, 0] * WORDS + inputs["input_ids"][:, 1]).tolist()
        facts = {"samples": digest(inputs.values()), "numbers": numbers}
        step = self.state.global_step
        self.journal.write("batch", step=step, random=random_state(), **facts)
        loss = super().training_step(model, inputs, *args, **kwargs)  # type: ignore[misc]
        self.journal.reach("backward", self.state.global_step)
        return loss

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self.journal.reach("save", self.state.global_step)
        super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]


def make_trainer(scenario: Scenario, arguments: Any, journal: Journal) -> Any:
    base = {"trainer": Trainer, "seq2seq": Seq2SeqTrainer}[scenario.kind]
    bases: tuple[Any, ...] = (Recorded, base)
    given: dict[str, Any] = {}
    own: dict[str, Any] = {}
    if scenario.settings is not None:
        own = ARGUMENTS if scenario.data == "own generators" else {}
        bases = (Recorded, TierTrainerMixin, base)
        given = {"tierckpt": {**scenario.settings, **own}}
    if scenario.data == "own generators":
        collator: Any = transformers.DataCollatorForLanguageModeling
        given["data_collator"] = collator(Tokenizer(), mlm_probability=0.3, seed=7)
    callbacks: list[Any] = [Recorder(journal)]
    if scenario.patience:
        callbacks.append(transformers.EarlyStoppingCallback(scenario.patience, 10.0))
    config = GPT2Config(
        vocab_size=WORDS,
        n_positions=LENGTH,
        n_embd=8,
        n_layer=1,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), scenario.dropout),
    )
    torch.manual_seed(3)
    model: Any = GPT2LMHeadModel(config)
    if scenario.lora:
        model = with_lora(model, ["c_attn"], fan_in_fan_out=True)
    trainer = type("Job", bases, {"journal": journal})(
        model,
        arguments,
        train_dataset=DATA[scenario.data](),
        eval_dataset=Noisy() if scenario.data == "own generators" else Plain(),
        callbacks=callbacks,
        **given,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def train(scenario: Scenario) -> None:
    torch.set_num_threads(1)
    journal = Journal(scenario, int(os.environ["RANK"]))
    kind = transformers.TrainingArguments
    if scenario.kind == "seq2seq":
        kind = transformers.Seq2SeqTrainingArguments
    options: dict[str, Any] = {
        "num_train_epochs": 3,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 16,
        "learning_rate": 0.01,
        "logging_steps": 3,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "save_strategy": "no",
        "dataloader_num_workers": scenario.workers,
        "ddp_find_unused_parameters": False,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    arguments = kind(str(Path(scenario.folder) / "out"), **{**options, **scenario.arguments})
    try:
        trainer = make_trainer(scenario, arguments, journal)
        result = trainer.train(**scenario.train)
    except SystemExit as end:
        journal.write("exited", status=end.code)
        raise
    except Exception as error:
        journal.write("raised", error=type(error).__name__, text=str(error))
        raise
    history = [without_clock(each) for each in trainer.state.log_history]
    weights = digest(trainer.model.state_dict().values())
    journal.write("done", weights=weights, history=history, loss=result.training_loss)


def run(environment: Mapping[str, str]) -> None:
    """Be a rank that was forked; does not return."""
    be_forked(lambda: train(Scenario.from_json(environment[VARIABLE])))


if __name__ == "__main__":
    train(Scenario.from_json(os.environ[VARIABLE]))
