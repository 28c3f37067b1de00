"""For tests: ranks as threads, suites for a Group, a store, a module, a tiny training job.

The suites are plain classes; subclass one, say how to make what is under test, and pytest finds
the rest:

    from tierckpt.testing import StoreConformance

    class TestMyStore(StoreConformance):
        def make_store(self, directory):
            return MyStore(directory)

They need pytest. Put `pytest.register_assert_rewrite("tierckpt.testing")` into your conftest.py,
before anything imports this package, and failures show the values that were compared.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .backendsuite import BackendConformance
    from .faults import injected
    from .groupsuite import GroupConformance
    from .jobs import TinyJob, run_in_child
    from .modulesuite import HidingConformance, ModuleConformance
    from .storesuite import StoreConformance
    from .threads import GroupAbortedError, ThreadGroup, run_ranks

_HOME = {
    "BackendConformance": "backendsuite",
    "GroupAbortedError": "threads",
    "GroupConformance": "groupsuite",
    "HidingConformance": "modulesuite",
    "ModuleConformance": "modulesuite",
    "StoreConformance": "storesuite",
    "ThreadGroup": "threads",
    "TinyJob": "jobs",
    "injected": "faults",
    "run_in_child": "jobs",
    "run_ranks": "threads",
}

__all__ = [
    "BackendConformance",
    "GroupAbortedError",
    "GroupConformance",
    "HidingConformance",
    "ModuleConformance",
    "StoreConformance",
    "ThreadGroup",
    "TinyJob",
    "injected",
    "run_in_child",
    "run_ranks",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{home}", __name__), name)
