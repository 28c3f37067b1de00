"""Signals to all processes, as launchers and schedulers send them, with workers of a DataLoader."""

from __future__ import annotations

import os
import select
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tierckpt
from tests.support.processes import end, python

pytestmark = pytest.mark.usefixtures("warm_python")

BEGIN = """
import multiprocessing, os, signal, subprocess, sys, time
import torch
import tierckpt

class Items(torch.utils.data.Dataset):
    def __len__(self):
        return 10**6
    def __getitem__(self, index):
        return item(index)

def item(index):
    return torch.ones(4)

def workers():
    return [worker.pid for worker in multiprocessing.active_children()]

def training():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

def checkpointer(model, optimizer):
    path, shm_dir = sys.argv[1:]
    settings = {"local_every_steps": 10**6, "local_every_seconds": 0}
    ckpt = tierckpt.Checkpointer(model, optimizer, path=path, shm_dir=shm_dir, **settings)
    ckpt.restore()
    return ckpt

def train(ckpt, model, optimizer, loader):
    for batch in loader:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        ckpt.step()
        if ckpt.version == 5:
            print("ready", *workers(), flush=True)
        if ckpt.version > 5:
            time.sleep(0.01)
        if ckpt.should_exit():
            break

def load(**options):
    return torch.utils.data.DataLoader(Items(), batch_size=4, num_workers=2, **options)

"""

TRAINS = """
model, optimizer = training()
with checkpointer(model, optimizer) as ckpt:
    train(ckpt, model, optimizer, load({options}))
print("ended", ckpt.version, flush=True)
"""

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(path: Path, shm_dir: Path) -> Iterator[Start]:
    """`start(program)`: run BEGIN and the program in a process group of its own."""
    started = []

    def run(program: str, warm: bool = True) -> subprocess.Popen[str]:
        started.append(python(BEGIN + program, path, shm_dir, own_group=True, warm=warm))
        return started[-1]

    yield run
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        end(process)


def heard(process: subprocess.Popen[str], word: str) -> list[int]:
    """The numbers after `word` in the next line that the process prints."""
    assert process.stdout is not None
    first, *numbers = process.stdout.readline().split()
    assert first == word
    return [int(number) for number in numbers]


def on_disk(path: Path, elsewhere: Path) -> int:
    """The newest version on disk, restored without memory."""
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    settings: dict[str, Any] = {"agent": "inline", "shm_dir": elsewhere}
    ckpt = tierckpt.Checkpointer(model, optimizer, path=path, **settings)
    try:
        assert ckpt.restore().levels == {"local": 1}
        return ckpt.version
    finally:
        ckpt.abandon()


@pytest.mark.parametrize(
    ("number", "options"),
    [(signal.SIGTERM, "persistent_workers=True"), (signal.SIGUSR1, "")],
    ids=["SIGTERM", "SIGUSR1"],
)
def test_everybody_is_signalled_and_the_job_ends_with_a_last_version(
    number: signal.Signals, options: str, start: Start, path: Path, tmp_path: Path
) -> None:
    process = start(TRAINS.format(options=options))
    assert len(heard(process, "ready")) == 2
    os.killpg(process.pid, number)
    (last,) = heard(process, "ended")
    assert process.wait(120) == 0
    assert on_disk(path, tmp_path) == last


def test_torchdatas_workers_are_spared_too(start: Start, path: Path, tmp_path: Path) -> None:
    pytest.importorskip("torchdata.stateful_dataloader")
    loads = """
from torchdata.stateful_dataloader import StatefulDataLoader
def load():
    return StatefulDataLoader(Items(), batch_size=4, num_workers=2)
"""
    process = start(loads + TRAINS.format(options=""))
    assert len(heard(process, "ready")) == 2
    os.killpg(process.pid, signal.SIGTERM)
    (last,) = heard(process, "ended")
    assert process.wait(120) == 0
    assert on_disk(path, tmp_path) == last


BY_SCRIPT = """
from tierckpt.checkpointer.checkpointer import attach_to_script
model, optimizer = training()
ckpt = checkpointer(model, optimizer)
attach_to_script(ckpt, restore=False, ends_with_script=True)
train(ckpt, model, optimizer, load(multiprocessing_context="forkserver"))
"""


@pytest.mark.parametrize(
    "program",
    [TRAINS.format(options="multiprocessing_context='forkserver'"), BY_SCRIPT],
    ids=["with", "at exit"],
)
def test_workers_that_cannot_be_spared_cost_no_version(
    program: str,
    start: Start,
    path: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """torch raises their death at the training's current place."""
    (tmp_path / "items.py").write_text(BEGIN)
    process = start(f"sys.path.insert(0, {str(tmp_path)!r})\nfrom items import Items\n" + program)
    heard(process, "ready")
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(120) == 1
    expected = "this rank received SIGTERM, and the training ended with an error"
    assert expected in capfd.readouterr().err
    assert on_disk(path, tmp_path) >= 5


STUCK = """
def item(index):
    if index >= 8:
        time.sleep(600)
    return torch.ones(4)
"""


def test_the_loader_ends_workers_that_are_stuck(start: Start) -> None:
    """Its last means is SIGTERM, which torch's own handler in a worker treats as a clean end."""
    process = start(
        STUCK
        + """
torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.5
with checkpointer(*training()):
    batches = iter(load())
    next(batches)
    ended = batches._workers
    del batches
    print("ended", *(worker.exitcode for worker in ended), flush=True)
"""
    )
    assert heard(process, "ended") == [0, 0]
    assert process.wait(120) == 0


def test_an_exception_with_workers_alive_is_no_hang(start: Start) -> None:
    """multiprocessing ends them by SIGTERM at exit, and joins them."""
    process = start(
        STUCK
        + """
with checkpointer(*training()):
    loader = load(persistent_workers=True)
    next(iter(loader))
    raise ArithmeticError("the script's own")
"""
    )
    assert process.wait(120) == 1


def test_workers_of_a_lost_trainer_end_at_a_signal(start: Start) -> None:
    """The same holds if the trainer was still alive when they received the signal."""
    process = start(
        STUCK
        + """
with checkpointer(*training()):
    batches = iter(load())
    next(batches)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    print("ready", *workers(), flush=True)
    time.sleep(60)
"""
    )
    pids = heard(process, "ready")
    watched = [os.pidfd_open(pid) for pid in pids]
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(120) == -signal.SIGKILL
    try:
        for fd in watched:
            assert select.select([fd], [], [], 50)[0], "a worker lives on"
    finally:
        for fd in watched:
            os.close(fd)


def test_a_worker_that_handles_it_itself_is_called(start: Start) -> None:
    process = start(
        """
def item(index):
    return torch.tensor(len(heard))

heard = []
def begin(_):
    signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))

model, optimizer = training()
with checkpointer(model, optimizer) as ckpt:
    train(ckpt, model, optimizer, torch.ones(10, 2, 4))
    batches = iter(load(worker_init_fn=begin))
    next(batches)
    print("ready", flush=True)
    sys.stdin.readline()
    while not next(batches).all():
        pass
    print("ended", flush=True)
"""
    )
    for _ in ("the training is", "the worker is"):
        heard(process, "ready")
    os.killpg(process.pid, signal.SIGUSR1)
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    heard(process, "ended")
    assert process.wait(120) == 0


def test_programs_that_a_worker_starts_can_be_ended(start: Start) -> None:
    """Without protection they would inherit the signals that the worker blocks."""
    process = start(
        """
def by_module():
    sleeps = subprocess.Popen(["sleep", "600"])
    sleeps.terminate()
    return sleeps.wait()

def by_shell():
    return os.system("kill -TERM $$; exit 3")

def by_spawn():
    pid = os.posix_spawn("/bin/sleep", ["sleep", "600"], os.environ)
    os.kill(pid, signal.SIGTERM)
    return os.waitpid(pid, 0)[1]

def by_fork():
    pid = os.fork()
    if not pid:
        os.execv("/bin/sh", ["sh", "-c", "kill -TERM $$; exit 3"])
    return os.waitpid(pid, 0)[1]

WAYS = [by_module, by_shell, by_spawn, by_fork]
def item(index):
    return torch.tensor(WAYS[index]())

with checkpointer(*training()):
    options = {"num_workers": len(WAYS), "sampler": range(len(WAYS))}
    ends = torch.cat(list(torch.utils.data.DataLoader(Items(), **options)))
    print("ended", *ends.tolist(), flush=True)
"""
    )
    assert heard(process, "ended") == [-signal.SIGTERM, *[signal.SIGTERM] * 3]
    assert process.wait(120) == 0
