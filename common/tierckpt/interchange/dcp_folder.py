"""Folders of torch.distributed.checkpoint (DCP)."""

from __future__ import annotations

import io
import itertools
import pickle
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from tierckpt.errors import ConfigError
from tierckpt.offline.load import Saved

from . import torch_file
from .foreign_state import ForeignState, is_model, sorted_out

METADATA = ".metadata"
SAFE = {
    "torch": {"Size", "device"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath", "Path"},
    "pathlib._local": {"PosixPath", "PurePosixPath", "Path"},
}
"""Names that metadata may use, besides the classes of its own module and torch's dtypes."""


def recognizes(path: Path) -> bool:
    """True for a folder that DCP wrote."""
    return path.is_dir() and (path / METADATA).exists()


def read(path: Path, model_key: str | None = None) -> ForeignState:
    """The state in the folder: as `dcp.save` got it, whatever the number of ranks. No code of the
    checkpoint runs. Raises ConfigError."""
    if not recognizes(path):
        raise ConfigError(f"{path} is no folder of torch.distributed.checkpoint: no {METADATA}")
    try:
        content = _content(path)
        content = {name: _optimizer_of(name, value) for name, value in content.items()}
        inner = next(iter(content.values()), None)
        if len(content) == 1 and isinstance(inner, Mapping) and not is_model(inner):
            content = dict(inner)  # one stateful object with everything: {"app": AppState}
        return sorted_out("a folder of torch.distributed.checkpoint", content, model_key)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _content(path: Path) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    content: dict[str, Any] = {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _load_state_dict(content, _Reader(path), planner=_Planner(), no_dist=True)
    except ConfigError:
        raise
    except (CheckpointException, Exception) as error:
        raise ConfigError(f"torch cannot load it: {torch_file.reason_of(_cause(error))}") from error
    return content


def _cause(error: BaseException) -> BaseException:
    """The first rank's error in one of DCP's."""
    failures = getattr(error, "failures", {})  # by rank: exception, traceback
    found: BaseException = next(iter(failures.values()), [error])[0]
    return found


def _optimizer_of(name: str, value: Any) -> Any:
    """Keys as `load_state_dict` wants them: DCP makes text of a parameter's number."""
    if not isinstance(value, Mapping):
        return value
    if "state" in value and "param_groups" in value and isinstance(value["state"], Mapping):
        states = {int(k) if str(k).isdigit() else k: v for k, v in value["state"].items()}
        return {**value, "state": states}
    return {key: _optimizer_of(key, each) for key, each in value.items()}


class _MetadataUnpickler(pickle.Unpickler):
    """Makes the plain classes of DCP's metadata, and refuses any other."""

    def find_class(self, module: str, name: str) -> Any:
        own = module == "torch.distributed.checkpoint.metadata"
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if own or dtype or name in SAFE.get(module, ()):
            return super().find_class(module, name)
        raise ConfigError(f"its metadata use {module}.{name}, which is not loaded: it may be code")


class _Reader(FileSystemReader):
    """Reads metadata without running code from them."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError for metadata that are not those of a checkpoint."""
        super().__init__(path)
        with (path / METADATA).open("rb") as file:
            found = _MetadataUnpickler(file).load()
        if not isinstance(found, Metadata):
            raise ConfigError("its metadata are of no checkpoint")
        self._metadata = found

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        meta = getattr(self._metadata, "storage_meta", None)
        if meta is not None:
            meta.load_id = self.load_id
        return self._metadata


class _Planner(DefaultLoadPlanner):
    """Makes the tree of the metadata, with new tensors on the host."""

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        assert metadata is not None
        for name, kind in metadata.state_dict_metadata.items():
            value: Any = kind
            if isinstance(kind, TensorStorageMetadata):
                value = torch.empty(kind.size, dtype=kind.properties.dtype)
            _put(state_dict, (metadata.planner_data or {}).get(name, (name,)), value)
        super().set_up_planner(state_dict, metadata, is_coordinator)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        assert self.metadata is not None
        path = (self.metadata.planner_data or {}).get(name, (name,))
        _put(self.original_state_dict, path, torch_file.without_code(value))


def _put(root: Any, path: tuple[str | int, ...], value: Any) -> None:
    """Set a value in nested dicts and lists, which are made as needed."""
    at = root
    for key, after in itertools.pairwise(path):
        new: Any = [] if isinstance(after, int) else {}
        if isinstance(at, list):
            at.extend([None] * (int(key) + 1 - len(at)))
            at[int(key)] = new if at[int(key)] is None else at[int(key)]
            at = at[int(key)]
        else:
            at = at.setdefault(key, new)
    if isinstance(at, list):
        at.extend([None] * (int(path[-1]) + 1 - len(at)))
        at[int(path[-1])] = value
    else:
        at[path[-1]] = value


def write(saved: Saved, out: Path) -> list[str]:
    """Write `model`, `optimizer` (with parameters by name, as torch's `get_state_dict` has it),
    `extra` and the counters. Raises OSError."""
    from torch.distributed.checkpoint.state_dict_saver import save

    content: dict[str, Any] = {"model": saved.model}
    optimizers = {
        label: _by_name(state, saved.parameters.get(label, ()))
        for label, state in saved.optimizers.items()
    }
    several = set(optimizers) != {"optimizer"}
    content |= {"optimizers": optimizers} if several else optimizers
    content |= {"extra": saved.extra, "version": saved.version, "iteration": saved.iteration}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            save(content, checkpoint_id=out, no_dist=True)
        except CheckpointException as error:  # no Exception
            raise OSError(str(_cause(error))) from error
    return []


def _by_name(state: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """An optimizer's state with names in place of its parameters' numbers."""
    if len(names) != sum(len(group["params"]) for group in state["param_groups"]):
        return dict(state)
    groups = [
        {**group, "params": [names[number] for number in group["params"]]}
        for group in state["param_groups"]
    ]
    states = {names[number]: values for number, values in state["state"].items()}
    return {**state, "state": states, "param_groups": groups}


__all__ = ["read", "recognizes", "write"]
