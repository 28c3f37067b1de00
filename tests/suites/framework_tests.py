"""A plugin of pytest for frameworks' own tests: `pytest -p framework_tests`.

`SUITE_OUTCOMES` is the file for the outcomes, `SUITE_OF` the framework. If `SUITE_HOW` is "with",
every training has checkpoints, with a path of its own: each fit of Lightning's Trainer a
`TierCheckpoint`, each `train()` of Hugging Face's Trainer the mixin, each Accelerator an attached
checkpointer.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import random
import signal
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch

LIMIT_SECONDS = 180
"""Time limit of one test."""
_told: dict[str, Any] = {}
_open: dict[int, Any] = {}
"""The test's unclosed checkpointers, by the optimizers' `id()`."""


def receive(event: Any) -> None:
    """Keep what a checkpointer reports for the test that runs."""
    if _told:  # no process that the test has started
        _told["sealed"] += event.name == "sealed"
        if event.name == "failed" and event.severity > logging.INFO:
            _told["lost"].append(event.message)


def settings() -> dict[str, Any]:
    """Settings of one checkpointer."""
    _told["checkpointers"] += 1
    return {"path": tempfile.mkdtemp(prefix="tierckpt-suite-"), "on_event": receive}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: Any) -> Iterator[None]:
    """Each test starts with the same random numbers, and ends in time."""
    _told.update(digest="", lost=[], checkpointers=0, sealed=0)
    random.seed(7)
    torch.manual_seed(7)
    try:
        return (yield)
    finally:
        for each in {*_open.values()}:
            each.close()
        _open.clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: Any) -> Iterator[None]:
    def late(*_: Any) -> None:
        raise RuntimeError(f"the test takes more than {LIMIT_SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(LIMIT_SECONDS)
    try:
        return (yield)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def pytest_runtest_logreport(report: Any) -> None:
    """Write the outcome: that of the call, or one not passed."""
    if report.when == "call" or report.outcome != "passed":
        told = {"test": report.nodeid, "outcome": report.outcome, "why": str(report.longrepr or "")}
        with open(os.environ["SUITE_OUTCOMES"], "a") as file:
            print(json.dumps({**told, "ranks": [dict(_told)]}), file=file)


def digest_of(module: torch.nn.Module) -> None:
    """Add the module's state to the test's digest."""
    with contextlib.suppress(Exception):  # fakes, modules without values
        found = hashlib.sha256(_told["digest"].encode())
        for name, value in module.state_dict().items():
            found.update(name.encode() + value.detach().cpu().double().numpy().tobytes())
        _told["digest"] = found.hexdigest()


def put_into_lightning(with_tier: bool) -> None:
    from lightning.pytorch import Trainer

    from tierckpt.lightning import TierCheckpoint

    fit = Trainer.fit

    def ours(self: Any, *args: Any, **kwargs: Any) -> Any:
        tier = TierCheckpoint(**settings()) if with_tier and not self.barebones else None
        if tier is not None:
            self.callbacks.append(tier)
        try:
            return fit(self, *args, **kwargs)
        finally:
            if tier in self.callbacks:
                self.callbacks.remove(tier)
            digest_of(self.lightning_module)

    Trainer.fit = ours


def put_into_transformers(with_tier: bool) -> None:
    import transformers

    from tierckpt.transformers import TierTrainerMixin

    base = transformers.Trainer
    loop = base._inner_training_loop

    def ours(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return loop(self, *args, **kwargs)
        finally:
            digest_of(self.model)

    base._inner_training_loop = ours
    if with_tier:

        class Trainer(TierTrainerMixin, base):  # type: ignore[misc,valid-type]
            def train(self, *args: Any, **kwargs: Any) -> Any:
                self._tier_settings = settings()
                return super().train(*args, **kwargs)

        transformers.Trainer = sys.modules["transformers.trainer"].Trainer = Trainer


def put_into_accelerate(with_tier: bool) -> None:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer

    from tierckpt.accelerate import attach

    prepare, zero_grad = Accelerator.prepare, AcceleratedOptimizer.zero_grad

    def ours(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = prepare(self, *args, **kwargs)
        if with_tier and self._optimizers and self._models:
            ckpt = attach(self, **settings())
            ckpt.restore()
            _open.update({id(each): ckpt for each in self._optimizers})
        return made

    def after(self: Any, *args: Any, **kwargs: Any) -> Any:
        zero_grad(self, *args, **kwargs)
        if (ckpt := _open.get(id(self))) is not None and not ckpt.closed:
            ckpt.step()

    Accelerator.prepare, AcceleratedOptimizer.zero_grad = ours, after


def pytest_configure(config: Any) -> None:
    """Put Tierckpt into the framework, before tests import it."""
    put = {
        "lightning": put_into_lightning,
        "transformers": put_into_transformers,
        "accelerate": put_into_accelerate,
    }
    put[os.environ["SUITE_OF"]](os.environ["SUITE_HOW"] == "with")
