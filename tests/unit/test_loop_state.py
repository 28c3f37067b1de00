"""A loop's values and running averages: a resumed loop continues with those of the version."""

from __future__ import annotations

import json
import threading
from collections import defaultdict, deque
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tierckpt
from tierckpt import Attributes, LoopState
from tierckpt.state import Arena, pack_tree, unpack_tree


class Kind(Enum):
    MEAN = 1


class Window:
    """A running average as torchvision's reference has it."""

    def __init__(self) -> None:
        self.values: deque[float] = deque(maxlen=3)
        self.total, self.kind, self.text = 0.0, Kind.MEAN, str

    def update(self, value: float) -> None:
        self.values.append(value)
        self.total += value


class Meters:
    """Averages in an object, each made when it is first used."""

    def __init__(self) -> None:
        self.meters: defaultdict[str, Window] = defaultdict(Window)

    def __getattr__(self, name: str) -> Any:
        if name in self.meters:
            return self.meters[name]
        raise AttributeError(name)


class Metric:
    """With both methods, as torchmetrics' have them."""

    def __init__(self) -> None:
        self.total, self.cache = torch.zeros(()), object()

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total = state["total"]


def stored(state: Any) -> Any:
    """The state as a version has it: nothing is shared with the live objects."""
    arena = Arena()
    packed = json.loads(json.dumps(pack_tree(state, "loop", arena.keep)))
    tensors = [each.clone() for each in arena.tensors]
    return unpack_tree(packed, lambda node: tensors[node["v"]])


def objects() -> dict[str, Any]:
    return {"window": Window(), "meters": Meters(), "metric": Metric(), "lists": {"a": [1]}}


def begun(epoch: int = 2) -> tuple[LoopState, dict[str, Any]]:
    """A loop in the middle of an epoch."""
    loop, every = LoopState(best=0.0, history=[]), objects()
    loop.resume(epoch, **{name: every[name] for name in ("window", "meters", "metric")})
    for value in (1.0, 2.0, 3.0, 4.0):
        every["window"].update(value)
        every["meters"].meters["loss"].update(value)
        every["metric"].total += value
    loop.best = 0.5
    loop.history.append({"epoch": 1})
    return loop, every


def test_a_loop_continues_in_the_middle_of_an_epoch() -> None:
    loop, _ = begun()
    state = stored(loop.state_dict())
    other, every = LoopState(best=0.0, history=[]), objects()
    other.load_state_dict(state)
    assert (other.best, other.history) == (0.5, [{"epoch": 1}])
    other.resume(2, window=every["window"], meters=every["meters"])
    other.resume(2, metric=every["metric"])
    for window in (every["window"], every["meters"].loss):
        assert (list(window.values), window.total, window.kind) == ([2, 3, 4], 10.0, Kind.MEAN)
        assert window.values.maxlen == 3
        assert window.text is str
    assert every["metric"].total == 10.0
    every["window"].update(5.0)
    assert stored(other.state_dict())["objects"]["window"]["total"] == 15.0


def test_a_version_before_the_objects_are_made_again_still_has_their_state() -> None:
    loop, _ = begun()
    state = loop.state_dict()
    other = LoopState()
    other.load_state_dict(stored(state))
    assert stored(other.state_dict()) == stored(state)


def test_the_next_epoch_starts_with_new_objects() -> None:
    loop, _ = begun()
    other, every = LoopState(), objects()
    other.load_state_dict(stored(loop.state_dict()))
    other.resume(3, window=every["window"])
    assert (every["window"].total, list(other.state_dict()["objects"])) == (0.0, ["window"])
    other.resume(3, window=(newer := Window()))
    newer.update(1.0)
    assert other.state_dict()["objects"]["window"]["total"] == 1.0


def test_keys_that_the_version_does_not_have_are_removed() -> None:
    loop = LoopState()
    loop.resume(0, meters=Meters())
    state, later = stored(loop.state_dict()), Meters()
    later.meters["loss"].update(1.0)
    other = LoopState()
    other.load_state_dict(state)
    other.resume(0, meters=later)
    assert dict(later.meters) == {}


def test_attributes_of_an_object() -> None:
    owner = SimpleNamespace(log=torch.zeros(1), best=(None, None), window=Window(), other=object())
    given = Attributes(owner, "log", "best", "window")
    owner.log, owner.best = torch.cat([owner.log, torch.ones(2)]), (0.5, 3)
    owner.window.update(2.0)
    state = stored(given.state_dict())
    again = SimpleNamespace(log=torch.zeros(1), best=(None, None), window=Window(), other=None)
    window = again.window
    Attributes(again, "log", "best", "window").load_state_dict(state)
    assert (again.log.tolist(), again.best, again.other) == ([0.0, 1.0, 1.0], (0.5, 3), None)
    assert again.window is window
    assert window.total == 2.0


def test_impossible_values_are_refused() -> None:
    with pytest.raises(tierckpt.ConfigError, match=r"LoopState\(resume=...\): this is a method's"):
        LoopState(resume=1)
    with pytest.raises(tierckpt.ConfigError, match=r"resume\(best=...\): a float .* loop.best ="):
        LoopState().resume(0, best=1.0)
    own = SimpleNamespace()
    own.parent = SimpleNamespace(child=own)
    with pytest.raises(tierckpt.ConfigError, match=r"the SimpleNamespace contains itself. Give"):
        LoopState().resume(0, own=own)
    lock = SimpleNamespace(inner=SimpleNamespace(lock=threading.Lock()))
    with pytest.raises(tierckpt.UnsupportedStateError, match=r"LoopState 'a'.*inner.*lock"):
        LoopState().resume(0, a=lock)
    with pytest.raises(tierckpt.ConfigError, match="the SimpleNamespace has no attribute 'a'"):
        Attributes(SimpleNamespace(), "a")
    with pytest.raises(tierckpt.ConfigError, match="give their names"):
        Attributes(SimpleNamespace(a=1))
