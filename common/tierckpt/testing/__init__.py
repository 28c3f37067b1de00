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
    "BATCH": "tiny_job",
    "BLOCKS": "conformance",
    "BackendConformance": "conformance",
    "CLASSES": "tiny_job",
    "CodecConformance": "conformance",
    "GroupAbortedError": "groups",
    "GroupConformance": "groups",
    "HUB_ADDRESS": "network",
    "HidingConformance": "conformance",
    "IN_FEATURES": "tiny_job",
    "Network": "network",
    "NoNetworkError": "network",
    "PLACE": "conformance",
    "Program": "groups",
    "StoreConformance": "conformance",
    "ThreadGroup": "groups",
    "TinyJob": "tiny_job",
    "burst_bytes": "network",
    "commit_one": "fault_injection",
    "content_of": "fault_injection",
    "fired": "tiny_job",
    "free_ports": "network",
    "injected": "fault_injection",
    "is_sound": "fault_injection",
    "key_of": "fault_injection",
    "manifest_of": "fault_injection",
    "noise": "conformance",
    "put": "conformance",
    "raw_bytes": "tiny_job",
    "run_in_child": "tiny_job",
    "run_ranks": "groups",
    "seed_everything": "tiny_job",
    "tiny_model": "tiny_job",
    "train": "tiny_job",
}
"""Names outside `__all__` are for Tierckpt's own tests."""

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
