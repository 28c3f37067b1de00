"""Other tools' checkpoints: imported, restored, exported, and opened by the tools."""

from __future__ import annotations

import argparse
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, load_model, save_file, save_model
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import tierckpt
from tests.support import exact
from tierckpt import Checkpointer
from tierckpt.cli import run_command
from tierckpt.state import PLAIN_VALUES, PlainValues
from tierckpt.storage.persistent import PersistentStore
from tierckpt.testing import TinyJob, tiny_model

STEPS = 5
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(autouse=True)
def this_machines_memory(shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERCKPT_SHM_DIR", str(shm_dir))


@pytest.fixture
def trained() -> TinyJob:
    """A job without checkpoints."""
    return TinyJob(None).run(STEPS)


def content_of(job: TinyJob, **more: Any) -> dict[str, Any]:
    return {"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict(), **more}


def to_torch(job: TinyJob, target: Path) -> Path:
    schedule = job.scheduler.state_dict()
    torch.save(content_of(job, lr_scheduler=schedule, epoch=2, iteration=STEPS), target)
    return target


def to_wrapped(job: TinyJob, target: Path) -> Path:
    """With the names of a compiled model in DDP, and the arguments of a script."""
    content = content_of(job, scheduler=job.scheduler.state_dict(), args=argparse.Namespace(lr=1))
    model = content.pop("model")
    content["state_dict"] = {f"module._orig_mod.{name}": value for name, value in model.items()}
    torch.save(content, target)
    return target


def to_dcp(job: TinyJob, target: Path) -> Path:
    content = content_of(job, scheduler=job.scheduler.state_dict(), iteration=STEPS)
    dcp.save(content, checkpoint_id=target, no_dist=True)
    return target


def to_dcp_app(job: TinyJob, target: Path) -> Path:
    """As in torch's tutorial."""
    model, optimizer = get_state_dict(job.model, job.optimizer)
    app = {"model": model, "optim": optimizer, "scheduler": job.scheduler.state_dict()}
    dcp.save({"app": app}, checkpoint_id=target, no_dist=True)
    return target


def state_of(job: TinyJob) -> Any:
    parts = (job.model, job.optimizer, job.scheduler)
    return [in_order(each.state_dict()) for each in parts]


def in_order(value: Any) -> Any:
    """The image of a tree, with its keys sorted."""
    if isinstance(value, dict):
        return [(key, in_order(value[key])) for key in sorted(value, key=str)]
    return [*map(in_order, value)] if isinstance(value, list) else exact.image(value)


def tensors(named: Any) -> dict[str, Any]:
    return {name: exact.image(tensor) for name, tensor in named.items()}


def start(path: Path, **settings: Any) -> TinyJob:
    """Another job, with other weights."""
    return TinyJob(path, seed=9, agent="inline", **settings)


@pytest.mark.parametrize("save", [to_torch, to_wrapped, to_dcp, to_dcp_app])
def test_a_job_continues_from_another_tools_file(
    save: Callable[[TinyJob, Path], Path], trained: TinyJob, tmp_path: Path
) -> None:
    source = save(trained, tmp_path / "source")
    assert run_command(["import", str(source), str(tmp_path / "ckpts")]) == 0
    with start(tmp_path / "ckpts") as job:
        restored = job.restore()
        assert (int(restored), restored.version) == (STEPS, STEPS)
        assert restored.imported
        assert state_of(job) == state_of(trained)
        job.run(STEPS + 2)
    assert tierckpt.load(tmp_path / "ckpts").version == STEPS + 2


def test_an_imported_version_is_read_without_a_job(trained: TinyJob, tmp_path: Path) -> None:
    source = to_torch(trained, tmp_path / "source.pt")
    assert run_command(["import", str(source), str(tmp_path / "ckpts")]) == 0
    saved = tierckpt.load(tmp_path / "ckpts")
    assert tensors(saved.model) == tensors(trained.model.state_dict())
    optimizer, before = saved.optimizers["optimizer"], trained.optimizer.state_dict()
    assert optimizer["param_groups"] == before["param_groups"]
    assert [tensors(each) for each in optimizer["state"].values()] == [
        tensors(each) for each in before["state"].values()
    ]
    assert saved.extra["lr_scheduler"]["last_epoch"] == STEPS
    for command in ("list", "verify"):
        assert run_command([command, str(tmp_path / "ckpts")]) == 0


def test_a_persistent_path(trained: TinyJob, tmp_path: Path) -> None:
    source, shared = to_torch(trained, tmp_path / "source.pt"), str(tmp_path / "shared")
    assert run_command(["import", str(source), shared, "--persistent"]) == 0
    with start(tmp_path / "ckpts", persistent_path=shared) as job:
        assert job.restore().levels == {"persistent": 1}
        assert state_of(job) == state_of(trained)
        assert not [event for event in job.events if "written by job" in event.text()]


def test_weights_alone_leave_the_rest_fresh(
    trained: TinyJob, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(trained.model, tmp_path / "model.safetensors")
    assert (
        run_command(["import", str(tmp_path / "model.safetensors"), str(tmp_path / "ckpts")]) == 0
    )
    assert "no optimizer: it starts fresh" in capsys.readouterr().out
    with start(tmp_path / "ckpts") as job:
        assert job.restore() == 0
        assert state_of(job)[0] == state_of(trained)[0]
        said = " ".join(event.text() for event in job.events)
        assert "optimizer 'optimizer' starts fresh" in said
        assert "extra 'scheduler', 'shuffle' starts fresh" in said
        job.run(2)


class Tied(torch.nn.Module):
    """Tied weights, a buffer of its own, and two equal tensors that are not tied."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(8, 12)
        self.head = torch.nn.Linear(12, 8, bias=False)
        self.core = torch.nn.Linear(12, 12)
        self.register_buffer("mask", torch.randn(12, 12))
        if tied:
            self.head.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.core(x) @ self.mask)[:, :4]


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("copied", [True, False])
def test_tied_weights(copied: bool, is_tied: bool, tmp_path: Path) -> None:
    """They may be two tensors in the file, and one in the model, or the other way round."""
    torch.manual_seed(3)
    model = Tied()
    with torch.no_grad():
        model.core.bias.zero_()
    state = {k: v.clone() if copied else v for k, v in model.state_dict().items()}
    torch.save(state, tmp_path / "weights.pt")
    assert run_command(["import", str(tmp_path / "weights.pt"), str(tmp_path / "ckpts")]) == 0
    with start(tmp_path / "ckpts", model=Tied(is_tied)) as job:
        job.restore()
        assert exact.image({**job.model.state_dict()}) == exact.image({**model.state_dict()})
        assert (job.model.head.weight is job.model.words.weight) == is_tied


def test_two_tensors_that_differ_are_not_one_weight(tmp_path: Path) -> None:
    torch.save(Tied(tied=False).state_dict(), tmp_path / "weights.pt")
    assert run_command(["import", str(tmp_path / "weights.pt"), str(tmp_path / "ckpts")]) == 0
    with (
        start(tmp_path / "ckpts", model=Tied()) as job,
        pytest.raises(tierckpt.StateMismatchError, match=r"one tensor in the model, and differ"),
    ):
        job.restore()


def changed(job: TinyJob) -> dict[str, dict[str, Any]]:
    """Files that do not fit, by the name in the error."""
    content = content_of(job)
    lost = {k: v for k, v in content["model"].items() if k != "4.bias"}
    wide = {**content["model"], "0.weight": torch.zeros(24, 13)}
    half = {**content["model"], "0.weight": content["model"]["0.weight"].half()}
    more = {**content["model"], "9.weight": torch.zeros(2)}
    groups = content["optimizer"]["param_groups"]
    two = [{**groups[0], "params": [0, 1]}, {**groups[0], "params": [2, 3, 4, 5]}]
    sgd = torch.optim.SGD(job.model.parameters(), 0.1, momentum=0.9).state_dict()
    turned = dict(content["optimizer"]["state"])
    turned[0], turned[4] = turned[4], turned[0]
    return {
        "model/4.bias is in the model, not in the checkpoint": {**content, "model": lost},
        "model/0.weight is float32[24, 13] in the checkpoint": {**content, "model": wide},
        "model/0.weight is float16[24, 12] in the checkpoint": {**content, "model": half},
        "model/9.weight float32[2] is in the checkpoint, not": {**content, "model": more},
        "2 param group(s) of 2 + 4": {
            **content,
            "optimizer": {**content["optimizer"], "param_groups": two},
        },
        "optimizer of another class": {**content, "optimizer": sgd},
        "exp_avg of 0.weight has the shape [4, 24]": {
            **content,
            "optimizer": {**content["optimizer"], "state": turned},
        },
        "optimizer 'second' is in the file": {
            "model": content["model"],
            "optimizer": content["optimizer"],
            "second": content["optimizer"],
        },
    }


def test_each_difference_is_named_and_nothing_is_changed(trained: TinyJob, tmp_path: Path) -> None:
    for number, (text, content) in enumerate(changed(trained).items()):
        path = tmp_path / f"ckpts{number}"
        torch.save(content, tmp_path / "source.pt")
        assert run_command(["import", str(tmp_path / "source.pt"), str(path)]) == 0
        job = start(path)
        before = state_of(job)
        with job, pytest.raises(tierckpt.StateMismatchError) as error:
            job.restore()
        assert text in str(error.value)
        assert state_of(job) == before


def test_a_prefix_is_dropped(trained: TinyJob, tmp_path: Path) -> None:
    model = {f"net.{k}": v for k, v in trained.model.state_dict().items()}
    torch.save({"model": {**model, "loss.weight": torch.ones(2)}}, tmp_path / "source.pt")
    arguments = ["import", str(tmp_path / "source.pt"), str(tmp_path / "ckpts")]
    assert run_command([*arguments, "--prefix", "other."]) == 1
    assert run_command([*arguments, "--prefix", "net."]) == 0
    with start(tmp_path / "ckpts") as job:
        job.restore()
        assert state_of(job)[0] == state_of(trained)[0]


# --- errors --------------------------------------------------------------------------------------


def run(path: str) -> None:
    Path(path).touch()


class Malicious:
    """An object with a pickle that makes a file or a folder."""

    def __init__(self, path: Path, act: Callable[[str], None]) -> None:
        self.path, self.act = path, act

    def __reduce__(self) -> Any:
        return self.act, (str(self.path),)


def test_no_code_of_a_file_runs(trained: TinyJob, tmp_path: Path, capsys: Any) -> None:
    ran, source, folder = tmp_path / "ran", tmp_path / "source.pt", tmp_path / "folder"
    torch.save({**content_of(trained), "evil": Malicious(ran, run)}, source)
    assert run_command(["import", str(source), str(tmp_path / "ckpts")]) == 0
    assert f"not taken: evil ({run.__module__}.run)" in capsys.readouterr().out
    torch.save({**content_of(trained), "evil": Malicious(ran, os.mkdir)}, source)
    assert run_command(["import", str(source), str(tmp_path / "other")]) == 1
    assert "posix" in capsys.readouterr().err
    to_dcp(trained, folder)
    (folder / ".metadata").write_bytes(pickle.dumps(Malicious(ran, os.mkdir)))
    assert run_command(["import", str(folder), str(tmp_path / "other")]) == 1
    assert "posix.mkdir, which is not loaded" in capsys.readouterr().err
    assert not ran.exists()


def test_used_places_and_unknown_sources(trained: TinyJob, tmp_path: Path, capsys: Any) -> None:
    source, path = to_torch(trained, tmp_path / "source.pt"), tmp_path / "ckpts"

    def error(*arguments: object) -> str:
        assert run_command(["import", *map(str, arguments)]) == 1
        return str(capsys.readouterr().err)

    assert "does not exist" in error(tmp_path / "nothing", path)
    (tmp_path / "text").write_text("text")
    assert "a file of no known format" in error(tmp_path / "text", path)
    (tmp_path / "empty").mkdir()
    assert "a folder of no known format" in error(tmp_path / "empty", path)
    torch.save({"a": {"x": torch.ones(1)}, "b": {"x": torch.ones(1)}}, tmp_path / "two.pt")
    assert "which part is the model?" in error(tmp_path / "two.pt", path)
    assert "such are: 'a', 'b'" in error(tmp_path / "two.pt", path, "--model", "c")
    assert not path.exists()
    with start(path) as job:
        job.run(1)
        assert "is in use by a running job" in error(source, path)
    assert "has checkpoints already (v1)" in error(source, path)
    assert run_command(["import", str(source), str(path), "--force"]) == 0
    with start(path) as job:
        assert job.restore().version == STEPS
        assert state_of(job) == state_of(trained)


def test_used_persistent_places(trained: TinyJob, tmp_path: Path, capsys: Any) -> None:
    source, shared = to_torch(trained, tmp_path / "source.pt"), tmp_path / "shared"

    def error(*arguments: object) -> str:
        assert run_command(["import", *map(str, arguments)]) == 1
        return str(capsys.readouterr().err)

    with start(tmp_path / "ckpts", persistent_path=str(shared)) as job:
        job.run(2)
    assert "is a persistent_path; give --persistent" in error(source, shared, "--force")
    assert "omit --persistent" in error(source, tmp_path / "ckpts", "--persistent", "--force")
    PersistentStore(str(shared)).lease("run", "another job").ensure()
    text, said = f"tierckpt takeover {shared}", error(source, shared, "--persistent", "--force")
    assert "is in use by another job" in said
    assert text in said
    assert run_command(text.split()[1:]) == 0
    assert run_command(["import", str(source), str(shared), "--persistent", "--force"]) == 0
    assert not PersistentStore(str(shared)).owner()
    with start(tmp_path / "other", persistent_path=str(shared)) as job:
        assert job.restore().version == STEPS
        assert state_of(job) == state_of(trained)


def cut(path: Path, target: Path) -> Path:
    target.write_bytes(path.read_bytes()[:-3000])
    return target


def test_damaged_and_foreign_files_are_named(trained: TinyJob, tmp_path: Path, capsys: Any) -> None:
    def error(source: Path, *arguments: str) -> str:
        assert run_command(["import", str(source), str(tmp_path / "ckpts"), *arguments]) == 1
        found = str(capsys.readouterr().err)
        assert str(source) in found
        assert not (tmp_path / "ckpts").exists()
        return found

    whole, folder = to_torch(trained, tmp_path / "whole.pt"), tmp_path / "folder"
    assert "is damaged, or not complete" in error(cut(whole, tmp_path / "cut.pt"))
    save_file({"x": torch.ones(2000)}, tmp_path / "x.safetensors")
    damaged = cut(tmp_path / "x.safetensors", tmp_path / "cut.safetensors")
    assert "cannot be read" in error(damaged)
    to_dcp(trained, folder)
    next(folder.glob("*.distcp")).unlink()
    assert "No such file" in error(folder)
    assert "is no file of torch.save" in error(folder, "--format", "torch")
    assert "is no folder of torch.distributed.checkpoint" in error(whole, "--format", "dcp")
    assert "is no checkpoint of Lightning" in error(whole, "--format", "lightning")
    assert "is no folder checkpoint-N" in error(whole, "--format", "transformers")
    torch.save(trained.model, tmp_path / "module.pt")
    assert "has a torch.nn.modules.container.Sequential" in error(tmp_path / "module.pt")


def test_the_former_form_of_torch_save(trained: TinyJob, tmp_path: Path) -> None:
    content = content_of(trained, args=argparse.Namespace(lr=1))
    torch.save(content, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert run_command(["import", str(tmp_path / "old.pt"), str(tmp_path / "ckpts")]) == 0
    with start(tmp_path / "ckpts") as job:
        job.restore()
        assert state_of(job)[:2] == state_of(trained)[:2]


class Elastic:
    epoch, batch = 0, 7


def test_plain_values_go_to_an_elastic_state(trained: TinyJob, tmp_path: Path) -> None:
    to_torch(trained, tmp_path / "source.pt")
    assert run_command(["import", str(tmp_path / "source.pt"), str(tmp_path / "ckpts")]) == 0
    owner, fresh = Elastic(), TinyJob(None, seed=7)
    values = PlainValues(owner, ["epoch", "batch"])
    given = {"path": str(tmp_path / "ckpts"), "agent": "inline", "extra": {PLAIN_VALUES: values}}
    with Checkpointer(fresh.model, fresh.optimizer, **given) as ckpt:
        assert ckpt.restore() == STEPS
        assert (owner.epoch, owner.batch) == (2, 7)


def test_another_model_takes_what_fits(trained: TinyJob, tmp_path: Path) -> None:
    """With `strict=False`."""
    to_torch(trained, tmp_path / "source.pt")
    assert run_command(["import", str(tmp_path / "source.pt"), str(tmp_path / "ckpts")]) == 0
    model = tiny_model()
    model[4] = torch.nn.Linear(24, 9)
    with start(tmp_path / "ckpts", model=model) as job:
        job.restore(strict=False)
        given = trained.model.state_dict()
        same = [
            k
            for k, v in model.state_dict().items()
            if v.shape == given[k].shape and torch.equal(v, given[k])
        ]
        assert same == [k for k in given if not k.startswith("4.")]


# --- export --------------------------------------------------------------------------------------


@pytest.fixture
def ended(tmp_path: Path) -> TinyJob:
    with TinyJob(tmp_path / "ckpts", agent="inline") as job:
        job.run(STEPS)
    return job


def export(tmp_path: Path, name: str, *more: str) -> Path:
    out = tmp_path / name
    assert run_command(["export", str(tmp_path / "ckpts"), str(out), *more]) == 0
    return out


def test_dcp_loads_what_was_exported(ended: TinyJob, tmp_path: Path) -> None:
    out = export(tmp_path, "folder", "--format", "dcp")
    fresh = TinyJob(None, seed=4)
    fresh.run(1)
    model, optimizer = get_state_dict(fresh.model, fresh.optimizer)
    content: dict[str, Any] = {"model": model, "optimizer": optimizer, "iteration": 0}
    dcp.load(content, checkpoint_id=out, no_dist=True)
    set_state_dict(
        fresh.model,
        fresh.optimizer,
        model_state_dict=content["model"],
        optim_state_dict=content["optimizer"],
    )
    assert content["iteration"] == STEPS
    assert state_of(fresh)[:2] == state_of(ended)[:2]


def test_weights_in_several_files(ended: TinyJob, tmp_path: Path, capsys: Any) -> None:
    out = export(tmp_path, "folder", "--format", "safetensors", "--max-shard-bytes", "1K")
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 1
    together = {name: tensor for file in files for name, tensor in load_file(file).items()}
    ended_model = ended.model.state_dict()
    assert together.keys() == ended_model.keys()
    assert all(exact.image(together[k]) == exact.image(v) for k, v in ended_model.items())
    assert run_command(["import", str(out), str(tmp_path / "again")]) == 0
    with start(tmp_path / "again") as job:
        assert job.restore().version == STEPS
        assert state_of(job)[0] == state_of(ended)[0]
    model = tmp_path / "model.safetensors"
    assert (
        run_command(["export", str(tmp_path / "ckpts"), str(model), "--max-shard-bytes", "1K"]) == 1
    )
    assert "Several files need a folder" in capsys.readouterr().err
    export(tmp_path, "model.safetensors")
    fresh = tiny_model()
    load_model(fresh, model)
    assert exact.image({**fresh.state_dict()}) == exact.image({**ended_model})


def test_a_folder_is_replaced_as_a_whole(ended: TinyJob, tmp_path: Path, capsys: Any) -> None:
    out = export(tmp_path, "folder", "--format", "dcp")
    command = ["export", str(tmp_path / "ckpts"), str(out), "--format", "dcp"]
    assert run_command(command) == 1
    assert "exists; --force replaces it" in capsys.readouterr().err
    (out / "old").touch()
    assert run_command([*command, "--force"]) == 0
    assert not (out / "old").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    command[2] = str(tmp_path / "mine")
    assert run_command([*command, "--force"]) == 1
    assert "a folder with other things than a checkpoint" in capsys.readouterr().err
    assert (tmp_path / "mine" / "thesis.tex").exists()
    assert {each.name for each in tmp_path.iterdir()} == {"ckpts", "folder", "mine"}


def test_an_exported_file_is_imported_with_all_objects(ended: TinyJob, tmp_path: Path) -> None:
    out = export(tmp_path, "all.pt")
    assert run_command(["import", str(out), str(tmp_path / "again")]) == 0
    with start(tmp_path / "again") as job:
        assert job.restore() == STEPS
        assert state_of(job) == state_of(ended)
