"""What a loop changes besides tensors: frozen parameters, groups of an optimizer, options of
modules. A resumed run has it as the undisturbed one."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tierckpt
from tierckpt.snapshot import tensor_memory

CHANGED_AT, KILLED_AT, END = 2, 4, 7


class Scaled(nn.Module):
    """A class of the user's own, with an option."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def build() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    hidden = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1))
    model = nn.Sequential(hidden, nn.Tanh(), Scaled(), nn.Linear(8, 1))
    hidden[0].requires_grad_(False)
    return model, torch.optim.Adam(model[3].parameters(), lr=0.01)


def thaw(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model[0][0].requires_grad_(True)
    optimizer.add_param_group({"params": [*model[0][0].parameters()], "lr": 0.003})


def grow(model: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["params"] += [*model[0].parameters()]


def set_options(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model[0][1].momentum, model[0][1].eps, model[0][2].p = None, 0.1, 0.7


CHANGES: dict[str, Callable[[Any, torch.optim.Optimizer], Any]] = {
    "thawed, with a group of its own": thaw,
    "frozen": lambda model, optimizer: model[3].bias.requires_grad_(False),
    "more parameters in a group": grow,
    "options of torch's modules": set_options,
    "a part in eval": lambda model, optimizer: model[0][1].eval(),
}


def train(path: Path, change: Any, steps: int, shm_dir: Path) -> tuple[dict[str, Any], list[str]]:
    """The end of a run: weights and flags; and the warnings."""
    model, optimizer = build()
    said: list[str] = []

    def receive(event: tierckpt.Event) -> None:
        said.extend([event.message] if event.severity >= logging.WARNING else [])

    settings: dict[str, Any] = {"shm_dir": str(shm_dir), "agent": "inline", "on_event": receive}
    with tierckpt.Checkpointer(model, optimizer, path=path, **settings) as ckpt:
        for step in range(ckpt.restore(), steps):
            if step == CHANGED_AT:
                change(model, optimizer)
            optimizer.zero_grad()
            model(torch.randn(6, 4)).square().sum().backward()
            optimizer.step()
            ckpt.step()
            ckpt.wait()
    end = {name: p.detach().clone() for name, p in model.state_dict().items()}
    end |= {f"{n} is trained": p.requires_grad for n, p in model.named_parameters()}
    return end, said


def without_tensor_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let boundaries look at tensors and dicts by their methods."""
    monkeypatch.setattr(tensor_memory, "find", lambda: None)
    monkeypatch.setattr(tensor_memory, "find_tag", lambda: None)


BY_METHODS = ("thawed, with a group of its own", "options of torch's modules")


@pytest.mark.parametrize(
    ("kind", "by_memory"),
    [*((kind, True) for kind in CHANGES), *((kind, False) for kind in BY_METHODS)],
)
def test_a_change_in_mid_run_is_there_after_a_restart(
    kind: str, by_memory: bool, tmp_path: Path, shm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change = CHANGES[kind]
    if not by_memory:
        without_tensor_memory(monkeypatch)
    wanted, _ = train(tmp_path / "one", change, END, shm_dir)
    train(tmp_path / "two", change, KILLED_AT, shm_dir)
    found, said = train(tmp_path / "two", change, END, shm_dir)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert not said


# --- what is in no checkpoint -------------------------------------------------------------------


def warnings_of(model: nn.Module, shm_dir: Path, path: Path, **given: Any) -> list[str]:
    """Warnings of a run of four steps."""
    said: list[str] = []

    def receive(event: tierckpt.Event) -> None:
        said.extend([event.message] if event.severity >= logging.WARNING else [])

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    settings: dict[str, Any] = {"shm_dir": str(shm_dir), "agent": "inline", "on_event": receive}
    with tierckpt.Checkpointer(model, optimizer, path=path, **settings, **given) as ckpt:
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(6, 4)).square().sum().backward()
            optimizer.step()
            for each in given.get("extra", {}).values():
                each.update(torch.randn(6))
            ckpt.step()
    return said


class Meter:
    """An object of the loop's own."""

    saved = ("kept",)

    def __init__(self) -> None:
        self.count, self.kept = 0, 0.0
        self.mean = torch.zeros(())
        self.noise = torch.Generator()
        self.seen_at = time.time()

    def update(self, values: torch.Tensor) -> None:
        self.count, self.kept = self.count + 1, self.kept + 0.5
        self.mean = 0.9 * self.mean + torch.rand((), generator=self.noise)
        self.seen_at = time.time()

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self.kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept = state["kept"]


class Smoothed(nn.Linear):
    """A layer with a state of its own."""

    def __init__(self) -> None:
        super().__init__(4, 1)
        self.meter_count, self.norm = 0, torch.zeros(())
        self.last: torch.Tensor | None = None
        self.window, self.means = deque[float](maxlen=5), {"x": 0.0}
        self.all_norms: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.meter_count += 1
        self.window.append(float(x.mean()))
        self.all_norms.append(self.window[-1])  # a record
        self.means["x"] += self.window[-1]
        self.norm.mul_(0.9).add_(x.norm())
        self.last = super().forward(x)  # of this step alone
        return self.last


class Kept(Smoothed):
    def get_extra_state(self) -> dict[str, Any]:
        kept = {"window": [*self.window], "means": self.means}
        return {"n": self.meter_count, "norm": self.norm, **kept}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.meter_count, self.norm = state["n"], state["norm"]
        self.window, self.means = deque(state["window"], 5), state["means"]


def test_values_that_change_with_the_steps_and_are_not_saved_are_named(
    tmp_path: Path, shm_dir: Path
) -> None:
    said = warnings_of(nn.Sequential(Smoothed()), shm_dir, tmp_path, extra={"meter": Meter()})
    assert len(said) == 2, said
    (of_module,) = [each for each in said if each.startswith("module '0'")]
    assert "Smoothed.meter_count (1, 2, 3), Smoothed.norm" in of_module
    assert "Smoothed.window and 1 more change with the steps" in of_module
    assert "last" not in of_module
    assert "all_norms" not in of_module
    (of_meter,) = [each for each in said if each.startswith("extra['meter']")]
    assert all(f"Meter.{name}" in of_meter for name in ("count", "mean", "noise"))
    assert "kept" not in of_meter
    assert "seen_at" not in of_meter
    assert not warnings_of(nn.Sequential(Kept()), shm_dir, tmp_path / "kept")


def test_a_metric_that_stores_nothing_is_named_with_its_cure(tmp_path: Path, shm_dir: Path) -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    metric = torchmetrics.SumMetric()
    said = warnings_of(nn.Linear(4, 1), shm_dir, tmp_path / "a", extra={"total": metric})
    assert any("extra['total'], a SumMetric: its state_dict() is empty" in each for each in said)
    assert all("persistent(True)" in each for each in said), said
    metric.persistent(True)
    assert not warnings_of(nn.Linear(4, 1), shm_dir, tmp_path / "b", extra={"total": metric})


# --- a module that saves what torch does not load ----------------------------------------------


class Inner(nn.Linear):
    """torch calls its state_dict(), and never its load_state_dict()."""

    def __init__(self, features: int = 8) -> None:
        super().__init__(features, features)
        self.calls = 0

    def state_dict(self, *args: Any, **options: Any) -> Any:
        found = super().state_dict(*args, **options)
        found[options.get("prefix", "") + "calls"] = self.calls
        return found

    def load_state_dict(self, state: Any, *args: Any, **options: Any) -> Any:
        self.calls = state.pop("calls")
        return super().load_state_dict(state, *args, **options)


class Mended(Inner):
    load_state_dict = nn.Module.load_state_dict

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self.calls = state_dict.pop(prefix + "calls")
        super()._load_from_state_dict(state_dict, prefix, *args)


@pytest.mark.parametrize("features", [8, 1024])
def test_a_module_that_torch_would_not_load_is_refused_at_once(
    features: int, tmp_path: Path, shm_dir: Path
) -> None:
    def attach(inner: nn.Module) -> None:
        model = nn.Sequential(inner)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        settings: dict[str, Any] = {"shm_dir": str(shm_dir), "agent": "inline"}
        with tierckpt.Checkpointer(model, optimizer, path=tmp_path, **settings):
            pass

    inner = Inner(features)
    before = vars(inner).copy()
    with pytest.raises(tierckpt.UnsupportedStateError) as caught:
        attach(inner)
    assert "self.calls = state_dict.pop(prefix + 'calls')" in str(caught.value)
    assert before.keys() == vars(inner).keys()
    assert all(vars(inner)[key] is value for key, value in before.items())
    mended = Mended(features)
    mended.calls = 3
    attach(mended)
    assert mended.calls == 3


# --- compared, not restored ---------------------------------------------------------------------


def test_other_options_and_switches_are_compared_and_edits_of_the_script_count(
    tmp_path: Path, shm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(model: Any, optimizer: Any) -> None:
        model[2].scale = 0.5
        model.eval()  # an evaluation, and the loop does not go back

    train(tmp_path, change, KILLED_AT, shm_dir)
    plain = build

    def edited() -> Any:
        model, optimizer = plain()
        model[0][0].requires_grad_(True)
        model[0][2].p = 0.3
        return model, optimizer

    monkeypatch.setitem(globals(), "build", edited)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        model, said = trained_model(tmp_path, shm_dir)
    finally:
        torch.set_num_threads(threads)
    assert model[0][0].weight.requires_grad
    assert model[0][2].p == 0.3
    assert model.training
    assert model[0][1].training
    assert any("2.scale was 0.5 and is 1.0: plain attributes of modules" in each for each in said)
    assert any(f"was {threads} and is {threads + 1}: results may be" in each for each in said)


def trained_model(path: Path, shm_dir: Path) -> tuple[Any, list[str]]:
    model, optimizer = build()
    said: list[str] = []
    settings: dict[str, Any] = {"shm_dir": str(shm_dir), "agent": "inline"}
    settings["on_event"] = lambda event: said.append(event.message)
    with tierckpt.Checkpointer(model, optimizer, path=path, **settings) as ckpt:
        assert ckpt.restore() == KILLED_AT
    return model, said
