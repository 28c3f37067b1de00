"""A loop over an ordinary loader, resumed in mid-epoch: losses are those of an undisturbed run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import tierckpt
from tierckpt.testing import BATCH, CLASSES, IN_FEATURES, seed_everything, tiny_model

LENGTH, EPOCHS = 5 * BATCH, 3
LOOP = tierckpt.LoopState(best=0.0)


class Script:
    """A user's script, with a checkpointer if it has a path."""

    def __init__(self, seed: int, path: Path | None, **settings: Any) -> None:
        seed_everything(seed)
        features = torch.randn(LENGTH, IN_FEATURES, generator=torch.Generator().manual_seed(9))
        data = TensorDataset(features, torch.arange(LENGTH) % CLASSES)
        self.model = tiny_model()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)
        self.data: tierckpt.ResumableLoader[Any] = tierckpt.ResumableLoader(
            DataLoader(data, BATCH, shuffle=True)
        )
        self.losses: list[float] = []
        self.ckpt: tierckpt.Checkpointer | None = None
        if path is not None:
            self.ckpt = tierckpt.Checkpointer(
                self.model,
                self.optimizer,
                extra={"schedule": self.schedule},
                extra_per_rank={"data": self.data},
                path=path,
                **settings,
            )

    def run(self, steps: int, explicit: bool = True) -> None:
        """Train up to the given number of steps, after an evaluation."""
        self.evaluate()
        for epoch in range(self.data.epoch, EPOCHS):
            self.data.set_epoch(epoch)
            for features, target in self.data:
                self.optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(self.model(features), target)
                loss.backward()
                self.optimizer.step()
                self.losses.append(loss.item())
                if self.ckpt is not None and explicit:
                    self.ckpt.step()
                if len(self.losses) == steps:
                    return
            self.schedule.step()
            self.evaluate()

    def evaluate(self) -> None:
        """Draws random numbers when its loader is made."""
        for _ in DataLoader([0, 1], shuffle=True):
            pass


@pytest.mark.parametrize("mode", ["error", "warn"])
def test_a_loader_that_resumes_after_the_first_step_speaks_for_itself(
    mode: str, path: Path, settings: Any
) -> None:
    """As a second loader does, which the loop takes a batch from now and then."""
    said: list[str] = []
    for life in (0, 1):
        model = tiny_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = torch.arange(4.0)
        one = tierckpt.ResumableLoader[Any](DataLoader(data))  # type: ignore[arg-type]
        two = tierckpt.ResumableLoader[Any](DataLoader(data + life))  # type: ignore[arg-type]
        given: dict[str, Any] = {"extra_per_rank": {"one": one, "two": two}, **settings}
        given |= {"on_event": lambda event: said.append(event.message), "data_witness": mode}
        ckpt = tierckpt.Checkpointer(model, optimizer, path=path, agent="inline", **given)
        version = ckpt.restore().version
        assert (version > 0) == bool(life)
        first, second = iter(one), None if life else iter(two)
        for _ in range(2):
            next(first), next(second or iter(()), None)
            model(torch.randn(BATCH, IN_FEATURES)).sum().backward()
            optimizer.step()
            ckpt.step()
        if life and mode == "error":
            with pytest.raises(tierckpt.RestoreError, match=rf"two on rank 0 .* of v{version} are"):
                iter(two)
        elif life:
            assert len(list(two)) == 2
        ckpt.abandon()
    assert len([text for text in said if text.startswith("two on rank 0")]) == (mode == "warn")


@pytest.mark.parametrize(("added", "told"), [(1e-8, False), (1.0, True)])
def test_weights_that_are_loaded_after_the_restore_are_named(
    added: float, told: bool, path: Path, settings: Any
) -> None:
    """The script's line for pretrained weights, in the wrong place."""
    said: list[str] = []
    given = {"agent": "inline", "on_event": lambda event: said.append(event.message), **settings}
    for life in (0, 1):
        model = tiny_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ckpt = tierckpt.Checkpointer(model, optimizer, path=path, **given)
        assert (ckpt.restore().version > 0) == bool(life)
        weights = {name: each + added for name, each in model.state_dict().items()}
        model.load_state_dict(weights)
        for _ in range(3):
            model(torch.randn(BATCH, IN_FEATURES)).sum().backward()
            optimizer.step()
            ckpt.step()
        ckpt.abandon()
    named = [text for text in said if "other values before the first step than restore()" in text]
    assert len(named) == told


def test_a_place_without_batches_is_named_as_unwitnessed(path: Path, settings: Any) -> None:
    said: list[str] = []
    for steps in (2, 1):
        model = tiny_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sampler = tierckpt.ResumableSampler(range(LENGTH), batch_size=BATCH, rank=0, ranks=1)
        given: dict[str, Any] = {"extra": {"position": sampler.position, "loop": LOOP}}
        given |= {"on_event": lambda event: said.append(event.message), **settings}
        ckpt = tierckpt.Checkpointer(model, optimizer, path=path, agent="inline", **given)
        ckpt.restore()
        for _ in range(steps):
            model(torch.randn(BATCH, IN_FEATURES)).sum().backward()
            optimizer.step()
            ckpt.step()
        assert [
            text.partition(" cannot give a batch again")[0]
            for text in said
            if "a batch again" in text
        ] == ["position"] * (steps == 1)
        ckpt.abandon()


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # restored, then stepped
@pytest.mark.parametrize(("killed_after", "explicit"), [(3, True), (5, False), (6, True)])
def test_losses_continue_as_if_nothing_had_happened(
    killed_after: int, explicit: bool, path: Path, settings: Any
) -> None:
    undisturbed = Script(1, None)
    undisturbed.run(-1)
    # Without step(), a step becomes a version when the next one starts.
    boundary = {"boundary": "explicit" if explicit else "forward", "agent": "inline", **settings}
    first = Script(1, path, **boundary)
    assert first.ckpt is not None
    first.run(killed_after + (not explicit), explicit)
    first.ckpt.abandon()
    second = Script(2, path, **boundary)
    assert second.ckpt is not None
    assert second.ckpt.restore() == killed_after
    second.run(-1, explicit)
    assert second.losses == undisturbed.losses[killed_after:]
    assert second.schedule.last_epoch == undisturbed.schedule.last_epoch
    second.ckpt.close()


@pytest.mark.parametrize("registered", [False, True])
def test_a_loader_knows_the_batches_that_were_trained_on(
    registered: bool, path: Path, settings: Any
) -> None:
    """Also one that came after the checkpointer. The loop ends with a batch it does not use."""
    seen: list[list[float]] = []
    done = 0
    for steps in (4, 8):
        seed_everything(steps)
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        order = torch.Generator().manual_seed(3)
        numbers: Any = torch.arange(40.0).reshape(40, 1)
        loader: tierckpt.ResumableLoader[Any] = tierckpt.ResumableLoader(
            DataLoader(numbers, 2, shuffle=True, generator=order)
        )
        given = {} if registered else {"extra_per_rank": {"data": loader}}
        ckpt = tierckpt.Checkpointer(
            model, optimizer, path=path, agent="inline", **given, **settings
        )
        if registered:
            ckpt.register("data", loader, per_rank=True)
        assert int(ckpt.restore()) == done
        for batch in loader:
            if done == steps:
                break
            seen.append(batch.flatten().tolist())
            model(batch).sum().backward()
            optimizer.step()
            ckpt.step()
            done += 1
        ckpt.close()
    assert len(seen) == 8
    assert len({each for batch in seen for each in batch}) == 16, "no batch comes twice"


def halve_weight(module: torch.nn.Module, _: Any) -> None:
    module.weight.data.mul_(0.5)


@pytest.mark.parametrize("named", [False, True])
def test_weights_that_the_forward_pass_changes_are_not_named_as_overwritten(
    named: bool, tmp_path: Path, shm_dir: Path
) -> None:
    """Those of the setting, and those of modules that are known to do so."""
    settings = {"shm_dir": str(shm_dir), "agent": "inline"}
    settings |= {"forward_changes": "0.weight"} if named else {}
    for _ in range(2):
        embedding = torch.nn.Embedding(4, 8, max_norm=None if named else 0.1)
        model = torch.nn.Sequential(embedding, torch.nn.Linear(8, 1))
        if named:
            model[0].register_forward_pre_hook(halve_weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        events: list[tierckpt.Event] = []
        with tierckpt.Checkpointer(
            model, optimizer, path=tmp_path / "c", on_event=events.append, **settings
        ) as ckpt:
            start = int(ckpt.restore())
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.tensor([0, 3])).sum().backward()
                optimizer.step()
                ckpt.step()
        assert [e.message for e in events if "had other values before" in e.message] == []
    assert start == 2
