"""`tierckpt.history`: chosen tensors of many versions, and no other bytes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import tierckpt
from tests.store.offline.test_offline import flip_byte
from tierckpt.errors import ConfigError, RestoreError
from tierckpt.offline import stored_version
from tierckpt.offline.history import History
from tierckpt.storage.local.store import LocalStore
from tierckpt.storage.persistent import PersistentStore
from tierckpt.storage.persistent.posix_backend import PosixBackend
from tierckpt.testing import TinyJob

STEPS = 6
BLOCK_BYTES = 512 * 1024
State = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def this_machines_memory(shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERCKPT_SHM_DIR", str(shm_dir))


class Model(torch.nn.Module):
    """A small part and a large one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.norm = torch.nn.BatchNorm1d(12)
        self.head = torch.nn.Linear(12, 4)
        self.tail = torch.nn.Linear(4, 4, bias=False)
        self.large = torch.nn.Linear(12, 200_000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tail(self.head(self.norm(x))) + self.large(x)[:, :4]


def made(path: Path, **settings: Any) -> dict[int, State]:
    """Run a job that keeps all its versions; returns the model's state after each step."""
    course = {}
    given = {"agent": "inline", "local_keep_last": STEPS, **settings}
    with TinyJob(path / "ckpts", model=Model(), **given) as job:
        for step in range(1, STEPS + 1):
            job.run(step)
            job.checkpointer.wait()
            course[step] = {k: v.clone() for k, v in job.model.state_dict().items()}
    return course


def far(path: Path, **more: Any) -> dict[str, Any]:
    (path / "shared").mkdir(exist_ok=True)
    return {
        "persistent_path": str(path / "shared"),
        "persistent_every_steps": 1,
        "persistent_keep_last": STEPS,
        **more,
    }


def test_each_version_has_the_tensors_of_its_step(tmp_path: Path) -> None:
    course = made(tmp_path)
    found = tierckpt.history(tmp_path / "ckpts")
    assert (len(found), found.versions) == (STEPS, [*range(1, STEPS + 1)])
    seen = 0
    for saved in found:
        assert {*saved.tensors} == {*course[saved.version]}
        for name, tensor in saved.tensors.items():
            assert torch.equal(tensor, course[saved.version][name]), name
        assert (saved.iteration, saved.ranks, saved.suspect) == (saved.version, 1, "")
        assert saved.levels == {"local": 1}
        assert saved.created_seconds > 1e9
        seen += 1
    assert seen == STEPS


def test_names_and_versions_are_chosen(tmp_path: Path) -> None:
    course = made(tmp_path)
    path = tmp_path / "ckpts"
    kept = list(tierckpt.history(path, names="head.*", every=2, first=3))
    assert [saved.version for saved in kept] == [4, 6]
    assert [*kept[0].tensors] == ["head.bias", "head.weight"]
    assert torch.equal(kept[0].tensors["head.bias"], course[4]["head.bias"]), "opened once more"
    kept[0].close()
    moments = ["optimizer/head.*/exp_avg", "norm.running_*"]
    (last,) = tierckpt.history(path, names=moments, first=STEPS, last=STEPS)
    assert [*last.tensors][:2] == ["norm.running_mean", "norm.running_var"]
    state = tierckpt.load(path).optimizers["optimizer"]["state"]
    name = "optimizer/head.bias/exp_avg"
    number = tierckpt.load(path).parameters["optimizer"].index("head.bias")
    assert torch.equal(last.tensors[name], state[number]["exp_avg"])
    last.close()


def test_a_name_that_is_not_there_is_reported_with_those_that_are(tmp_path: Path) -> None:
    made(tmp_path)
    path = tmp_path / "ckpts"
    for saved in tierckpt.history(path, names="head.*", last=1):
        with pytest.raises(KeyError, match=r"'tail.weight' is not among the tensors of v1 .*head"):
            saved.tensors["tail.weight"]
    with pytest.warns(UserWarning, match=r"v1 has no tensor named 'haed.\*', but .*head.bias"):
        assert [len(saved.tensors) for saved in tierckpt.history(path, names="haed.*", last=1)] == [
            0
        ]
    with pytest.raises(ConfigError, match="every=0"):
        tierckpt.history(tmp_path / "ckpts", every=0)


# --- only the bytes that are needed --------------------------------------------------------------


@pytest.mark.parametrize("row", ["", "zstd", "incremental full_every=3, zstd"])
def test_only_the_blocks_of_the_chosen_tensors_are_read(
    row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    course = made(tmp_path, **far(tmp_path, persistent_codecs=row))
    shutil.rmtree(tmp_path / "ckpts")
    read = []
    inner = (PosixBackend.read, PosixBackend.read_into)

    def counted(self: PosixBackend, *given: Any) -> bytes:
        data = inner[0](self, *given)
        read.append(len(data))
        return data

    def counted_into(self: PosixBackend, *given: Any) -> int:
        came = inner[1](self, *given)
        read.append(came)
        return came

    monkeypatch.setattr(PosixBackend, "read", counted)
    monkeypatch.setattr(PosixBackend, "read_into", counted_into)
    found = tierckpt.history(tmp_path / "shared", names=["head.*"])
    nbytes = PersistentStore(str(tmp_path / "shared")).read_manifest
    whole = [nbytes(n).nbytes for n in PersistentStore(str(tmp_path / "shared")).versions()]
    for saved in found:
        read.clear()
        for name, tensor in saved.tensors.items():
            assert torch.equal(tensor, course[saved.version][name])
        # The two tensors share a block, perhaps two; the rest are the header and the records.
        assert sum(read) < 2 * BLOCK_BYTES + 200_000
        assert sum(read) < max(whole) / 10
        assert saved.levels == {"persistent": 1}


def test_tensors_come_in_the_callers_hands_one_version_at_a_time(tmp_path: Path) -> None:
    made(tmp_path)
    read: list[int] = []
    found = History(tmp_path / "ckpts", "large.weight", None, None, None, read.append)
    opened = []
    for saved in found:
        opened.append(saved)
        assert not sum(read), "nothing is read before a tensor is looked up"
        tensor = saved.tensors["large.weight"]
        assert 0 <= sum(read) - tensor.nbytes < 2 * BLOCK_BYTES
        assert sum(each._opened is not None for each in opened) == 1
        read.clear()
    assert all(each._opened is None for each in opened)


def test_a_block_that_two_tensors_share_may_be_dropped_between_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last block of the large tensor is kept when its fetch begins, and not at its end."""
    monkeypatch.setattr(stored_version, "KEPT_BLOCKS", 2)
    course = made(tmp_path, **far(tmp_path, persistent_codecs="zstd"))
    (saved,) = tierckpt.history(tmp_path / "shared", first=STEPS)
    for name in ("norm.weight", "large.weight", "norm.weight", "large.bias"):
        assert torch.equal(saved.tensors[name], course[STEPS][name])
    saved.close()


# --- damage --------------------------------------------------------------------------------------


def damage(path: Path, version: int) -> None:
    """Flip bytes all over the data of a version."""
    (data,) = path.rglob(f"v{version:010d}.*.safetensors")
    for at in range(BLOCK_BYTES, data.stat().st_size, BLOCK_BYTES // 2):
        flip_byte(data, at)


def test_damage_names_version_and_tensor_and_the_next_version_is_read(tmp_path: Path) -> None:
    course = made(tmp_path)
    damage(tmp_path / "ckpts", 3)
    failed = {}
    for saved in tierckpt.history(tmp_path / "ckpts", names="large.weight"):
        try:
            assert torch.equal(saved.tensors["large.weight"], course[saved.version]["large.weight"])
        except RestoreError as error:
            failed[saved.version] = str(error)
    assert [*failed] == [3]
    assert "v3, large.weight: no sound copy of the tensor is left" in failed[3]
    assert "differ from their checksum" in failed[3]


def test_another_copy_is_read_instead_of_a_damaged_one(tmp_path: Path) -> None:
    course = made(tmp_path, **far(tmp_path))
    damage(tmp_path / "ckpts", 3)
    paths = [tmp_path / "ckpts", tmp_path / "shared"]
    for saved in tierckpt.history(paths, names="large.weight"):
        found = saved.tensors["large.weight"]
        assert torch.equal(found, course[saved.version]["large.weight"])
        assert saved.levels == ({"persistent": 1} if saved.version == 3 else {"local": 1})


def test_a_version_that_is_retired_in_the_meantime_is_skipped(tmp_path: Path) -> None:
    made(tmp_path)
    store, seen = LocalStore(tmp_path / "ckpts"), []
    for saved in tierckpt.history(tmp_path / "ckpts", names="head.*"):
        seen.append(saved.version)
        if saved.version == 2:
            store.retire(next(key for key in store.keys() if key.id.version == 3))  # noqa: SIM118
    assert seen == [1, 2, 4, 5, 6]
