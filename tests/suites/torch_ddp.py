"""torch's own tests of DDP, on gloo and CPU, with or without a Checkpointer on every DDP module.

Run by `python -m tests.suites` in a process of its own for each number of ranks:
    WORLD_SIZE=2 BACKEND=gloo python -m tests.suites.torch_ddp with FOLDER [TEST ...]
Every rank of every test is a fork of that process. torch's tests are not changed on disk: their
questions about GPUs are answered here, and checkpointers attach by the optimizers' global hooks.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import multiprocessing
import os
import re
import sys
import unittest
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.overrides import TorchFunctionMode
from torch.testing._internal import common_distributed

import ddp_ckpt
from tests.support import exact

OF_DDP = re.compile(r"DistributedDataParallel\(|\bDDP\(|DistributedDataParallel[A-Z]")
ATTACH = len(sys.argv) > 1 and sys.argv[1] == "with"
LIMIT_SECONDS = 300
"""Time limit of a test, which also ends one of ranks that wait for each other forever."""
FOLDER = Path(sys.argv[2] if len(sys.argv) > 2 else ".")


# --- GPUs that are none --------------------------------------------------------------------------


class OnCpu(TorchFunctionMode):
    """Whatever is to be on a GPU is on the CPU: `.cuda()`, `.to(0)`, `device=rank`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if is_gpu(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if getattr(func, "__name__", "") in ("to", "_parse_to", "device"):
            args = tuple("cpu" if is_gpu(each) else each for each in args)
        return func(*args, **kwargs)


def is_gpu(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return type(device) is int or (isinstance(device, str) and device.startswith("cuda"))


def pretend_gpus() -> None:
    """Before torch's tests are imported: their decorators ask then."""
    for name in ("skip_if_lt_x_gpu", "nccl_skip_if_lt_x_gpu"):
        setattr(common_distributed, name, lambda *_, **__: lambda test: test)
    common_distributed.skip_if_no_gpu = lambda test: test
    common_distributed.get_timeout = lambda _: LIMIT_SECONDS
    common_distributed.init_multigpu_helper = lambda ranks, _: {i: [i] for i in range(ranks)}
    torch.cuda.set_device = lambda *_, **__: None
    torch.cuda.synchronize = lambda *_, **__: None
    torch.cuda.current_device = lambda: 0
    made = DistributedDataParallel.__init__

    def make(self: Any, *args: Any, **settings: Any) -> None:
        for name in ("device_ids", "output_device"):
            settings.pop(name, None)
        made(self, *args[:1], **settings)
        modules.append(self)
        if ATTACH:
            attach_to_new(self)

    DistributedDataParallel.__init__ = make


# --- checkpointers -------------------------------------------------------------------------------

modules: list[DistributedDataParallel] = []
"""All that the test made, in order."""
attached: dict[int, ddp_ckpt.Checkpointer] = {}
"""Checkpointers by `id()` of the DDP module."""
idle: dict[int, ddp_ckpt.Checkpointer] = {}
"""Those of modules that no optimizer of the test has stepped yet."""
stepping: dict[int, list[ddp_ckpt.Checkpointer]] = {}
"""Those with boundaries after an optimizer's steps, by `id()` of the optimizer."""
events: list[Any] = []


def attach(ddp: DistributedDataParallel, optimizer: Any) -> ddp_ckpt.Checkpointer:
    number = sum(event == "attached" for event in events)
    events.append("attached")
    attached[id(ddp)] = ddp_ckpt.Checkpointer(
        ddp,
        optimizer,
        path=str(FOLDER / "ckpts" / f"{os.environ['SUITES_TEST']}-{number}"),
        boundary="explicit",
        on_event=events.append,
    )
    return attached[id(ddp)]


def attach_to_new(ddp: DistributedDataParallel) -> None:
    """Until an optimizer of the test's steps it, if ever: with one never stepped."""
    trained = [p for p in ddp.parameters() if p.requires_grad]
    if trained:
        idle[id(ddp)] = attach(ddp, torch.optim.SGD(trained))


def before_forward(module: torch.nn.Module, _: Any) -> None:
    """A boundary, where no optimizer makes any."""
    ckpt = idle.get(id(module))
    if ckpt is not None and torch.is_grad_enabled() and module.training:
        ckpt.step()


def before_step(optimizer: Any, *_: Any) -> None:
    """Attach again at an optimizer's first step, with it, to the modules that it steps."""
    if id(optimizer) in stepping:
        return
    stepping[id(optimizer)] = mine = []
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for ddp in modules:
        if id(ddp) in idle and not held.isdisjoint(map(id, ddp.parameters())):
            idle.pop(id(ddp)).close()
            mine.append(attach(ddp, optimizer))


def after_step(optimizer: Any, *_: Any) -> None:
    for ckpt in stepping.get(id(optimizer), ()):
        ckpt.step()


# --- one test on one rank ------------------------------------------------------------------------


def digest() -> str:
    """Digest of all parameters, gradients and buffers of all modules."""
    found = hashlib.sha256()
    for ddp in modules:
        for name, tensor in [*ddp.named_parameters(), *ddp.named_buffers()]:
            for each in (tensor, tensor.grad):
                value = each.to_dense() if each is not None and each.is_sparse else each
                found.update(repr((name, exact.image(value))).encode())
    return found.hexdigest()


def report(test: str, rank: int, **findings: Any) -> None:
    (FOLDER / f"{test}.{rank}.json").write_text(json.dumps(findings))


def run_on_rank(fn: Any, test: str, rank: int) -> None:
    """Run the test; raises its error."""
    os.environ["SUITES_TEST"] = test
    if ATTACH:
        register_optimizer_step_pre_hook(before_step)
        register_optimizer_step_post_hook(after_step)
        register_module_forward_pre_hook(before_forward)
    with OnCpu():
        fn()
    found = digest()
    for ckpt in attached.values():
        ckpt.close()
    told = [event for event in events if event != "attached"]
    lost = [event.message for event in told if event.name == "failed"]
    report(
        test,
        rank,
        digest=found,
        checkpointers=len(events) - len(told),
        sealed=sum(event.name == "sealed" for event in told),
        lost=lost,
    )


# --- all tests -----------------------------------------------------------------------------------


def is_of_ddp(suite: Any, function: Any, depth: int = 3) -> bool:
    """True if the test, or a helper of it, makes a DDP module."""
    try:
        source = inspect.getsource(inspect.unwrap(function))
    except (OSError, TypeError):
        return False
    helpers = set(re.findall(r"self\.(_\w+)\(", source)) if depth else set()
    return bool(OF_DDP.search(source)) or any(
        is_of_ddp(suite, getattr(suite, name), depth - 1)
        for name in helpers
        if hasattr(suite, name)
    )


def make_suite() -> type[unittest.TestCase]:
    pretend_gpus()
    from torch.testing._internal.distributed import distributed_test as theirs

    class Suite(theirs.TestDistBackend, theirs.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(multiprocessing.get_context("fork").Process)

        def run_test(self, test_name: str, parent_pipe: Any) -> None:
            fn = getattr(self, test_name)
            setattr(self, test_name, lambda: run_on_rank(fn, test_name, self.rank))
            super().run_test(test_name, parent_pipe)

    return Suite


def outcomes(suite: type[unittest.TestCase], names: list[str]) -> dict[str, Any]:
    """Outcome, reason of a failure, and reports of the ranks, by test."""
    found: dict[str, Any] = {}
    for name in names:
        result = unittest.TestResult()
        suite(name).run(result)
        ranks = [json.loads(p.read_text()) for p in sorted(FOLDER.glob(f"{name}.*.json"))]
        bad = [text for _, text in [*result.failures, *result.errors]]
        skipped = [text for _, text in result.skipped]
        outcome = "failed" if bad else "skipped" if skipped else "passed"
        found[name] = {"outcome": outcome, "why": (bad or skipped or [""])[0], "ranks": ranks}
        print(f"{outcome:8} {name}", flush=True)
    return found


def main() -> None:
    suite = make_suite()
    tests = [n for n in dir(suite) if n.startswith("test_") and is_of_ddp(suite, getattr(suite, n))]
    found = outcomes(suite, [n for n in tests if not sys.argv[3:] or n in sys.argv[3:]])
    (FOLDER / "outcomes.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
