"""Formats of Hugging Face: weights as safetensors, and folders `checkpoint-N` of its Trainer.

Weights are one file, or a folder of several with `model.safetensors.index.json`. Transformers
itself is not imported.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from tierckpt._text import error_text, some
from tierckpt.errors import ConfigError
from tierckpt.offline.stored_version import Saved
from tierckpt.proof import WALL_CLOCK

from . import torch_formats
from .foreign_state import ForeignState, is_model, is_optimizer, schedulers_in, without_wrappers
from .log_history import entries_of

__all__ = [
    "has_weights",
    "plain_model",
    "read_model",
    "read_safetensors",
    "read_transformers",
    "recognizes_safetensors",
    "recognizes_transformers",
    "write_folder",
    "write_safetensors",
    "write_transformers",
]


WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def recognizes_safetensors(path: Path) -> bool:
    """True for a file of safetensors, and for a folder with weights and nothing to resume from."""
    if path.is_dir():
        return has_weights(path) and not (path / "trainer_state.json").exists()
    return path.suffix == ".safetensors" or path.name.endswith(".safetensors.index.json")


def has_weights(folder: Path) -> bool:
    """True if the folder has a model in this format."""
    return any((folder / name).exists() for name in (WEIGHTS, INDEX))


def read_safetensors(path: Path) -> ForeignState:
    """The model. Raises ConfigError."""
    found = ForeignState("safetensors")
    found.model, metadata = read_model(path)
    if {"iteration", "version"} <= metadata.keys():  # of an export; others name other things so
        found.iteration = _number(metadata["iteration"])
        found.steps = _number(metadata["version"])
    found.values = {}
    return found


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def read_model(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The tensors, as views of the mapped files, and the metadata."""
    tensors: dict[str, Any] = {}
    metadata: dict[str, str] = {}
    for file in _files_of(path):
        names, values, facts = _read_one(file)
        tensors |= values
        metadata |= facts
        # The metadata have the other names of tied weights (safetensors.torch.save_model).
        tensors |= {name: values[first] for name, first in facts.items() if first in names}
    return without_wrappers(tensors), metadata


def _files_of(path: Path) -> list[Path]:
    if path.is_dir():
        path = next(path / name for name in (INDEX, WEIGHTS) if (path / name).exists())
    if path.suffix != ".json":
        return [path]
    try:
        table = json.loads(path.read_text())["weight_map"]
        return [path.parent / name for name in sorted({*table.values()})]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is no index of safetensors: {error_text(error)}") from error


def _read_one(file: Path) -> tuple[set[str], dict[str, torch.Tensor], dict[str, str]]:
    open_file = _library().safe_open
    try:
        with open_file(file, "pt") as content:
            values = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
            return {*values}, values, dict(content.metadata() or {})
    except FileNotFoundError as error:
        raise ConfigError(f"{file} is named by the index, and does not exist") from error
    except Exception as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error


def _library() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise ConfigError(f"{error}: pip install safetensors") from error
    return safetensors


def write_safetensors(saved: Saved, out: Path, max_shard_bytes: int | None) -> list[str]:
    """Write the model: a file, or a folder if the target's name has no suffix."""
    tensors, tied = plain_model(saved.model)
    facts = {"format": "pt", "version": str(saved.version), "iteration": str(saved.iteration)}
    if out.suffix != ".safetensors":
        write_folder(tensors, {**tied, **facts}, out, max_shard_bytes)
        return _of_tied(tied)
    if max_shard_bytes is not None and _nbytes(tensors) > max_shard_bytes:
        raise ConfigError(
            f"the model has {_nbytes(tensors)} bytes, more than --max-shard-bytes. Several files "
            "need a folder: leave the suffix of the target out, and give --format safetensors"
        )
    write_file(tensors, {**tied, **facts}, out)
    return _of_tied(tied)


def _of_tied(tied: Mapping[str, str]) -> list[str]:
    if not tied:
        return []
    names = some([f"{name} is saved as {kept}" for name, kept in tied.items()])
    return [f"tied weights: {names}. safetensors.torch.load_model(model, file) restores both"]


def plain_model(model: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors, a tied one once, and its other names. Raises ConfigError for a value but no
    tensor."""
    tensors, first, tied = dict[str, torch.Tensor](), dict[int, str](), dict[str, str]()
    for name, tensor in model.items():
        if not isinstance(tensor, torch.Tensor):
            raise ConfigError(
                f"{name} is not a tensor (a module has it in its state_dict()), and safetensors "
                "stores only tensors; export to a .pt file"
            )
        if id(tensor) in first:
            tied[name] = first[id(tensor)]
            continue
        first[id(tensor)] = name
        tensors[name] = tensor.contiguous()
    return tensors, tied


def write_file(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str], out: Path) -> None:
    """Write one file, as `safetensors.torch.save_model` does. Raises ConfigError for a dtype that
    safetensors does not have."""
    library = _library()
    try:
        library.torch.save_file(dict(tensors), out, dict(metadata))
    except Exception:
        _refuse_dtypes(tensors)
        raise


def _refuse_dtypes(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise ConfigError for the first tensor that safetensors cannot write, with its name."""
    library = _library()
    for name, tensor in tensors.items():
        try:
            library.torch.save({name: tensor.flatten()[:0]})
        except Exception as error:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise ConfigError(
                f"{name} has dtype {kind}, which this release of safetensors cannot store; export "
                "to a .pt file"
            ) from error


MAX_BYTES = 5_000_000_000
"""Limit of a file in a folder, as in Hugging Face's libraries."""


def write_folder(
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str],
    folder: Path,
    max_shard_bytes: int | None,
) -> None:
    """Write `model.safetensors`, or several files and their index if it would be larger than the
    limit. A tensor is never divided."""
    folder.mkdir(exist_ok=True)
    shards = list(_shards(tensors, max_shard_bytes or MAX_BYTES))
    if len(shards) == 1:
        write_file(tensors, metadata, folder / WEIGHTS)
        return
    table: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_file(shard, metadata, folder / name)
        table |= dict.fromkeys(shard, name)
    index = {"metadata": {"total_size": _nbytes(tensors)}, "weight_map": table}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _shards(
    tensors: Mapping[str, torch.Tensor], limit_bytes: int
) -> Iterator[dict[str, torch.Tensor]]:
    shard, nbytes = dict[str, torch.Tensor](), 0
    for name, tensor in tensors.items():
        if shard and nbytes + tensor.nbytes > limit_bytes:
            yield shard
            shard, nbytes = {}, 0
        shard[name] = tensor
        nbytes += tensor.nbytes
    yield shard


def _nbytes(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


OPTIMIZER, SCHEDULER, SCALER = "optimizer.pt", "scheduler.pt", "scaler.pt"
TRAINER_STATE, PICKLED = "trainer_state.json", "pytorch_model.bin"
STATE = "transformers"
"""Name of the Trainer's state in the versions of `tierckpt.transformers`."""
FILES_OF_SCRIPT = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "vocab.txt", "vocab.json", "merges.txt", "README.md"),
)
"""Files that belong to the script, not to the state."""


def recognizes_transformers(path: Path) -> bool:
    """True for a folder with the state of a Trainer."""
    return path.is_dir() and (path / TRAINER_STATE).exists()


def read_transformers(path: Path) -> ForeignState:
    """The model, the optimizer, the scheduler, the scaler, and the counters. Raises ConfigError."""
    if not path.is_dir():
        raise ConfigError(f"{path} is no folder checkpoint-N of a Trainer")
    found = ForeignState("a checkpoint of Hugging Face's Trainer")
    if has_weights(path):
        found.model, _ = read_model(path)
    elif (path / PICKLED).exists():
        model = torch_formats.load(path / PICKLED)
        if not is_model(model):
            raise ConfigError(f"{path / PICKLED} is no state_dict(): it has other than tensors")
        found.model = without_wrappers(model)
    else:
        raise ConfigError(
            f"{path} has neither model.safetensors nor {PICKLED}: adapters and sharded states of "
            "FSDP or DeepSpeed are not read"
        )
    if (path / OPTIMIZER).exists():
        found.optimizers["optimizer"] = state = torch_formats.load(path / OPTIMIZER)
        if not is_optimizer(state):
            raise ConfigError(f"{path / OPTIMIZER} is no state_dict() of an optimizer of torch's")
    for name, file in (("scheduler", SCHEDULER), ("scaler", SCALER)):
        if (path / file).exists():
            found.extra[name] = torch_formats.load(path / file)
    if (path / TRAINER_STATE).exists():
        try:
            numbers = json.loads((path / TRAINER_STATE).read_text())
            found.iteration = found.steps = int(numbers["global_step"])
            found.values |= {"epoch": numbers["epoch"]} if "epoch" in numbers else {}
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path / TRAINER_STATE} cannot be read: {error_text(error)}"
            ) from error
        found.not_taken.append(f"{TRAINER_STATE}: log history and best metric")
    taken = {OPTIMIZER, SCHEDULER, SCALER, TRAINER_STATE, *FILES_OF_SCRIPT}
    for name in sorted(each.name for each in path.iterdir()):
        if name not in taken and not name.startswith(("model", PICKLED)):
            found.not_taken.append(name)
    return found


def write_transformers(saved: Saved, out: Path, max_shard_bytes: int | None) -> list[str]:
    """Write a folder for `Trainer.train(resume_from_checkpoint=...)`, with weights that
    `from_pretrained` reads if it gets a config.

    Raises ConfigError for several optimizers, or a model with values that are no tensors.
    """
    if len(saved.optimizers) > 1:
        names = ", ".join(saved.optimizers)
        raise ConfigError(f"it has several optimizers ({names}), and a Trainer has one")
    out.mkdir()
    tensors, _ = plain_model(saved.model)
    write_folder(tensors, {"format": "pt"}, out, max_shard_bytes)
    for state in saved.optimizers.values():
        torch_formats.save(state, out / OPTIMIZER)
    schedulers = schedulers_in(saved.extra)
    if len(schedulers) == 1:
        torch_formats.save(next(iter(schedulers.values())), out / SCHEDULER)
    if "scaler" in saved.extra:
        torch_formats.save(saved.extra["scaler"], out / SCALER)
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
