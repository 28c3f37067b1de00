"""The formats of other tools, by name: how a source is recognized, read, and written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tierckpt.errors import ConfigError
from tierckpt.offline.load import Saved

from . import dcp_folder, lightning_file, safetensors_file, torch_file, transformers_folder
from .foreign_state import ForeignState


@dataclass(frozen=True)
class Options:
    """Options of a reader or a writer; a format ignores those that it does not have."""

    model_key: str | None = None
    """The part of a script's file that is the model."""
    max_shard_bytes: int | None = None
    """Limit of one file of weights; None: the format's own."""


@dataclass(frozen=True)
class Format:
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
    return torch_file.read(path, options.model_key)


FORMATS = (
    Format(
        "safetensors",
        safetensors_file.recognizes,
        lambda path, options: safetensors_file.read(path),
        lambda saved, out, options: safetensors_file.write(saved, out, options.max_shard_bytes),
        (".safetensors",),
        model_only=True,
    ),
    Format(
        "transformers",
        transformers_folder.recognizes,
        lambda path, options: transformers_folder.read(path),
        lambda saved, out, options: transformers_folder.write(saved, out, options.max_shard_bytes),
    ),
    Format(
        "dcp",
        dcp_folder.recognizes,
        lambda path, options: dcp_folder.read(path, options.model_key),
        lambda saved, out, options: dcp_folder.write(saved, out),
    ),
    Format(
        "lightning",
        lightning_file.recognizes,
        lambda path, options: lightning_file.read(path),
        lambda saved, out, options: lightning_file.write(saved, out),
        (".ckpt",),
    ),
    Format(
        "torch",
        torch_file.is_torch_file,
        _script,
        lambda saved, out, options: torch_file.write(saved, out),
        (".pt", ".pth"),
    ),
    Format(
        "horovod",
        lambda path: False,  # its files are those of torch.save
        _script,
        lambda saved, out, options: torch_file.write_for_horovod(saved, out),
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


__all__ = ["FORMATS", "NAMES", "Format", "Options", "format_of_source", "format_of_target"]
