"""The calls of a Checkpointer to its adapter, their order, and the effect of calls that fail."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.tiny_course import fingerprints, in_shm
from tierckpt.checkpointer import VOID, Adapter, Handle, PlainAdapter
from tierckpt.testing import TinyJob

METHODS = [name for name in vars(PlainAdapter) if callable(getattr(PlainAdapter, name))]
METHODS = [name for name in METHODS if not name.startswith("_")]


class Recording(PlainAdapter):
    """An adapter that records the calls of its methods."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        for name in METHODS:
            setattr(self, name, partial(self._called, name))

    def _called(self, name: str, *args: Any) -> Any:
        self.calls.append(name)
        found = getattr(PlainAdapter, name)(self, *args)
        return [torch.zeros(1)] if name == "untrained_parameters" else found

    def taken(self) -> list[str]:
        """Return the calls since the last time."""
        calls, self.calls = self.calls, []
        return calls


class Breaks(PlainAdapter):
    """An adapter that raises in one method."""

    def __init__(self, method: str) -> None:
        self.closes = 0
        self.loaded: list[Any] = []
        setattr(self, method, self._break)

    def _break(self, *_: Any) -> Any:
        raise ZeroDivisionError("the adapter is broken")

    def pack(self) -> Any:
        return {"a": 1}

    def load(self, value: Any) -> None:
        self.loaded.append(value)

    def untrained_parameters(self) -> list[torch.Tensor]:
        return [torch.zeros(1)]

    def closed(self) -> None:
        self.closes += 1


@pytest.fixture
def settings(shm_dir: Path) -> dict[str, Any]:
    return {"shm_dir": str(shm_dir), "agent": "inline", "local_every_steps": 0}


STEP = ["before_step", "step_completed"]
BOUNDARY = ["boundary_begins", "vote", "resume_iteration", "newly_unreduced", "pack"]
BOUNDARY = [*BOUNDARY, "boundary_passed"]
LIVE = ["keeps_boundary", "resume_iteration", "newly_unreduced", "pack"]


def test_the_calls_come_in_the_order_that_the_protocol_states(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    adapter = Recording()
    with TinyJob(tmp_path, adapter=adapter, **settings) as job:
        assert adapter.taken() == ["reduced_parameters", "untrained_parameters", "attached"]
        job.restore()
        assert adapter.taken() == ["restore_begins"]  # there is nothing
        job.run(1)
        assert adapter.taken() == [*STEP, *BOUNDARY]
        job.train_one()
        assert adapter.taken() == STEP
        job.checkpointer.save(now=True)
        assert adapter.taken() == ["inconsistent", "saving_now", *BOUNDARY]
        job.checkpointer.save(now=True)
        assert adapter.taken() == ["inconsistent", "saving_now", *LIVE]
        job.checkpointer.step()
        job.restore()
        assert adapter.taken()[-3:] == ["restore_begins", "load", "resumed"]
    assert adapter.taken()[-1] == "closed"


def test_a_plain_adapter_is_one() -> None:
    assert isinstance(PlainAdapter(), Adapter)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (PlainAdapter, "adapter=PlainAdapter is a class; give an instance"),
        (object(), "adapter is a object, which lacks attached, before_step, .*PlainAdapter"),
        (torch.nn.Linear(1, 1), "adapter is a Linear, which lacks attached"),
    ],
)
def test_an_object_but_no_adapter_is_refused(
    wrong: Any, says: str, tmp_path: Path, settings: dict[str, Any]
) -> None:
    with pytest.raises(TypeError, match=says):
        TinyJob(tmp_path, adapter=wrong, **settings)


@pytest.mark.parametrize("method", ["pack", "newly_unreduced"])
def test_values_that_cannot_be_packed_cost_versions_not_the_training(
    method: str, tmp_path: Path, settings: dict[str, Any], shm_dir: Path
) -> None:
    with TinyJob(tmp_path, adapter=Breaks(method), **settings) as job:
        job.run(3)
        assert job.fingerprint() == fingerprints()[3]
    lost = [e for e in job.events if e.name == "failed"]
    assert "the adapter is broken" in lost[0].text()
    assert not job.heard("sealed")


def test_a_version_with_unloadable_values_counts_as_damaged(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    settings = {**settings, "local_every_steps": 1}
    with TinyJob(tmp_path, adapter=Breaks("vote_of_nobody"), **settings) as job:
        job.run(2)
    with TinyJob(tmp_path, adapter=PlainAdapter(), **settings) as job:
        assert job.restore() == 2
    broken = TinyJob(tmp_path, adapter=Breaks("load"), **settings)
    with pytest.raises(Exception, match="the adapter is broken"):
        broken.restore()
    broken.checkpointer.abandon()
    whole = Breaks("vote_of_nobody")
    with TinyJob(tmp_path, adapter=whole, **settings) as job:
        assert job.restore() == 2
        assert whole.loaded == [{"a": 1}]


def test_where_it_cannot_attach_nothing_is_left(
    tmp_path: Path, settings: dict[str, Any], shm_dir: Path
) -> None:
    adapter = Breaks("attached")
    with pytest.raises(ZeroDivisionError):
        TinyJob(tmp_path, adapter=adapter, **settings)
    assert adapter.closes == 1
    with TinyJob(tmp_path, **settings) as job:  # the place is free again
        job.run(1)
    assert in_shm(shm_dir) == []


def test_where_it_cannot_close_the_end_is_as_it_was(
    tmp_path: Path, settings: dict[str, Any], shm_dir: Path
) -> None:
    with TinyJob(tmp_path, adapter=Breaks("closed"), **settings) as job:
        job.run(2)
    assert job.checkpointer.closed
    assert any(re.search("adapter could not detach: .*is broken", e.text()) for e in job.events)
    assert in_shm(shm_dir) == []


class Voids(PlainAdapter):
    """An adapter without a version at some boundaries."""

    def __init__(self, when: Callable[[Handle], bool]) -> None:
        self._when = when

    def boundary_begins(self, forced: bool) -> None:
        self.void = not forced and self._when(self.handle)

    def vote(self) -> int:
        return VOID if self.void else 7

    def resume_iteration(self, iteration: int) -> int:
        return iteration - 1


def test_a_void_boundary_has_no_version_and_a_later_one_has(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    adapter = Voids(lambda handle: handle.iteration == 2)
    with TinyJob(tmp_path, adapter=adapter, **settings) as job:
        job.run(4)
        job.settle()
        job.checkpointer._active.finish()
        assert [e.version for e in job.heard("sealed")] == [1, 3, 4]
        assert job.restore() == 3  # its iteration is to be repeated
        assert job.checkpointer.version == 4
