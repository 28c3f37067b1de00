"""Places: paths, and names that are parts of paths."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from tierckpt._text import directory_of
from tierckpt.errors import ConfigError

if TYPE_CHECKING:
    from .config import Config

FOLDERS = ("path", "shm_dir", "events_dir", "trace_dir")
"""Settings that, like `persistent_path`, may start with `~`, the home directory, or be `file://`
URLs."""
NAME_BYTES = 255
"""Limit of a file name on Linux."""
DEFAULT_ID_BYTES = 53
"""As `job_directory.job_id_of` makes it."""


def make_absolute(outer: dict[str, Any], persistent: dict[str, Any]) -> None:
    """Expand and make absolute the paths among the given settings at the top level and of the
    persistent level, in place. Raises ConfigError for a URL where a directory must be."""
    for given, name in (*((outer, n) for n in FOLDERS), (persistent, "path")):
        if name in given:
            given[name] = os.path.expanduser(directory_of(given[name]))
    for name in FOLDERS:
        if "://" in outer.get(name, ""):
            raise ConfigError(
                f"{name} is {outer[name]!r}, but must be a directory; for a URL use "
                "persistent_path, in addition to a path on the node's own disk"
            )
    outer.update({k: os.path.abspath(outer[k]) for k in ("path", "shm_dir") if outer.get(k)})
    if persistent.get("path") and "://" not in persistent["path"]:
        persistent["path"] = os.path.abspath(persistent["path"])


def check_places(config: Config) -> None:
    """Check paths and names here, where the setting's name is known."""
    if not config.path:
        raise ConfigError("path is empty; name the directory for checkpoints")
    if not config.shm_dir:
        raise ConfigError("shm_dir is empty; name a memory file system (default: /dev/shm)")
    for name in FOLDERS:
        _text(name, getattr(config, name))
    shared = config.persistent.path
    _text("persistent_path", shared)
    if shared in (config.path, config.directory):
        raise ConfigError(
            f"path and persistent_path are both {shared!r}; each level needs its own "
            "directory: path on the node's disk, persistent_path where all nodes see it"
        )
    if "{node}" in shared:
        raise ConfigError(
            f"persistent_path is {shared!r}; it is one place for all nodes, and {{node}} is "
            "allowed only in path"
        )
    for name in ("job_id", "node"):
        _file_name(name, getattr(config, name))
    folder_bytes = (len(config.job_id.encode()) or DEFAULT_ID_BYTES) + len(config.node.encode()) + 1
    if folder_bytes > NAME_BYTES:
        longer = max(("job_id", "node"), key=lambda name: len(getattr(config, name)))
        raise ConfigError(
            f"{longer} is too long ({len(getattr(config, longer))} letters): it is part of the "
            f"name of a folder, which would have {folder_bytes} bytes with job_id and node, "
            f"and the limit is {NAME_BYTES}"
        )


def _text(name: str, value: str) -> None:
    """Check that a path is UTF-8: the agent and manifests get it so."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{name} is {value!r}, which is not UTF-8: {error.reason}") from None
    if "\0" in value:
        raise ConfigError(f"{name} is {value!r}; a path cannot contain a NUL character")


def _file_name(name: str, value: str) -> None:
    _text(name, value)
    if "/" in value or value in (".", ".."):
        raise ConfigError(
            f"{name} is {value!r}; it is part of folder names: give any text without '/' except "
            "'.' and '..'"
        )


__all__ = ["DEFAULT_ID_BYTES", "FOLDERS", "NAME_BYTES", "check_places", "make_absolute"]
