"""Replicas that differ are found within a round, and named; equal replicas raise no alarm."""

from __future__ import annotations

import logging
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_ckpt
import tierckpt
from tests.dist.state.test_state_matrix import ALIKE, NOT_BY_DDP, RANKS, RanksBench, says
from tests.support import exact
from tests.support.parts import monitor_of
from tests.support.rank_pool import HOROVODRUN
from tests.support.state_matrix.matrix import CASES, PRODUCT
from tests.support.thorough import everything
from tests.support.training import Net, Place, import_adapter, make_horovod_job
from tierckpt.replicas import Finding, replica_check, replicated_state

ROUND = 5
BEHIND = 3
"""Boundaries between a look and the report of a difference."""
KINDS = ("weight", "optimizer state", "gradient")
FOLLOWS = ("alike again", "in all of the state, what differed")
"""Messages after a drift; the second one because the whole state is looked at before it is
mended."""


def net() -> nn.Module:
    torch.manual_seed(1)
    layers = [nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3)]
    return nn.Sequential(*layers)


class Trial:
    """A job with replicas that are damaged and mended repeatedly."""

    def __init__(self, place: Place, optimizer: str, **settings: Any) -> None:
        self.events: list[tierckpt.Event] = []
        self.model = DistributedDataParallel(net())
        kinds = {
            "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
            "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
        }
        self.optimizer = kinds[optimizer](self.model.parameters())
        self.ckpt = ddp_ckpt.Checkpointer(
            self.model,
            self.optimizer,
            path=place.path,
            shm_dir=place.shm,
            agent="inline",
            **{"replicas": f"warn every {ROUND}", "local_every_seconds": 0, **settings},
            on_event=self.events.append,
        )
        self.rank, self.iteration = dist.get_rank(), 0
        self.found: list[Finding] = []
        drift = monitor_of(self.ckpt)._drift
        found = drift.found
        drift.found = lambda each: (self.found.append(each), found(each))[1]

    def iterate(self, damage: Any = None, before_step: Any = None) -> None:
        self.optimizer.zero_grad()
        source = torch.Generator().manual_seed(1000 * self.rank + self.iteration)
        self.model(torch.randn(4, 12, generator=source)).square().mean().backward()
        if before_step is not None:
            before_step()
        self.optimizer.step()
        if damage is not None:
            damage()
        self.ckpt.step()
        self.iteration += 1

    def tensors(self) -> dict[str, torch.Tensor]:
        names = {id(p): n for n, p in self.model.module.named_parameters()}
        found = {f"model/{n}": p for n, p in self.model.module.named_parameters()}
        for param, state in self.optimizer.state.items():
            found.update({f"optimizer/{names[id(param)]}/{k}": v for k, v in state.items()})
        return found

    def differing(self) -> list[str]:
        """The true difference."""
        mine = {name: exact.tensor_image(t) for name, t in self.tensors().items()}
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, mine)
        return [name for name in mine if any(each[name] != told[0][name] for each in told)]

    def mend(self) -> None:
        """Restore all live state from `kept`: a flipped bit may have made a NaN."""
        for name, tensor in self.tensors().items():
            tensor.data.copy_(self.kept[name])

    def keep(self) -> None:
        self.kept = {name: tensor.detach().clone() for name, tensor in self.tensors().items()}

    def drifts(self) -> list[tierckpt.Event]:
        return [e for e in self.events if e.name == "drifted"]


def flip(tensor: torch.Tensor, element: int, bit: int) -> None:
    """One bit of one element of 32."""
    bits = tensor.detach().view(torch.int32).view(-1)
    bits[element] ^= (1 << bit) - (1 << 32 if bit == 31 else 0)


def damaged(place: Place, optimizer: str, trials: int, seed: int, together: bool) -> dict[str, Any]:
    """Flip one bit on one rank, check the finding, repair it, and repeat. Without `together`,
    slices are compared one by one, though they are small."""
    with pytest.MonkeyPatch.context() as patch:
        if not together:
            patch.setattr(replica_check, "LOOK_BYTES", 1)
        return _damaged(Trial(place, optimizer), trials, seed)


def _damaged(trial: Trial, trials: int, seed: int) -> dict[str, Any]:
    draw = random.Random(seed)
    told: dict[str, Any] = {"found": 0, "healed": 0, "later": 0, "wrong": [], "longest": 0}
    for _ in range(3):
        trial.iterate()
    trial.keep()
    for _ in range(trials):
        assert monitor_of(trial.ckpt).finding is None
        kind, victim = draw.choice(KINDS), draw.randrange(dist.get_world_size())
        names = [n for n, _ in trial.model.module.named_parameters()]
        name, bit = draw.choice(names), draw.randrange(31)
        param = trial.model.module.get_parameter(name)
        element = draw.randrange(param.numel())
        key = draw.choice(sorted(trial.optimizer.state[param]))
        state = trial.optimizer.state[param][key]

        def hit(tensor: torch.Tensor, at: int = element, bit: int = bit, by: int = victim) -> None:
            if trial.rank == by:
                flip(tensor, at % tensor.numel(), bit)

        before = len(trial.drifts())
        if kind == "gradient":
            trial.iterate(before_step=lambda param=param: hit(param.grad))
        else:
            trial.iterate(damage=partial(hit, param if kind == "weight" else state))
        started = trial.differing()
        steps = 0
        # The last bit may be rounded away in optimizer state after it has come to a weight, and
        # that weight's slice was looked at just before: then it takes another round.
        while len(trial.drifts()) == before and steps < 2 * ROUND + BEHIND:
            if steps == ROUND + BEHIND and set(started) & set(trial.differing()):
                break
            trial.iterate()
            steps += 1
        if len(trial.drifts()) > before:
            told["found"] += 1
            told["longest"] = max(told["longest"], steps)
            told["later"] += steps > ROUND + BEHIND
            finding = trial.found[-1]
            right = all(f"/{name}" in each for each in finding.names[:1])
            odd = (victim,) if dist.get_world_size() > 2 else None
            if not right or finding.odd != odd:
                told["wrong"].append((kind, name, key, bit, victim, finding.text()))
        elif trial.differing():
            told["wrong"].append((kind, name, key, bit, "not found", started, trial.differing()))
        else:
            told["healed"] += 1
        trial.mend()
        for _ in range(2 * ROUND + BEHIND):
            if monitor_of(trial.ckpt).finding is None and not monitor_of(trial.ckpt).asking:
                break
            trial.iterate()
        trial.mend()
    told["complaints"] = [
        e.text()
        for e in trial.events
        if e.severity >= logging.WARNING
        and e.name != "drifted"
        and not any(part in e.text() for part in FOLLOWS)
    ]
    trial.ckpt.abandon()
    return told


@pytest.mark.parametrize(("size", "optimizer", "together"), [(2, "adamw", False), (3, "sgd", True)])
def test_one_flipped_bit_is_found_within_a_round(
    size: int, optimizer: str, together: bool, ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    trials = 500 if everything() else 15
    place = Place.under(tmp_path, shm_dir)
    told = ranks(size).run(
        damaged, place, optimizer, trials, seed=size, together=together, timeout_seconds=1500
    )
    for each in told:
        assert each["wrong"] == []
        assert each["complaints"] == []
        assert each["found"] + each["healed"] == trials
    print(told[0])


def damaged_by_horovod(place: Place) -> dict[str, Any]:
    """Like `damaged`, with a weight and optimizer state, and several passes per step."""
    job = make_horovod_job(Small, passes=2)
    events: list[tierckpt.Event] = []
    settings = {"replicas": f"warn every {ROUND}", "agent": "inline", "local_every_seconds": 0}
    where = {"path": place.path, "shm_dir": place.shm}
    adapter = import_adapter()
    ckpt = adapter.Checkpointer(
        job.model, job.optimizers, **where, **settings, on_event=events.append
    )

    def train(steps: int, damage: Any = lambda: None) -> None:
        for _ in range(steps):
            job.iterate(ckpt.iteration)
            damage()
            ckpt.step()

    def drifted() -> list[str]:
        return [e.message for e in events if e.name == "drifted"]

    train(2 * ROUND)
    before = drifted()
    weight = job.model.head.weight
    moment = job.optimizers[0].state[weight]["exp_avg"]
    train(1, lambda: flip(moment, 7, 25) if ckpt.group.rank == 1 else None)
    train(ROUND + BEHIND)
    ckpt.abandon()
    return {"before": before, "found": drifted()}


class Small(Net):
    """A model with one layer."""

    def __init__(self) -> None:
        super().__init__(layers=1)


def test_under_horovod_too(ranks: Any, tmp_path: Path, shm_dir: Path) -> None:
    for told in ranks(2, HOROVODRUN).run(damaged_by_horovod, Place.under(tmp_path, shm_dir)):
        assert told["before"] == []
        (text,) = told["found"]
        assert "/head.weight" in text
        assert "rank 0 and rank 1 differ" in text


# --- no rank waits -------------------------------------------------------------------------------

FLIP = 4
"""The iteration after which a bit flips. Looks cover the whole state at each boundary: two
iterations later the ranks start an inquiry, and one more later they know the difference."""


def apart(place: Place, cases: list[tuple[str, int]]) -> list[tuple[int, int]]:
    """Rank 1 skips its step, or leaves the loop, a number of iterations after the flip in each
    case; all make the same backward passes. Returns versions, and reported drifts."""
    found = []
    for way, late in cases:
        case = Place(f"{place.path}/{way}{late}", place.shm)
        found.append(_apart(case, way, FLIP + late))
    return found


def _apart(place: Place, way: str, at: int) -> tuple[int, int]:
    events: list[tierckpt.Event] = []
    settings = {"replicas": "warn every 1", "agent": "inline", "local_every_seconds": 0}
    where = {"path": place.path, "shm_dir": place.shm, "on_event": events.append}
    job = make_horovod_job(Small)
    model, optimizer = job.model, job.optimizers[0]
    ckpt = import_adapter().Checkpointer(model, optimizer, **where, **settings)
    one = ckpt.group.rank == 1
    for iteration in range(at + 6 if way == "skip" else at + 1):
        optimizer.zero_grad()
        job.loss(iteration).backward()
        optimizer.synchronize()  # type: ignore[attr-defined]
        if one and iteration == at:
            if way == "leave":
                break
        else:
            with optimizer.skip_synchronize():  # type: ignore[attr-defined]
                optimizer.step()
        if one and iteration == FLIP:
            flip(next(iter(model.parameters())), 7, 22)
        ckpt.step()
    ckpt.close()
    return ckpt.version, sum(e.name == "drifted" for e in events)


CASES_APART = [("skip", 1), ("skip", 2), ("skip", 3), ("leave", 2), ("leave", 3)]


def test_nobody_waits_for_a_rank_that_does_not_come(
    ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    place = Place.under(tmp_path, shm_dir)
    told = ranks(2, HOROVODRUN).run(apart, place, CASES_APART, timeout_seconds=90)
    for (way, late), (ahead, drifts), (behind, _) in zip(CASES_APART, *told, strict=True):
        assert behind == ahead - 1, (way, late)
        assert drifts == (1 if way == "skip" or late > 2 else 0), (way, late)


# --- no false alarm ------------------------------------------------------------------------------

NOT_MANY_STEPS = ("compiled", "OneCycleLR")
"""They take seconds, or cannot make as many steps."""
OF_EVERY_KIND = (
    "optimizer adam fused amsgrad",
    "optimizer lbfgs",
    "optimizer sparse adam",
    "complex adam",
    "channels_last adam",
    "weights stored column by column",
    "batch norm cumulative",
    "tied weights adam",
    "unused and frozen parameters adam",
    "several thousand small tensors",
    "a parameter outside the model",
    "embeddings with a largest norm adam",
    "a group added while running, adam",
    "state created in iteration 2",
    "a branch that joins after the restored version",
    "optimizer state thrown away",
    "two optimizers by turns",
    "a running average of the model",
    "a gradient scaler",
)


def all_alike(name: str, place: Place, boundaries: int) -> dict[str, Any]:
    """Train a case of the matrix as `test_matrix_ranks` does; returns the alarms."""
    by_ddp = not says(NOT_BY_DDP, name)
    alike = not by_ddp or says(ALIKE, name)
    where = (Path(place.path), Path(place.shm))
    bench = RanksBench(*where, False, ddp_ckpt.Checkpointer, RANKS, by_ddp=by_ddp, alike=alike)
    job = bench.make((CASES | PRODUCT)[name], seed=1)
    events: list[tierckpt.Event] = []
    settings = {"path": place.path, "shm_dir": place.shm, "local_every_seconds": 0}
    ckpt = ddp_ckpt.Checkpointer(
        job.wrapper or job.model,
        job.optimizers,
        extra=job.extra,
        **settings,
        replicas=f"warn every {ROUND}",
        agent="inline",
        on_event=events.append,
    )
    for iteration in range(boundaries):
        job.prepare(iteration)
        job.iterate()
        ckpt.step()
    clean, version = monitor_of(ckpt)._clean, ckpt.version
    ckpt.abandon()
    loud = [e for e in events if e.severity >= logging.WARNING and e.name != "skipped"]
    # After a hundred steps towards zero some case has come to where nothing changes any more.
    told = [e.text() for e in loud if "equal bit for bit" not in e.message]
    return {"told": told, "clean": clean, "version": version}


def many_alike(names: list[str], place: Place, boundaries: int) -> dict[str, dict[str, Any]]:
    found = {}
    for i, name in enumerate(names):
        with pytest.MonkeyPatch.context() as patch:
            if i % 2:
                patch.setattr(
                    replica_check, "LOOK_BYTES", 1
                )  # slice by slice, though all are small
            found[name] = all_alike(name, Place(f"{place.path}/{i}", place.shm), boundaries)
    return found


def swapped(place: Place) -> tuple[list[str], int | None]:
    """Weights are swapped for an evaluation after `wait()`, while a copier would hash them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicated_state, "INLINE_BYTES", 0)
        trial = Trial(place, "adamw", release="forward", memory_every_steps=2)
        monitor_of(trial.ckpt)._submit = lambda look: None  # the copier comes late
        for _ in range(2 * ROUND + BEHIND):
            trial.iterate()
            trial.ckpt.wait()
            trial.keep()
            for param in trial.model.parameters():
                param.data.fill_(trial.rank)
            look = monitor_of(trial.ckpt)._look
            if look is not None:
                look.run()  # here it is
            trial.mend()
        clean = monitor_of(trial.ckpt)._clean
        trial.ckpt.close()
    return [event.message for event in trial.drifts()], clean


def test_weights_swapped_after_a_wait_are_no_drift(
    ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    for drifts, clean in ranks(2).run(swapped, Place.under(tmp_path, shm_dir)):
        assert drifts == []
        assert clean is not None
        assert clean >= ROUND


def test_equal_replicas_are_no_finding(ranks: Any, tmp_path: Path, shm_dir: Path) -> None:
    names, boundaries = list(OF_EVERY_KIND), 3 * ROUND
    if everything():
        every = [*CASES, *PRODUCT]
        names = [name for name in every if not any(part in name for part in NOT_MANY_STEPS)]
        boundaries = 20 * ROUND
    place = Place.under(tmp_path, shm_dir)
    told = ranks(RANKS).run(many_alike, names, place, boundaries, timeout_seconds=3000)
    for each in told:
        assert {name: found["told"] for name, found in each.items() if found["told"]} == {}
        late = [name for name, found in each.items() if not found["clean"]]
        assert late == [], "nothing was looked at"
        behind = {n: f for n, f in each.items() if f["version"] - f["clean"] > 4 * ROUND}
        assert behind == {}, "not all of it was looked at in a round"
