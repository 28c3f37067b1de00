"""Formats of PyTorch: files of `torch.save`, Lightning's `.ckpt` files, and folders of DCP.

Files of `torch.save` are those of scripts, of Horovod's examples, and other tools' parts. Scripts
compute learning rates and metrics with numpy, so files have numbers of it. numpy's own functions
would take flags and pointers from a file, so they are not called: a number is made from its bytes.
Arrays are not read.

Lightning's files are a dict of `torch.save` with names of their own; Lightning is not imported.
DCP is torch.distributed.checkpoint.
"""

from __future__ import annotations

import functools
import io
import itertools
import json
import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from tierckpt.errors import ConfigError
from tierckpt.offline.stored_version import Saved
from tierckpt.state.extras import PLAIN_VALUES

from .foreign_state import (
    ForeignState,
    Unread,
    is_model,
    named_optimizers,
    schedulers_in,
    sorted_out,
    without_wrappers,
)

__all__ = [
    "BY_NAME",
    "is_torch_file",
    "load",
    "read_dcp",
    "read_lightning",
    "read_torch",
    "reason_of",
    "recognizes_dcp",
    "recognizes_lightning",
    "save",
    "without_code",
    "write_dcp",
    "write_for_horovod",
    "write_lightning",
    "write_torch",
]


MAX_BYTES = 1 << 10
"""Limit of one number or text."""


class Dtype:
    """Stands for `numpy.dtype` in a pickle."""

    def __init__(self, code: Any, *_: Any) -> None:
        self._code, self._order = code, "|"

    def __setstate__(self, state: Any) -> None:
        """Take the byte order, and nothing else."""
        self._order = state[1]

    def made(self) -> np.dtype[Any] | None:
        """The type of a number or a text; None for any other."""
        if not isinstance(self._code, str) or self._order not in ("|", "<", ">", "="):
            return None
        found = np.dtype(self._code).newbyteorder(self._order)  # type: ignore[arg-type]
        return found if found.kind in "biufcSU" else None


class UnreadScalar(Unread):
    """Stands for a scalar, no number."""

    name = "numpy.generic"


def scalar(dtype: Any, data: Any = None) -> Any:
    """Stands for numpy's function of that name: makes a number from its bytes."""
    try:
        kind = dtype.made()
        if kind is None or not isinstance(data, bytes) or len(data) > MAX_BYTES:
            return UnreadScalar()
        return np.frombuffer(data, kind)[0]
    except (AttributeError, TypeError, ValueError, IndexError):
        return UnreadScalar()


BY_NAME: dict[str, Any] = {
    "numpy.dtype": Dtype,
    "numpy.core.multiarray.scalar": scalar,
    "numpy._core.multiarray.scalar": scalar,
}
"""By the names in files; the last is that of numpy 2."""


MAX_CLASSES = 100
"""Limit of classes in a file with errors that name them one at a time."""
_NAMED = re.compile(r"Unsupported global: GLOBAL (\S+)")
_BLOCKED = re.compile(r"GLOBAL (\S+) whose module")
_ADVICE = re.compile(r"\. In PyTorch 2\.6.*?(?=WeightsUnpickler error|$)", re.DOTALL)
"""torch's advice to load the file with its code."""


def is_torch_file(path: Path) -> bool:
    """True for a file that `torch.save` wrote, in its current or its former form."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(16)
    return head.startswith(b"PK\x03\x04") or b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19" in head


def load(path: Path) -> Any:
    """The content of a file of `torch.save`, on the host; tensors are views of the mapped file.

    No code of the file runs: an object of another class than torch's own becomes an `Unread`.
    Raises ConfigError if it is no such file, or if torch cannot read it in this way.
    """
    if not is_torch_file(path):
        raise ConfigError(f"{path} is no file of torch.save")
    if _is_cut(path):
        raise ConfigError(f"{path} is damaged, or not complete: its end is missing")
    try:
        return without_code(path)
    except Exception as error:
        raise ConfigError(
            f"{path} cannot be read by torch.load(weights_only=True): {reason_of(error)}. If it "
            "can be read where it was made, save the state_dict()s of its objects again, and "
            "import that file"
        ) from error


def without_code(source: Path | io.BytesIO) -> Any:
    """The content, as `load` has it. Raises torch's errors; see `reason_of`."""
    names = [name for name in _unread_classes(source) if name not in BY_NAME]
    for _ in range(MAX_CLASSES):
        try:
            return _loaded(source, names)
        except pickle.UnpicklingError as error:
            name = _NAMED.search(str(error))
            if name is None or name[1] in names:
                raise
            names.append(name[1])
    return _loaded(source, names)


def reason_of(error: BaseException) -> str:
    """The reason in an error of `torch.load`, without its advice to load the file with its code."""
    if blocked := _BLOCKED.search(str(error)):
        return f"it has code ({blocked[1]})"
    return " ".join(_ADVICE.sub(": ", str(error)).split())[:300].rstrip(" .:")


def _is_cut(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"PK" and not zipfile.is_zipfile(path)


def _loaded(source: Path | io.BytesIO, names: Sequence[str]) -> Any:
    where: dict[str, Any] = {"map_location": "cpu", "weights_only": True}
    known: dict[str, Any] = {name: _stand_in(name) for name in names} | BY_NAME
    with torch.serialization.safe_globals([(each, name) for name, each in known.items()]):
        if isinstance(source, io.BytesIO):
            source.seek(0)
            return torch.load(source, **where)
        if not zipfile.is_zipfile(source):  # as torch before 1.6 wrote it: it cannot be mapped
            return torch.load(source, **where)
        return torch.load(source, mmap=True, **where)


def _unread_classes(source: Path | io.BytesIO) -> list[str]:
    """The classes that the file names and torch does not load."""
    find = getattr(torch.serialization, "get_unsafe_globals_in_checkpoint", None)
    try:
        return [] if find is None else [*find(source)]
    except Exception:  # of the former form, or damaged: its error names one class at a time
        return []


@functools.cache
def _stand_in(name: str) -> type:
    module, _, kind = name.rpartition(".")
    return type(kind, (Unread,), {"name": name, "__module__": module})


def read_torch(path: Path, model_key: str | None = None) -> ForeignState:
    """The state in a script's file. Raises ConfigError."""
    try:
        return sorted_out("a file of torch.save", load(path), model_key)
    except ConfigError as error:
        raise ConfigError(
            f"{path}: {error}" if str(path) not in str(error) else str(error)
        ) from error


def save(content: Mapping[str, Any], out: Path) -> None:
    """Write a file of `torch.save`. Equal contents make equal bytes: torch puts the file's name,
    here a temporary one, into an archive that it opens by itself. Raises OSError."""
    try:
        with out.open("wb") as file:
            torch.save(content, file)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):  # torch's own error hides a full disk
            raise error.__context__ from None
        raise


def write_torch(saved: Saved, out: Path) -> list[str]:
    """Write everything, in the form that scripts with `torch.load` expect."""
    several = set(saved.optimizers) != {"optimizer"}
    optimizers = {"optimizers": saved.optimizers} if several else saved.optimizers
    rest = {"extra": saved.extra, "extra_per_rank": saved.extra_per_rank}
    facts = {"version": saved.version, "iteration": saved.iteration, "metric": saved.metric}
    save({"model": saved.model, **optimizers, **rest, **facts}, out)
    return []


def write_for_horovod(saved: Saved, out: Path) -> list[str]:
    """Write the dict of Horovod's examples: `model` and `optimizer`, and what an elastic state has
    besides (`epoch`, `batch`)."""
    if len(saved.optimizers) > 1:
        names = ", ".join(saved.optimizers)
        raise ConfigError(
            f"it has several optimizers ({names}), and files of Horovod's examples have one; "
            "export with --format torch"
        )
    content: dict[str, Any] = {"model": saved.model}
    content |= dict(zip(["optimizer"], saved.optimizers.values(), strict=False))
    values = saved.extra.get(PLAIN_VALUES)
    content |= {k: v for k, v in dict(values or {}).items() if k not in content}
    save(content, out)
    return []


VERSION_KEY = "pytorch-lightning_version"
WRITTEN_AS = "2.4.0"
"""The oldest release that Tierckpt supports: a newer one reads its files without a message."""
STATE = "lightning"
"""Name of the Trainer's state in the versions of `tierckpt.lightning`."""
LOOPS = ("epoch_loop", "automatic_optimization", "manual_optimization", "val_loop")
SCALERS = ("MixedPrecision", "MixedPrecisionPlugin", "native_amp_scaling_state")
NOT_CARRIED = ("loops", "callbacks")


def recognizes_lightning(path: Path) -> bool:
    """True for a file with Lightning's version in it."""
    if not is_torch_file(path):
        return False
    if path.suffix == ".ckpt":
        content = load(path)
        return isinstance(content, Mapping) and VERSION_KEY in content
    return False


def read_lightning(path: Path) -> ForeignState:
    """The model, the optimizers, the schedulers and the scaler. Raises ConfigError."""
    content = load(path)
    if not isinstance(content, Mapping) or not is_model(content.get("state_dict")):
        raise ConfigError(f"{path} is no checkpoint of Lightning: it has no state_dict")
    found = ForeignState("a checkpoint of Lightning")
    found.model = without_wrappers(content["state_dict"])
    found.optimizers = named_optimizers(content.get("optimizer_states") or [])
    schedulers = content.get("lr_schedulers") or []
    for number, state in enumerate(schedulers):
        found.extra["scheduler" if len(schedulers) == 1 else f"scheduler{number}"] = dict(state)
    for name in SCALERS:
        if content.get(name):
            found.extra["scaler"] = dict(content[name])
    found.values = {"epoch": content.get("epoch", 0)}
    found.iteration = found.steps = int(content.get("global_step", 0))
    known = {"state_dict", "optimizer_states", "lr_schedulers", "epoch", "global_step", VERSION_KEY}
    for key, value in content.items():
        if key in known or key in SCALERS or _is_nothing(value):
            continue
        what = value.name if isinstance(value, Unread) else "the Trainer's own"
        found.not_taken.append(f"{key} ({what})" if key in NOT_CARRIED else str(key))
    return found


def _is_nothing(value: Any) -> bool:
    return value is None or (isinstance(value, Mapping) and not value)


def write_lightning(saved: Saved, out: Path) -> list[str]:
    """Write a file for `Trainer.fit(ckpt_path=...)`. A version of `tierckpt.lightning` has the
    Trainer's loops; another one gets loops at the start of an epoch, and the number of steps."""
    state = saved.extra_per_rank.get(STATE)
    own = state if isinstance(state, Mapping) else {}
    remarks = []
    if own:
        loops = _loops_of(json.loads(own["progress"]), own["batches_that_stepped"])
        schedulers = [each for _, each in own["schedulers"]]
    else:
        loops = _first_loops(saved.version)
        schedulers = [*schedulers_in(saved.extra).values()]
        remarks.append(
            "no state of a Trainer is in the version: Lightning starts an epoch, at global_step "
            f"{saved.version}"
        )
    epoch = loops["epoch_progress"]["current"]["completed"]
    content: dict[str, Any] = {
        "epoch": epoch,
        "global_step": saved.version,
        VERSION_KEY: WRITTEN_AS,
        "state_dict": saved.model,
        "loops": {"fit_loop": loops},
        "callbacks": dict(dict(own.get("scripts") or {}).get("callbacks") or {}),
        "optimizer_states": [*saved.optimizers.values()],
        "lr_schedulers": schedulers,
    }
    if scaler := saved.extra.get("scaler"):
        content["MixedPrecision"] = scaler
    save(content, out)
    return remarks


def _loops_of(progress: Mapping[str, Any], batches_that_stepped: int) -> dict[str, Any]:
    """Lightning's flat dict of the counters of nested loops."""
    flat: dict[str, Any] = {"state_dict": {}}

    def add(prefix: str, counters: Mapping[str, Any]) -> None:
        for name, value in counters.items():
            if name in LOOPS:
                flat[f"{prefix}{name}.state_dict"] = {}
                add(f"{prefix}{name}.", value)
            else:
                flat[f"{prefix}{name}"] = value

    add("", progress)
    flat["epoch_loop.state_dict"] = {"_batches_that_stepped": batches_that_stepped}
    return flat


def _first_loops(steps: int) -> dict[str, Any]:
    none = {"ready": 0, "completed": 0, "started": 0, "processed": 0}
    made = {"ready": steps, "completed": steps}
    step = {"total": made, "current": {"ready": 0, "completed": 0}}
    zeroed = {name: {**counts, "started": counts["ready"]} for name, counts in step.items()}
    return {
        "state_dict": {},
        "epoch_loop.state_dict": {"_batches_that_stepped": steps},
        "epoch_loop.automatic_optimization.state_dict": {},
        "epoch_loop.automatic_optimization.optim_progress": {
            "optimizer": {"step": step, "zero_grad": zeroed}
        },
        "epoch_loop.manual_optimization.state_dict": {},
        "epoch_progress": {"total": dict(none), "current": dict(none)},
    }


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


def recognizes_dcp(path: Path) -> bool:
    """True for a folder that DCP wrote."""
    return path.is_dir() and (path / METADATA).exists()


def read_dcp(path: Path, model_key: str | None = None) -> ForeignState:
    """The state in the folder: as `dcp.save` got it, whatever the number of ranks. No code of the
    checkpoint runs. Raises ConfigError."""
    if not recognizes_dcp(path):
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
        raise ConfigError(f"torch cannot load it: {reason_of(_cause(error))}") from error
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
        _put(self.original_state_dict, path, without_code(value))


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


def write_dcp(saved: Saved, out: Path) -> list[str]:
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
