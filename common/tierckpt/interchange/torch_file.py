"""Files of `torch.save`: those of scripts, of Horovod's examples, and other tools' parts."""

from __future__ import annotations

import functools
import io
import pickle
import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tierckpt.errors import ConfigError
from tierckpt.offline.load import Saved
from tierckpt.state.extras import PLAIN_VALUES

from . import numpy_numbers
from .foreign_state import ForeignState, Unread, sorted_out

MOST_CLASSES = 100
"""Limit of classes in a file whose errors name them one at a time."""
_NAMED = re.compile(r"Unsupported global: GLOBAL (\S+)")
_BLOCKED = re.compile(r"GLOBAL (\S+) whose module")
_ADVICE = re.compile(r"\. In PyTorch 2\.6.*?(?=WeightsUnpickler error|$)", re.DOTALL)
"""torch's advice to load the file with its code."""


def is_torch_file(path: Path) -> bool:
    """True for a file that `torch.save` wrote, in its current or its former form."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        begin = file.read(16)
    return begin.startswith(b"PK\x03\x04") or b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19" in begin


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
    names = [name for name in _unread_classes(source) if name not in numpy_numbers.BY_NAME]
    for _ in range(MOST_CLASSES):
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
    known: dict[str, Any] = {name: _stand_in(name) for name in names} | numpy_numbers.BY_NAME
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


def read(path: Path, model_key: str | None = None) -> ForeignState:
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


def write(saved: Saved, out: Path) -> list[str]:
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


__all__ = [
    "is_torch_file",
    "load",
    "read",
    "reason_of",
    "save",
    "without_code",
    "write",
    "write_for_horovod",
]
