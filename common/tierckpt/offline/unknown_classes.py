"""Refusal of loaded values with classes that are not imported here.

Without its class a value would be a different state: no member of an Enum `is` it, and an optimizer
behaves differently. Nothing is imported because a checkpoint names it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from tierckpt._text import in_words, some
from tierckpt.errors import ConfigError, RestoreError
from tierckpt.state.custom_values import foreign_values


def refuse_unknown(parts: Mapping[str, Any], where: str) -> None:
    """Raise RestoreError if a value in `parts` is a `custom_values.ForeignValue`."""
    found = [*foreign_values(parts)]
    if not found:
        return
    names = some([f"{path} is a {kind.replace(':', '.')}" for path, kind in found], 3)
    raise RestoreError(
        f"{where}: {names}; the class is not imported, and a checkpoint's names are never imported "
        "by themselves",
        f"{_way_out(kind.partition(':')[0] for _, kind in found)}. Or get the parts of such values "
        "with the names of their classes: tierckpt.load(..., as_parts=True). `tierckpt export` to "
        "a .safetensors file takes only the model",
    )


def _way_out(modules: Iterable[str]) -> str:
    names = [*dict.fromkeys(modules)]
    if "__main__" in names:
        return "Its script defines it: load it in a script with the same definition"
    if old := [name for name in names if name in sys.modules]:
        return (
            f"{some(old)} is imported but does not define it any more: use the release that wrote "
            "it"
        )
    flags = " ".join(f"--import {name}" for name in names)
    return f"First: import {', '.join(names)} (`tierckpt export ... {flags}`)"


def import_named(modules: Iterable[str]) -> None:
    """Import the modules that the user named. Raises ConfigError."""
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:  # a module may raise anything on import
            why = in_words(error)
            raise ConfigError(
                f"--import {name}: {why}. Add the folders of your own modules to PYTHONPATH"
            ) from error


__all__ = ["import_named", "refuse_unknown"]
