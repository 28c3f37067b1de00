"""A forked child of a training process: it may use the model freely."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import tierckpt
from tierckpt.testing import TinyJob

pytestmark = pytest.mark.usefixtures("inline_agent")


def status_of_child(work: Callable[[], None]) -> int:
    """Exit status of a forked child that runs this function; the child is killed if it hangs."""
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_childs_steps_are_no_boundaries(shm_dir: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ckpt = tierckpt.Checkpointer(
        model,
        optimizer,
        path=tmp_path / "c",
        shm_dir=str(shm_dir),
        local_every_seconds=0,
        boundary="forward",
    )

    def train(steps: int, its_optimizer: torch.optim.Optimizer) -> None:
        for _ in range(steps):
            its_optimizer.zero_grad()
            model(torch.ones(2, 8)).square().mean().backward()
            its_optimizer.step()

    def child() -> None:
        before = ckpt.version
        train(2, optimizer)
        train(2, torch.optim.SGD(model.parameters(), lr=0.1))
        assert ckpt.version == before

    train(3, optimizer)
    version = ckpt.version
    # A step was made since: the next forward pass would be a boundary.
    assert status_of_child(child) == 0
    train(2, optimizer)
    assert ckpt.version == version + 2
    ckpt.close()
    assert ckpt._log.counts.get("failed", 0) == 0


ENDS: dict[str, Callable[[tierckpt.Checkpointer], None]] = {
    "close": lambda ckpt: ckpt.close(),
    "abandon": lambda ckpt: ckpt.abandon(),
    "exit": lambda ckpt: ckpt.__exit__(SystemExit, SystemExit(0), None),
    "block": lambda ckpt: ckpt.__exit__(None, None, None),
    "step": lambda ckpt: ckpt.step(),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_child_that_ends_takes_nothing_along(end: str, shm_dir: Path, tmp_path: Path) -> None:
    """The slots are its parent's, which may be killed and restarted."""
    settings = {"shm_dir": shm_dir, "local_every_seconds": 0, "agent": "inline"}
    parent = TinyJob(tmp_path / "c", **settings).run(5)
    parent.checkpointer.wait()
    assert status_of_child(lambda: ENDS[end](parent.checkpointer)) == 0
    parent.checkpointer.abandon()
    with TinyJob(tmp_path / "c", seed=1, **settings) as again:
        assert again.checkpointer.restore().levels == {"memory": 1}
        assert again.checkpointer.version == 5


def test_a_childs_own_requests_are_refused(shm_dir: Path, tmp_path: Path) -> None:
    settings = {"shm_dir": shm_dir, "local_every_seconds": 0, "agent": "inline"}

    def child() -> None:
        for ask in (job.checkpointer.save, job.checkpointer.restore):
            with pytest.raises(tierckpt.TierckptError, match="in a forked child"):
                ask()

    with TinyJob(tmp_path / "c", **settings) as job:
        job.run(2)
        assert status_of_child(child) == 0
