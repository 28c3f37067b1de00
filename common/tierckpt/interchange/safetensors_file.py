"""Weights as safetensors: one file, or a folder of several with `model.safetensors.index.json`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from tierckpt._text import in_words, some
from tierckpt.errors import ConfigError
from tierckpt.offline.load import Saved

from .foreign_state import ForeignState, without_wrappers

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def recognizes(path: Path) -> bool:
    """True for a file of safetensors, and for a folder with weights and nothing to resume from."""
    if path.is_dir():
        return has_weights(path) and not (path / "trainer_state.json").exists()
    return path.suffix == ".safetensors" or path.name.endswith(".safetensors.index.json")


def has_weights(folder: Path) -> bool:
    """True if the folder has a model in this format."""
    return any((folder / name).exists() for name in (WEIGHTS, INDEX))


def read(path: Path) -> ForeignState:
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
        raise ConfigError(f"{path} is no index of safetensors: {in_words(error)}") from error


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


def write(saved: Saved, out: Path, max_shard_bytes: int | None) -> list[str]:
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
    """The tensors, a tied one once, and its other names. Raises ConfigError for a value that is no
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


MOST_BYTES = 5_000_000_000
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
    shards = list(_shards(tensors, max_shard_bytes or MOST_BYTES))
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


__all__ = [
    "has_weights",
    "plain_model",
    "read",
    "read_model",
    "recognizes",
    "write",
    "write_folder",
]
