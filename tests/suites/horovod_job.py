"""Horovod's own tests on one rank, with `horovod.torch` or with `horovod_ckpt.torch`.

Run by `python -m tests.suites` under horovodrun:
    python -m tests.suites.horovod_job plain|with|cured FILE FOLDER [TEST ...]
Each rank writes FOLDER/rank-<n>.jsonl: a line when a test starts, and one when it has ended. A test
of ranks that wait for each other forever is the last of its job; the caller starts another one.
Horovod's tests are not changed on disk: replacements are made in the imported module.
"""

from __future__ import annotations

import gc
import importlib.util
import itertools
import json
import os
import sys
import unittest
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import horovod.torch
import torch

import horovod_ckpt.torch
from tierckpt.checkpointer import close_now


def load(file: Path) -> ModuleType:
    """The module, adapted to later changes: Muon takes only matrices, and `mock`, which Horovod's
    tests import, is now in Python."""
    sys.modules.setdefault("mock", mock)
    del torch.optim.Muon  # the tests go through all subclasses, and those of torch.optim alone
    torch.optim._muon.Muon.__module__ = "not torch.optim"
    spec = importlib.util.spec_from_file_location("theirs", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Ours(ModuleType):
    """`horovod_ckpt.torch` with a path of its own for each optimizer, as for separate scripts.

    `cured`: the arguments that refusals ask for are given.
    """

    def __init__(self, folder: Path, cured: bool) -> None:
        super().__init__("ours")
        self._folder, self._cured = folder, cured
        self._numbers = itertools.count()
        self.elastic = SimpleNamespace(**vars(horovod_ckpt.torch.elastic))
        self.elastic.TorchState = self._state

    def __getattr__(self, name: str) -> Any:
        return getattr(horovod_ckpt.torch, name)

    def _name_path(self) -> None:
        os.environ["TIERCKPT_PATH"] = str(self._folder / f"ckpts-{next(self._numbers)}")

    def DistributedOptimizer(self, optimizer: Any, *args: Any, **settings: Any) -> Any:
        self._name_path()
        if self._cured:
            settings["model"] = model_of(optimizer)
        return horovod_ckpt.torch.DistributedOptimizer(optimizer, *args, **settings)

    def _state(self, model: Any = None, optimizer: Any = None, **values: Any) -> Any:
        self._name_path()
        if self._cured:
            model = model or torch.nn.Linear(1, 1)
            optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer = horovod.torch.DistributedOptimizer(optimizer, model.named_parameters())
        state = horovod_ckpt.torch.elastic.TorchState(model, optimizer, **values)
        if self._cured:
            synced = state.sync
            state.sync = lambda: (synced(), state.commit())
        return state


def model_of(optimizer: Any) -> torch.nn.Module:
    """The smallest module that has all that the optimizer steps."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    modules = [m for m in gc.get_objects() if isinstance(m, torch.nn.Module)]
    whole = [m for m in modules if held <= {id(p) for p in m.parameters()}]
    return min(whole, key=lambda module: len([*module.modules()]))


def main() -> None:
    file, folder = Path(sys.argv[2]), Path(sys.argv[3])
    theirs = load(file)
    if sys.argv[1] != "plain":
        theirs.hvd = Ours(folder, cured=sys.argv[1] == "cured")
    (case,) = (
        c for c in vars(theirs).values() if isinstance(c, type) and issubclass(c, unittest.TestCase)
    )
    # Horovod aborts after many restarts: it stays up.
    case.tearDown = lambda self: close_now()
    names = sys.argv[4:] or unittest.defaultTestLoader.getTestCaseNames(case)
    horovod.torch.init()
    if horovod.torch.rank() == 0 and not (folder / "names.json").exists():
        (folder / "names.json").write_text(json.dumps(names))
    with (folder / f"rank-{horovod.torch.rank()}.jsonl").open("a", buffering=1) as lines:
        for name in names:
            lines.write(json.dumps({"test": name}) + "\n")
            result = unittest.TestResult()
            case(name).run(result)
            bad = [text for _, text in [*result.failures, *result.errors]]
            skipped = [text for _, text in result.skipped]
            outcome = "failed" if bad else "skipped" if skipped else "passed"
            why = (bad or skipped or [""])[0]
            lines.write(json.dumps({"test": name, "outcome": outcome, "why": why}) + "\n")


if __name__ == "__main__":
    main()
