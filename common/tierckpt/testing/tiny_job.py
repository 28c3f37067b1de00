"""A training job small enough for thousands of steps a second, and child processes to kill."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
import torch

from tierckpt import _faults
from tierckpt.checkpointer.checkpointer import Checkpointer
from tierckpt.events import Event
from tierckpt.restored import Restored
from tierckpt.state.tree_codec import flat

IN_FEATURES, HIDDEN, CLASSES, BATCH = 12, 24, 4, 8


def tiny_model() -> torch.nn.Module:
    """A model with buffers and random numbers, both of which a checkpoint can get wrong."""
    return torch.nn.Sequential(
        torch.nn.Linear(IN_FEATURES, HIDDEN),
        torch.nn.BatchNorm1d(HIDDEN),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.2),
        torch.nn.Linear(HIDDEN, CLASSES),
    )


class TinyJob:
    """A model, Adam, a learning rate schedule, data from all random streams, and a Checkpointer.

    Deterministic: two jobs with the same seed have the same `fingerprint()` after the same number
    of steps, interrupted or not, or the checkpoints are wrong. Use it in a `with` statement: it
    closes its Checkpointer, or abandons it after an exception.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        *,
        seed: int = 0,
        model: torch.nn.Module | None = None,
        on_step: Callable[[TinyJob], None] | None = None,
        **settings: Any,
    ) -> None:
        """`settings` go to the Checkpointer; by default every step is taken to both levels.

        Without a `path` there is no Checkpointer: for the reference run.
        """
        seed_everything(seed)
        self.model = tiny_model() if model is None else model
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, gamma=0.7)
        self.shuffle = np.random.default_rng(seed)
        self.iteration = 0
        self.losses: dict[int, float] = {}
        self.events: list[Event] = []
        self.on_step = on_step
        self._checkpointer: Checkpointer | None = None
        if path is None:
            return
        defaults = {"local_every_steps": 1, "local_every_seconds": 0.0, "when_busy": "wait"}
        self._checkpointer = Checkpointer(
            self.model,
            self.optimizer,
            extra={"scheduler": self.scheduler},
            extra_per_rank={"shuffle": self.shuffle},
            on_event=self.events.append,
            path=path,
            **{**defaults, **settings},
        )

    @property
    def checkpointer(self) -> Checkpointer:
        """The job's Checkpointer; the job must have a path."""
        assert self._checkpointer is not None
        return self._checkpointer

    def restore(self, version: SupportsIndex | None = None, strict: bool = True) -> Restored:
        """Restore the newest version, and continue from there."""
        restored = self.checkpointer.restore(version, strict)
        self.iteration = int(restored)
        return restored

    def run(self, until: int) -> TinyJob:
        """Train until `until` iterations are done."""
        while self.iteration < until:
            self.train_one()
            self.iteration += 1
            if self._checkpointer is not None:
                self._checkpointer.step()
            if self.on_step is not None:
                self.on_step(self)
        return self

    def train_one(self) -> None:
        """One iteration up to, not including, the boundary."""
        batch = torch.randn(BATCH, IN_FEATURES)
        batch[:, 0] += random.random() + float(np.random.rand()) + float(self.shuffle.random())
        target = torch.randint(CLASSES, (BATCH,))
        self.optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(self.model(batch), target)
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.losses[self.iteration] = loss.item()

    def settle(self, timeout_seconds: float = 60.0) -> None:
        """Wait until the version of the last boundary is in memory, and the agent has no work."""
        snapshot = self.checkpointer._active.snapshot
        finished = self.checkpointer._levels.slot_handoff.finished
        deadline = time.monotonic() + timeout_seconds
        while snapshot and not any(each is snapshot for _, each in finished):
            if time.monotonic() > deadline:
                raise TimeoutError(f"v{snapshot.facts.id.version} is still being copied")
            time.sleep(0.001)
        if not self.checkpointer._agent.wait(timeout_seconds):
            raise TimeoutError("the agent is still writing")
        self.checkpointer._levels.collect()

    def fingerprint(self) -> str:
        """Hash of every bit that the next steps depend on."""
        found = hashlib.sha256()
        for name, tensor in self.model.state_dict().items():
            found.update(name.encode() + raw_bytes(tensor))
        for index, state in sorted(self.optimizer.state_dict()["state"].items()):
            for key in sorted(state):
                found.update(f"{index}{key}".encode() + raw_bytes(torch.as_tensor(state[key])))
        found.update(repr(self.scheduler.state_dict()).encode())
        found.update(repr([g["lr"] for g in self.optimizer.param_groups]).encode())
        kind, key, *rest = np.random.get_state()
        found.update(repr((kind, rest)).encode() + np.asarray(key).tobytes())
        found.update(repr(random.getstate()).encode())
        found.update(repr(self.shuffle.bit_generator.state).encode())
        found.update(raw_bytes(torch.get_rng_state()))
        return found.hexdigest()

    def heard(self, name: str, level: str | None = None) -> list[Event]:
        """Events of that name, on that level if one is given."""
        return [e for e in self.events if e.name == name and level in (None, e.level)]

    def __enter__(self) -> TinyJob:
        """Return the job."""
        return self

    def __exit__(self, *error: Any) -> None:
        """Close or abandon the Checkpointer, see `Checkpointer.__exit__`."""
        self.checkpointer.__exit__(*error)


def seed_everything(seed: int) -> None:
    """Seed the process-wide generators."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """A tensor's memory."""
    return flat(tensor).contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def train(path: str, until: int, settings: Mapping[str, Any], restore: bool = False) -> None:
    """A whole run, for `run_in_child`."""
    with TinyJob(path, **settings) as job:
        if restore:
            job.restore()
        job.run(until)


def run_in_child(
    function: Callable[..., Any],
    *arguments: Any,
    rules: str = "",
    marks: str | os.PathLike[str] | None = None,
    timeout_seconds: float = 120.0,
    **keywords: Any,
) -> int:
    """Run `function` in a child process; returns its exit status, negative for a signal.

    Args:
        function: a function of a module, not of `__main__`.
        rules: faults for the child and its own children (see `tierckpt._faults`).
        marks: folder where a rule that fires leaves a file; look there, or the test proves nothing.
        timeout_seconds: after that the child is killed and TimeoutError raised.
    """
    context = multiprocessing.get_context("forkserver")  # torch is imported once for all children
    context.set_forkserver_preload([__name__])
    environment = {
        _faults.FAULTS_VARIABLE: rules,
        **({_faults.FIRED_VARIABLE: os.fspath(marks)} if marks is not None else {}),
    }
    # The fork server keeps the environment of its own start.
    environment = {**os.environ, **environment}
    child = context.Process(target=_child, args=(environment, function, arguments, keywords))
    child.start()
    child.join(timeout_seconds)
    try:
        if child.exitcode is None:
            child.kill()
            child.join()
            raise TimeoutError(f"{function.__name__} in a child took over {timeout_seconds} s")
        return child.exitcode
    finally:
        child.close()


def _child(
    environment: dict[str, str],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    _faults._rules = _faults.parse(environment[_faults.FAULTS_VARIABLE])
    function(*arguments, **keywords)


def fired(marks: Path) -> list[str]:
    """Rules that fired (see `run_in_child`)."""
    return sorted(p.name for p in marks.iterdir())
