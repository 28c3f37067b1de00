"""Parts of another job's version, under other names, and what does not fit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tierckpt import Checkpointer, LoopState, ResumableLoader
from tierckpt.errors import RestoreError, StateMismatchError
from tierckpt.testing import TinyJob, raw_bytes

pytestmark = pytest.mark.usefixtures("inline_agent")


class Net(torch.nn.Module):
    """A body under a name of choice, and a head."""

    def __init__(self, body: str, classes: int) -> None:
        super().__init__()
        layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8))
        self.add_module(body, layers)
        self.head = torch.nn.Linear(8, classes)
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(getattr(self, self.body)(x))  # type: ignore[no-any-return]


def attach(model: Net, path: Path, shm_dir: Path) -> tuple[Checkpointer, torch.optim.Optimizer]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    found = Checkpointer(
        model, optimizer, path=path, shm_dir=str(shm_dir), local_every_steps=1, when_busy="wait"
    )
    return found, optimizer


def step(model: Net, optimizer: torch.optim.Optimizer, ckpt: Checkpointer) -> None:
    optimizer.zero_grad()
    model(torch.randn(5, 4)).square().sum().backward()
    optimizer.step()
    ckpt.step()


@pytest.fixture
def source(tmp_path: Path, shm_dir: Path) -> dict[str, bytes]:
    torch.manual_seed(1)
    model = Net("backbone", 3)
    ckpt, optimizer = attach(model, tmp_path / "source", shm_dir)
    for _ in range(3):
        step(model, optimizer, ckpt)
    ckpt.close()
    return {name: raw_bytes(value) for name, value in model.state_dict().items()}


def new(path: Path, shm_dir: Path, classes: int = 3) -> tuple[Net, Checkpointer, Any]:
    torch.manual_seed(2)
    model = Net("encoder", classes)
    return model, *attach(model, path, shm_dir)


def test_names_are_mapped_and_the_rest_is_in_the_report(
    source: dict[str, bytes], tmp_path: Path, shm_dir: Path
) -> None:
    model, ckpt, optimizer = new(tmp_path / "new", shm_dir, classes=5)
    head = raw_bytes(model.head.weight)
    started = ckpt.restore(
        fork_from=tmp_path / "source",
        only="model",
        map={"backbone.*": "encoder.*"},
        strict=False,
    )
    report = started.partial
    assert report is not None
    assert (int(started), ckpt.version) == (0, 0)
    assert report.other_shape == [
        "head.weight is float32[3, 8] in the source, head.weight is float32[5, 8] here",
        "head.bias is float32[3] in the source, head.bias is float32[5] here",
    ]
    assert report.skipped == report.missing == report.other == []
    now = {name: raw_bytes(value) for name, value in model.state_dict().items()}
    assert {n for n in now if n.startswith("encoder")} == {*report.loaded}
    for name in report.loaded:
        assert now[name] == source[name.replace("encoder", "backbone")]
    assert now["head.weight"] == head
    assert not optimizer.state
    step(model, optimizer, ckpt)
    ckpt.close()
    assert not [*(tmp_path / "source").glob("*.hold")]
    model, ckpt, optimizer = new(tmp_path / "new", shm_dir, classes=5)
    again = ckpt.restore(fork_from=tmp_path / "source", only="model", strict=False)
    assert again == 1, "a whole version of its own"
    assert again.partial is None
    ckpt.close()


@pytest.mark.parametrize(
    ("map_", "text"),
    [
        ({"backbone.*": "encoder.*"}, r"head.weight is float32\[3, 8\] in the source, .*\[5, 8\]"),
        ({}, "backbone.0.weight is in the source, not here"),
        ({"trunk.*": "encoder.*"}, "'trunk.*', which fits no name"),
        ({"backbone.*": "encoder.0.*"}, "encoder.0.weight is here, not in the source"),
        ({"*.bias": "head.bias", "backbone.*": "encoder.*"}, "both lead to head.bias"),
    ],
)
def test_a_strict_load_names_what_does_not_match_and_changes_nothing(
    source: dict[str, bytes], tmp_path: Path, shm_dir: Path, map_: dict[str, str], text: str
) -> None:
    model, ckpt, _ = new(tmp_path / "new", shm_dir, classes=5)
    before = {name: raw_bytes(value) for name, value in model.state_dict().items()}
    with pytest.raises(StateMismatchError, match=text) as refused:
        ckpt.restore(fork_from=tmp_path / "source", only="model", map=map_)
    assert "Give names that differ with map=" in str(refused.value)
    assert {name: raw_bytes(value) for name, value in model.state_dict().items()} == before
    ckpt.abandon()


def test_nothing_that_fits_is_refused_in_any_case(
    source: dict[str, bytes], tmp_path: Path, shm_dir: Path
) -> None:
    _, ckpt, _ = new(tmp_path / "new", shm_dir, classes=5)
    with pytest.raises(StateMismatchError, match="in the source, not here"):
        ckpt.load_from(tmp_path / "source", map={"*": "nothing.*"}, strict=False)
    ckpt.abandon()


def test_a_model_and_its_optimizer_under_new_names(
    source: dict[str, bytes], tmp_path: Path, shm_dir: Path
) -> None:
    model, ckpt, optimizer = new(tmp_path / "new", shm_dir)
    optimizer.param_groups[0]["lr"] = 0.5
    report = ckpt.load_from(
        tmp_path / "source", only=("model", "optimizer"), map={"backbone.*": "encoder.*"}
    )
    assert report.differences == []
    assert optimizer.param_groups[0]["lr"] == 0.1
    state = optimizer.state[model.encoder[0].weight]  # type: ignore[index]
    assert int(state["step"]) == 3
    assert bool(state["exp_avg"].abs().sum() > 0)
    ckpt.abandon()


@pytest.mark.parametrize("parts", ["model", "optimizer", "extra"])
def test_one_part_leaves_the_others(parts: str, tmp_path: Path, shm_dir: Path) -> None:
    places = {"shm_dir": str(shm_dir), "local_keep": 2}

    def facts(job: TinyJob) -> dict[str, Any]:
        state = job.optimizer.state_dict()["state"]
        return {
            "model": [raw_bytes(value) for value in job.model.state_dict().values()],
            "optimizer": [
                raw_bytes(torch.as_tensor(v)) for s in state.values() for v in s.values()
            ],
            "extra": job.scheduler.state_dict()["last_epoch"],
            "random": raw_bytes(torch.get_rng_state()),
        }

    with TinyJob(tmp_path / "a", **places) as a:
        wanted = facts(a.run(6))
    with TinyJob(tmp_path / "b", seed=5, **places) as b:
        before = facts(b.run(3))
        assert b.checkpointer.load_from(f"{tmp_path / 'a'}@6", only=parts).parts == (parts,)
        after = facts(b)
        assert after == {**before, parts: wanted[parts]}
        course = b.run(5).fingerprint()
    with TinyJob(tmp_path / "b", seed=6, **places) as b:
        assert b.restore() == 5
        assert b.fingerprint() == course


def test_parts_need_a_source_and_a_name(tmp_path: Path, shm_dir: Path) -> None:
    _, ckpt, _ = new(tmp_path / "new", shm_dir)
    with pytest.raises(ValueError, match="give fork_from="):
        ckpt.restore(only="model")
    with pytest.raises(ValueError, match="the parts are 'model', 'optimizer', 'extra'"):
        ckpt.load_from(tmp_path / "a", only="weights")
    ckpt.abandon()


def moments(optimizer: torch.optim.Optimizer, param: torch.Tensor) -> bytes:
    return raw_bytes(optimizer.state[param]["exp_avg"])


def test_the_optimizer_of_a_head_of_another_shape_keeps_its_own_state(
    source: dict[str, bytes], tmp_path: Path, shm_dir: Path
) -> None:
    model, ckpt, optimizer = new(tmp_path / "new", shm_dir, classes=5)
    step(model, optimizer, ckpt)
    ckpt.complete()
    body, head = model.encoder[0].weight, model.head.weight  # type: ignore[index]
    before = moments(optimizer, body), moments(optimizer, head)
    report = ckpt.load_from(
        tmp_path / "source",
        only=("model", "optimizer"),
        map={"backbone.*": "encoder.*"},
        strict=False,
    )
    assert report.other == [
        f"optimizer 'optimizer': the state of head.{each} was left out, as its parameter does not "
        "fit"
        for each in ("weight", "bias")
    ]
    assert moments(optimizer, body) != before[0]
    assert moments(optimizer, head) == before[1]
    step(model, optimizer, ckpt)
    ckpt.abandon()


@pytest.mark.parametrize(
    ("map_", "text"),
    [
        ({}, r"only there: backbone.0.bias, .*; only here: encoder.0.bias, "),
        ({"backbone.0.*": "encoder.1.*"}, "has other parameters in the source"),
    ],
)
def test_an_optimizer_of_other_parameters_is_left_out(
    source: dict[str, bytes], tmp_path: Path, shm_dir: Path, map_: dict[str, str], text: str
) -> None:
    _, ckpt, optimizer = new(tmp_path / "new", shm_dir)
    report = ckpt.load_from(
        tmp_path / "source", only=("model", "optimizer"), map=map_, strict=False
    )
    assert any(re.search(text, each) for each in report.other)
    assert not optimizer.state
    ckpt.abandon()


def test_gradients_that_no_step_uses_are_no_accumulation(
    source: dict[str, bytes], tmp_path: Path, shm_dir: Path
) -> None:
    """A GAN's discriminator, gradients that a scaler passed over, and those that are zero."""
    torch.manual_seed(2)
    nets = torch.nn.ModuleList([Net("backbone", 3), Net("backbone", 3)])
    optimizers = {str(n): torch.optim.SGD(net.parameters(), lr=0.1) for n, net in enumerate(nets)}
    ckpt = Checkpointer(nets, optimizers, path=tmp_path / "new", shm_dir=str(shm_dir))

    def passes(*stepping: str) -> None:
        for label in stepping:
            sum(net(torch.randn(5, 4)).square().sum() for net in nets).backward()
            optimizers[label].step()
        ckpt.step()

    def load() -> None:
        renamed = {"*": "0.*"}
        ckpt.load_from(tmp_path / "source", map=renamed, strict=False, progress=False)

    passes("0", "1")
    load()
    passes("0")
    with pytest.raises(RestoreError, match=r"optimizer '1' has gradients of backward passes"):
        load()
    for param in nets[1].parameters():
        assert param.grad is not None
        param.grad.fill_(float("inf"))
    load()
    nets.zero_grad(set_to_none=False)
    load()
    nets.zero_grad()
    load()
    ckpt.abandon()


def test_the_place_of_a_job_is_its_own(tmp_path: Path, shm_dir: Path) -> None:
    """Counts and places in the data belong to the iterations of the job that made them."""

    def made(name: str) -> tuple[Checkpointer, Any, Any, Any]:
        model = Net("trunk", 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        data, loop = ResumableLoader([*range(6)]), LoopState(best=0.0)
        ckpt = Checkpointer(
            model,
            optimizer,
            extra={"scheduler": scheduler},
            extra_per_rank={"data": data, "loop": loop},
            path=tmp_path / name,
            shm_dir=str(shm_dir),
        )
        for number, _ in enumerate(data):
            if number == 4:
                break
            loop.best += 1
            step(model, optimizer, ckpt)
            scheduler.step()
        return ckpt, scheduler, data, loop

    made("a")[0].close()
    ckpt, scheduler, data, loop = made("b")
    scheduler.last_epoch, loop.best = 0, 0.5
    place = data.state_dict()
    report = ckpt.load_from(tmp_path / "a", only="extra")
    assert report.loaded == ["extra['scheduler']"]
    assert report.kept == ["extra_per_rank['data']", "extra_per_rank['loop']"]
    assert not report.differences
    assert (scheduler.last_epoch > 0, loop.best, data.state_dict()) == (True, 0.5, place)
    ckpt.abandon()


class Counting(torch.optim.Adam):
    """Its `state_dict()` has a value under a parameter's name."""

    seen = 0

    def state_dict(self) -> dict[str, Any]:
        params = [p for group in self.param_groups for p in group["params"]]
        return {**super().state_dict(), "seen": self.seen, "first": params[0]}

    def load_state_dict(self, state_dict: Any) -> None:
        told = dict(state_dict)
        self.seen, _ = told.pop("seen"), told.pop("first")
        super().load_state_dict(told)


def test_an_optimizer_with_values_of_its_own_is_taken_under_the_same_names(
    tmp_path: Path, shm_dir: Path
) -> None:
    def made(body: str, path: Path) -> tuple[Net, Counting, Checkpointer]:
        model = Net(body, 3)
        optimizer = Counting(model.parameters(), lr=0.1)
        places: dict[str, Any] = {"path": path, "shm_dir": str(shm_dir)}
        ckpt = Checkpointer(model, optimizer, **places, local_every_steps=1, when_busy="wait")
        return model, optimizer, ckpt

    model, optimizer, ckpt = made("backbone", tmp_path / "source")
    optimizer.seen = 7
    step(model, optimizer, ckpt)
    ckpt.close()
    model, optimizer, ckpt = made("backbone", tmp_path / "same")
    assert not ckpt.load_from(tmp_path / "source", only=("model", "optimizer")).differences
    assert optimizer.seen == 7
    assert optimizer.state
    ckpt.abandon()
    model, optimizer, ckpt = made("encoder", tmp_path / "other")
    taken: dict[str, Any] = {
        "only": ("model", "optimizer"),
        "map": {"backbone.*": "encoder.*"},
    }
    with pytest.raises(StateMismatchError, match="is taken only without map="):
        ckpt.load_from(tmp_path / "source", **taken)
    report = ckpt.load_from(tmp_path / "source", **taken, strict=False)
    assert len(report.other) == 1
    assert not optimizer.state
    assert optimizer.seen == 0
    ckpt.abandon()
