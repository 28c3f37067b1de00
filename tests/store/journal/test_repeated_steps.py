"""The journal repeats the steps of every optimizer that it accepts, and all kinds of loops, bit for
bit; it refuses the others by name."""

from __future__ import annotations

import contextlib
import functools
import logging
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn

import tierckpt
from tests.support import exact
from tierckpt.checkpointer import PlainAdapter
from tierckpt.errors import ConfigError, UnsupportedStateError
from tierckpt.journal import FOLDER, REPEATABLE, JournalReader, names_in
from tierckpt.testing import seed_everything

STEPS = 6
optim = torch.optim
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "SGD": [
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"maximize": True},
        {"fused": True, "momentum": 0.9},
    ],
    "Adam": [{"amsgrad": True}, {"foreach": True}, {"fused": True}],
    "AdamW": [{"foreach": False}, {"lr": torch.tensor(0.01), "foreach": False}],
    "Adagrad": [{"lr_decay": 0.1}, {"fused": True}],
    "RMSprop": [{"centered": True, "momentum": 0.9}],
    "NAdam": [{"decoupled_weight_decay": True, "weight_decay": 0.1}],
}
VARIANTS = [
    (name, options)
    for name in sorted(REPEATABLE)
    if hasattr(optim, name)
    for options in [{}, *OPTIONS.get(name, [])]
]


class Loop:
    """A training with iterations that depend on its state alone."""

    def __init__(self, make: Make) -> None:
        seed_everything(0)
        self.model = nn.Sequential(
            nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Dropout(0.2), nn.Linear(7, 5, bias=False)
        )
        self.optimizers: dict[str, torch.optim.Optimizer] = {"optimizer": make(self.params)}
        self.extra: dict[str, Any] = {}

    @property
    def params(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.ndim == 2]

    def loss(self) -> torch.Tensor:
        found: torch.Tensor = self.model(torch.randn(4, 6)).square().mean()
        return found

    def iterate(self) -> None:
        self.model.zero_grad()
        self.loss().backward()
        for optimizer in self.optimizers.values():
            optimizer.step()

    def image(self) -> dict[str, Any]:
        named = exact.replicated(self.model, *self.optimizers.values())
        extra = {name: exact.image(each.state_dict()) for name, each in self.extra.items()}
        return {**named, **exact.buffers(self.model), **exact.streams(), **extra}


class Accumulating(Loop):
    """Two backward passes for a step."""

    def iterate(self) -> None:
        self.model.zero_grad(set_to_none=False)
        self.loss().backward()
        self.loss().backward()
        self.optimizers["optimizer"].step()


class Clipping(Loop):
    """Gradients are clipped in place, before the step, and by a hook of the optimizer."""

    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.optimizers["optimizer"].register_step_pre_hook(
            lambda *_: nn.utils.clip_grad_value_(self.params, 0.01)
        )

    def iterate(self) -> None:
        self.model.zero_grad()
        self.loss().backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.05)
        self.optimizers["optimizer"].step()


class Scaled(Loop):
    """A GradScaler, which skips one step; half the parameters are in bfloat16."""

    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.extra["scaler"] = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        self.iteration = 0

    def iterate(self) -> None:
        self.iteration += 1
        optimizer, scaler = self.optimizers["optimizer"], self.extra["scaler"]
        self.model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = self.loss()
        scaler.scale(loss * (float("inf") if self.iteration == 3 else 1.0)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()


class Alternating(Loop):
    """Two optimizers, one of which steps every other iteration; a schedule changes all options; a
    parameter has no gradient at times."""

    def __init__(self, make: Make) -> None:
        super().__init__(make)
        bias = [p for p in self.model.parameters() if p.ndim == 1]
        self.optimizers["other"] = torch.optim.SGD(bias, 0.1, momentum=0.5)
        self.extra["schedule"] = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizers["optimizer"], 0.1, total_steps=100
        )
        self.iteration = 0

    def iterate(self) -> None:
        self.iteration = self.extra["schedule"].last_epoch + 1
        self.model.zero_grad()
        self.loss().backward()
        if self.iteration % 3 == 0:
            self.params[0].grad = None
        if self.iteration % 2:
            self.optimizers["other"].step()
        self.optimizers["optimizer"].step()
        self.extra["schedule"].step()


class Closing(Loop):
    """The backward pass is the closure of the step."""

    def iterate(self) -> None:
        def closure() -> torch.Tensor:
            self.model.zero_grad()
            loss = self.loss()
            loss.backward()
            return loss

        self.optimizers["optimizer"].step(closure)


def attach(loop: Loop, path: Path, shm_dir: Path, **settings: Any) -> tierckpt.Checkpointer:
    return tierckpt.Checkpointer(
        loop.model,
        loop.optimizers,
        extra=loop.extra,
        path=path,
        shm_dir=shm_dir,
        agent="inline",
        when_busy="wait",
        local_every_seconds=0,
        **{"memory_every_steps": 0, "local_journal_steps": 100, **settings},
    )


def crash_and_restore(
    make_loop: Callable[[], Loop], path: Path, shm_dir: Path, **settings: Any
) -> None:
    """Train, abandon everything in the middle of an iteration, and restore in a fresh process's
    way: the state is that of the last boundary, and the next iteration is the same."""
    first = make_loop()
    ckpt = attach(first, path, shm_dir, **settings)
    explicit = "boundary" not in settings
    for _ in range(STEPS):
        first.iterate()
        if explicit:
            ckpt.step()
    at_boundary = first.image()
    steps = ckpt.version if explicit else STEPS
    first.iterate()
    after = first.image()
    ckpt.abandon()

    second = make_loop()
    again = attach(second, path, shm_dir, **settings)
    restored = again.restore()
    assert (restored, restored.version) == (STEPS, steps)
    assert restored.base is not None
    assert (restored.base.version, restored.replayed) == (1, steps - 1)
    assert second.image() == at_boundary
    second.iterate()
    assert second.image() == after
    if explicit:
        again.step()
    again.close()
    assert names_in(path / FOLDER) == []


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_steps_of_every_optimizer(
    name: str, options: dict[str, Any], tmp_path: Path, shm_dir: Path
) -> None:
    def make(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        chosen = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        kind: Any = getattr(optim, name)
        return kind(params, **{"lr": 0.01, **chosen})

    crash_and_restore(lambda: Loop(make), tmp_path / "ckpts", shm_dir)


@pytest.mark.parametrize("loop", [Accumulating, Clipping, Scaled, Alternating, Closing])
def test_all_kinds_of_loops(loop: type[Loop], tmp_path: Path, shm_dir: Path) -> None:
    adam = functools.partial(optim.Adam, lr=0.01)
    crash_and_restore(lambda: loop(adam), tmp_path / "ckpts", shm_dir)


def test_boundaries_at_the_forward_pass(tmp_path: Path, shm_dir: Path) -> None:
    adam = functools.partial(optim.Adam, lr=0.01)
    crash_and_restore(lambda: Loop(adam), tmp_path / "ckpts", shm_dir, boundary="forward")


def test_old_files_go_with_the_versions(tmp_path: Path, shm_dir: Path) -> None:
    """Those after the two newest complete versions stay, as the versions do."""
    path = tmp_path / "ckpts"
    loop = Loop(functools.partial(optim.Adam, lr=0.01))
    ckpt = attach(loop, path, shm_dir, local_journal_steps=3)
    for _ in range(20):
        loop.iterate()
        ckpt.step()
        ckpt.wait()
    ckpt.abandon()
    bases = [name.base.id.version for name in names_in(path / FOLDER)]
    assert bases == [13, 16, 19]


def test_a_file_that_cannot_be_read_ends_no_process(tmp_path: Path, shm_dir: Path) -> None:
    """Its end is gone after it was mapped: without care a SIGBUS, as with a disk that fails."""
    loop = Loop(functools.partial(optim.Adam, lr=0.01))
    ckpt = attach(loop, tmp_path / "job", shm_dir)
    train(loop, ckpt, STEPS)
    ckpt.abandon()
    folder = tmp_path / "job" / FOLDER
    with contextlib.closing(JournalReader(folder, names_in(folder))) as reader:
        (path,) = {record.path for record in reader.records.values()}
        os.truncate(path, mmap.PAGESIZE)
        assert len(reader.records) == STEPS - 1
        assert not reader.is_sound(*min(reader.records))
        assert "cannot be read" in reader.problems[0]


def test_a_copy_in_the_same_folder_replaces_a_damaged_record(tmp_path: Path, shm_dir: Path) -> None:
    """As on a file system that all nodes see."""
    loop = Loop(functools.partial(optim.Adam, lr=0.01))
    ckpt = attach(loop, tmp_path / "job", shm_dir)
    train(loop, ckpt, STEPS)
    ckpt.abandon()
    folder = tmp_path / "job" / FOLDER
    (name,) = names_in(folder)
    whole = (folder / str(name)).read_bytes()
    (folder / str(replace(name, keeper=1))).write_bytes(whole)
    (folder / str(name)).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with contextlib.closing(JournalReader(folder, names_in(folder))) as reader:
        assert len(reader.records) == STEPS - 1
        assert all(reader.is_sound(*held) for held in reader.records)
        assert len(reader.problems) == 1
        assert {record.path.name for record in reader.records.values()} == {
            str(each) for each in names_in(folder)
        }


def train(loop: Loop, ckpt: tierckpt.Checkpointer, steps: int) -> None:
    for _ in range(steps):
        loop.iterate()
        ckpt.step()
    ckpt.wait()


def test_steps_after_going_back_count_instead_of_newer_versions(
    tmp_path: Path, shm_dir: Path
) -> None:
    adam, path = functools.partial(optim.Adam, lr=0.01), tmp_path / "ckpts"
    loop = Loop(adam)
    ckpt = attach(loop, path, shm_dir, local_journal_steps=4)
    train(loop, ckpt, 7)
    ckpt.restore(version=1)
    torch.manual_seed(5)  # other steps than before
    train(loop, ckpt, 3)
    ckpt.abandon()
    again = Loop(adam)
    ckpt = attach(again, path, shm_dir, local_journal_steps=4)
    assert ckpt.restore() == 4, "not v7, to which v5 and the journal of the first run lead"
    assert again.image() == loop.image()
    ckpt.abandon()


def test_loaded_parts_do_not_end_the_journal(tmp_path: Path, shm_dir: Path) -> None:
    """No steps lead to them: the journal starts again, with a version of them."""
    adam, path = functools.partial(optim.Adam, lr=0.01), tmp_path / "ckpts"
    source = Loop(adam)
    with attach(source, tmp_path / "source", shm_dir) as ckpt:
        train(source, ckpt, 2)
    loop = Loop(adam)
    ckpt = attach(loop, path, shm_dir)
    train(loop, ckpt, 3)
    ckpt.load_from(tmp_path / "source", only="model")
    train(loop, ckpt, 3)
    ckpt.abandon()
    again, events = Loop(adam), list[tierckpt.Event]()
    ckpt = attach(again, path, shm_dir, on_event=events.append)
    assert ckpt.restore() == STEPS
    assert ckpt.restored.base is not None
    assert again.image() == loop.image()
    assert not [event for event in events if event.severity >= logging.WARNING]
    ckpt.abandon()


class Meddling(Loop):
    """The loop changes the state outside of steps, once."""

    def __init__(self, make: Make, what: str) -> None:
        super().__init__(make)
        self.what, self.iteration = what, 0

    def iterate(self) -> None:
        super().iterate()
        self.iteration += 1
        if self.iteration == STEPS:
            param, optimizer = self.params[0], self.optimizers["optimizer"]
            changed = param if self.what == "parameter" else optimizer.state[param]["exp_avg"]
            changed.data.mul_(0.5)


@pytest.mark.parametrize("what", ["parameter", "state"])
def test_a_state_that_steps_do_not_lead_to_is_not_made_up(
    what: str, tmp_path: Path, shm_dir: Path
) -> None:
    adam = functools.partial(optim.Adam, lr=0.01)
    first, path, events = Meddling(adam, what), tmp_path / "ckpts", list[tierckpt.Event]()
    images = {}
    ckpt = attach(first, path, shm_dir)
    for _ in range(STEPS):
        first.iterate()
        ckpt.step()
        images[ckpt.version] = first.image()
    ckpt.abandon()
    second = Meddling(adam, what)
    again = attach(second, path, shm_dir, on_event=events.append)
    restored = again.restore()
    assert restored.version == STEPS - 1, "the last one to which the steps lead"
    assert restored.replayed == STEPS - 2
    assert second.image() == images[restored.version]
    (error,) = [event.message for event in events if event.severity >= logging.ERROR]
    why = f"v{STEPS}: parameters or optimizer state differ from the killed run's"
    assert restored.unrepeated == f"rank 0: {why}"
    assert f"{restored.unrepeated}. The job continues from v{STEPS - 1}, which is exact" in error
    again.abandon()


# --- what is refused ------------------------------------------------------------------------------


class Noisy(torch.optim.SGD):
    """Adds noise to its steps."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                param.data.add_(torch.randn_like(param), alpha=1e-3)
        return super().step(closure)


def refusal(make_loop: Callable[[], Loop], path: Path, shm_dir: Path, **settings: Any) -> str:
    with pytest.raises((ConfigError, UnsupportedStateError)) as raised:
        attach(make_loop(), path, shm_dir, **settings)
    return str(raised.value)


def test_other_optimizers_are_refused_by_name(tmp_path: Path, shm_dir: Path) -> None:
    def loop_of(kind: Any) -> Callable[[], Loop]:
        return lambda: Loop(lambda params: kind(params, lr=0.01))

    text = refusal(loop_of(optim.LBFGS), tmp_path, shm_dir)
    assert "optimizer 'optimizer' is a torch.optim.lbfgs.LBFGS" in text
    assert "Adam, AdamW" in text
    text = refusal(loop_of(Noisy), tmp_path, shm_dir)
    assert "test_repeated_steps.Noisy" in text
    with attach(loop_of(Noisy)(), tmp_path, shm_dir, local_journal_steps=0):
        pass  # the remedy


def test_a_fused_sgd_of_half_precision_is_refused(tmp_path: Path, shm_dir: Path) -> None:
    class Half(Loop):
        def __init__(self, make: Make) -> None:
            super().__init__(make)
            self.model.to(torch.bfloat16)

    def make(**options: Any) -> Callable[[], Loop]:
        return lambda: Half(functools.partial(optim.SGD, lr=0.1, momentum=0.9, **options))

    text = refusal(make(fused=True), tmp_path, shm_dir)
    assert "fused SGD of torch gives the momentum of 0.weight, 3.weight (torch.bfloat16)" in text
    with attach(make(fused=False)(), tmp_path, shm_dir):
        pass  # the remedy


def test_state_that_the_forward_pass_changes_is_refused(tmp_path: Path, shm_dir: Path) -> None:
    class Words(Loop):
        def __init__(self, make: Make) -> None:
            super().__init__(make)
            self.model.append(nn.Embedding(3, 2, max_norm=1.0))

    text = refusal(lambda: Words(optim.Adam), tmp_path, shm_dir)
    assert "each rank has its own 4.weight" in text


def test_an_elastic_job_is_refused(
    tmp_path: Path, shm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PlainAdapter, "repeats_steps", False)  # as elastic Horovod's
    text = refusal(lambda: Loop(optim.Adam), tmp_path, shm_dir)
    assert "local_journal_steps is 100, and elastic jobs have no journal" in text


def test_no_journal_beside_encrypted_shards(
    tmp_path: Path, shm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERCKPT_ENCRYPTION_KEY", "ab" * 32)
    text = refusal(lambda: Loop(optim.Adam), tmp_path, shm_dir, local_codecs="aes-gcm")
    assert "the journal is not encrypted" in text


def test_a_fused_optimizer_under_a_scaler_has_no_journal(tmp_path: Path, shm_dir: Path) -> None:
    fused = functools.partial(optim.Adam, lr=0.01, fused=True)
    loop, events = Scaled(fused), list[tierckpt.Event]()
    ckpt = attach(loop, tmp_path / "ckpts", shm_dir, on_event=events.append)
    for _ in range(3):
        loop.iterate()
        ckpt.step()
    ckpt.abandon()
    texts = [event.message for event in events]
    assert any("the journal ends at v1: a fused optimizer unscales" in text for text in texts)
