"""A thread asks for short slices, and keeps its share of the processor."""

from __future__ import annotations

import ctypes
import os
import platform
import threading

import pytest

from tierckpt.agent import processor

GETATTR = {"x86_64": 315, "aarch64": 275}.get(platform.machine())
SINCE = (6, 12)
"""Linux has slices by thread since then."""


def attributes() -> processor._SchedAttr:
    """Attributes of the calling thread, from sched_getattr(2)."""
    found = processor._SchedAttr()
    size = ctypes.sizeof(found)
    assert ctypes.CDLL(None).syscall(GETATTR, 0, ctypes.byref(found), size, 0) == 0
    return found


def in_a_thread(asks: bool) -> processor._SchedAttr:
    found = []

    def work() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        if asks:
            processor.shorten_slices()
        found.append(attributes())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return found[0]


NICE = 15


@pytest.mark.skipif(GETATTR is None, reason="the number of the system call is not known here")
def test_slices_are_short_and_nothing_else_changes() -> None:
    if tuple(map(int, platform.release().split(".")[:2])) < SINCE:
        pytest.skip(f"this Linux is older than {SINCE}")
    before, after = in_a_thread(False), in_a_thread(True)
    assert after.runtime == processor.SHORTEST_SLICE_NANOSECONDS < before.runtime
    assert (after.policy, after.nice) == (before.policy, before.nice) == (before.policy, NICE)


def test_a_system_that_refuses_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "other")
    processor.shorten_slices()
