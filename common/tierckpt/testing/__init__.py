"""For tests: ranks as threads, suites for a Group, a store, a codec, and a tiny training job.

The suites are plain classes; subclass one, define how to make the object under test, and pytest
finds the rest::

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
    from .conformance import (
        BackendConformance,
        CodecConformance,
        HidingConformance,
        StoreConformance,
    )
    from .fault_injection import injected
    from .groups import GroupAbortedError, GroupConformance, ThreadGroup, run_ranks
    from .tiny_job import TinyJob, run_in_child

_HOME = {
    "BackendConformance": "conformance",
    "GroupAbortedError": "groups",
    "GroupConformance": "groups",
    "HidingConformance": "conformance",
    "CodecConformance": "conformance",
    "StoreConformance": "conformance",
    "ThreadGroup": "groups",
    "TinyJob": "tiny_job",
    "injected": "fault_injection",
    "run_in_child": "tiny_job",
    "run_ranks": "groups",
}

__all__ = [
    "BackendConformance",
    "CodecConformance",
    "GroupAbortedError",
    "GroupConformance",
    "HidingConformance",
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
