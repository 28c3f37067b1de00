"""One rank of the program that looks for false alarms, and the jobs that it trains."""

from __future__ import annotations

import contextlib
import gc
import io
import itertools
import logging
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
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
from tests.alarms.scripts import SCRIPTS
from tests.dist.state.test_state_matrix import ALIKE, NOT_BY_DDP, says
from tests.store.state.test_optimizer_fleet import OTHERS, torchs
from tests.support import exact
from tests.support.parts import monitor_of
from tests.support.state_matrix.jobs import Job
from tests.support.state_matrix.matrix import CASES, PRODUCT
from tests.support.state_matrix.proof import seed_everything
from tierckpt.format import REPLICATED
from tierckpt.replicas import replica_check, replicated_state

RANKS = 2
STEPS = (4, 7, 50)
"""Boundaries in which replicas are compared once."""
WAYS = ((None, None), (1, None), (1, 1), (None, 1))
"""LOOK_BYTES (1: slices one by one) and INLINE_BYTES (1: shared with a copier)."""
BLOCK, BLOCK_SECONDS = 150, 12.0
"""Boundaries of each job in one round, and the time after which a round ends earlier."""
NOT_MANY = ("compiled", "OneCycleLR", "spectralsphere")
"""These take seconds, or cannot pass so many boundaries."""
SAME_DATA = (
    *("LBFGS", "lbfgs", "sam", "SAM", "ReduceLROnPlateau", "PCGrad"),
    *("dash", "gravity", "kron", "magma"),
)
"""These decide by the loss, or by noise of their own, which no rank reduces."""


@dataclass
class Script:
    """One job of this program."""

    iterate: Callable[[int], None]
    model: nn.Module
    optimizers: Any
    extra: dict[str, Any]


class Indexed(DistributedDataParallel):
    def __getitem__(self, index: int) -> nn.Module:
        return self.module[index]  # type: ignore[index, no-any-return]


def of_job(job: Job) -> Script:
    def iterate(iteration: int) -> None:
        job.prepare(iteration)
        job.iterate()

    return Script(iterate, job.wrapper or job.model, job.optimizers, job.extra)


def made(name: str, seed: int) -> Script:
    """Seed all ranks equally; the data from here on differ by rank, where the job allows that."""
    kind, _, which = name.partition(": ")
    alike = any(part in name for part in SAME_DATA)
    seed_everything(seed)
    if kind == "script":
        wrap = partial(DistributedDataParallel, find_unused_parameters=True)
        script = of_job(SCRIPTS[which](wrap))
    elif kind == "matrix":
        job = (CASES | PRODUCT)[which]()
        alike |= says(NOT_BY_DDP, which) or says(ALIKE, which)
        if not says(NOT_BY_DDP, which):
            job.wrapper = DistributedDataParallel(job.model, find_unused_parameters=True)
        script = of_job(job)
    else:
        ship = (torchs() if kind == "torch" else OTHERS)[which]()
        model = Indexed(ship.model)
        script = Script(
            lambda iteration: ship.iterate(model, ship.optimizer), model, ship.optimizer, {}
        )
    seed_everything(1000 * seed + (0 if alike else dist.get_rank()))
    return script


def names() -> list[str]:
    every = [f"script: {name}" for name in SCRIPTS]
    every += [f"matrix: {name}" for name in (*CASES, *PRODUCT)]
    every += [f"torch: {name}" for name in torchs()]
    every += [f"pytorch_optimizer: {name}" for name in OTHERS]
    return [name for name in every if not any(part in name for part in NOT_MANY)]


def image(ckpt: tierckpt.Checkpointer) -> dict[str, Any]:
    state = ckpt._state
    walk = state.walk()
    entries = [e for e in state.entries(walk) if walk.placement(e[2]) is REPLICATED]
    return {name: exact.tensor_image(tensor) for name, tensor, _ in entries}


@dataclass
class Told:
    """Result of one job."""

    boundaries: int = 0
    alarms: tuple[str, ...] = ()
    apart: tuple[str, ...] = ()
    unseen: bool = False
    """Some tensors were not compared."""
    failed: str = ""


def run(name: str, seed: int, place: Path, check_steps: int) -> Told:
    """Collective."""
    script, events = made(name, seed), list[tierckpt.Event]()
    (place / "shm").mkdir(parents=True, exist_ok=True)
    settings = {"path": place / "ckpts", "shm_dir": place / "shm", "local_every_seconds": 0}
    ckpt = ddp_ckpt.Checkpointer(
        script.model,
        script.optimizers,
        extra=script.extra,
        **settings,
        memory_every_steps=5,
        replicas=f"warn every {check_steps}",
        agent="inline",
        halt_signals="",
        on_event=events.append,
    )
    told, wanted, start = Told(), BLOCK, time.monotonic()
    try:
        for iteration in itertools.count():
            if iteration == 10:
                seconds = torch.tensor([time.monotonic() - start])
                dist.all_reduce(seconds)
                wanted = int(min(BLOCK, max(40, 20 * BLOCK_SECONDS / float(seconds))))
            if iteration == wanted:
                break
            script.iterate(iteration)
            ckpt.step()
            told.boundaries += 1
        told.alarms = tuple(e.text() for e in events if e.name == "drifted")
        images: list[Any] = [None] * RANKS
        dist.all_gather_object(images, image(ckpt))
        told.apart = tuple(exact.differences(images[0], images[1]))
        clean = monitor_of(ckpt)._clean
        rounds = min(3 * check_steps, told.boundaries - 3)
        told.unseen = clean is None or clean < ckpt.version - rounds * ckpt.version / iteration - 3
    finally:
        ckpt.abandon()
    return told


def attempt(name: str, seed: int, place: Path, number: int) -> Told:
    look, inline = WAYS[(number + seed) % len(WAYS)]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()):
        if look is not None:
            patch.setattr(replica_check, "LOOK_BYTES", look)
        if inline is not None:
            patch.setattr(replicated_state, "INLINE_BYTES", inline)
        try:
            return run(name, seed, place, STEPS[(number + seed) % len(STEPS)])
        except Exception as error:
            return Told(failed=f"{type(error).__name__}: {error}".splitlines()[0])


def rank_main(rank: int, folder: str, boundaries: int, only: str) -> None:
    """Run one rank; rank 0 prints. Returns the exit status: 1 after a finding."""
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=RANKS)
    chosen = [name for name in names() if only in name]
    passed, alarms, mistakes, start = 0, 0, 0, time.monotonic()
    for seed in itertools.count(1):
        assert passed or seed == 1, "none of them runs"
        for number, name in enumerate(chosen):
            place = Path(folder) / f"{seed}-{number}"
            told = attempt(name, seed, place, number)
            dist.barrier()
            passed += told.boundaries
            alarms += bool(told.alarms and not told.apart)
            mistakes += bool(told.apart)
            if rank == 0:
                show(name, seed, told)
                shutil.rmtree(place, ignore_errors=True)
                if number % 25 == 24 or number == len(chosen) - 1:
                    seconds = time.monotonic() - start
                    text = f"{passed} boundaries, {alarms} alarms, {mistakes} apart"
                    print(f"{text}; {number + 1} of {len(chosen)}, {seconds:.0f} s", flush=True)
            gc.collect()
            if passed >= boundaries:
                if rank == 0:
                    print(f"{passed} boundaries, {alarms} alarms, {mistakes} apart", flush=True)
                dist.barrier()
                dist.destroy_process_group()
                sys.exit(int(alarms + mistakes > 0))


def show(name: str, seed: int, told: Told) -> None:
    if told.failed:
        print(f"{name} (seed {seed}) did not run: {told.failed}", flush=True)
    elif told.apart:
        print(f"{name} (seed {seed}): ranks went apart in {told.apart[:2]}", flush=True)
        print(f"  told: {told.alarms[:1]}", flush=True)
    elif told.alarms:
        print(f"FALSE ALARM, {name} (seed {seed}): {told.alarms}", flush=True)
    elif told.unseen:
        print(f"{name} (seed {seed}): not all of it was compared", flush=True)
