"""Tierckpt: checkpoints for data-parallel PyTorch that cost nothing you can feel.

Importing the package is cheap: torch is imported when something that needs it is first used.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING:
    from tierckpt.checkpointer.checkpointer import Checkpointer
    from tierckpt.lineage.fork import PartReport
    from tierckpt.offline.catalog import Latest, latest
    from tierckpt.offline.comparison import History, SavedVersion, history
    from tierckpt.offline.stored_version import Saved, load

    from .callbacks import Callbacks
    from .config import Config, load_config
    from .errors import (
        ConfigError,
        CorruptShardError,
        FormatError,
        NodeHealthError,
        PinError,
        ReplicaError,
        RestoreError,
        StateMismatchError,
        StateTornError,
        TierckptError,
        UnsupportedStateError,
    )
    from .events import Event, JobEnd
    from .group import Group, SingleGroup
    from .loop_state import Attributes, LoopState
    from .restored import Restored
    from .resumable_loader import ResumableLoader
    from .sampler import ResumableSampler
    from .settings import Settings

__all__ = [
    "Attributes",
    "Callbacks",
    "Checkpointer",
    "Config",
    "ConfigError",
    "CorruptShardError",
    "Event",
    "FormatError",
    "Group",
    "History",
    "JobEnd",
    "Latest",
    "LoopState",
    "NodeHealthError",
    "PartReport",
    "PinError",
    "ReplicaError",
    "RestoreError",
    "Restored",
    "ResumableLoader",
    "ResumableSampler",
    "Saved",
    "SavedVersion",
    "Settings",
    "SingleGroup",
    "StateMismatchError",
    "StateTornError",
    "TierckptError",
    "UnsupportedStateError",
    "__version__",
    "history",
    "latest",
    "load",
    "load_config",
]


def lazy_exports(face: str) -> Callable[[str], Any]:
    """The `__getattr__` of a package with names that its modules define.

    The names are those that the package imports under TYPE_CHECKING, its only list of them, which
    mypy checks. A module is imported when one of its names is first used.
    """

    @cache
    def homes() -> dict[str, tuple[str, str]]:
        import ast
        import pkgutil

        tree = ast.parse(pkgutil.get_data(face, "__init__.py") or b"")
        blocks = (node.body for node in tree.body if isinstance(node, ast.If))
        imports = (node for body in blocks for node in body if isinstance(node, ast.ImportFrom))
        return {
            name.asname or name.name: ("." * node.level + (node.module or ""), name.name)
            for node in imports
            for name in node.names
        }

    def get(name: str) -> Any:
        if name not in homes():
            raise AttributeError(f"module {face!r} has no attribute {name!r}")
        module, own_name = homes()[name]
        return getattr(importlib.import_module(module, face), own_name)

    return get


__getattr__ = lazy_exports(__name__)
