"""Memory of tensors that moves or is freed between boundary and step.

The version is exact, or refused with a text, and nothing reads freed memory, wherever the copy is.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tierckpt
from tests.support.late_copies import copy_late, without_the_engine
from tierckpt.coordination import Agreement, SlotHandoff
from tierckpt.core import BROKEN
from tierckpt.snapshot import Snapshot, describe_engine, find_engine, tensor_memory
from tierckpt.testing import run_in_child

Hash = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t)
SIZE = 512
"""A weight of 1 MiB: malloc returns its memory to the system when it is freed."""
AT = 3
"""The step with a move of memory after its boundary."""


def model_of() -> torch.nn.Sequential:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE, bias=False), torch.nn.Linear(SIZE, 4))


# --- the operations ------------------------------------------------------------------------------


def share(weight: Any) -> None:
    weight.share_memory_()


def share_by_file_name(weight: Any) -> None:
    weight.untyped_storage()._share_filename_cpu_()


def share_by_descriptor(weight: Any) -> None:
    _, descriptor, _ = (None, *weight.untyped_storage()._share_fd_cpu_())
    os.close(descriptor)


def send(weight: Any) -> None:
    """The queue's own thread shares it."""
    queue = multiprocessing.get_context("fork").SimpleQueue()
    torch.multiprocessing.reductions.init_reductions()
    thread = threading.Thread(target=queue.put, args=(weight.detach(),))
    thread.start()
    thread.join()
    queue.close()


def grow_the_storage(weight: Any) -> None:
    weight.untyped_storage().resize_(2 * weight.nbytes)


def free_and_fill_again(weight: Any) -> None:
    """As FSDP does; the address may be the same."""
    kept, nbytes = weight.detach().clone(), weight.nbytes
    weight.untyped_storage().resize_(0)
    weight.untyped_storage().resize_(nbytes)
    weight.data.copy_(kept)


def resize(weight: Any) -> None:
    weight.data.resize_(2 * SIZE, SIZE)
    weight.data.resize_(SIZE, SIZE)


def resize_as(weight: Any) -> None:
    shape = torch.empty(2 * SIZE, SIZE)
    weight.data.resize_as_(shape)
    weight.data.resize_(SIZE, SIZE)


def set_elsewhere(weight: Any) -> None:
    with torch.no_grad():
        weight.set_(weight.detach() + 1)


def new_data(weight: Any) -> None:
    weight.data = weight.data + 1


def half(weight: Any) -> None:
    weight.data = weight.data.bfloat16().float()


def swap(weight: Any) -> None:
    torch.utils.swap_tensors(weight, torch.nn.Parameter(weight.detach() + 1))


MOVES = [
    share,
    share_by_file_name,
    share_by_descriptor,
    send,
    grow_the_storage,
    free_and_fill_again,
    resize,
    resize_as,
    set_elsewhere,
    new_data,
    half,
    swap,
]


# --- a job in a child process: a crash is seen as its signal -------------------------------------


class InTheMiddle:
    """Holds the copier within a block of the weight until the operation waits or has ended."""

    def __init__(self, engine: Any, patch: pytest.MonkeyPatch) -> None:
        self.inside, self.go_on = threading.Event(), threading.Event()
        self.armed = False
        hashed = Hash(engine.hash_address)
        main = threading.get_ident()

        def hold(address: int, nbytes: int) -> int:
            if self.armed and threading.get_ident() != main and not self.inside.is_set():
                self.inside.set()
                self.go_on.wait(60.0)
            return int(hashed(address, nbytes))

        self._kept = Hash(hold)
        patch.setattr(engine, "hash_address", ctypes.cast(self._kept, ctypes.c_void_p).value)
        barrier = Snapshot.barrier

        def waits(taken: Any) -> None:
            self.go_on.set()
            barrier(taken)

        patch.setattr(Snapshot, "barrier", waits)


def train(path: str, settings: dict[str, Any], name: str, how: str) -> None:
    move = {each.__name__: each for each in MOVES}[name]
    model, events = model_of(), list[Any]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.MonkeyPatch.context() as patch:
        middle = None
        if how == "torch":
            without_the_engine(patch)
        if how in ("late", "torch"):
            copy_late(patch, 0.0)
        if how == "in the middle":
            middle = InTheMiddle(find_engine(), patch)
        ckpt = tierckpt.Checkpointer(
            model,
            optimizer,
            path=path,
            agent="inline",
            local_every_steps=1,
            local_keep=99,
            when_busy="wait",
            release="backward",
            on_event=events.append,
            **settings,
        )
        ckpt._active.release_early = how == "in the middle"
        ckpt.restore()
        for step in range(1, AT + 3):
            for param in model.parameters():
                param.grad = torch.ones_like(param)
            optimizer.step()
            torch.save(model.state_dict(), f"{path}/{step}.pt")
            if middle is not None and step == AT:
                middle.armed = True
            ckpt.step()
            if step == AT:
                if middle is not None:
                    assert middle.inside.wait(60.0)
                move(model[0].weight)
                if middle is not None:
                    middle.go_on.set()
                    middle.armed = False
        ckpt.complete()
        ckpt.wait()
        ckpt.abandon()
    lost = [(event.version, event.message) for event in events if event.name == "failed"]
    torch.save(lost, f"{path}/lost.pt")


@pytest.mark.parametrize(
    ("move", "how"),
    [
        *((move, "in the middle") for move in MOVES),
        *((move, "late") for move in MOVES[::3]),
        *((move, "torch") for move in MOVES[1::3]),
    ],
)
def test_the_version_is_exact_or_refused(
    move: Callable[[Any], None], how: str, path: Path, settings: dict[str, Any]
) -> None:
    if how != "torch" and find_engine() is None:
        pytest.skip(describe_engine())
    path.mkdir(parents=True, exist_ok=True)
    assert run_in_child(train, str(path), settings, move.__name__, how) == 0
    lost = torch.load(path / "lost.pt")
    assert {version for version, _ in lost} <= {AT}
    assert all("model/0.weight: changed between" in text or "void" in text for _, text in lost)
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ckpt = tierckpt.Checkpointer(model, optimizer, path=path, agent="inline", **settings)
    for version in {*range(1, AT + 3)} - {version for version, _ in lost}:
        assert ckpt.restore(version=version).version == version
        wanted = torch.load(path / f"{version}.pt")
        assert all(torch.equal(value, wanted[key]) for key, value in model.state_dict().items())
    ckpt.abandon()


# --- seen at the seal ----------------------------------------------------------------------------


class Extension:
    """Moves memory as an extension would, past the wrappers."""

    def __init__(self) -> None:
        self.resize = torch._C.StorageBase.resize_

    def grow(self, weight: Any) -> None:
        self.resize(weight.untyped_storage(), 2 * weight.nbytes)


def late_checkpointer(
    path: Path, settings: dict[str, Any], events: list[Any], patch: pytest.MonkeyPatch
) -> tuple[Any, Any, tierckpt.Checkpointer]:
    """A model, its optimizer, and a checkpointer that copies nothing before the barrier."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    copy_late(patch, 0.0)
    given = {**settings, "agent": "inline", "local_every_steps": 1, "when_busy": "wait"}
    ckpt = tierckpt.Checkpointer(model, optimizer, path=path, on_event=events.append, **given)
    return model, optimizer, ckpt


def make_step(model: Any, optimizer: Any, ckpt: tierckpt.Checkpointer) -> None:
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    ckpt.step()


def failed(events: list[Any]) -> list[Any]:
    return [event for event in events if event.name == "failed"]


@pytest.mark.parametrize("by", ["memory", "methods"])
@pytest.mark.parametrize("with_torch", [False, True])
def test_memory_that_an_extension_moved_is_refused_by_name(
    with_torch: bool,
    by: str,
    path: Path,
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if with_torch:
        without_the_engine(monkeypatch)
    if by == "methods":
        monkeypatch.setattr(tensor_memory, "find", lambda: None)
    elif tensor_memory.find() is None:
        pytest.skip("this torch has other objects")
    events = list[Any]()
    model, optimizer, attached = late_checkpointer(path, settings, events, monkeypatch)
    with attached as ckpt:
        ckpt.restore()
        step = 0
        while step < 5 or (len(failed(events)) < 2 and step < 1000):  # a busy copier votes late
            step += 1
            make_step(model, optimizer, ckpt)
            if step == 3:
                Extension().grow(model.weight)
        wanted = model.weight.clone()
        ckpt.wait()
        said, void = failed(events)
        assert said.version == void.version == 3
        assert said.message.removeprefix("SnapshotError: ").startswith(
            "model/weight: their memory was moved or freed between"
        )
        assert "their memory was moved or freed between the boundary and" in said.message
        assert "Do that before the boundary, i.e. before step()" in said.message
        with torch.no_grad():
            model.weight.zero_()
        assert ckpt.restore().version == step
        assert torch.equal(model.weight, wanted)


def test_a_failure_known_after_the_vote_is_reported_as_void(
    path: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `when_busy="wait"` ranks vote again if votes lag: the other ranks learn of the failure
    from these votes only."""
    tell, wait, late = Agreement.tell, SlotHandoff.wait, list[Any]()

    def tell_late(self: Agreement, *told: Any) -> None:
        late.append((self, told)) if told[2] == BROKEN else tell(self, *told)

    def wait_for_all(self: SlotHandoff) -> None:
        wait(self)
        while late:
            agreement, told = late.pop(0)
            tell(agreement, *told)

    monkeypatch.setattr(Agreement, "tell", tell_late)
    monkeypatch.setattr(SlotHandoff, "wait", wait_for_all)
    monkeypatch.setattr(SlotHandoff, "take_stock", lambda self: None)
    events = list[Any]()
    model, optimizer, attached = late_checkpointer(path, settings, events, monkeypatch)
    with attached as ckpt:
        ckpt.restore()
        for step in range(5):
            make_step(model, optimizer, ckpt)
            if step == 2:
                Extension().grow(model.weight)
        ckpt.wait()
        said, void = failed(events)
        assert said.version == void.version == 3
        assert "void on all" in void.message


def test_a_forked_child_waits_for_no_copy(
    path: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The threads that copy are its parent's."""
    copy_late(monkeypatch, 0.0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tierckpt.Checkpointer(model, optimizer, path=path, agent="inline", **settings) as ckpt:
        ckpt.restore()
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        ckpt.step()
        assert ckpt._active.snapshot.open
        child = os.fork()
        if child == 0:
            model.weight.share_memory_()
            os._exit(0 if model.weight.is_shared() else 1)
        assert os.waitpid(child, 0)[1] == 0
