"""Files and targets as people have them: values of numpy, odd tensors, names with a prefix, a full
disk."""

from __future__ import annotations

import argparse
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import tierckpt
from tests.support import exact
from tests.support.tmpfs import SIZE_BYTES
from tierckpt.cli import run_command
from tierckpt.testing import TinyJob, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(autouse=True)
def this_machines_memory(shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERCKPT_SHM_DIR", str(shm_dir))


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command, and returns its output, or its error."""

    def run(*arguments: object, fails: bool = False) -> str:
        assert run_command([*map(str, arguments)]) == fails
        output = capsys.readouterr()
        assert "Traceback" not in output.err
        return str(output.err if fails else output.out)

    return run


@pytest.fixture
def ended(tmp_path: Path) -> TinyJob:
    with TinyJob(tmp_path / "ckpts", agent="inline") as job:
        job.run(2)
    return job


def job_at(path: Path, **settings: Any) -> TinyJob:
    return TinyJob(path, seed=9, agent="inline", **settings)


def image(named: Any) -> Any:
    return exact.image(dict(named))


@pytest.mark.parametrize("new", [True, False])
def test_numbers_of_numpy(new: bool, tmp_path: Path, command: Callable[..., str]) -> None:
    """Scripts compute learning rates, metrics and counters with numpy."""
    trained = TinyJob(None).run(2)
    trained.optimizer.param_groups[0]["lr"] = np.float64(0.01)
    content = {"model": trained.model.state_dict(), "optimizer": trained.optimizer.state_dict()}
    content |= {
        "iteration": np.int64(7),
        "best": np.float32(0.5),
        "name": np.str_("a"),
        "curve": np.arange(3.0),
    }
    objects = {"names": np.array([None, "a"], dtype=object), "args": argparse.Namespace(lr=1)}
    torch.save({**content, **objects}, tmp_path / "source.pt", _use_new_zipfile_serialization=new)
    said = command("import", tmp_path / "source.pt", tmp_path / "ckpts")
    assert "values, for an elastic state: iteration, best, name" in said
    assert "not taken: args (argparse.Namespace)" in said
    assert "not taken: curve (numpy._core.multiarray._reconstruct)" in said.replace(
        ".core", "._core"
    )
    with job_at(tmp_path / "ckpts") as job:
        assert job.restore() == 7
        assert image(job.optimizer.state_dict()) == image(trained.optimizer.state_dict())


def test_objects_in_a_folder_of_dcp(tmp_path: Path, command: Callable[..., str]) -> None:
    content = {"model": tiny_model().state_dict(), "args": argparse.Namespace(lr=1)}
    content |= {"epoch": np.int64(3), "place": Path("data")}
    dcp.save(content, checkpoint_id=tmp_path / "folder", no_dist=True)
    said = command("import", tmp_path / "folder", tmp_path / "ckpts")
    assert "not taken: args (argparse.Namespace)" in said
    assert "not taken: place (pathlib" in said
    assert "values, for an elastic state: epoch" in said
    content["evil"] = Malicious(tmp_path / "ran", os.mkdir)
    dcp.save(content, checkpoint_id=tmp_path / "evil", no_dist=True)
    said = command("import", tmp_path / "evil", tmp_path / "other", fails=True)
    assert "it has code (posix.mkdir)" in said
    assert not (tmp_path / "ran").exists()


class Malicious:
    """An object with a pickle that makes a folder."""

    def __init__(self, path: Path, act: Callable[[str], None]) -> None:
        self.path, self.act = path, act

    def __reduce__(self) -> Any:
        return self.act, (str(self.path),)


class Odd(nn.Module):
    """Tensors of many kinds; `lazy`: one that torch has not conjugated yet."""

    def __init__(self, seed: int, lazy: bool) -> None:
        super().__init__()
        torch.manual_seed(seed)
        for name, tensor in {
            "turned": torch.randn(6, 4).t(),
            "some": torch.randn(8, 8)[::2, ::2],
            "last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
            "scalar": torch.randn(()),
            "bf16": torch.randn(5).bfloat16(),
            "none": torch.empty(0, 3),
            "nothing": torch.empty(0, 3),
        }.items():
            self.register_parameter(name, nn.Parameter(tensor))
        phases = torch.randn(2, 3, dtype=torch.complex64)
        self.register_buffer("phase", phases[0].conj() if lazy else phases[0].clone())
        self.register_buffer("other", phases[1].clone())
        rows = torch.randn(2, 4)
        self.register_buffer("row", rows[0])
        self.register_buffer("next_row", rows[1])
        self.register_buffer("flags", torch.tensor([True, False]))


def test_odd_tensors(tmp_path: Path, command: Callable[..., str]) -> None:
    source, fresh = Odd(1, lazy=True), Odd(2, lazy=False)
    torch.save({"net": source.state_dict()}, tmp_path / "source.pt")
    command("import", tmp_path / "source.pt", tmp_path / "ckpts")
    with job_at(tmp_path / "ckpts", model=fresh) as job:
        job.restore()
        expected = {name: each.resolve_conj() for name, each in source.state_dict().items()}
        assert image(job.model.state_dict()) == image(expected)


def test_optimizer_names_lose_the_prefix_too(tmp_path: Path, command: Callable[..., str]) -> None:
    trained, outer = TinyJob(None).run(2), nn.Module()
    outer.net = trained.model
    model, optimizer = get_state_dict(outer, trained.optimizer)
    folder = tmp_path / "folder"
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder, no_dist=True)
    command("import", folder, tmp_path / "ckpts", "--prefix", "net.")
    with job_at(tmp_path / "ckpts") as job:
        job.restore()
        assert image(job.model.state_dict()) == image(trained.model.state_dict())
        assert image(job.optimizer.state_dict()) == image(trained.optimizer.state_dict())


def test_parameters_of_another_group_are_named(tmp_path: Path, command: Callable[..., str]) -> None:
    trained = TinyJob(None).run(1)
    model, optimizer = get_state_dict(trained.model, trained.optimizer)
    torch.save({"model": model, "optimizer": optimizer}, tmp_path / "source.pt")
    command("import", tmp_path / "source.pt", tmp_path / "ckpts")
    net = tiny_model()
    some = torch.optim.AdamW([net[0].weight, net[0].bias, *net[1].parameters(), net[4].weight])
    other = nn.Parameter(torch.ones(4))
    some.add_param_group({"params": [net[4].bias]})
    del some.param_groups[1:]
    some.param_groups[0]["params"].append(other)
    net.register_parameter("other", other)
    with (
        tierckpt_job(tmp_path / "ckpts", net, some) as ckpt,
        pytest.raises(tierckpt.StateMismatchError, match=r"param group with other, .* with 4.bias"),
    ):
        ckpt.restore()


def tierckpt_job(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    from tierckpt import Checkpointer

    return Checkpointer(model, optimizer, path=str(path), agent="inline")


def test_an_optimizer_without_a_counter(tmp_path: Path, command: Callable[..., str]) -> None:
    model = tiny_model()
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    torch.save({"model": model.state_dict(), "opt": sgd.state_dict()}, tmp_path / "source.pt")
    assert "no iteration: it is 0; --iteration" in command(
        "import", tmp_path / "source.pt", tmp_path / "ckpts"
    )


def test_keys_that_name_other_things_than_in_an_export(
    tmp_path: Path, command: Callable[..., str]
) -> None:
    weights = tiny_model().state_dict()
    torch.save({"model": weights, "version": "1.0", "iteration": 4, "extra": None}, tmp_path / "a")
    assert "v4, iteration 4" in command("import", tmp_path / "a", tmp_path / "ckpts")
    save_file(weights, tmp_path / "b.safetensors", {"version": "3"})
    assert "v1, iteration 0" in command("import", tmp_path / "b.safetensors", tmp_path / "other")


def test_what_is_no_model_is_named(tmp_path: Path, command: Callable[..., str]) -> None:
    model, source = tiny_model(), tmp_path / "source.pt"

    def error(content: Any) -> str:
        torch.save(content, source)
        return command("import", source, tmp_path / "ckpts", fails=True)

    assert "but a torch.nn.modules.container.Sequential; save model.state_dict()" in error(
        {"model": model}
    )
    assert "'n' in it is no tensor" in error({"model": {**model.state_dict(), "n": 3}})
    assert "it is empty" in error({"state_dict": {}})
    assert "with tensors alone: 'epoch'" in error({"epoch": 3})
    source.write_bytes(b"")
    assert "source.pt is empty" in command("import", source, tmp_path / "ckpts", fails=True)
    whole = tmp_path / "whole.pt"
    torch.save(model.state_dict(), whole)
    source.write_bytes(whole.read_bytes().replace(b"data.pkl", b"date.pkl"))
    said = command("import", source, tmp_path / "ckpts", fails=True)
    assert "weights_only` set to `False`" not in said
    assert not (tmp_path / "ckpts").exists()


def test_parts_of_a_folder_of_the_trainers(tmp_path: Path, command: Callable[..., str]) -> None:
    folder = tmp_path / "checkpoint-3"
    folder.mkdir()
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 3}))
    torch.save({"0.weight": torch.ones(2), "n": 3}, folder / "pytorch_model.bin")
    assert "pytorch_model.bin is no state_dict()" in command(
        "import", folder, tmp_path / "ckpts", fails=True
    )
    torch.save(tiny_model().state_dict(), folder / "pytorch_model.bin")
    torch.save([1, 2], folder / "optimizer.pt")
    assert "optimizer.pt is no state_dict() of an optimizer" in command(
        "import", folder, tmp_path / "ckpts", fails=True
    )


# --- targets -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["all.pt", "last.ckpt", "epoch.pth.tar"])
def test_equal_versions_make_equal_files(
    name: str, ended: TinyJob, tmp_path: Path, command: Callable[..., str]
) -> None:
    """Also after an import and another export; the first import orders the names."""
    command("export", tmp_path / "ckpts", tmp_path / name)
    inner = {Path(each).parts[0] for each in zipfile.ZipFile(tmp_path / name).namelist()}
    assert inner == {"archive"}
    source = tmp_path / name
    for turn in "abc":
        command("import", source, tmp_path / turn)
        source = tmp_path / f"{turn}-{name}"
        command("export", tmp_path / turn, source)
    assert source.read_bytes() == (tmp_path / f"b-{name}").read_bytes()


def test_a_target_named_by_a_dot(
    ended: TinyJob, tmp_path: Path, command: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    command("export", tmp_path / "ckpts", ".", "--format", "dcp", "--force")
    assert (tmp_path / "here" / ".metadata").exists()


@pytest.fixture
def full_disk(small_tmpfs: Path) -> Path:
    """A file system with room for two pages."""
    (small_tmpfs / "full").write_bytes(bytes(SIZE_BYTES - 8192))
    return small_tmpfs


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_full_disk(
    ended: TinyJob, tmp_path: Path, full_disk: Path, command: Callable[..., str]
) -> None:
    """The error names the target and the reason, and nothing is left of it."""
    targets = [("all.pt",), ("last.ckpt",), *((f, "--format", f) for f in ("dcp", "transformers"))]
    for name, *more in targets:
        said = command("export", tmp_path / "ckpts", full_disk / name, *more, fails=True)
        assert f"{full_disk / name} cannot be written" in said
        assert "No space left on device" in said
        assert [each.name for each in full_disk.iterdir()] == ["full"]
    command("export", tmp_path / "ckpts", tmp_path / "all.pt")
    said = command("import", tmp_path / "all.pt", full_disk / "ckpts", fails=True)
    assert f"{full_disk / 'ckpts'} cannot be written" in said
    assert "No space left on device" in said
    (tmp_path / "file").touch()
    said = command("import", tmp_path / "all.pt", tmp_path / "file", fails=True)
    assert f"{tmp_path / 'file'} cannot be written" in said
