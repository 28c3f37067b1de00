"""Optimizers inside others: all of their state is in checkpoints, whichever step the loop calls.
Weights that change outside of a step tear no version. Missing steps are an error."""

from __future__ import annotations

import copy
import logging
import pickle
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tierckpt
from tests.store.state.test_optimizer_extra_state import Job, proved
from tests.support import exact
from tests.support.state_matrix.fleet import plain
from tierckpt.errors import UnsupportedStateError

Iterate = Callable[[Any, Any], None]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


class Sam(torch.optim.Optimizer):
    """The version that most scripts have copied: it shares groups with its inner optimizer, and its
    own state_dict() has none of the inner state."""

    def __init__(self, model: nn.Module, rho: float = 0.05) -> None:
        super().__init__(model.parameters(), {"rho": rho, "lr": 0.05, "momentum": 0.9})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=0.05, momentum=0.9)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        for param in self.param_groups[0]["params"]:
            self.state[param]["old"] = param.detach().clone()
            param.add_(param.grad, alpha=self.param_groups[0]["rho"])
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        for param in self.param_groups[0]["params"]:
            param.data = self.state[param]["old"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    def step(self, closure: Any = None) -> None:
        assert closure is not None
        self.first_step(zero_grad=True)
        with torch.enable_grad():
            closure()
        self.second_step()

    def load_state_dict(self, told: Any) -> None:
        super().load_state_dict(told)
        self.base_optimizer.param_groups = self.param_groups


def in_halves(model: Any, optimizer: Any) -> None:
    x = torch.randn(5, 6)
    for half in (optimizer.first_step, optimizer.second_step):
        model(x).square().mean().backward()
        half(zero_grad=True)


def by_closure(model: Any, optimizer: Any) -> None:
    x = torch.randn(5, 6)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        return loss

    closure()
    optimizer.step(closure)


class Lookahead(torch.optim.Optimizer):
    """Never calls torch's own __init__, and shares groups, as torch_optimizer's."""

    def __init__(self, model: nn.Module) -> None:
        self.optimizer = sgd(model)
        self.param_groups = self.optimizer.param_groups
        self.state = defaultdict(dict)
        self.defaults = {}
        for group in self.param_groups:
            group["counter"] = 0

    def step(self, closure: Any = None) -> None:
        self.optimizer.step()
        for group in self.param_groups:
            group["counter"] = (group["counter"] + 1) % 2
            for param in group["params"] if group["counter"] == 0 else ():
                slow = self.state[param].setdefault("slow", param.detach().clone())
                slow.lerp_(param.detach(), 0.5)
                param.data.copy_(slow)

    def state_dict(self) -> dict[str, Any]:
        slow, fast = super().state_dict(), self.optimizer.state_dict()
        groups = fast["param_groups"]
        return {"fast": fast["state"], "slow": slow["state"], "param_groups": groups}

    def load_state_dict(self, told: Any) -> None:
        groups = told["param_groups"]
        super().load_state_dict({"state": told["slow"], "param_groups": groups})
        self.optimizer.load_state_dict({"state": told["fast"], "param_groups": groups})


class ScheduleFree:
    """Is no torch.optim.Optimizer, and swaps weights in train() and eval(), as Meta's wrapper."""

    def __init__(self, model: nn.Module) -> None:
        self.base = torch.optim.SGD(model.parameters(), lr=0.05)
        self.train_mode = True

    param_groups = property(lambda self: self.base.param_groups)
    state = property(lambda self: self.base.state)

    def zero_grad(self) -> None:
        self.base.zero_grad()

    def state_dict(self) -> Any:
        return self.base.state_dict()

    def load_state_dict(self, told: Any) -> None:
        self.base.load_state_dict(told)

    def _params(self) -> Any:
        return [p for g in self.param_groups for p in g["params"]]

    def swap(self) -> None:
        for param in self._params():
            z = self.state[param].setdefault("z", param.detach().clone())
            kept = param.data.clone()
            param.data.copy_(z)
            z.copy_(kept)

    def eval(self) -> None:
        self.swap()

    def train(self) -> None:
        self.swap()

    def step(self) -> None:
        self.swap()
        self.base.step()
        self.swap()
        for param in self._params():
            param.data.lerp_(self.state[param]["z"], 0.1)


class Accelerated(torch.optim.Optimizer):
    """Everything belongs to the inner one, as with Accelerate's AcceleratedOptimizer."""

    def __init__(self, model: nn.Module) -> None:
        self.optimizer = sgd(model)

    param_groups = property(lambda self: self.optimizer.param_groups)  # type: ignore[assignment]
    state = property(lambda self: self.optimizer.state)  # type: ignore[assignment]
    defaults = property(lambda self: self.optimizer.defaults)  # type: ignore[assignment]

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def load_state_dict(self, told: Any) -> None:
        self.optimizer.load_state_dict(told)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


class Several:
    """Holds several; its state_dict() is a list of theirs."""

    def __init__(self, model: Any) -> None:
        self.optimizers = [torch.optim.Adam(model[0].parameters()), sgd(model[2])]

    def zero_grad(self) -> None:
        for each in self.optimizers:
            each.zero_grad()

    def step(self) -> None:
        for each in self.optimizers:
            each.step()

    def state_dict(self) -> Any:
        return [each.state_dict() for each in self.optimizers]

    def load_state_dict(self, told: Any) -> None:
        for each, state in zip(self.optimizers, told, strict=True):
            each.load_state_dict(state)


class Masters:
    """fp32 copies of the model's parameters, as in apex and fairseq; no state or groups."""

    def __init__(self, model: nn.Module) -> None:
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.masters = [nn.Parameter(p.detach().double()) for p in self.params]
        self.optimizer = torch.optim.SGD(self.masters, lr=0.05, momentum=0.9)
        self.scale = 2.0

    def zero_grad(self) -> None:
        for param in self.params:
            param.grad = None

    @torch.no_grad()
    def step(self) -> None:
        self.scale += 0.25
        for param, master in zip(self.params, self.masters, strict=True):
            assert param.grad is not None
            master.grad = param.grad.double() / self.scale
        self.optimizer.step()
        for param, master in zip(self.params, self.masters, strict=True):
            param.copy_(master)

    def state_dict(self) -> Any:
        masters = [master.detach().clone() for master in self.masters]
        return {**self.optimizer.state_dict(), "masters": masters, "scale": self.scale}

    @torch.no_grad()
    def load_state_dict(self, told: Any) -> None:
        self.scale = told["scale"]
        self.optimizer.load_state_dict({k: told[k] for k in ("state", "param_groups")})
        for master, saved in zip(self.masters, told["masters"], strict=True):
            master.copy_(saved)


class Quantized(torch.Tensor):
    """Bytes and a scale in the form of numbers, as torchao's 8-bit state."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, signed: bool) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, signed: bool) -> None:
        self.codes, self.scale, self.signed = codes, scale, signed

    def __tensor_flatten__(self) -> Any:
        return ["codes", "scale"], [self.signed]

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, *_: Any) -> Any:
        return cls(inner["codes"], inner["scale"], *context)

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(f"{function} of codes")


class EightBit(torch.optim.SGD):
    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.05)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            if not state:
                codes = torch.zeros(param.shape, dtype=torch.uint8)
                state["moment"] = Quantized(codes, torch.ones(1), signed=False)
            moment = state["moment"]
            moment.scale.mul_(0.9)
            moment.codes.add_(param.grad.abs().mul(100).to(torch.uint8))
            param -= 0.05 * param.grad - 1e-4 * moment.codes * moment.scale


INSIDE: dict[str, tuple[Any, Iterate]] = {
    "SAM by a closure": (Sam, by_closure),
    "SAM in halves": (Sam, in_halves),
    "Lookahead": (Lookahead, plain),
    "ScheduleFree": (ScheduleFree, plain),
    "Accelerated": (Accelerated, plain),
    "several": (Several, plain),
    "masters": (Masters, plain),
    "tensor subclasses": (EightBit, plain),
}


@pytest.mark.parametrize("name", INSIDE)
def test_all_of_its_state_comes_back(name: str, path: Path, settings: Any) -> None:
    make, iterate = INSIDE[name]
    found, told = proved(make, path, settings, iterate)
    assert found == told


def test_inner_state_outside_of_any_state_dict_is_restored(path: Path, settings: Any) -> None:
    """SAM's has none of the momentum, which torch.save would lose."""

    def momentum(job: Job) -> list[Any]:
        state = job.optimizer.base_optimizer.state
        return [exact.image(state[p]["momentum_buffer"]) for p in job.model.parameters()]

    with Job(Sam, path, settings) as job:
        job.run(3, in_halves)
        wanted = momentum(job)
        job.checkpointer.save(now=True)
    found = tierckpt.load(path).optimizers
    assert found.keys() == {"optimizer", "optimizer.base_optimizer"}
    assert "momentum_buffer" in found["optimizer.base_optimizer"]["state"][0]
    with Job(Sam, path, settings, seed=2) as job:
        job.checkpointer.restore()
        assert momentum(job) == wanted
        assert job.optimizer.base_optimizer.param_groups is job.optimizer.param_groups


def test_with_a_wrapper_and_without_it_a_version_is_the_same(path: Path, settings: Any) -> None:
    with Job(Accelerated, path, settings) as job:
        job.run(2)
        wanted = job.image()
    with Job(sgd, path, settings, seed=2) as job:
        assert job.checkpointer.restore() == 2
        assert exact.differences(wanted, job.image()) == []


@pytest.mark.usefixtures("by_layer")
@pytest.mark.parametrize(
    ("make", "change"),
    [(Sam, "first_step"), (ScheduleFree, "eval"), (ScheduleFree, "step")],
)
def test_a_change_of_weights_outside_of_a_step_waits_for_copies(
    make: Any, change: str, path: Path, settings: Any
) -> None:
    with Job(make, path, settings) as job:
        job.checkpointer._active.release_early = False  # copies wait for the barrier
        job.run(2, in_halves if make is Sam else plain)
        wanted = exact.parameters(job.model)
        job.model(torch.ones(5, 6)).sum().backward()
        assert job.checkpointer._active.snapshot is not None
        getattr(job.optimizer, change)()
        assert job.checkpointer._active.snapshot is None
        assert exact.parameters(job.model) != wanted
        assert job.repeated_errors() == []
    with Job(make, path, settings, seed=2) as job:
        assert job.checkpointer.restore() == 2
        assert exact.parameters(job.model) == wanted


def test_methods_are_the_classes_own_again_and_copies_have_them(path: Path, settings: Any) -> None:
    with Job(ScheduleFree, path, settings) as job:
        job.run(1)
        copied = copy.deepcopy(job.optimizer)
        again = pickle.loads(pickle.dumps(job.optimizer))
        for each in (copied, again):
            before = job.image()
            assert each.eval.__self__ is each
            each.eval()
            assert job.image() == before
        optimizer = job.optimizer
        assert "step" in vars(optimizer)
    assert vars(optimizer).keys() == {"base", "train_mode"}


@pytest.mark.usefixtures("by_layer")
def test_a_scheduler_before_and_one_after(path: Path, settings: Any) -> None:
    """The library replaces step(), of the wrapper as well."""
    with Job(Accelerated, path, settings) as job:
        schedule = torch.optim.lr_scheduler.ExponentialLR(job.optimizer, 0.5)
        job.run(1)
        schedule.step()
        assert job.optimizer.param_groups[0]["lr"] == 0.025
        optimizer = job.optimizer
        events: list[tierckpt.Event] = []
        given = {**settings, "path": path.with_name("other"), "on_event": events.append}
        with tierckpt.Checkpointer(job.model, optimizer, agent="inline", **given) as other:
            other._active.release_early = False
            for _ in range(2):
                plain(job.model, optimizer)
                other.step()
            assert other._active.snapshot is not None
            optimizer.step()
            assert other._active.snapshot is None
            assert other.version == 2


def test_an_object_without_an_optimizer_is_refused(path: Path, settings: Any) -> None:
    class Own:
        def step(self) -> None: ...
        def state_dict(self) -> Any: ...
        def load_state_dict(self, told: Any) -> None: ...

    with pytest.raises(UnsupportedStateError, match=r"give a torch\.optim\.Optimizer, a list of"):
        Job(lambda model: Own(), path, settings)  # type: ignore[arg-type, return-value]
    with pytest.raises(UnsupportedStateError, match=r"Own is not a torch\.optim\.Optimizer, and"):
        Job(lambda model: {"it": Own()}, path, settings)  # type: ignore[arg-type, return-value]


# --- steps that never come -----------------------------------------------------------------------


def errors(job: Job) -> list[str]:
    return [e.message for e in job.events if e.severity >= logging.ERROR]


def test_boundaries_without_a_step_of_the_given_optimizer_are_an_error(
    path: Path, settings: Any
) -> None:
    with Job(sgd, path, settings) as job:
        other = torch.optim.AdamW(job.model.parameters())
        for boundaries in range(1, 8):
            plain(job.model, other)
            job.checkpointer.step()
            assert len(errors(job)) == (boundaries >= 4)
        (said,) = errors(job)
        assert "optimizer 'optimizer', a SGD, made no step at 4 boundaries in a row" in said
        assert "a AdamW that the checkpointer was not given steps its parameters (0.weight" in said
        assert "no checkpoint is taken" in said
        assert "optimizer=... with that AdamW" in said
        assert job.checkpointer.version == 0
    given = {**settings, "path": path.with_name("other")}
    with tierckpt.Checkpointer(job.model, other, agent="inline", **given) as ckpt:  # does it
        plain(job.model, other)
        ckpt.step()
        assert ckpt.version == 1


def test_one_of_several_stepped_by_another_is_named(path: Path, settings: Any) -> None:
    def make(model: Any) -> Any:
        return {"first": sgd(model[0]), "second": sgd(model[2])}

    with Job(make, path, settings) as job:
        other = torch.optim.Adam(job.model[2].parameters())
        for _ in range(6):
            plain(job.model, other)
            job.optimizer["first"].step()
            job.checkpointer.step()
        (said,) = errors(job)
        assert "optimizer 'second', a SGD, made no step at 4 boundaries in a row" in said
        assert "all checkpoints have its first state" in said
        assert "optimizer={'second': ..., ...} with that Adam" in said


def test_turns_are_no_error(path: Path, settings: Any) -> None:
    """A given one that waits for its turn, an optimizer of other parameters, and iterations without
    any step."""

    def make(model: Any) -> Any:
        return {"first": sgd(model[0]), "second": sgd(model[2])}

    with Job(make, path, settings) as job:
        foreign = nn.Linear(6, 1)
        elsewhere = sgd(foreign)
        for number in range(24):
            loss = job.model(torch.randn(5, 6)).square().mean() + foreign(torch.ones(6)).sum()
            loss.backward()
            elsewhere.step()
            if number < 8 or number % 8 == 0:
                job.optimizer["first"].step()
            job.checkpointer.step()
        assert job.repeated_errors() == []


def test_a_loop_without_boundaries_is_reported_after_some_steps(path: Path, settings: Any) -> None:
    with Job(sgd, path, settings) as job:
        other = torch.optim.AdamW(job.model.parameters())
        for steps in range(1, 40):
            plain(job.model, other)
            assert len(errors(job)) == (steps >= 32)
        assert "made no step while it made 32 steps" in errors(job)[0]


def test_weights_that_change_without_any_step_are_an_error(path: Path, settings: Any) -> None:
    with Job(sgd, path, settings) as job:
        for boundaries in range(1, 9):
            with torch.no_grad():
                job.model[0].weight.mul_(0.5)
            job.checkpointer.step()
            assert len(errors(job)) == (boundaries >= 5)
        (said,) = errors(job)
        assert "parameters changed (0.weight), but the given optimizers" in said
