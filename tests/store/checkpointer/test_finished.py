"""Two trainings at one path: the second never takes the end of the first for its own silently."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import end, python
from tierckpt.core import HaltRequest
from tierckpt.errors import ConfigError, RestoreError
from tierckpt.events import Event
from tierckpt.storage import JobBusyError
from tierckpt.testing import TinyJob

Make = Callable[..., TinyJob]
STEPS = 4


@pytest.fixture
def make(tmp_path: Path, shm_dir: Path) -> Make:
    """`make(name="ckpts", **settings)`: a job at that path, with objects of its own."""

    def made(name: str = "ckpts", **settings: Any) -> TinyJob:
        given = {"shm_dir": str(shm_dir), "agent": "inline", **settings}
        return TinyJob(tmp_path / name, **given)

    return made


def warnings(job: TinyJob) -> list[str]:
    return [each.message for each in job.heard("notice") if "nothing is left" in each.message]


# --- in one process ------------------------------------------------------------------------------


@pytest.mark.usefixtures("one_process")
def test_a_further_fold_of_a_process_is_refused_with_ways_out(make: Make, tmp_path: Path) -> None:
    with make(seed=1) as fold:
        fold.run(STEPS)
    before = make("other", seed=2)
    fresh = before.fingerprint()
    before.checkpointer.abandon()
    with make(seed=2) as fold:
        with pytest.raises(RestoreError, match=f"{tmp_path}/ckpts has the end of ") as refused:
            fold.restore()
        assert fold.fingerprint() == fresh, "nothing was changed"
        fold.checkpointer.abandon()
    assert f"restore(version={STEPS})" in str(refused.value)
    # The ways out that it names.
    with make(seed=2) as asked:
        assert asked.restore(version=STEPS) == STEPS
    with make(seed=2, rollback_to=STEPS) as asked:
        assert asked.restore() == STEPS
    with make("elsewhere", seed=2, fork_from=str(tmp_path / "ckpts")) as fork:
        assert fork.restore() == STEPS
    with make("fold2", seed=2) as fold:
        assert fold.restore() == 0


@pytest.mark.usefixtures("one_process")
def test_the_same_objects_continue(make: Make, shm_dir: Path) -> None:
    with make() as first:
        first.run(STEPS)
    ckpt = type(first.checkpointer)(
        first.model,
        first.optimizer,
        extra={"scheduler": first.scheduler},
        extra_per_rank={"shuffle": first.shuffle},
        path=first.checkpointer.config.path,
        shm_dir=str(shm_dir),
        agent="inline",
    )
    with ckpt:
        assert ckpt.restore() == STEPS


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("why", ["an error", "a close in a finally", "a halt"])
def test_an_unfinished_training_continues_in_its_process(make: Make, why: str) -> None:
    job = make(seed=1).run(STEPS)
    if why == "a halt":
        job.checkpointer._halt.ask(HaltRequest(now=True))
        while not job.checkpointer.should_exit():
            job.run(job.iteration + 1)
        job.checkpointer.close()
    else:
        with pytest.raises(ZeroDivisionError):
            _fail(job, in_with=why == "an error")
    with make(seed=2) as again:
        assert again.restore() >= STEPS


def _fail(job: TinyJob, in_with: bool) -> None:
    try:
        with job if in_with else contextlib.nullcontext():
            raise ZeroDivisionError
    finally:
        job.checkpointer.close()


# --- of two processes ----------------------------------------------------------------------------

FIRST = """
import os, signal, sys
from tierckpt.testing import TinyJob
with TinyJob(sys.argv[1], shm_dir=sys.argv[2], agent="inline", node=sys.argv[3]) as job:
    job.run(4)
    print("running", flush=True)
    if sys.stdin.readline() == "halt\\n":
        os.kill(os.getpid(), signal.SIGTERM)
        while not job.checkpointer.should_exit():
            job.run(job.iteration + 1)
"""


@pytest.mark.usefixtures("warm_python")
@pytest.mark.parametrize(
    ("machine", "ends"),
    [("", "finishes"), ("another", "finishes"), ("", "halt"), ("another", "dies")],
)
def test_a_start_that_waits_takes_over_from_all_but_a_finished_training(
    machine: str, ends: str, tmp_path: Path, shm_dir: Path
) -> None:
    """On another machine the directory's claim is all that both see."""
    path = tmp_path / "ckpts"
    first = python(FIRST, path, shm_dir, machine, warm=True)
    assert first.stdin is not None
    assert first.stdout is not None
    assert first.stdout.readline() == "running\n"
    events: list[Event] = []

    def receive(event: Event) -> None:
        events.append(event)
        if "waiting at most" in event.message:
            if ends == "dies":
                first.send_signal(signal.SIGKILL)
            else:
                assert first.stdin is not None
                first.stdin.write(f"{ends}\n")
                first.stdin.flush()

    settings = {"shm_dir": str(shm_dir), "agent": "inline"}
    callbacks = _receiver(receive)
    try:
        if ends == "finishes":
            with pytest.raises(ConfigError, match=f"finished at v{STEPS} since") as refused:
                TinyJob(path, callbacks=callbacks, **settings)
            assert isinstance(refused.value, JobBusyError)
            assert f"TIERCKPT_ROLLBACK_TO={STEPS}" in str(refused.value)
        with TinyJob(path, callbacks=callbacks, **settings) as second:
            assert second.restore() >= (1 if ends == "dies" else STEPS)
        assert any("waiting at most" in event.message for event in events)
        assert not [name for name in path.iterdir() if name.name.startswith(".claim.")]
    finally:
        end(first)


def _receiver(receive: Callable[[Event], None]) -> list[Any]:
    from tierckpt.callbacks import Callbacks

    class Receiver(Callbacks):
        def on_event(self, event: Event) -> None:
            receive(event)

    return [Receiver()]


# --- a later process -----------------------------------------------------------------------------


def test_a_run_that_makes_no_step_after_a_finished_one_says_so(make: Make) -> None:
    with make() as job:
        job.run(STEPS)
    with make() as again:
        again.restore()
    (text,) = warnings(again)
    assert f"It started with v{STEPS}, where an earlier run has finished" in text
    with make() as more:
        more.restore()
        more.run(STEPS + 1)
    assert warnings(more) == []


def test_after_a_killed_run_it_may_be_the_end_of_the_same_training(make: Make) -> None:
    job = make().run(STEPS)
    job.settle()
    job.checkpointer.abandon()
    with make() as again:
        assert again.restore() == STEPS
    assert warnings(again) == []
