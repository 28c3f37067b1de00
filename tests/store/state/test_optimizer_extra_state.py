"""The remainder of an optimizer's state_dict() is restored through its own load_state_dict(), bit
for bit. A value that cannot be stored is refused, and the advice works."""

from __future__ import annotations

import copy
import enum
import logging
import re
from collections import OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import tierckpt
from tests.support import exact
from tests.support.state_matrix.fleet import plain, small
from tierckpt.errors import StateTornError, UnsupportedStateError
from tierckpt.state import Arena, EncodedTree, decode_tree, pack_tree

Make = Callable[[nn.Module], torch.optim.Optimizer]
BOUNDARIES, LATER = 3, 2


class Job:
    """A model, an optimizer, a checkpointer."""

    def __init__(self, make: Make, path: Path, settings: dict[str, Any], seed: int = 1) -> None:
        torch.manual_seed(seed)
        self.events: list[tierckpt.Event] = []
        self.model: Any = small()
        self.optimizer: Any = make(self.model)
        self.checkpointer = tierckpt.Checkpointer(
            self.model,
            self.optimizer,
            path=path,
            **{"agent": "inline", "on_event": self.events.append, **settings},
        )

    def run(self, steps: int, iterate: Any = plain) -> None:
        for _ in range(steps):
            iterate(self.model, self.optimizer)
            self.checkpointer.step()

    def image(self) -> dict[str, Any]:
        told = self.optimizer.state_dict()
        return {**exact.parameters(self.model), "told": exact.image(_sorted(told))}

    def repeated_errors(self) -> list[str]:
        return [e.message for e in self.events if e.severity >= logging.WARNING]

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.checkpointer.abandon()


def _sorted(value: Any) -> Any:
    """Sort state, which has no order."""
    if type(value) is dict:
        return {k: _sorted(value[k]) for k in sorted(value, key=repr)}
    return [*map(_sorted, value)] if type(value) is list else value


def proved(make: Make, path: Path, settings: dict[str, Any], iterate: Any = plain) -> Any:
    """Asserts that it is exact; returns the state_dict() that a reader without a job finds, and the
    original one."""
    with Job(make, path, settings) as job:
        job.run(BOUNDARIES, iterate)
        at_boundary, told = job.image(), job.optimizer.state_dict()
        told = exact.image(_sorted(told))
        job.checkpointer.save(now=True)
        for _ in range(LATER):
            iterate(job.model, job.optimizer)
        later = job.image()
        assert job.repeated_errors() == []
    found = exact.image(_sorted(tierckpt.load(path).optimizers["optimizer"]))
    with Job(make, path, settings, seed=2) as job:
        assert job.checkpointer.restore() == BOUNDARIES
        assert exact.differences(at_boundary, job.image()) == []
        for _ in range(LATER):
            iterate(job.model, job.optimizer)
        assert exact.differences(later, job.image()) == []
        assert job.repeated_errors() == []
    return found, told


# --- an optimizer's own state_dict() -------------------------------------------------------------


class Noam(torch.optim.Adam):
    """Its rate follows a counter that it saves by itself."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters())
        self.steps, self.scale = 0, torch.tensor([1.0, -0.0, float("nan")], dtype=torch.float64)

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        self.scale *= 1.5
        for group in self.param_groups:
            group["lr"] = 0.01 * self.steps**-0.5
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "steps": self.steps, "scale": self.scale}

    def load_state_dict(self, told: Any) -> None:
        super().load_state_dict({k: told[k] for k in ("state", "param_groups")})
        self.steps, self.scale = told["steps"], told["scale"].clone()


def hooked(model: nn.Module) -> torch.optim.Optimizer:
    """The same with hooks, registered on the object alone."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    count = [0]

    def counted(optimizer: Any, *_: Any) -> None:
        count[0] += 1
        optimizer.param_groups[0]["lr"] = 0.1 / count[0]

    def saved(_: Any, told: dict[str, Any]) -> None:
        told["count"] = count[0]

    def loaded(_: Any, told: dict[str, Any]) -> None:
        count[0] = told.pop("count")

    optimizer.register_step_pre_hook(counted)
    optimizer.register_state_dict_post_hook(saved)
    optimizer.register_load_state_dict_pre_hook(loaded)
    return optimizer


class Late(Noam):
    """Has the extra value only after some steps."""

    def state_dict(self) -> dict[str, Any]:
        told = super().state_dict()
        return told if self.steps > 1 else {k: told[k] for k in ("state", "param_groups")}

    def load_state_dict(self, told: Any) -> None:
        super().load_state_dict({"steps": 0, "scale": self.scale, **told})


class Masters(torch.optim.SGD):
    """Copies of the weights in double precision, as an attribute; steps those."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.05)
        self.masters = [p.detach().double() for p in model.parameters()]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = self.param_groups[0]["params"]
        for param, master in zip(params, self.masters, strict=True):
            master -= 0.05 * param.grad
            param.copy_(master)

    def state_dict(self) -> dict[str, Any]:
        return {"masters": self.masters, "own": super().state_dict()}

    def load_state_dict(self, told: Any) -> None:
        super().load_state_dict(told["own"])
        for master, saved in zip(self.masters, told["masters"], strict=True):
            master.copy_(saved)


class Casting(Noam):
    """Keeps state in double precision; torch's load_state_dict() casts it to float."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for param in self.param_groups[0]["params"]:
            exact = self.state[param].get("exact")
            self.state[param]["exact"] = param.detach().double() / 3 + (
                0 if exact is None else exact
            )
        return loss


class Renaming(Noam):
    """Returns state under other names, and in other tensors, than it keeps."""

    def state_dict(self) -> dict[str, Any]:
        told = super().state_dict()
        states = {k: {**v} for k, v in told["state"].items()}
        for state in states.values():
            state["doubled"] = state.pop("exp_avg") * 2
        return {**told, "state": states, "groups": OrderedDict(first=told["param_groups"][0])}

    def load_state_dict(self, told: Any) -> None:
        states = {k: {**v} for k, v in told["state"].items()}
        for state in states.values():
            state["exp_avg"] = state.pop("doubled") / 2
        super().load_state_dict({**told, "state": states})


@pytest.mark.parametrize("make", [Noam, hooked, Late, Masters, Casting, Renaming])
def test_it_comes_back_and_a_reader_finds_it(make: Make, path: Path, settings: Any) -> None:
    found, told = proved(make, path, settings)
    assert found == told


# --- state under keys that are no parameters -----------------------------------------------------


class Global(torch.optim.SGD):
    """State that belongs to no single parameter, as in MADGRAD and others."""

    keys: ClassVar[Any] = {
        "k": lambda n: torch.tensor([n]),
        None: lambda n: n,
        ("a", 1): lambda n: {"nested": [torch.full((2,), n / 7)]},
        "number": lambda n: 0.1 * n,
    }

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.05, momentum=0.9)

    def step(self, closure: Any = None) -> Any:
        kept: Any = self.state
        now = kept.get("count", 0) + 1
        kept["count"] = now
        kept.update({key: value(now) for key, value in self.keys.items()})
        self.param_groups[0]["lr"] = 0.05 / now
        return super().step(closure)


class ByParameter(Global):
    """The same under one such key, by parameter."""

    keys: ClassVar[Any] = {}

    def step(self, closure: Any = None) -> Any:
        kept: Any = self.state
        kept["seen"] = {p: p.detach().clone() for p in self.param_groups[0]["params"]}
        return super().step(closure)

    def state_dict(self) -> Any:  # torch's own has parameters as keys, which cannot be stored
        told = super().state_dict()
        seen = told["state"].get("seen", {})
        return {**told, "state": {**told["state"], "seen": [*seen.values()]}}

    def load_state_dict(self, told: Any) -> None:
        seen = dict(zip(self.param_groups[0]["params"], told["state"]["seen"], strict=False))
        super().load_state_dict({**told, "state": {**told["state"], "seen": seen}})


@pytest.mark.parametrize("make", [Global, ByParameter])
def test_state_of_no_parameter_comes_back(make: Make, path: Path, settings: Any) -> None:
    found, told = proved(make, path, settings)
    assert found == told


def test_going_back_removes_later_state(path: Path, settings: Any) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    with Job(make, path, settings) as job:
        job.run(2)
        job.checkpointer.wait()
        job.optimizer.state["later"] = 1
        job.optimizer.state[next(job.model.parameters())][("odd", 3)] = torch.ones(2)
        assert job.checkpointer.restore() == 2
        assert set(job.optimizer.state) == set(job.model.parameters())
        assert {len(each) for each in job.optimizer.state.values()} == {1}


def test_parameters_as_keys_of_torchs_own_state_dict(path: Path, settings: Any) -> None:
    class Plainly(ByParameter):
        state_dict = torch.optim.Optimizer.state_dict
        load_state_dict = torch.optim.Optimizer.load_state_dict

    with Job(Plainly, path, settings) as job:
        job.run(2)
        wanted = [value.clone() for value in job.optimizer.state["seen"].values()]
    with Job(Plainly, path, settings, seed=2) as job:
        assert job.checkpointer.restore() == 2
        found = job.optimizer.state["seen"]
        assert list(map(id, found)) == list(map(id, job.model.parameters()))
        assert all(map(torch.equal, found.values(), wanted))


# --- kinds of values -----------------------------------------------------------------------------


class Norm(enum.Enum):
    SPECTRAL, SIGN = "spectral", "sign"


class Level(enum.IntFlag):
    LOW, HIGH = 1, 2


class Range(NamedTuple):
    low: float
    high: Any


def schedule(step: int) -> float:
    return 1.0


class Keeps(torch.optim.SGD):
    """Options and state of many kinds."""

    def __init__(self, model: nn.Module) -> None:
        options = {
            "norm": Norm.SIGN,
            "levels": Level.LOW | Level.HIGH,
            "range": Range(0.5, Range(torch.ones(2), [Norm.SPECTRAL])),
            "numpy": np.float32(0.1),
            "flags": torch.tensor([True, False]),
            "rate": torch.tensor(0.5),
            "deque": deque([1, 2], maxlen=3),
            "function": schedule,
            "class": Norm,
        }
        groups = [{"params": [p], **copy.deepcopy(options)} for p in model.parameters()]
        super().__init__(groups, lr=0.05, momentum=0.9)

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            (param,) = group["params"]
            state: Any = self.state[param]
            mean = param.detach().mean()
            group["deque"].append(float(mean))
            group["range"] = Range(float(mean), Range(mean.clone(), [Norm.SIGN]))
            group["norm"] = Norm.SPECTRAL
            state["norm"] = Norm.SIGN
            state["range"] = Range(float(mean), mean.clone())
            state["history"] = deque([*state.get("history", ()), mean.clone()], maxlen=2)
            state["nothing"], state["count"] = None, state.get("count", 0) + 1
            state[0], state["a/b"] = mean.clone(), {"x": 1}
            state[("key", 2)] = param.detach() * 2
        return loss


def test_values_of_all_kinds_come_back(path: Path, settings: Any) -> None:
    proved(Keeps, path, settings)


def test_a_reader_without_the_class_gets_the_parts_of_the_value() -> None:
    value = {"norm": Norm.SIGN, "range": Range(0.5, torch.ones(2))}
    arena = Arena()
    node = pack_tree(value, "it", arena.keep)
    encoded = EncodedTree(node, arena)
    data = torch.zeros(encoded.nbytes, dtype=torch.uint8)
    encoded.copy(0, data)
    raw = data.numpy().tobytes()
    assert exact.image(decode_tree(raw)) == exact.image(value)
    found = decode_tree(raw.replace(b"test_optimizer_extra_state:", b"TEST_optimizer_extra_state:"))
    assert found["norm"].parts == "sign"
    assert found["norm"].kind.endswith("TEST_optimizer_extra_state:Norm")
    assert found["range"].parts.keys() == {"low", "high"}


class Shared(torch.optim.SGD):
    """One map for all parameters, as in bitsandbytes, and one of two of them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.05)
        self.map = torch.linspace(0, 1, 5)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = self.param_groups[0]["params"]
        for number, param in enumerate(params):
            state = self.state[param]
            state.setdefault("map", self.map)
            state.setdefault("pair", self.state[params[number // 2 * 2]].get("pair", torch.ones(1)))
            state["pair"] += 1
            param -= 0.01 * state["pair"] * param.grad


def test_a_tensor_that_parameters_share_is_one_again(path: Path, settings: Any) -> None:
    proved(Shared, path, settings)
    with Job(Shared, path, settings, seed=3) as job:
        job.checkpointer.restore()
        states = [job.optimizer.state[p] for p in job.model.parameters()]
        assert len({id(state["map"]) for state in states}) == 1
        first, second, third, fourth = (id(state["pair"]) for state in states)
        assert first == second != third == fourth


# --- refused, with advice ------------------------------------------------------------------------


class Projector:
    """A value that no checkpoint can hold."""

    def __init__(self, matrix: torch.Tensor) -> None:
        self.matrix = matrix


class Projecting(torch.optim.SGD):
    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.05)
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls += 1
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            old = state["projector"].matrix if "projector" in state else 0
            state["projector"] = Projector(param.double() / self.calls + old)
            param -= 0.01 * state["projector"].matrix


def mended(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Fixed by the very lines of docs/models.md."""
    text = Path("docs/models.md").read_text()
    (block,) = re.findall(r"```python\n(def saved.*?)```", text, re.DOTALL)
    exec(block, {"optimizer": optimizer, "Projector": Projector})
    return optimizer


def test_a_value_that_cannot_be_stored_is_named_and_the_suggested_hooks_cure_it(
    path: Path, settings: Any
) -> None:
    with Job(Projecting, path, settings) as job:
        job.run(1)
        job.checkpointer.wait()
        (said,) = [text for text in job.repeated_errors() if "could not be captured" in text]
        assert "Projecting.state['0.weight']['projector'] is a " in said
        assert "register_state_dict_post_hook" in said
        assert job.events[-1].severity == logging.ERROR

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return mended(Projecting(model))

    found, told = proved(make, path.with_name("mended"), settings)
    assert found == told


class Sparse(torch.optim.SGD):
    """Keeps a tensor that cannot be stored as its bytes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.05)
        for param in self.param_groups[0]["params"]:
            self.state[param]["mask"] = (param.detach() > 0).float().to_sparse()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            mask = self.state[param]["mask"] = self.state[param]["mask"] * 0.9
            param -= 0.05 * mask.to_dense()


def test_so_is_a_tensor_that_cannot_be_taken_as_it_is(path: Path, settings: Any) -> None:
    with pytest.raises(
        UnsupportedStateError, match=r"Sparse\.state\['0\.weight'\]\['mask'\] is of"
    ):
        Job(Sparse, path, settings)

    def turned(told: dict[str, Any], turn: Any) -> dict[str, Any]:
        states = {k: {**v, "mask": turn(v["mask"])} for k, v in told["state"].items()}
        return {**told, "state": states}

    def cured(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = Sparse(model)
        optimizer.register_state_dict_post_hook(lambda _, told: turned(told, torch.Tensor.to_dense))
        optimizer.register_load_state_dict_pre_hook(
            lambda _, told: turned(told, torch.Tensor.to_sparse)
        )
        return optimizer

    found, told = proved(cured, path, settings)
    assert found == told


def test_the_same_of_an_option_is_refused_at_once(path: Path, settings: Any) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        optimizer.param_groups[0]["projector"] = Projector(torch.arange(3.0) / 7)
        return optimizer

    with pytest.raises(UnsupportedStateError, match=r"SGD\.param_groups\[0\]\['projector'\] is a "):
        Job(make, path, settings)

    def saved(_: Any, told: dict[str, Any]) -> dict[str, Any]:
        groups = [{**g, "projector": g["projector"].matrix} for g in told["param_groups"]]
        return {**told, "param_groups": groups}

    def loaded(_: Any, told: dict[str, Any]) -> dict[str, Any]:
        groups = [{**g, "projector": Projector(g["projector"])} for g in told["param_groups"]]
        return {**told, "param_groups": groups}

    def cured(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = make(model)
        optimizer.register_state_dict_post_hook(saved)
        optimizer.register_load_state_dict_pre_hook(loaded)
        return optimizer

    found, told = proved(cured, path, settings)
    assert found == told
    with Job(cured, path, settings, seed=3) as job:
        job.checkpointer.restore()
        assert torch.equal(job.optimizer.param_groups[0]["projector"].matrix, torch.arange(3.0) / 7)


def test_a_state_dict_that_fails_is_refused_when_attaching(path: Path, settings: Any) -> None:
    class Failing(Noam):
        def state_dict(self) -> dict[str, Any]:
            raise KeyError("warmup")

    with pytest.raises(
        UnsupportedStateError, match=r"its state_dict\(\) raised KeyError: 'warmup'"
    ):
        Job(Failing, path, settings)


def test_a_load_state_dict_that_forgets_is_reported(path: Path, settings: Any) -> None:
    class Forgetful(Noam):
        def load_state_dict(self, told: Any) -> None:
            super().load_state_dict({**told, "steps": 0})

    with Job(Forgetful, path, settings) as job:
        job.run(2)
    with Job(Forgetful, path, settings) as job:
        assert job.checkpointer.restore() == 2
        (said,) = job.repeated_errors()
        assert "'steps' of its state_dict() differs from the saved one" in said


def test_one_that_does_not_take_its_state_ends_the_restore_with_its_name(
    path: Path, settings: Any
) -> None:
    class Refusing(Noam):
        def load_state_dict(self, told: Any) -> None:
            raise ValueError("not mine")

    with Job(Noam, path, settings) as job:
        job.run(2)
    with Job(lambda m: _named(Refusing, "Noam")(m), path, settings) as job:
        with pytest.raises(StateTornError, match="a Noam, did not take its state") as caught:
            job.checkpointer.restore()
        assert "ValueError: not mine" in str(caught.value)


def _named(kind: type, name: str) -> Any:
    kind.__name__ = name
    return kind


# --- values in no state_dict() -------------------------------------------------------------------


def test_a_counter_saved_nowhere_is_reported_and_the_hooks_cure_it(
    path: Path, settings: Any
) -> None:
    class Counting(torch.optim.SGD):
        def __init__(self, model: nn.Module) -> None:
            super().__init__(model.parameters(), lr=0.05)
            self.calls, self.size, self.name = 0, 3.5, "x"

        def step(self, closure: Any = None) -> Any:
            self.calls += 1
            self.param_groups[0]["lr"] = 0.05 / self.calls
            return super().step(closure)

    with Job(Counting, path, settings) as job:
        job.run(5)
        (said,) = job.repeated_errors()
        assert (
            "Counting.calls changes with the steps (1, 2, 3) and is not in its state_dict()" in said
        )

    def make(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = Counting(model)
        optimizer.register_state_dict_post_hook(lambda o, told: told.update(calls=o.calls))
        optimizer.register_load_state_dict_pre_hook(
            lambda o, told: setattr(o, "calls", told.pop("calls"))
        )
        return optimizer

    found, told = proved(make, path.with_name("mended"), settings)
    assert found == told


# --- cost ----------------------------------------------------------------------------------------


def test_an_optimizer_without_extra_state_is_not_asked(
    path: Path, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    class Same(torch.optim.SGD):
        """Overrides state_dict(), and adds nothing."""

        def __init__(self, model: nn.Module) -> None:
            super().__init__(model.parameters(), lr=0.05)

        def state_dict(self) -> dict[str, Any]:
            asked.append(1)
            return super().state_dict()

    monkeypatch.setattr("tierckpt.state.optimizer_state.FEW", 3)
    with Job(Same, path, settings) as job:
        started = len(asked)
        job.run(33)
        assert started >= 1
        assert len(asked) - started <= 8, "at the first, and after 1, 2, 4, 8, 16, 32 more"

    def plainly(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters())

    monkeypatch.setattr(torch.optim.Optimizer, "state_dict", None)
    monkeypatch.setattr("tierckpt.state.optimizer_state._TORCHS", None)
    with Job(plainly, path.with_name("plain"), settings) as job:
        job.run(3)
        assert job.repeated_errors() == []


def test_large_extra_state_is_reported(
    path: Path, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierckpt.state.optimizer_state.HEAVY_BYTES", 8)
    with Job(Masters, path, settings) as job:
        job.run(3)
        (said,) = job.repeated_errors()
        assert "in the state_dict() of optimizers, besides state and options" in said
