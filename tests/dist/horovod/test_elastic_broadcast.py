"""The state that another rank sends to a new rank, or to a rank that differs."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from tests.support import exact
from tests.support.elastic_script import RATE, Adversaries, Script, distributed, lose
from tests.support.rank_pool import RankPool
from tests.support.training import Net, Place, horovod, rank


class Forgetful(Script):
    """An optimizer without state; its steps without gradients change weights."""

    def distribute(self, model: nn.Module) -> Any:
        return distributed(model, "", partial(torch.optim.SGD, weight_decay=0.5))

    def schedule(self, optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def joined(script: Script, new: int, anew: Callable[[], Script]) -> tuple[str, str, str]:
    """Hosts change, and rank `new` is new. Returns the bits of the live state, of the state with
    which both continue, and of the state two batches later."""
    script.train_to(3)
    script.hosts_change()
    live = exact.digest(script.replicated())
    if rank() == new:
        script = anew()
    script.start()
    assert (script.state.restored, script.state.batch) == (None, 3)
    found = exact.digest(script.replicated())
    script.train_to(5)
    later = exact.digest(script.replicated())
    script.end()
    return live, found, later


def without_optimizer_state(place: Place, new: int) -> tuple[bool, tuple[str, str, str]]:
    script = Forgetful(place, seed=1)
    before = exact.digest(script.replicated())
    script.start()
    unmoved = exact.digest(script.replicated()) == before
    return unmoved, joined(script, new, partial(Forgetful, place, seed=9))


def test_an_optimizer_without_state(pool: RankPool, place: Place) -> None:
    """Neither a fresh start nor a broadcast changes weights, and learning rates are sent, too."""
    told = pool.run(without_optimizer_state, place, 0)
    assert [unmoved for unmoved, _ in told] == [True, True]
    (_, (live, found, later)), (_, others) = told
    assert live == found != later
    assert others == (live, found, later)


class Remembering(torch.optim.SGD):
    """An optimizer with a count in its own state_dict(), and a sum under a key but no parameter."""

    count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        kept: Any = self.state
        kept["sum"] = kept.get("sum", torch.zeros(2)) + self.count / 7
        for group in self.param_groups:
            group["lr"] = RATE / self.count + float(kept["sum"][0]) / 1000
        return super().step(closure)

    def state_dict(self) -> Any:
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, told: Any) -> None:
        super().load_state_dict({k: told[k] for k in ("state", "param_groups")})
        self.count = told["count"]


LARGEST = 100


def sent_in_slices() -> tuple[list[list[int]], bool]:
    """The bytes of each broadcast of a tensor, and whether all values of rank 1 arrived, in
    place."""
    sending = importlib.import_module("horovod_ckpt.broadcast")

    def values(of: int) -> dict[str, torch.Tensor]:
        made = torch.Generator().manual_seed(of)
        return {
            "double": torch.randn(7, 9, generator=made, dtype=torch.float64),
            "empty": torch.empty(0),
            "exact": torch.randint(256, (2 * LARGEST,), generator=made, dtype=torch.uint8),
            "half": torch.randn(1200, generator=made).half(),
            "scalar": torch.randn((), generator=made),
            "transposed": torch.randn(11, 13, generator=made).t(),
        }

    mine = values(rank())
    sizes: dict[str, list[int]] = {name: [] for name in mine}
    addresses = [tensor.data_ptr() for tensor in mine.values()]

    def send(named: dict[str, torch.Tensor], root: int) -> None:
        for name, part in named.items():
            sizes[name.split("#")[0]].append(part.nbytes)
        horovod().broadcast_parameters(named, root)

    with (
        mock.patch.object(sending, "MAX_BYTES", LARGEST),
        mock.patch.object(sending, "hvd", mock.Mock(broadcast_parameters=send)),
    ):
        sending.send_tensors(mine, 1)
    came = [exact.image(t) for t in mine.values()] == [exact.image(t) for t in values(1).values()]
    in_place = addresses == [tensor.data_ptr() for tensor in mine.values()]
    return list(sizes.values()), came and in_place


def test_large_tensors_are_sent_in_slices(pool: RankPool) -> None:
    """Horovod would count the bytes of a broadcast over 2 GiB wrongly."""
    slices = [[100] * 5 + [4], [], [100, 100], [100] * 24, [4], [100] * 5 + [72]]
    assert pool.run(sent_in_slices) == [(slices, True)] * 2


class Counting(Net):
    """A module that counts its calls, outside tensors."""

    calls = 0

    def forward(self, x: torch.Tensor, use_branch: bool = False) -> torch.Tensor:
        self.calls += 1
        return super().forward(x, use_branch)

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


class Rich(Script):
    """State beside modules' parameters: the model's, the optimizer's, a parameter of no module."""

    def net(self) -> nn.Module:
        return Counting()

    def distribute(self, model: nn.Module) -> Any:
        self.log_temp = nn.Parameter(torch.randn(3))
        named = [*model.named_parameters(), ("log_temp", self.log_temp)]
        plain = Remembering([param for _, param in named], lr=RATE, momentum=0.9)
        return horovod().DistributedOptimizer(plain, named_parameters=named)

    def forward(self) -> torch.Tensor:
        return super().forward() * self.log_temp.exp().sum()

    def replicated(self) -> dict[str, Any]:
        optimizer = self.state.optimizer
        beside = exact.image([optimizer.count, optimizer.state.get("sum")])
        calls, log_temp = self.state.model.calls, exact.image(self.log_temp)
        return {**super().replicated(), "beside": beside, "calls": calls, "log_temp": log_temp}


def with_rich_state(place: Place, new: int) -> tuple[str, tuple[str, str, str]]:
    """The bits at a fresh start of ranks with different initial values, and those of `joined`."""
    script = Rich(place, seed=1 + rank())
    script.state.model.calls = 10 + rank()
    script.start()
    assert script.state.model.calls == 10
    fresh = exact.digest(script.replicated())
    return fresh, joined(script, new, partial(Rich, place, seed=9))


@pytest.mark.parametrize("new", [1, 0])
def test_state_beside_modules_parameters_is_sent(new: int, pool: RankPool, place: Place) -> None:
    """At a fresh start, and to a new rank."""
    one, other = pool.run(with_rich_state, place, new)
    fresh, (live, found, later) = one
    assert other == one
    assert fresh != live == found != later


class Grown(Net):
    """A module that counts its calls in the state of its own methods, and keeps its input in a
    buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, x: torch.Tensor, use_branch: bool = False) -> torch.Tensor:
        self.calls += 1
        self.seen = torch.cat([self.seen, x.detach().mean()[None]])
        return super().forward(x, use_branch)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}calls"] = self.calls

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.calls = state_dict.pop(f"{prefix}calls")
        super()._load_from_state_dict(state_dict, prefix, *rest)


def sent_own_state(root: int) -> tuple[int, list[float]]:
    """The state that arrived from `root`, which is the only rank that has called it."""
    sending = importlib.import_module("horovod_ckpt.broadcast")
    torch.manual_seed(rank())
    model = Grown()
    if rank() == root:
        model.calls, model.seen = 7, torch.arange(3.0)
    sending.send_model(model, root)
    return model.calls, model.seen.tolist()


def test_extra_state_of_modules_is_sent(pool: RankPool) -> None:
    assert pool.run(sent_own_state, 1) == [(7, [0.0, 1.0, 2.0])] * 2


def only_one_made_both_steps(place: Place) -> tuple[list[str], bool]:
    """Rank 1 stepped D and G, rank 0 only D, when a third was lost with all versions."""
    script = Adversaries(True, place, seed=1).start()
    script.train_to(2)
    g, d, opt_g, opt_d = script.parts
    (d(g(torch.randn(3, 6)))).mean().backward()
    opt_d.step()
    opt_g.synchronize()
    if rank() == 1:
        with opt_g.skip_synchronize():
            opt_g.step()
    script.fail()
    lose(place.shm, place.path)
    digests = [exact.digest(script.replicated())]
    script.state.sync()
    digests.append(exact.digest(script.replicated()))
    said = bool(script.said("no level has a complete version"))
    script.train_to(4)
    digests.append(exact.digest(script.replicated()))
    script.end()
    return digests, said


def test_survivors_that_differ_are_made_equal(pool: RankPool, losable: Place) -> None:
    """Both have made the same number of steps, but have different weights."""
    (one, said), (other, also) = pool.run(only_one_made_both_steps, losable)
    assert one[0] != other[0]
    assert one[1:] == other[1:]
    assert one[1] == one[0]
    assert said
    assert also


class Odd(nn.Module):
    """Types and memory orders that Horovod's own broadcasts refuse or change."""

    def __init__(self) -> None:
        super().__init__()
        made = torch.randn
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.brain = nn.Parameter(made(5).to(torch.bfloat16))
        self.waves = nn.Parameter(made(3, dtype=torch.complex64))
        self.scalar = nn.Parameter(made(()))
        self.empty = nn.Parameter(made(0, 2))
        self.frozen = nn.Parameter(made(2).to(torch.float8_e4m3fn), requires_grad=False)
        self.register_buffer("mask", made(7) > 0)
        self.register_buffer("counts", (100 * made(3)).to(torch.int16))


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": partial(torch.optim.Adam, amsgrad=True),
    "momentum": partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    "lbfgs": partial(torch.optim.LBFGS, lr=0.01, max_iter=3, history_size=2),
}


def trained(kind: str, seed: int, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """An unusual model on this rank alone, and its optimizer."""
    torch.manual_seed(seed)
    model = Odd()
    params = [p for p in model.parameters() if p.requires_grad]
    if kind == "lbfgs":
        params = [model.conv.bias, model.scalar]  # it flattens tensors of one type without gaps
    optimizer = OPTIMIZERS[kind](params)

    def loss() -> float:
        optimizer.zero_grad()
        total = sum((p.abs().float() ** 2).sum() for p in params)
        assert isinstance(total, torch.Tensor)
        total.backward()
        return float(total)

    for _ in range(steps):
        optimizer.step(loss)
    return model, optimizer


def sent_odd_state(kind: str, root: int, steps: int) -> tuple[bool, list[tuple[int, ...]]]:
    """Whether the state of `root` arrived if others made this number of steps; and the memory order
    of the convolution's weights and their state."""
    sending = importlib.import_module("horovod_ckpt.broadcast")
    model, optimizer = trained(kind, seed=rank(), steps=2 if rank() == root else steps)
    wanted = exact.replicated(*trained(kind, seed=root, steps=2))
    assert (exact.replicated(model, optimizer) == wanted) == (rank() == root)
    sending.send_optimizer_state("optimizer", optimizer, root)
    sending.send_model(model, root)
    state = optimizer.state[model.conv.weight]
    alike = [v for v in state.values() if isinstance(v, torch.Tensor) and v.dim() == 4]
    strides = [t.stride() for t in (model.conv.weight, *alike)]
    return exact.replicated(model, optimizer) == wanted, strides


@pytest.mark.parametrize(
    ("kind", "root", "steps"),
    [("adam", 0, 0), ("adam", 1, 1), ("momentum", 1, 0), ("lbfgs", 0, 1)],
)
def test_any_type_and_memory_order_is_sent(
    kind: str, root: int, steps: int, pool: RankPool
) -> None:
    """To ranks with an optimizer without state, and to those with a different state."""
    told = pool.run(sent_odd_state, kind, root, steps)
    assert [came for came, _ in told] == [True, True]
    assert {stride for _, strides in told for stride in strides} == {(27, 1, 9, 3)}
