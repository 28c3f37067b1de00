"""What was loaded has values whose classes are not here: refused, with their names.

Without its class a value would pass for a state that it is not: no member of an Enum `is` it, and
an optimizer goes on otherwise. Nothing is imported because a checkpoint names it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from tierckpt._text import some
from tierckpt.errors import ConfigError, RestoreError
from tierckpt.state.custom_values import foreign_values


def refuse_unknown(parts: Mapping[str, Any], where: str) -> None:
    """Raise RestoreError where a value in `parts` is a `kinds.ForeignValue`."""
    found = [*foreign_values(parts)]
    if not found:
        return
    names = some([f"{path} is a {kind.replace(':', '.')}" for path, kind in found], 3)
    raise RestoreError(
        f"{where}: {names}; no such class is here, and none is imported because a checkpoint "
        "names it",
        f"{_way_out(kind.partition(':')[0] for _, kind in found)}. Or have what such values are "
        "made of, under the names of their classes: tierckpt.load(..., as_parts=True). "
        "`tierckpt export` to a .safetensors file takes the model alone",
    )


def _way_out(modules: Iterable[str]) -> str:
    names = [*dict.fromkeys(modules)]
    if "__main__" in names:
        return "Its script defines it: load it in a script that defines the same"
    if old := [name for name in names if name in sys.modules]:
        return f"{some(old)} is imported and has it no more: take the release that wrote it"
    flags = " ".join(f"--import {name}" for name in names)
    return f"First: import {', '.join(names)} (`tierckpt export ... {flags}`)"


def import_named(modules: Iterable[str]) -> None:
    """Import what the user named. Raises ConfigError."""
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:  # whatever a module does as it is imported
            why = f"{type(error).__name__}: {error}"
            raise ConfigError(
                f"--import {name}: {why}. PYTHONPATH names the folders of modules of your own"
            ) from error


__all__ = ["import_named", "refuse_unknown"]
