"""Tierckpt: checkpoints for data-parallel PyTorch that cost nothing you can feel.

Importing the package is cheap: torch is imported when something that needs it is first used.
"""

from __future__ import annotations

import importlib
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

_HOME = {
    "Attributes": "loop_state",
    "Callbacks": "callbacks",
    "Checkpointer": "checkpointer.checkpointer",
    "Config": "config",
    "load_config": "config",
    "ConfigError": "errors",
    "CorruptShardError": "errors",
    "FormatError": "errors",
    "NodeHealthError": "errors",
    "PartReport": "lineage.fork",
    "PinError": "errors",
    "ReplicaError": "errors",
    "RestoreError": "errors",
    "StateMismatchError": "errors",
    "StateTornError": "errors",
    "TierckptError": "errors",
    "UnsupportedStateError": "errors",
    "Event": "events",
    "JobEnd": "events",
    "Group": "group",
    "SingleGroup": "group",
    "LoopState": "loop_state",
    "Restored": "restored",
    "History": "offline.comparison",
    "SavedVersion": "offline.comparison",
    "history": "offline.comparison",
    "Saved": "offline.stored_version",
    "load": "offline.stored_version",
    "Latest": "offline.catalog",
    "latest": "offline.catalog",
    "ResumableLoader": "resumable_loader",
    "ResumableSampler": "sampler",
    "Settings": "settings",
}

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


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{home}", __name__), name)
