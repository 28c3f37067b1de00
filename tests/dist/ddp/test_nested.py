"""DDP modules inside the given model: the two of a GAN, a wrapped backbone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import ddp_ckpt
import tierckpt
from tests.support import exact
from tests.support.rank_pool import RankPool
from tests.support.training import (
    ROWS,
    WIDTH,
    Attached,
    Job,
    Net,
    Place,
    attach,
    crash_after,
    only_layers_release,
    rank,
    through_a_crash,
    train,
)

CRASH = 4
END = 7
many_buckets = {"bucket_cap_mb": 0.003}


class Generator(nn.Module):
    """A generator with normalizations, and a part with the name of an attribute of DDP."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.module = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Tanh())
        self.body = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        return self.body(self.module(noise))


@dataclass
class Gan(Job):
    """Two networks that are trained in turns; `optimizers` are those of generator and
    discriminator."""

    freezes: bool = True
    """The discriminator while the generator is trained: its gradients are neither computed nor
    reduced then."""

    @property
    def g(self) -> nn.Module:
        return self.model["g"]

    @property
    def d(self) -> nn.Module:
        return self.model["d"]

    def batch(self, iteration: int, part: int) -> torch.Tensor:
        source = torch.Generator().manual_seed(10_000 * rank() + 100 * part + iteration)
        width = next(self.g.parameters()).shape[1]
        return torch.randn(ROWS, width, generator=source)

    def backward_d(self, iteration: int) -> None:
        with torch.no_grad():
            made = self.g(self.batch(iteration, 0))
        self._zero_grad(1)
        judged = self.d(torch.cat([self.batch(iteration, 1), made]))
        (judged[:ROWS] - 1).square().mean().add(judged[ROWS:].square().mean()).backward()

    def backward_g(self, iteration: int) -> None:
        self._zero_grad(0)
        self.d.requires_grad_(not self.freezes)
        (self.d(self.g(self.batch(iteration, 2))) - 1).square().mean().backward()
        self.d.requires_grad_(True)

    def _zero_grad(self, which: int) -> None:
        self.optimizers[which].zero_grad(set_to_none=not self.keeps_gradients)

    def iterate(self, iteration: int) -> str:
        self.backward_d(iteration)
        self.optimizers[1].step()
        self.backward_g(iteration)
        gradients = exact.digest(exact.gradients(self.bare))
        self.optimizers[0].step()
        return gradients


def make_gan(seed: int = 1, freezes: bool = True, keeps: bool = False, **ddp: Any) -> Gan:
    torch.manual_seed(seed)
    nets = {"g": Generator(), "d": Net()}
    torch.manual_seed(1000 * seed + rank())
    optimizers = [torch.optim.Adam(net.parameters(), lr=0.01) for net in nets.values()]
    both = nn.ModuleDict({n: DistributedDataParallel(net, **ddp) for n, net in nets.items()})
    return Gan(both, optimizers, keeps_gradients=keeps, freezes=freezes)


def attach_gan(gan: Gan, place: Place, **settings: Any) -> Attached:
    return attach(gan, place, optimizer=dict(zip("gd", gan.optimizers, strict=True)), **settings)


def course_of(gan: Gan, iterations: range) -> dict[int, str]:
    course = {}
    for iteration in iterations:
        gan.iterate(iteration)
        course[iteration + 1] = gan.digest()
    return course


# --- a GAN ---------------------------------------------------------------------------------------


VARIANTS: dict[str, tuple[int, dict[str, Any]]] = {
    "default": (2, {}),
    "gradients of both in one pass": (3, {"freezes": False, **many_buckets}),
    "gradients that stay views of buckets": (
        3,
        {"freezes": False, "keeps": True, "gradient_as_bucket_view": True, **many_buckets},
    ),
}
"""The number of ranks, and the options."""


def trained_with_and_without(variant: str, place: Place) -> dict[str, Any]:
    _, options = VARIANTS[variant]
    return through_a_crash(
        lambda seed: make_gan(**options, seed=seed), place, CRASH, END, attach_gan
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_networks_that_take_turns_resume_to_the_bit(
    variant: str, ranks: Any, place: Place
) -> None:
    """With three ranks that needs the buckets of each network, and the same way to compute
    means."""
    place, (size, _) = place, VARIANTS[variant]
    for told in ranks(size).run(trained_with_and_without, variant, place):
        assert told["complaints"] == []
        assert [text for text in told["said"] if "communication hook" in text] == []
        assert told["restored"] == (CRASH, {"memory": size})
        assert told["found"] == told["plain"][CRASH - 1][1]
        assert told["course"] == told["plain"]


class Wide(Generator):
    """A network in which each rank's part of a weight fills a block of its own."""

    def __init__(self) -> None:
        super().__init__(width=640)


@only_layers_release()
def released_by_each_backward(place: Place) -> list[dict[str, bool]]:
    """For each network: may all of its blocks be copied? At the boundary, after its own backward
    pass, and after that of the other."""
    both = nn.ModuleDict({name: DistributedDataParallel(Wide()) for name in "gd"})
    optimizers = [torch.optim.SGD(net.parameters(), lr=1e-3) for net in both.values()]
    gan = Gan(both, list(optimizers))
    attached = attach_gan(gan, place, release="backward")
    train(gan, attached.ckpt, range(2))
    snapshot = attached.ckpt._active.snapshot
    assert snapshot is not None

    def blocks(net: nn.Module) -> list[int]:
        matrices = [param for param in net.parameters() if param.dim() > 1]
        return [block for param in matrices for block in snapshot.plan.blocks_of[id(param)]]

    def released() -> dict[str, bool]:
        return {
            name: not snapshot.held_blocks().intersection(blocks(net)) for name, net in both.items()
        }

    told = [released()]
    gan.backward_d(2)
    told.append(released())
    gan.backward_g(2)
    told.append(released())
    attached.ckpt.abandon()
    return told


def test_layers_of_each_are_copied_while_its_gradients_are_reduced(
    pool: RankPool, place: Place
) -> None:
    for told in pool.run(released_by_each_backward, place):
        assert told == [
            {"g": False, "d": False},
            {"g": False, "d": True},
            {"g": True, "d": True},
        ]


# --- names ---------------------------------------------------------------------------------------


class Named(nn.Module):
    """A wrapper that calls its network as DDP does."""

    def __init__(self) -> None:
        super().__init__()
        self.module = Net()


def names_here() -> list[list[str]]:
    """The saved names, independent of the wrappers; and those of a module that only looks like
    DDP."""
    wrap = DistributedDataParallel
    plain = wrap(Net(norm=nn.BatchNorm1d))
    nested = nn.ModuleDict({"net": wrap(Net(norm=nn.BatchNorm1d))})
    both = wrap(torch.compile(Net(norm=nn.BatchNorm1d), backend="eager"))
    found = [plain, nested, both, nn.ModuleDict({"net": Named()}), nn.ModuleDict({"net": Net()})]
    states = [tierckpt.state.training_state.TrainingState(model, {}) for model in found]
    walks = [(state, state.walk()) for state in states]
    return [
        [name for name, *_ in [*state.entries(walk), *state.buffer_entries(walk)]]
        for state, walk in walks
    ]


def test_names_are_those_without_ddp_wherever_it_is(pool: RankPool) -> None:
    for plain, nested, both, own, bare in pool.run(names_here):
        assert plain == both
        assert nested == [name.replace("/", "/net.", 1) for name in plain]
        assert "model/body.0.weight" in plain
        assert "buffer/body.3.running_mean" in plain
        assert own == [name.replace("/net.", "/net.module.", 1) for name in bare]


# --- hooks, groups -------------------------------------------------------------------------------


def power() -> powerSGD_hook.PowerSGDState:
    return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)


def with_hooks(place: Place | None, seed: int) -> tuple[Gan, Attached | None]:
    """The hook of each network, registered after the checkpointer is made."""
    gan, states = make_gan(seed=seed), {name: power() for name in "gd"}
    saved = {name: ddp_ckpt.HookState(state) for name, state in states.items()}
    attached = attach_gan(gan, place, extra_per_rank=saved) if place else None
    for name, state in states.items():
        gan.model[name].register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return gan, attached


def trained_with_hooks(place: Place) -> tuple[Any, ...]:
    plain, _ = with_hooks(None, 1)
    expected = course_of(plain, range(END))
    gan, first = with_hooks(place, 1)
    course = crash_after(gan, first, CRASH)
    gan, second = with_hooks(place, 2)
    restored = second.ckpt.restore()
    course.update(train(gan, second.ckpt, range(restored, END)))
    second.ckpt.abandon()
    return expected, course, [e.text() for e in first.events + second.events if e.severity > 20]


def test_each_may_have_a_hook_that_remembers_something(pool: RankPool, place: Place) -> None:
    for expected, course, repeated_errors in pool.run(trained_with_hooks, place):
        assert course == expected
        assert repeated_errors == []


def refused(place: Place) -> tuple[str, str, list[Path]]:
    """One hook for both; a module with other ranks; and the files that are left."""
    gan = make_gan()
    with pytest.raises(tierckpt.ConfigError) as one_hook:
        attach_gan(gan, place, comm_hook=(power(), powerSGD_hook.powerSGD_hook))
    alone = [dist.new_group([member]) for member in range(dist.get_world_size())][rank()]
    gan.model["d"] = DistributedDataParallel(Net(), process_group=alone)
    with pytest.raises(tierckpt.ConfigError) as other_ranks:
        attach_gan(gan, place)
    dist.destroy_process_group(alone)
    left = [path for folder in (place.path, place.shm) for path in Path(folder).rglob("*")]
    return str(one_hook.value), str(other_ranks.value), left


def test_one_hook_for_several_and_several_groups_are_refused(pool: RankPool, place: Place) -> None:
    told = pool.run(refused, place)
    for one_hook, other_ranks, left in told:
        assert "several DDP modules (g, d)" in one_hook
        assert "register_comm_hook" in one_hook
        # The first rank's text, on all ranks.
        assert "'g' and 'd' have process groups of different ranks, [0, 1] and [0]" in other_ranks
        assert left == []


def groups_of_the_same_ranks(place: Place) -> int:
    groups = [dist.new_group() for _ in range(2)]
    nets = {
        n: DistributedDataParallel(Net(), process_group=g)
        for n, g in zip("gd", groups, strict=True)
    }
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets.values()]
    gan = Gan(nn.ModuleDict(nets), list(optimizers))
    attached = attach_gan(gan, place)
    for _ in range(2):
        for optimizer in optimizers:
            optimizer.step()
        attached.ckpt.step()
    version = attached.ckpt.version
    attached.ckpt.abandon()
    for group in groups:
        dist.destroy_process_group(group)
    return version


def test_groups_may_be_several_if_their_ranks_are_the_same(pool: RankPool, place: Place) -> None:
    assert pool.run(groups_of_the_same_ranks, place) == [2, 2]
