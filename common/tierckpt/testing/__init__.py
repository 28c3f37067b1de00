"""For tests: ranks as threads, suites for a Group, store, codec, stage, and a tiny training job.

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

from typing import TYPE_CHECKING

from tierckpt import lazy_exports

if TYPE_CHECKING:
    from .conformance import BLOCKS, PLACE, BackendConformance, CodecConformance, HidingConformance
    from .conformance import StageConformance, StoreConformance, noise, put
    from .fault_injection import commit_one, content_of, injected, is_sound, key_of, manifest_of
    from .groups import GroupAbortedError, GroupConformance, Program, ThreadGroup, run_ranks
    from .network import HUB_ADDRESS, Network, NoNetworkError, burst_bytes, free_ports
    from .network import network as temporary_network
    from .tiny_job import BATCH, CLASSES, IN_FEATURES, TinyJob, fired, raw_bytes, run_in_child
    from .tiny_job import seed_everything, tiny_model, train

# The names outside it are for Tierckpt's own tests.
__all__ = [
    "BackendConformance",
    "CodecConformance",
    "GroupAbortedError",
    "GroupConformance",
    "HidingConformance",
    "StageConformance",
    "StoreConformance",
    "ThreadGroup",
    "TinyJob",
    "injected",
    "run_in_child",
    "run_ranks",
]

__getattr__ = lazy_exports(__name__)
