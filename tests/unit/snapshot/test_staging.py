"""What is staged at a boundary is the same, whether all is looked at or only what has changed."""

from __future__ import annotations

import random
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tierckpt.snapshot import CopyPlan, Staging, describe_engine, find_engine
from tierckpt.state import EncodedTree, KeptFile, TrainingState


class Part(torch.nn.Module):
    """A module with all that a boundary looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)
        self.drop = torch.nn.Dropout(0.2)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(3)])
        self.register_buffer("mask", torch.ones(4))
        self.register_buffer("cache", torch.ones(4), persistent=False)


class Other(Part):
    """A class with its own way of saving."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}extra"] = torch.ones(2)


class OtherAdam(torch.optim.Adam):
    """An optimizer with more than torch's state. A header has the name of the first class."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "more": 7}


OtherAdam.__name__ = "Adam"


class Job:
    """A model and an optimizer after one step."""

    def __init__(self, lr: Any = 0.1, extras: Callable[[Job], list[dict[str, Any]]] | None = None):
        torch.manual_seed(0)
        self.model: Any = torch.nn.Sequential(Part(), torch.nn.Linear(4, 2))
        groups = [{"params": [*each.parameters()]} for each in self.model]
        self.optimizer: Any = torch.optim.Adam(groups, lr=lr)
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        extra = extras(self) if extras is not None else []
        self.state = TrainingState(self.model, {"optimizer": self.optimizer}, *extra)

    @property
    def part(self) -> Any:
        return self.model[0]

    @property
    def first(self) -> dict[str, Any]:
        """The optimizer's state of the first parameter."""
        return next(iter(self.optimizer.state.values()))  # type: ignore[no-any-return]


def staging(state: TrainingState) -> Staging:
    return Staging(state, SimpleNamespace(rank=0, size=1), None, None)  # type: ignore[arg-type]


def staged(it: Staging, whole: bool = False) -> dict[str, Any]:
    """Everything that a version takes from a boundary."""
    plan, node, arena = it.stage(None, whole)
    copies = {id(each) for each in plan.buffers.staged.values()}
    live = [t for t in plan.sources if id(t) not in copies]
    return {
        "tree": EncodedTree(node, arena).whole,
        "header": plan.encoded_header(0),
        "trained": plan.trained_parameters(),
        "counters": plan.baseline,
        "sources": [(t.data_ptr(), t.shape, t.stride(), t.dtype) for t in live],
        "buffers": {name: t.tolist() for name, t in plan.buffers.staged.items()},
    }


@pytest.fixture
def every_object(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """What another staging of the same state finds, which looks at all objects."""

    def found(state: TrainingState, whole: bool = False) -> dict[str, Any]:
        with monkeypatch.context() as patch:
            patch.setattr(CopyPlan, "_make_watch", lambda self, state: None)
            patch.setattr(state, "looks", state.looks)  # the names are looked up again
            return staged(staging(state), whole)

    return found


def set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    tensor.data = data


def set_item(held: Any, key: Any, value: Any) -> None:
    held[key] = value


def rename(held: Any, old: Any, new: Any) -> None:
    held[new] = held.pop(old)


def swap_groups(job: Job) -> None:
    one, other = job.optimizer.param_groups
    one["params"], other["params"] = other["params"], one["params"]


def swap_members(job: Job) -> None:
    params = job.optimizer.param_groups[0]["params"]
    params[0], params[2] = params[2], params[0]


def new_state(job: Job) -> None:
    job.optimizer.state = defaultdict(dict, {k: {**v} for k, v in job.optimizer.state.items()})


def load_state(job: Job) -> None:
    job.optimizer.load_state_dict(job.optimizer.state_dict())


def flip(job: Job) -> None:
    job.model.eval()
    job.model.train()


def draw_and_return(job: Job) -> None:
    with torch.random.fork_rng(devices=()):
        torch.rand(5)


SAME: dict[str, Callable[[Job], Any]] = {
    "nothing": lambda job: None,
    "values": lambda job: job.part.layer.weight.data.add_(1),
    "values of buffers": lambda job: job.part.mask.add_(1),
    "a step": lambda job: job.optimizer.step(),
    "a rate": lambda job: set_item(job.optimizer.param_groups[1], "lr", 0.3),
    "an attribute of a module": lambda job: setattr(job.part, "last", torch.ones(3)),
    "an attribute of the optimizer": lambda job: setattr(job.optimizer, "last", 1),
    "an option": lambda job: setattr(job.part.drop, "p", 0.4),
    "modes": flip,
    "a part in eval": lambda job: job.part.norm.eval(),
    "a draw of torch": lambda job: torch.rand(1),
    "a normal draw of torch": lambda job: torch.randn(1),
    "a draw and a return": draw_and_return,
    "a seed": lambda job: torch.manual_seed(5),
    "a draw of Python": lambda job: random.random(),
    "a normal draw of Python": lambda job: random.gauss(0, 1),
    "a draw of numpy": lambda job: np.random.rand(),
    "a normal draw of numpy": lambda job: np.random.randn(),
    "a seed of numpy": lambda job: np.random.seed(3),
    "the same state": lambda job: job.optimizer.state.update(dict(job.optimizer.state)),
}
"""Changes that a plan survives, without a look at all objects."""

SEEN: dict[str, Callable[[Job], Any]] = {
    "a parameter replaced": lambda job: setattr(
        job.part.layer, "weight", torch.nn.Parameter(torch.zeros(4, 4))
    ),
    "a parameter None": lambda job: setattr(job.part.layer, "bias", None),
    "parameters renamed": lambda job: rename(job.part.layer._parameters, "bias", "b"),
    "a dict of parameters replaced": lambda job: setattr(
        job.part.layer, "_parameters", {"weight": job.part.layer.weight}
    ),
    "a module replaced": lambda job: set_item(job.part.layers, 1, torch.nn.Linear(4, 4)),
    "a module more": lambda job: job.part.layers.append(torch.nn.Linear(4, 4)),
    "a module less": lambda job: job.part.layers.__delitem__(1),
    "a dict of modules replaced": lambda job: setattr(
        job.part.layers, "_modules", {"0": job.part.layers[0]}
    ),
    "new data": lambda job: set_data(job.part.layer.weight, torch.zeros(4, 4)),
    "transposed data": lambda job: set_data(job.part.layer.weight, job.part.layer.weight.data.t()),
    "a parameter frozen": lambda job: job.part.layer.weight.requires_grad_(False),
    "a state replaced": lambda job: set_item(job.first, "exp_avg", torch.zeros(4, 4)),
    "a state moved": lambda job: set_data(job.first["exp_avg"], torch.zeros(4, 4)),
    "a state more": lambda job: set_item(job.first, "more", torch.zeros(2)),
    "a number more": lambda job: set_item(job.first, "more", 3),
    "a state less": lambda job: job.first.pop("exp_avg"),
    "a state renamed": lambda job: rename(job.first, "exp_avg", "mean"),
    "no state": lambda job: job.optimizer.state.clear(),
    "one parameter's state less": lambda job: job.optimizer.state.popitem(),
    "another dict of states": new_state,
    "a state beside the parameters": lambda job: set_item(job.optimizer.state, "all", 3),
    "a loaded state": load_state,
    "groups swapped": swap_groups,
    "members swapped": swap_members,
    "a member less": lambda job: job.optimizer.param_groups[0]["params"].pop(),
    "a group less": lambda job: job.optimizer.param_groups.pop(),
    "a group more": lambda job: job.optimizer.add_param_group(
        {"params": [torch.nn.Parameter(torch.zeros(3))]}
    ),
    "other groups": lambda job: setattr(
        job.optimizer, "param_groups", job.optimizer.param_groups[:1]
    ),
    "a buffer replaced": lambda job: setattr(job.part, "mask", torch.zeros(4)),
    "a buffer of another size": lambda job: setattr(job.part, "mask", torch.zeros(2)),
    "a buffer moved": lambda job: set_data(job.part.mask, torch.zeros(4)),
    "a buffer None": lambda job: setattr(job.part, "mask", None),
    "a buffer more": lambda job: job.part.layer.register_buffer("more", torch.ones(1)),
    "a buffer not stored": lambda job: job.part._non_persistent_buffers_set.add("mask"),
    "a buffer stored": lambda job: job.part._non_persistent_buffers_set.discard("cache"),
    "another set of names": lambda job: setattr(job.part, "_non_persistent_buffers_set", set()),
    "another class": lambda job: setattr(job.part, "__class__", Other),
    "a hook": lambda job: job.part.layer.register_state_dict_pre_hook(lambda *_: None),
    "a hook that adds": lambda job: job.part.layer._register_state_dict_hook(
        lambda module, state, *_: state.update(more=torch.ones(1))
    ),
    "a method of a module": lambda job: setattr(job.part, "state_dict", lambda **_: {}),
    "another class of the optimizer": lambda job: setattr(job.optimizer, "__class__", OtherAdam),
    "a hook of the optimizer": lambda job: job.optimizer.register_state_dict_post_hook(
        lambda optimizer, state: state.update(more=5)
    ),
    "a method of the optimizer": lambda job: setattr(
        job.optimizer,
        "state_dict",
        lambda: {**torch.optim.Adam.state_dict(job.optimizer), "more": 9},
    ),
}
"""Changes after which all objects are looked at."""


@pytest.fixture
def job() -> Job:
    if find_engine() is None:
        pytest.skip(describe_engine())
    return Job()


def warmed_up(job: Job) -> Staging:
    """A staging after some boundaries."""
    it = staging(job.state)
    for _ in range(3):
        staged(it)
    assert it.plan is not None
    assert it.plan.watch is not None
    return it


@pytest.mark.parametrize("change", [*SAME, *SEEN])
@pytest.mark.parametrize("whole", [False, True])
def test_every_change_is_staged(
    change: str, whole: bool, job: Job, every_object: Callable[..., dict[str, Any]]
) -> None:
    it = warmed_up(job)
    watch = it.plan and it.plan.watch
    {**SAME, **SEEN}[change](job)
    found = staged(it, whole)
    assert (it.plan and it.plan.watch is watch) == (change in SAME)
    assert found == every_object(job.state, whole)
    assert staged(it) == found


class Setter:
    """An object whose `state_dict()` changes other parts of the state."""

    rate = 0.5

    def __init__(self, job: Job) -> None:
        self.job = job

    def state_dict(self) -> dict[str, Any]:
        """Sets a rate, and registers a hook."""
        self.job.optimizer.param_groups[0]["lr"] = self.rate
        if self.rate == 0.25 and not self.job.part.layer._state_dict_hooks:
            SEEN["a hook that adds"](self.job)
        return {}

    def load_state_dict(self, state: Any) -> None:
        """Nothing."""


def schedule(job: Job) -> torch.optim.lr_scheduler.LRScheduler:
    found = torch.optim.lr_scheduler.StepLR(job.optimizer, 3)
    job.optimizer.step()
    return found


EXTRAS: dict[str, Callable[[Job], list[dict[str, Any]]]] = {
    "none": lambda job: [],
    "a scheduler": lambda job: [{"scheduler": schedule(job)}, {"generator": torch.Generator()}],
    "one that changes others": lambda job: [{}, {"setter": Setter(job)}],
}


@pytest.mark.parametrize("extras", EXTRAS)
@pytest.mark.parametrize("missing", ["", "find", "find_tag"])
def test_many_changes_are_staged(
    missing: str,
    extras: str,
    job: Job,
    every_object: Callable[..., dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`missing`: of the C library, or of this Python."""
    if missing:
        monkeypatch.setattr(f"tierckpt.snapshot.tensor_memory.{missing}", lambda: None)
    job = Job(extras=EXTRAS[extras])
    it, order = staging(job.state), random.Random(4)
    for number in range(60):
        SAME[order.choice([*SAME])](job)
        for each in (*job.state.extra.values(), *job.state.extra_per_rank.values()):
            if isinstance(each, Setter):
                each.rate = [0.5, 0.125, 0.25][number // 20]
            elif not isinstance(each, torch.Generator):
                each.step()
        assert staged(it) == every_object(job.state)
        if number == 10:
            assert (it.plan and it.plan.watch is None) == bool(missing)


def test_a_class_of_an_optimizer_that_changes_is_seen(
    job: Job,
    every_object: Callable[..., dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    it, theirs = warmed_up(job), torch.optim.Adam.state_dict
    more = lambda self: {**theirs(self), "more": 1}  # noqa: E731
    monkeypatch.setattr(torch.optim.Adam, "state_dict", more)
    found = staged(it)
    assert b'"more"' in found["tree"]
    assert found == every_object(job.state)


def test_a_rate_in_a_tensor_is_read_at_every_boundary(
    every_object: Callable[..., dict[str, Any]],
) -> None:
    job = Job(lr=torch.tensor(0.1))
    it = staging(job.state)
    for _ in range(5):
        job.optimizer.param_groups[0]["lr"].mul_(2)
        assert staged(it) == every_object(job.state)


def replace_python(patch: pytest.MonkeyPatch) -> Callable[[], Any]:
    mine = random.Random(3)
    patch.setattr(random, "getstate", mine.getstate)
    return mine.random


def replace_numpy(patch: pytest.MonkeyPatch) -> Callable[[], Any]:
    mine = np.random.RandomState(3)
    patch.setattr(np.random, "get_state", mine.get_state)
    return mine.rand


def replace_bits(patch: pytest.MonkeyPatch) -> Callable[[], Any]:
    np.random.set_bit_generator(np.random.MT19937(3))
    return np.random.rand


def replace_torch(patch: pytest.MonkeyPatch) -> Callable[[], Any]:
    mine = torch.Generator()
    patch.setattr(torch, "default_generator", mine)
    return lambda: torch.rand(1, generator=mine)


@pytest.mark.parametrize("replace", [replace_python, replace_numpy, replace_bits, replace_torch])
def test_a_generator_that_is_replaced_is_read(
    replace: Callable[[pytest.MonkeyPatch], Callable[[], Any]],
    job: Job,
    every_object: Callable[..., dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    it, bits = warmed_up(job), np.random.get_bit_generator()
    try:
        draw = replace(monkeypatch)
        for _ in range(4):
            draw()
            assert staged(it) == every_object(job.state)
    finally:
        np.random.set_bit_generator(bits)


INTERRUPTED: dict[str, Callable[[Job], Any]] = {
    "a rate": lambda job: set_item(job.optimizer.param_groups[1], "lr", 0.0125),
    "an option": lambda job: setattr(job.part.drop, "p", 0.9),
    "a draw": lambda job: random.random(),
}


@pytest.mark.parametrize("change", INTERRUPTED)
def test_a_change_is_seen_after_an_interrupt_during_the_look(
    change: str, job: Job, every_object: Callable[..., dict[str, Any]]
) -> None:
    it = warmed_up(job)
    assert it.plan is not None
    assert it.plan.watch is not None
    guard = it.plan.watch._guard
    look = guard._look

    def interrupted(at: int) -> int:
        look(at)
        raise KeyboardInterrupt

    guard._look = interrupted
    INTERRUPTED[change](job)
    with pytest.raises(KeyboardInterrupt):
        staged(it)
    for _ in range(3):
        assert staged(it) == every_object(job.state)


def test_options_are_read_after_a_boundary_that_failed(
    job: Job, every_object: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    it = warmed_up(job)
    assert it.plan is not None
    with monkeypatch.context() as patch:

        def fails() -> None:
            raise MemoryError

        patch.setattr(it.plan.buffers, "stage", fails)
        job.part.drop.p = 0.6
        with pytest.raises(MemoryError):
            staged(it)
    for chance in (0.6, 0.7, 0.8):
        job.part.drop.p = chance
        assert staged(it) == every_object(job.state)


def test_files_that_are_gone_are_not_in_the_tree(
    job: Job, every_object: Callable[..., dict[str, Any]]
) -> None:
    it = warmed_up(job)
    job.state.routed.kept = {"index.bin": KeptFile(torch.arange(50, dtype=torch.uint8), 0o600)}
    for _ in range(2):
        assert b"index.bin" in staged(it)["tree"]
    job.state.routed.replace([])
    for _ in range(3):
        found = staged(it)
        assert b"index.bin" not in found["tree"]
        assert found == every_object(job.state)


def test_attributes_of_an_optimizer_that_are_replaced_are_seen(
    job: Job, every_object: Callable[..., dict[str, Any]]
) -> None:
    it = warmed_up(job)
    job.optimizer.__dict__ = dict(job.optimizer.__dict__)
    job.optimizer.param_groups = [{**group, "lr": 0.777} for group in job.optimizer.param_groups]
    assert staged(it) == every_object(job.state)


def test_streams_that_were_kept_are_no_later_ones(
    job: Job, every_object: Callable[..., dict[str, Any]]
) -> None:
    """The generators drew before the forward pass, and were set back."""
    it = warmed_up(job)
    before = torch.get_rng_state()
    torch.rand(3)
    it.keep_streams()
    torch.set_rng_state(before)
    it.drop_streams()
    assert staged(it) == every_object(job.state)


def test_a_watch_that_does_not_fit_is_made_less_often(
    job: Job, every_object: Callable[..., dict[str, Any]]
) -> None:
    it = warmed_up(job)
    with_watch = 0
    for _ in range(40):
        job.part.mask = torch.ones(4)
        assert staged(it) == every_object(job.state)
        with_watch += bool(it.plan and it.plan.watch)
    assert 3 <= with_watch <= 6


def test_dicts_that_can_be_reordered_are_looked_at(
    job: Job, every_object: Callable[..., dict[str, Any]]
) -> None:
    job.part.layers._modules = OrderedDict(job.part.layers._modules)
    it = staging(job.state)
    for _ in range(3):
        staged(it)
    assert it.plan is not None
    assert it.plan.watch is None
    job.part.layers._modules.move_to_end("0")
    assert staged(it) == every_object(job.state)
