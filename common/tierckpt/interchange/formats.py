"""The formats of other tools, by name.

A format says how a source is recognized, read, and written. A folder with the routed files of a
version has one folder for each rank that wrote some.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from tierckpt.errors import ConfigError, RestoreError
from tierckpt.offline.stored_version import Saved, StoredVersion
from tierckpt.storage.routed import checked_name

from . import hugging_face, torch_formats
from .foreign_state import ForeignState

__all__ = [
    "FORMATS",
    "NAMES",
    "Format",
    "Options",
    "format_of_source",
    "format_of_target",
    "recognizes_routed_files",
    "write_routed_files",
]


class Options(Struct, frozen=True):
    """Options of a reader or a writer; a format ignores those that it does not have."""

    model_key: str | None = None
    """The model's part of a script's file."""
    max_shard_bytes: int | None = None
    """Limit of one file of weights; None: the format's own."""


class Format(Struct, frozen=True):
    """A format. `recognizes` and `read` get the source's path, `write` a path that does not exist
    yet; it writes a file or a folder there, and returns remarks for the user."""

    name: str
    recognizes: Callable[[Path], bool]
    read: Callable[[Path, Options], ForeignState]
    write: Callable[[Saved, Path, Options], list[str]]
    suffixes: tuple[str, ...] = ()
    """Of targets; a format without any is written only by its name."""
    model_only: bool = False
    """The format has the model alone."""


def _script(path: Path, options: Options) -> ForeignState:
    return torch_formats.read_torch(path, options.model_key)


FORMATS = (
    Format(
        "safetensors",
        hugging_face.recognizes_safetensors,
        lambda path, options: hugging_face.read_safetensors(path),
        lambda saved, out, options: hugging_face.write_safetensors(
            saved, out, options.max_shard_bytes
        ),
        (".safetensors",),
        model_only=True,
    ),
    Format(
        "transformers",
        hugging_face.recognizes_transformers,
        lambda path, options: hugging_face.read_transformers(path),
        lambda saved, out, options: hugging_face.write_transformers(
            saved, out, options.max_shard_bytes
        ),
    ),
    Format(
        "dcp",
        torch_formats.recognizes_dcp,
        lambda path, options: torch_formats.read_dcp(path, options.model_key),
        lambda saved, out, options: torch_formats.write_dcp(saved, out),
    ),
    Format(
        "lightning",
        torch_formats.recognizes_lightning,
        lambda path, options: torch_formats.read_lightning(path),
        lambda saved, out, options: torch_formats.write_lightning(saved, out),
        (".ckpt",),
    ),
    Format(
        "torch",
        torch_formats.is_torch_file,
        _script,
        lambda saved, out, options: torch_formats.write_torch(saved, out),
        (".pt", ".pth"),
    ),
    Format(
        "horovod",
        lambda path: False,  # its files are those of torch.save
        _script,
        lambda saved, out, options: torch_formats.write_for_horovod(saved, out),
        (".pth.tar",),
    ),
)
NAMES = tuple(each.name for each in FORMATS)


def format_of_source(path: Path, name: str | None) -> Format:
    """The format of a source: as named, or as recognized. Raises ConfigError."""
    if name is not None:
        return _named(name)
    found = next((each for each in FORMATS if each.recognizes(path)), None)
    if found is None:
        kinds = "a folder" if path.is_dir() else "a file"
        raise ConfigError(f"{path} is {kinds} of no known format ({', '.join(NAMES)})")
    return found


def format_of_target(path: Path, name: str | None) -> Format:
    """The format of a target: as named, or by its suffix. Raises ConfigError."""
    if name is not None:
        return _named(name)
    for each in FORMATS:
        if path.name.endswith(each.suffixes or "\0"):
            return each
    known = ", ".join(
        f"{'/'.join(each.suffixes)} ({each.name})" for each in FORMATS if each.suffixes
    )
    raise ConfigError(
        f"{path}: unknown suffix. Use {known}, or choose with --format: {', '.join(NAMES)}, files"
    )


def _named(name: str) -> Format:
    return next(each for each in FORMATS if each.name == name)


def recognizes_routed_files(path: Path) -> bool:
    """True for a folder that looks as if `write` had made it."""
    return all(each.is_dir() and re.fullmatch(r"\d{5,}", each.name) for each in path.iterdir())


def write_routed_files(version: StoredVersion, out: Path) -> int:
    """Write the files of all ranks to `out/<rank>/<name>`, with their permissions; returns their
    number.

    Every byte is verified. Raises RestoreError if the version has no files, CorruptShardError for
    damage, and OSError.
    """
    count = 0
    for rank, shard in enumerate(version.shards):
        modes = (version.tree(rank).get("files") or {}).get("modes", {})
        for name, (low, high) in version.files(rank).items():
            path = out / f"{rank:05d}" / checked_name(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                for window in shard.windows(low, high):
                    file.write(window)
            path.chmod(modes[name] | stat.S_IRUSR)
            count += 1
    if not count:
        raise RestoreError(f"{version.text()} has no files: no program routed any")
    return count
