"""A model with a checkpointer is compiled and scripted like one without."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn

import tierckpt

pytestmark = pytest.mark.usefixtures("inline_agent")


class Own(nn.Module):
    """A user's class."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torchs_own()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def torchs_own() -> nn.Module:
    """A torch module; its hooks are part of its graph."""
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


def wrapped(model: nn.Module, **options: Any) -> nn.Module:
    return torch.compile(model, backend="eager", **options)


def in_place(model: nn.Module, **options: Any) -> nn.Module:
    model.compile(backend="eager", **options)
    return model


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


class Loop:
    """Trains the result of `prepare` for the model after the checkpointer is attached."""

    def __init__(
        self,
        make: Callable[[], nn.Module],
        prepare: Callable[..., nn.Module],
        shm_dir: Path,
        tmp_path: Path,
        boundary: str,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.events: list[tierckpt.Event] = []
        bare = make()
        self.optimizer = torch.optim.SGD(bare.parameters(), lr=0.1)
        self.ckpt = tierckpt.Checkpointer(
            bare,
            self.optimizer,
            path=tmp_path / "c",
            shm_dir=str(shm_dir),
            boundary=boundary,
            on_event=self.events.append,
        )
        try:
            self.model = prepare(bare, **options)
        except BaseException:
            self.ckpt.abandon()
            raise

    def steps(self, count: int, rows: int = 2, after: Callable[[], None] = lambda: None) -> None:
        for _ in range(count):
            self.optimizer.zero_grad()
            self.model(torch.ones(rows, 8)).square().mean().backward()
            self.optimizer.step()
            after()

    @property
    def errors(self) -> list[str]:
        return [e.message for e in self.events if e.severity >= logging.ERROR]


def test_a_module_with_explicit_boundaries_is_one_graph(shm_dir: Path, tmp_path: Path) -> None:
    loop = Loop(torchs_own, wrapped, shm_dir, tmp_path, "explicit", fullgraph=True)
    loop.steps(3, after=loop.ckpt.step)
    assert loop.ckpt.version == 3
    assert not torch._dynamo.utils.counters["graph_break"]
    loop.ckpt.abandon()


@pytest.mark.parametrize(("make", "compiled"), [(Own, wrapped), (torchs_own, in_place)])
def test_boundaries_of_one_compiled_later_are_seen(
    compiled: Callable[..., nn.Module],
    make: Callable[[], nn.Module],
    shm_dir: Path,
    tmp_path: Path,
) -> None:
    loop = Loop(make, compiled, shm_dir, tmp_path, "forward")
    loop.steps(4)
    assert loop.ckpt.version == 3
    assert loop.errors == []
    loop.ckpt.abandon()


@pytest.mark.skipif(torch.__version__ < "2.8", reason="this torch tells no reasons")
def test_a_graph_that_cannot_be_whole_names_the_remedy(shm_dir: Path, tmp_path: Path) -> None:
    loop = Loop(torchs_own, wrapped, shm_dir, tmp_path, "forward", fullgraph=True)
    with pytest.raises(Exception, match="call the checkpointer's step\\(\\) once per iteration"):
        loop.steps(1)
    loop.ckpt.abandon()


@pytest.mark.filterwarnings("ignore:`torch.jit")  # which torch itself uses to compile a step
def test_forward_passes_within_a_compiled_function_are_seen(shm_dir: Path, tmp_path: Path) -> None:
    loop = Loop(Own, lambda model: model, shm_dir, tmp_path, "forward")
    step = torch.compile(lambda: loop.steps(1), backend="eager")
    for _ in range(4):
        step()
    assert (loop.ckpt.version, loop.errors) == (3, [])
    loop.ckpt.abandon()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_module_with_explicit_boundaries_can_be_scripted(shm_dir: Path, tmp_path: Path) -> None:
    loop = Loop(torchs_own, torch.jit.script, shm_dir, tmp_path, "explicit")
    loop.steps(3, after=loop.ckpt.step)
    assert loop.ckpt.version == 3
    loop.ckpt.abandon()


def test_a_capturable_optimizer_comes_back(path: Path, shm_dir: Path) -> None:
    """Its step count is a tensor beside the weights. Without a GPU a compiled optimizer makes the
    steps."""

    def life(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer, tierckpt.Checkpointer]:
        torch.manual_seed(seed)
        model = torch.nn.Linear(3, 3)
        optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
        settings = {"path": path, "shm_dir": str(shm_dir), "agent": "inline"}
        return model, optimizer, tierckpt.Checkpointer(model, optimizer, **settings)

    model, optimizer, ckpt = life(1)
    step = torch.compile(optimizer.step, backend="eager")
    with ckpt:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            step()
            ckpt.step()
    again, restored, ckpt = life(2)
    with ckpt:
        assert ckpt.restore().version == 3
    assert torch.equal(again.weight, model.weight)
    assert restored.param_groups[0]["capturable"]
    for name, value in optimizer.state[model.weight].items():
        assert torch.equal(restored.state[again.weight][name], value), name
