"""`tierckpt.history`: chosen tensors of many versions, and no other bytes."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import tierckpt
from tests.store.offline.test_offline import flip_byte
from tests.support.persistent_shards import s3_options
from tests.support.s3_server import Proxy
from tierckpt import History
from tierckpt.cli import run_command
from tierckpt.errors import ConfigError, RestoreError
from tierckpt.offline import stored_version
from tierckpt.storage import LocalStore
from tierckpt.storage.persistent import PersistentStore, PosixBackend
from tierckpt.testing import ThreadGroup, TinyJob, run_ranks

STEPS = 6
BLOCK_BYTES = 512 * 1024
State = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def this_machines_memory(shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERCKPT_SHM_DIR", str(shm_dir))


class Model(torch.nn.Module):
    """A small part and a large one."""

    def __init__(self, rows: int = 60_000) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.norm = torch.nn.BatchNorm1d(12)
        self.head = torch.nn.Linear(12, 4)
        self.tail = torch.nn.Linear(4, 4, bias=False)
        self.large = torch.nn.Linear(12, rows)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tail(self.head(self.norm(x))) + self.large(x)[:, :4]


def made(path: Path, model: Model | None = None, **settings: Any) -> dict[int, State]:
    """Run a job that keeps all its versions; returns the model's state after each step."""
    course = {}
    given = {"agent": "inline", "local_keep": STEPS, **settings}
    with TinyJob(path / "ckpts", model=model or Model(), **given) as job:
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
        "persistent_keep": STEPS,
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


def test_a_missing_name_is_reported_with_the_existing_ones(tmp_path: Path) -> None:
    made(tmp_path)
    path = tmp_path / "ckpts"
    for saved in tierckpt.history(path, names="head.*", last=1):
        with pytest.raises(KeyError, match=r"'tail.weight' is not among the tensors of v1 .*head"):
            saved.tensors["tail.weight"]
    found = tierckpt.history(path, names=["haed.*", "tail.*"])
    with pytest.warns(UserWarning, match=r"v1 has no tensor named haed.\*, but .*head.b") as told:
        assert [len(saved.tensors) for saved in found] == [1] * STEPS
    assert len(told) == 1, "not for each version again"


@pytest.mark.parametrize(
    "given",
    [{"every": 0}, {"every": "1"}, {"first": 1.5}, {"names": []}, {"names": ""}, {"names": 3}],
    ids=str,
)
def test_an_argument_that_chooses_nothing_is_refused(given: dict[str, Any], tmp_path: Path) -> None:
    name, value = next(iter(given.items()))
    with pytest.raises(ConfigError, match=re.escape(f"{name}={value!r}: give a ")):
        tierckpt.history(tmp_path, **given)


def test_no_version_is_reported_with_those_that_are_there(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="no checkpoints here"):
        assert not len(tierckpt.history(tmp_path))
    made(tmp_path)
    with pytest.warns(UserWarning, match="no version for every=7, first=2; there is v1, v2, v3"):
        assert tierckpt.history(tmp_path / "ckpts", every=7, first=2).versions == []


def test_where_a_multiple_is_missing_the_next_version_stands_for_it(tmp_path: Path) -> None:
    made(tmp_path)
    path = tmp_path / "ckpts"
    assert tierckpt.history(path, every=4).versions == [4]
    (manifest,) = path.glob("v0000000004.*.manifest")
    manifest.write_bytes(b"damaged")
    with pytest.warns(UserWarning, match="versions may be missing.*v0000000004"):
        assert tierckpt.history(path, every=4).versions == [5]
    manifest.unlink()
    assert tierckpt.history(path, every=4).versions == [5]
    with pytest.warns(UserWarning, match="no version for every=4, last=4; there is v1, v2"):
        assert tierckpt.history(path, every=4, last=4).versions == []


# --- runs and jobs -------------------------------------------------------------------------------


def test_the_versions_of_a_run_that_was_given_up_are_chosen_by_its_number(tmp_path: Path) -> None:
    course = made(tmp_path)
    path = tmp_path / "ckpts"
    assert run_command(["rollback", str(path), "3"]) == 0
    pinned = ["pin", str(path), str(STEPS)]
    assert run_command(pinned) == 0
    with TinyJob(path, model=Model(), agent="inline", local_keep=STEPS) as second:
        assert second.restore() == 3
        for parameter in second.model.parameters():
            parameter.data.mul_(2)
        second.run(4)
        second.checkpointer.wait()
    newest = tierckpt.history(path)
    assert newest.versions == [1, 2, 3, 4]
    assert tierckpt.history(path, run=2).versions == newest.versions
    (given_up,) = tierckpt.history(path, run=1, first=STEPS)
    assert torch.equal(given_up.tensors["head.weight"], course[STEPS]["head.weight"])
    given_up.close()
    (last,) = tierckpt.history(path, first=4)
    assert not torch.equal(last.tensors["head.weight"], course[4]["head.weight"])
    last.close()
    with pytest.raises(ConfigError, match="nothing is left of run 3; runs with versions: 1, 2"):
        tierckpt.history(path, run=3)


def test_the_places_of_two_nodes_are_of_one_job(tmp_path: Path) -> None:
    """Their paths have no part in common, so the job has a name on each."""

    def program(group: ThreadGroup) -> None:
        path = tmp_path / f"{group.rank}" / "ckpts"
        with TinyJob(path, group=group, agent="inline", local_every_steps=1) as job:
            job.run(2)

    run_ranks(2, program)
    places = [tmp_path / "0" / "ckpts", tmp_path / "1" / "ckpts"]
    assert tierckpt.history(places).versions == [1, 2]
    with pytest.warns(UserWarning, match="no version is complete here; give the places of all"):
        assert not tierckpt.history(places[0]).versions


def test_places_of_two_jobs_are_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        made(tmp_path / name)
    with pytest.raises(ConfigError, match=r"2 jobs are here: .*/a/ckpts, .*/b/ckpts\. Give"):
        tierckpt.history([tmp_path / "a" / "ckpts", tmp_path / "b" / "ckpts"])


# --- only the bytes that are needed --------------------------------------------------------------


@pytest.mark.parametrize("row", ["", "zstd", "incremental full_every=3, zstd"])
def test_only_the_blocks_of_the_chosen_tensors_are_read(
    row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    course = made(tmp_path, Model(200_000), **far(tmp_path, persistent_codecs=row))
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


def test_of_a_store_only_the_ranges_of_the_chosen_tensors_are_read(
    tmp_path: Path, proxy: Proxy, served: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted by a real S3 server, with differences: a block of the version and one of its base."""
    url = f"s3://{tmp_path.relative_to(served)}/far"
    options = s3_options(proxy.url)
    more = {"persistent_path": url, "persistent_storage_options": options}
    codecs = {
        "persistent_codecs": "delta full_every=3, zstd",
        "persistent_keep": f"{STEPS}, every 1",
    }
    course = made(tmp_path, Model(200_000), **{**far(tmp_path), **more, **codecs})
    shutil.rmtree(tmp_path / "ckpts")
    store = PersistentStore(url, **options)
    there = {name.id.version: store.read_manifest(name) for name in store.versions()}
    store.close()
    assert [version for version, each in there.items() if not each.bases] == [1, 4]
    monkeypatch.setenv("TIERCKPT_PERSISTENT_STORAGE_OPTIONS", json.dumps(options))
    proxy.reset()
    found = tierckpt.history(url, names="head.*")
    assert proxy.answered_bytes < 100_000, "manifests, and a list"
    for saved in found:
        proxy.reset()
        for name, tensor in saved.tensors.items():
            assert torch.equal(tensor, course[saved.version][name])
        assert proxy.answered_bytes < BLOCK_BYTES + 100_000 < there[1].nbytes / 10


def test_tensors_come_in_the_callers_hands_one_version_at_a_time(tmp_path: Path) -> None:
    made(tmp_path)
    read: list[int] = []
    found = History(tmp_path / "ckpts", "large.weight", on_read=read.append)
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
    """The last block of the large tensor is kept when its fetch starts, and not at its end."""
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


def test_a_version_retired_in_the_meantime_is_skipped(tmp_path: Path) -> None:
    made(tmp_path)
    store, seen = LocalStore(tmp_path / "ckpts"), []
    for saved in tierckpt.history(tmp_path / "ckpts", names="head.*"):
        seen.append(saved.version)
        if saved.version == 2:
            store.retire(next(key for key in store.keys() if key.id.version == 3))  # noqa: SIM118
    assert seen == [1, 2, 4, 5, 6]


def test_versions_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    codecs = {
        "persistent_codecs": "delta full_every=4, zstd",
        "persistent_keep": f"{STEPS}, every 1",
    }
    course = made(tmp_path, **far(tmp_path, **codecs))
    shared = tmp_path / "shared"
    next(shared.glob("v0000000001.*.manifest")).unlink()
    with pytest.warns(UserWarning, match="versions may be missing: .*v2 .*refers to v1 .*v3"):
        assert tierckpt.history(shared).versions == [5, 6]
    for saved in tierckpt.history(shared, first=5, names="head.weight"):
        assert torch.equal(saved.tensors["head.weight"], course[saved.version]["head.weight"])
    for path in shared.glob("v000000000[56].*.manifest"):
        path.write_bytes(b"nothing")
    with pytest.raises(RestoreError, match=r"nothing can be read: .*v2"):
        tierckpt.history(shared)
