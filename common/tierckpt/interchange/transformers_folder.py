"""Folders `checkpoint-N` of Hugging Face's Trainer. Transformers itself is not imported."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tierckpt._text import in_words
from tierckpt.errors import ConfigError
from tierckpt.offline.load import Saved
from tierckpt.proof import WALL_CLOCK

from . import safetensors_file, torch_file
from .foreign_state import (
    ForeignState,
    is_model,
    is_optimizer,
    schedulers_in,
    without_wrappers,
)
from .log_history import entries_of

OPTIMIZER, SCHEDULER, SCALER = "optimizer.pt", "scheduler.pt", "scaler.pt"
TRAINER_STATE, PICKLED = "trainer_state.json", "pytorch_model.bin"
STATE = "transformers"
"""Name of the Trainer's state in the versions of `tierckpt.transformers`."""
FILES_OF_SCRIPT = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "vocab.txt", "vocab.json", "merges.txt", "README.md"),
)
"""Files that belong to the script, not to the state."""


def recognizes(path: Path) -> bool:
    """True for a folder with the state of a Trainer."""
    return path.is_dir() and (path / TRAINER_STATE).exists()


def read(path: Path) -> ForeignState:
    """The model, the optimizer, the scheduler, the scaler, and the counters. Raises ConfigError."""
    if not path.is_dir():
        raise ConfigError(f"{path} is no folder checkpoint-N of a Trainer")
    found = ForeignState("a checkpoint of Hugging Face's Trainer")
    if safetensors_file.has_weights(path):
        found.model, _ = safetensors_file.read_model(path)
    elif (path / PICKLED).exists():
        model = torch_file.load(path / PICKLED)
        if not is_model(model):
            raise ConfigError(f"{path / PICKLED} is no state_dict(): it has other than tensors")
        found.model = without_wrappers(model)
    else:
        raise ConfigError(
            f"{path} has neither model.safetensors nor {PICKLED}: adapters and sharded states of "
            "FSDP or DeepSpeed are not read"
        )
    if (path / OPTIMIZER).exists():
        found.optimizers["optimizer"] = state = torch_file.load(path / OPTIMIZER)
        if not is_optimizer(state):
            raise ConfigError(f"{path / OPTIMIZER} is no state_dict() of an optimizer of torch's")
    for name, file in (("scheduler", SCHEDULER), ("scaler", SCALER)):
        if (path / file).exists():
            found.extra[name] = torch_file.load(path / file)
    if (path / TRAINER_STATE).exists():
        try:
            numbers = json.loads((path / TRAINER_STATE).read_text())
            found.iteration = found.steps = int(numbers["global_step"])
            found.values |= {"epoch": numbers["epoch"]} if "epoch" in numbers else {}
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path / TRAINER_STATE} cannot be read: {in_words(error)}"
            ) from error
        found.not_taken.append(f"{TRAINER_STATE}: log history and best metric")
    taken = {OPTIMIZER, SCHEDULER, SCALER, TRAINER_STATE, *FILES_OF_SCRIPT}
    for name in sorted(each.name for each in path.iterdir()):
        if name not in taken and not name.startswith(("model", PICKLED)):
            found.not_taken.append(name)
    return found


def write(saved: Saved, out: Path, max_shard_bytes: int | None) -> list[str]:
    """Write a folder for `Trainer.train(resume_from_checkpoint=...)`, whose weights
    `from_pretrained` reads if it gets a config.

    Raises ConfigError for several optimizers, or a model with values that are no tensors.
    """
    if len(saved.optimizers) > 1:
        names = ", ".join(saved.optimizers)
        raise ConfigError(f"it has several optimizers ({names}), and a Trainer has one")
    out.mkdir()
    tensors, _ = safetensors_file.plain_model(saved.model)
    safetensors_file.write_folder(tensors, {"format": "pt"}, out, max_shard_bytes)
    for state in saved.optimizers.values():
        torch_file.save(state, out / OPTIMIZER)
    schedulers = schedulers_in(saved.extra)
    if len(schedulers) == 1:
        torch_file.save(next(iter(schedulers.values())), out / SCHEDULER)
    if "scaler" in saved.extra:
        torch_file.save(saved.extra["scaler"], out / SCALER)
    own: Mapping[str, Any] | None = saved.extra_per_rank.get(STATE)
    (out / TRAINER_STATE).write_text(json.dumps(_trainer_state(saved, own), indent=2) + "\n")
    remarks = ["config.json is not in it: model.config.save_pretrained(TARGET) adds it"]
    if own is None:
        remarks.append(
            "no state of a Trainer is in the version: only global_step is set. A resumed Trainer "
            f"takes logging_steps, eval_steps and save_steps from {TRAINER_STATE}: change them "
            "there"
        )
    if len(schedulers) != 1:
        remarks.append(
            f"{len(schedulers)} schedulers are in extra, and a Trainer has one: it loads neither "
            f"that nor the optimizer without {SCHEDULER}"
        )
    return remarks


FLAGS = (
    *("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate"),
    "should_log",
)
CONTROL = {"TrainerControl": {"args": dict.fromkeys(FLAGS, False), "attributes": {}}}
"""State of the TrainerControl between two steps; a Trainer that saves looks it up."""


INTERVALS = {"logging_steps": 500, "eval_steps": 500, "save_steps": 500}
"""The Trainer's defaults; a resumed one takes them from the file, whatever its arguments are."""


def _trainer_state(saved: Saved, own: Mapping[str, Any] | None) -> dict[str, Any]:
    if own is None:
        counts = {"global_step": saved.version, "epoch": 0.0, "log_history": []}
        return {**counts, **INTERVALS, "stateful_callbacks": CONTROL}
    numbers = json.loads(own["numbers"])
    callbacks: dict[str, list[Any]] = {}
    for kind, state in numbers["callbacks"]:
        callbacks.setdefault(kind, []).append(state)
    several = {kind: each if each[1:] else each[0] for kind, each in callbacks.items()}
    return {
        **numbers["state"],
        **numbers["intervals"],
        "max_steps": numbers["max_steps"],
        "train_batch_size": numbers["step"]["batch"],
        "log_history": entries_of(own["history"], own[WALL_CLOCK]),
        "stateful_callbacks": {**several, **CONTROL},
    }


__all__ = ["read", "recognizes", "write"]
