"""Frameworks: the versions that an integration was tested with, and the private names it uses."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from tierckpt._tested_versions import is_tested
from tierckpt.errors import ConfigError

UNKNOWN = (
    "{name} {version} is not a version that Tierckpt was tested with ({oldest} to {newest}): a "
    "resumed run may differ from an undisturbed one. `tierckpt prove` compares them for your "
    "script; or install a tested version"
)
MISSING = (
    "{name} {version} has no {names}, which Tierckpt needs to resume exactly: this version is not "
    "supported. Install {name} {oldest} to {newest}"
)
Say = Callable[[str, int], None]
"""Takes text and severity."""


class Framework:
    """The tested versions of one framework, both ends included, by major and minor number."""

    def __init__(self, name: str, oldest: str, newest: str) -> None:
        self.name, self.oldest, self.newest = name, oldest, newest

    def warn_if_unknown(self, version: str, say: Say) -> None:
        """Warn if `version` is older or newer than the tested ones."""
        if not is_tested(version, self.oldest, self.newest):
            say(UNKNOWN.format(version=version, **vars(self)), logging.WARNING)

    def require(self, version: str, owner: Any, names: Iterable[str]) -> None:
        """Raise ConfigError unless `owner` has all attributes in `names`, which may have dots."""
        missing = [name for name in names if not _has(owner, name)]
        if missing:
            text = MISSING.format(version=version, names=", ".join(missing), **vars(self))
            raise ConfigError(text)


def _has(owner: Any, name: str) -> bool:
    for part in name.split("."):
        if not hasattr(owner, part):
            return False
        owner = getattr(owner, part)
    return True


__all__ = ["Framework"]
