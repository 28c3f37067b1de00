"""A KeyboardInterrupt that the script catches, as in notebooks: training and checkpoints continue,
wherever it was raised."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.support.thorough import points
from tierckpt.coordination import SlotHandoff
from tierckpt.core import Version
from tierckpt.snapshot import Snapshot
from tierckpt.testing import TinyJob

OURS = str(Path(sys.modules["tierckpt"].__file__ or "").parent)
RECOVERY = 8
"""Number of boundaries after an interrupt; the second half of them must have lost nothing."""
STRIDE = int(points(["1", "11"], "11")[0])


class Interrupt:
    """An interrupt at the nth point where the interpreter checks for signals: at the start of
    functions, and after calls of C functions, with their result lost."""

    def __init__(self, number: int) -> None:
        self.came = ""
        self._left = number

    def __call__(self, frame: FrameType, what: str, called: object) -> None:
        code = frame.f_code
        if what not in ("call", "c_return") or not code.co_filename.startswith(OURS):
            return
        self._left -= 1
        if self._left < 0:
            sys.setprofile(None)
            self.came = f"{Path(code.co_filename).name}:{frame.f_lineno}, {what} {called}"
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def awaited(self) -> Iterator[None]:
        sys.setprofile(self)
        try:
            with contextlib.suppress(KeyboardInterrupt):
                yield
        finally:
            sys.setprofile(None)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"when_busy": "wait"}, id="local"),
        pytest.param({"when_busy": "skip", "local_every_steps": 0}, id="memory-skipping"),
    ],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_at_a_boundary_costs_a_few_versions(
    settings: dict[str, Any], path: Path, shm_dir: Path
) -> None:
    """With two slots, and every step to each level, no spare slot hides a lost one."""
    with TinyJob(path, shm_dir=str(shm_dir), agent="inline", **settings) as job:
        step = job.checkpointer.step
        job.run(4)
        for number in itertools.count(0, STRIDE):
            job.train_one()
            interrupt = Interrupt(number)
            with interrupt.awaited():
                step()
            if not interrupt.came:
                break
            heard = len(job.events)
            for _ in range(RECOVERY):
                job.train_one()
                step()
            job.checkpointer.wait()
            made = job.checkpointer._live.steps_made
            later = set(range(made - RECOVERY // 2 + 1, made + 1))
            for name in (
                ("sealed", "committed") if "local_every_steps" not in settings else ["sealed"]
            ):
                there = {event.version for event in job.events[heard:] if event.name == name}
                assert later <= there, f"{name} behind an interrupt at {interrupt.came}"
        assert number > 100


def test_a_slot_is_free_again_after_an_interrupt_and_a_restore(
    path: Path, shm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interrupt comes when a copy has ended, before its slot is said to be filled; `restore()`
    starts another run in the same process, which must know of that slot."""
    done, cut = SlotHandoff.done, list[int]()

    def interrupted(handoff: SlotHandoff, version: Version, snapshot: Snapshot) -> None:
        if armed and not cut and threading.current_thread() is threading.main_thread():
            cut.append(version.id.version)
            raise KeyboardInterrupt
        done(handoff, version, snapshot)

    monkeypatch.setattr(SlotHandoff, "done", interrupted)
    armed = False
    with TinyJob(path, shm_dir=str(shm_dir), agent="inline", slots=2, when_busy="wait") as job:
        job.run(4)
        armed = True
        with contextlib.suppress(KeyboardInterrupt):
            while not cut:
                job.run(job.iteration + 1)
        job.restore()
        start = job.checkpointer.version
        heard = len(job.events)
        job.run(job.iteration + RECOVERY)
        job.checkpointer.wait()
        told = [(event.name, event.version) for event in job.events[heard:]]
    assert [each for each in told if each[0] == "failed"] == []
    assert {("sealed", start + number) for number in range(1, RECOVERY)} <= {*told}


class Interrupted:
    """A user's object; the interrupt comes while its state is taken."""

    def __init__(self) -> None:
        self.armed = False

    def state_dict(self) -> dict[str, Any]:
        if self.armed:
            self.armed = False
            raise KeyboardInterrupt
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load nothing."""


def test_an_interrupt_while_a_state_is_captured_is_reported_with_its_cost(
    path: Path, settings: Any
) -> None:
    job = TinyJob(path, agent="inline", **settings)
    with job:
        extra = Interrupted()
        job.checkpointer.register("theirs", extra)
        job.run(3)
        extra.armed = True
        with pytest.raises(KeyboardInterrupt):
            job.run(4)
        job.run(12)
    assert {event.version for event in job.heard("failed")} == {4}
    assert any("an interrupt came" in event.message for event in job.heard("failed", "memory"))
    assert {event.version for event in job.heard("committed")} == set(range(1, 13)) - {4}
