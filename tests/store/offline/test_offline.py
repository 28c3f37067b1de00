"""Checkpoints without their job: listed, verified, exported, and read by `tierckpt.load`."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_model

import tierckpt
from tests.support import exact, peer_shards
from tests.support.peer_shards import Members
from tests.support.rights import as_anybody
from tierckpt.cli import run_command
from tierckpt.codecs import FILE_VARIABLE, KEY_VARIABLE
from tierckpt.coordination import PROOF_VARIABLE, ProofOrder
from tierckpt.erasure import Code
from tierckpt.errors import ConfigError, RestoreError
from tierckpt.format import with_check
from tierckpt.offline import Row, rows_of, survey_of
from tierckpt.restore import PieceWriter
from tierckpt.storage import JobDirectory, LocalStore, job_id_of
from tierckpt.testing import TinyJob, tiny_model

STEPS = 5
KEY, OTHER_KEY = "5e" * 32, "a7" * 32


@pytest.fixture(autouse=True)
def this_machines_memory(shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERCKPT_SHM_DIR", str(shm_dir))


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., TinyJob]:
    """`job(**settings)`: the same job again, in the same place."""

    def start(**settings: Any) -> TinyJob:
        given = {"agent": "inline", "local_keep": STEPS, **settings}
        return TinyJob(tmp_path / "ckpts", **given)

    return start


def step_with(metric: float, job: TinyJob) -> None:
    """One more iteration."""
    job.train_one()
    job.iteration += 1
    job.checkpointer.step(metric)


def tensors_of(value: Any) -> Any:
    """The tensors, without the type of the mapping."""
    plain = {k: tensors_of(v) for k, v in value.items()} if isinstance(value, dict) else value
    return plain if isinstance(value, dict) else exact.image(value)


def same(one: Any, other: Any) -> bool:
    return bool(tensors_of(dict(one)) == tensors_of(dict(other)))


def key_of(path: Path, version: int) -> Any:
    keys = LocalStore(path).keys()
    return next(key for key in keys if key.id.version == version)


def flip_byte(path: Path, at: int) -> None:
    """Flip a byte at `at`; a negative number counts from the end."""
    with path.open("r+b") as file:
        offset = file.seek(at, os.SEEK_SET if at >= 0 else os.SEEK_END)
        (value,) = file.read(1)
        file.seek(offset)
        file.write(bytes([value ^ 1]))


def damage(path: Path, version: int) -> None:
    flip_byte(path / f"{key_of(path, version).stem}.safetensors", -5000)


@contextlib.contextmanager
def agent_at(folder: Path) -> Iterator[None]:
    """A process that holds an agent's lock, like an agent that waits for its next trainer."""
    text = (
        "import sys; from pathlib import Path; "
        "from tierckpt.storage.job_directory import take_lock; "
        "take_lock(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    )
    line = [sys.executable, "-c", text, str(folder / "agent0.lock")]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as agent:
        assert agent.stdout is not None
        assert agent.stdout.readline() == b"held\n"
        yield  # leaving closes its standard input, and it ends


def killed(job: TinyJob) -> None:
    """Its last version is in memory alone."""
    job.run(STEPS).checkpointer.complete()
    job.checkpointer.abandon()


def texts(capsys: pytest.CaptureFixture[str]) -> tuple[list[str], str]:
    out, err = capsys.readouterr()
    return out.splitlines(), err


# --- load ----------------------------------------------------------------------------------------


def test_all_that_a_job_had_is_there(job: Any, tmp_path: Path) -> None:
    with job() as ended:
        step_with(0.25, ended.run(STEPS - 1))
    saved = tierckpt.load(tmp_path / "ckpts")
    assert (saved.version, saved.iteration, saved.metric) == (STEPS, STEPS, 0.25)
    assert same(saved.model, ended.model.state_dict())
    assert same(saved.optimizers["optimizer"], ended.optimizer.state_dict())
    assert same(saved.extra["scheduler"], ended.scheduler.state_dict())
    assert set(saved.extra_per_rank) == {"shuffle"}
    assert (saved.levels, saved.rejected) == ({"local": 1}, ())


def test_a_script_without_tierckpt_continues_from_it_bit_for_bit(job: Any, tmp_path: Path) -> None:
    with job() as ended:
        ended.run(STEPS)
    saved = tierckpt.load(tmp_path / "ckpts")
    other = TinyJob(None, seed=3)
    other.model.load_state_dict(saved.model)
    other.optimizer.load_state_dict(saved.optimizers["optimizer"])
    for each in (ended, other):
        torch.manual_seed(9)
        each.optimizer.zero_grad()
        each.model(torch.ones(8, 12)).square().sum().backward()
        each.optimizer.step()
    assert same(other.model.state_dict(), ended.model.state_dict())
    assert same(other.optimizer.state_dict(), ended.optimizer.state_dict())


def test_only_the_model(job: Any, tmp_path: Path) -> None:
    with job() as ended:
        ended.run(STEPS)
    saved = tierckpt.load(tmp_path / "ckpts", model_only=True)
    assert saved.optimizers == {}
    assert same(saved.model, ended.model.state_dict())


class Tied(torch.nn.Module):
    """Several names refer to one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Embedding(9, 12)
        self.block = torch.nn.Sequential(torch.nn.Linear(12, 12), torch.nn.BatchNorm1d(12))
        self.again = self.block
        self.last = torch.nn.Linear(12, 9, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.again(self.block(x)))
        return out


class Layers(Tied):
    """`load_model` rejects a BatchNorm under two names: torch does not report its count as
    missing."""

    def __init__(self) -> None:
        super().__init__()
        self.block[1] = torch.nn.LayerNorm(12)


class Speaking(Tied):
    """The state also has an entry, not a tensor."""

    def get_extra_state(self) -> dict[str, int]:
        return {"words": 9}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"words": 9}


@pytest.mark.parametrize("kind", [Tied, Speaking])
def test_names_are_those_of_a_state_dict(kind: type[Tied], job: Any, tmp_path: Path) -> None:
    with job(model=kind()) as ended:
        ended.run(STEPS)
    saved = tierckpt.load(tmp_path / "ckpts")
    assert same(saved.model, ended.model.state_dict())
    assert saved.model["last.weight"] is saved.model["first.weight"]
    again = kind()
    again.load_state_dict(saved.model)
    assert same(again.state_dict(), ended.model.state_dict())
    # A restart behaves with it as before.
    with job(model=kind(), seed=1) as back:
        assert back.restore() == STEPS
        assert same(back.model.state_dict(), ended.model.state_dict())


def test_a_damaged_version_is_passed_over_and_named(job: Any, tmp_path: Path) -> None:
    with job() as ended:
        ended.run(STEPS)
    damage(tmp_path / "ckpts", STEPS)
    saved = tierckpt.load(tmp_path / "ckpts")
    assert saved.version == STEPS - 1
    assert len(saved.rejected) == 1
    assert f"v{STEPS} shard 0 of 1" in saved.rejected[0]
    with pytest.raises(
        RestoreError, match=f"no v{STEPS} is complete and sound.*differ from their checksum"
    ):
        tierckpt.load(tmp_path / "ckpts", STEPS)
    assert tierckpt.load(tmp_path / "ckpts", 2).version == 2


def test_versions_of_a_killed_job_in_memory_are_found(job: Any, tmp_path: Path) -> None:
    ended = job(local_every_steps=2).run(STEPS)
    ended.checkpointer.complete()
    ended.checkpointer.abandon()
    saved = tierckpt.load(tmp_path / "ckpts")
    assert (saved.version, saved.levels) == (STEPS, {"memory": 1})
    assert same(saved.model, ended.model.state_dict())


def test_the_memory_of_a_living_job_is_left_alone(job: Any, tmp_path: Path) -> None:
    with job(local_every_steps=2) as living:
        living.run(STEPS).settle()
        assert [row.version for row in rows(tmp_path) if row.level == "memory"] == [3, 4, 5]
        saved = tierckpt.load(tmp_path / "ckpts")
        assert (saved.version, saved.levels) == (4, {"local": 1})
        assert len(saved.rejected) == 1
        assert f"v{STEPS} is left out: its job is running" in saved.rejected[0]
        with pytest.raises(RestoreError, match=f"v{STEPS} is left out: its job is running"):
            tierckpt.load(tmp_path / "ckpts", STEPS)


def test_an_agent_that_lingers_is_no_living_job(
    job: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`export` takes the version that `list` marks."""
    ended = job(local_every_steps=2).run(STEPS)
    ended.checkpointer.complete()
    ended.checkpointer.abandon()
    (memory,) = (row.places[0] for row in rows(tmp_path) if row.next)
    with agent_at(Path(memory).parent):
        assert [row.level for row in rows(tmp_path) if row.next] == ["memory"]
        assert tierckpt.load(tmp_path / "ckpts").version == STEPS
        assert run_command(["export", str(tmp_path / "ckpts"), str(tmp_path / "out.pt")]) == 0
        assert f"v{STEPS}, from memory" in capsys.readouterr().out


def test_a_version_retired_while_it_is_read_is_not_returned(
    job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with job() as ended:
        ended.run(STEPS)
    store = LocalStore(tmp_path / "ckpts")
    take, gone = PieceWriter.take, list[Any]()

    def retiring(self: PieceWriter, shard: int, offset: int, window: memoryview) -> None:
        take(self, shard, offset, window)
        if not gone:
            gone.append(key_of(tmp_path / "ckpts", STEPS))
            store.retire(gone[0])

    monkeypatch.setattr(PieceWriter, "take", retiring)
    assert tierckpt.load(tmp_path / "ckpts").version == STEPS - 1
    assert gone


def test_the_persistent_level_alone_will_do(job: Any, tmp_path: Path) -> None:
    with job(persistent_path=str(tmp_path / "shared"), persistent_every_steps=1) as ended:
        ended.run(STEPS)
    saved = tierckpt.load(tmp_path / "shared")
    assert (saved.version, saved.levels) == (STEPS, {"persistent": 1})
    assert same(saved.model, ended.model.state_dict())
    assert same(saved.optimizers["optimizer"], ended.optimizer.state_dict())


@pytest.mark.parametrize("level", ["local", "persistent"])
def test_encrypted_versions_need_their_key(
    level: str, job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(FILE_VARIABLE, raising=False)
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    row = "incremental full_every=3, zstd, aes-gcm"
    shared = {"persistent_path": str(tmp_path / "shared"), "persistent_every_steps": 1}
    with job(**{f"{level}_codecs": row}, **(shared if level == "persistent" else {})) as ended:
        ended.run(STEPS)
    path = tmp_path / ("ckpts" if level == "local" else "shared")
    assert same(tierckpt.load(path).model, ended.model.state_dict())
    monkeypatch.setenv(KEY_VARIABLE, OTHER_KEY)
    with pytest.raises(RestoreError, match=r"cannot be decoded.*key"):
        tierckpt.load(path)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere is not a directory; give a job's path"):
        tierckpt.load(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"for any name in place of \{node\}"):
        tierckpt.load(tmp_path / "{node}" / "ckpts")
    with pytest.raises(RestoreError, match=r"no version is complete and sound$"):
        tierckpt.load(tmp_path)


def test_versions_of_a_newer_tierckpt_are_not_silently_skipped(job: Any, tmp_path: Path) -> None:
    with job() as ended:
        ended.run(STEPS)
    path = tmp_path / "ckpts" / f"{key_of(tmp_path / 'ckpts', STEPS).stem}.manifest"
    told = json.loads(path.read_bytes().split(b"\n")[0])
    told["format_version"] = "9.0"
    path.write_bytes(with_check(json.dumps(told).encode()))
    with pytest.raises(RestoreError, match="a newer release of tierckpt wrote"):
        tierckpt.load(tmp_path / "ckpts")
    assert tierckpt.load(tmp_path / "ckpts", STEPS - 1).version == STEPS - 1


# --- list ----------------------------------------------------------------------------------------


def rows(tmp_path: Path, *more: Path) -> list[Row]:
    return rows_of(survey_of([tmp_path / "ckpts", *more]))


def test_each_level_of_each_version_has_a_line(
    job: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = tmp_path / "shared"
    flushed = {"persistent_path": str(shared), "persistent_every_steps": 4}
    with job(**flushed, local_keep=2) as ended:
        ended.run(2)
        step_with(0.125, ended)
        ended.checkpointer.save(now=True)
        ended.checkpointer.pin(3)
        ended.run(STEPS)
    assert run_command(["list", str(tmp_path / "ckpts"), str(shared)]) == 0
    lines, _ = texts(capsys)
    assert lines[0].split() == [
        "version",
        "level",
        "shards",
        "size",
        "taken",
        "iteration",
        "metric",
    ]
    found = {tuple(line.split()[:2]): line for line in lines[1:]}
    assert set(found) == {
        *((f"v{v}", "local") for v in (3, 4, 5)),
        *((f"v{v}", "persistent") for v in (3, 4, 5)),
        ("nothing", "in"),
    }
    assert "pinned" in found["v3", "local"]
    assert "0.125" in found["v3", "local"]
    assert [name for name, line in found.items() if "a restart takes this" in line] == [
        ("v5", "local")
    ]
    assert run_command(["list", "--json", str(tmp_path / "ckpts")]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [each["version"] for each in told["versions"] if each["next"]] == [STEPS]
    assert told["problems"] == []


def test_versions_that_a_later_run_discarded_are_marked(job: Any, tmp_path: Path) -> None:
    """The version is on a node that the later run did not have."""
    with job() as first:
        first.run(STEPS)
    shutil.copytree(tmp_path / "ckpts", tmp_path / "other")
    with job() as second:
        assert second.restore(2) == 2
        second.run(3)
    found = {(row.generation, row.version): row for row in rows(tmp_path, tmp_path / "other")}
    assert {key for key, row in found.items() if not row.is_past} == {(1, 3), (1, 4), (1, 5)}
    assert [key for key, row in found.items() if row.next] == [(2, 3)]
    assert not found[1, 5].next


def test_a_version_of_which_a_shard_is_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of two nodes' folders is not enough: the missing shards are named. In the folder above
    both, none is missing."""
    code = Code(3, 2, 1)
    with Members(tmp_path / "nodes", code, [40_960, 40_960, 81_920]) as members:
        members.protect()
    for member in (0, 1):
        store = members.store(member)
        image, manifest = peer_shards.shard_of(member, members.lengths[member], code.n)
        store.commit(peer_shards.key_of(member, code), image, manifest)
    assert run_command(["list", str(tmp_path / "nodes" / "node0")]) == 0
    lines, _ = texts(capsys)
    assert "1 of" in lines[1]
    assert "not complete, shard" in lines[1]
    assert "parity of 1" in lines[1]
    assert lines[-1].startswith("no version is complete here")
    with pytest.raises(RestoreError, match="shards of v1, but no version is complete here"):
        tierckpt.latest(tmp_path / "nodes" / "node0")
    assert lines[-2].startswith("nothing in memory: looked for ")
    everyone = rows_of(survey_of(tmp_path / "nodes"))
    assert [(len(row.there), row.parities) for row in everyone] == [(2, 3)]
    template = rows_of(survey_of(tmp_path / "nodes" / "{node}"))
    assert [(len(row.there), row.parities) for row in template] == [(2, 3)]


def test_a_manifest_without_its_data_file_is_no_shard(
    job: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with job() as ended:
        ended.run(STEPS)
    path = tmp_path / "ckpts"
    (path / f"{key_of(path, STEPS).stem}.safetensors").unlink()
    rows = {row.version: row for row in rows_of(survey_of(path))}
    assert (rows[STEPS - 1].next, STEPS in rows) == (True, False)
    found = tierckpt.latest(path)
    assert found is not None
    assert found.version == STEPS - 1
    assert run_command(["list", str(path)]) == 0
    gone = f"the data file of v{STEPS} shard 0 of 1 is missing"
    lost = f"v{STEPS} cannot be restored from what is here: no usable copy of shard 0 is left"
    lines, _ = texts(capsys)
    assert any(gone in line for line in lines)
    assert any(lost in line and f"a restart takes v{STEPS - 1}" in line for line in lines)
    assert run_command(["verify", str(path)]) == 1
    lines, _ = texts(capsys)
    assert any("its data file v" in line and ".safetensors is missing" in line for line in lines)
    assert sum(lost in line for line in lines) == 1
    with pytest.raises(RestoreError, match=f"v{STEPS} shard 0 of 1 on level local .* is missing"):
        tierckpt.load(path, STEPS)
    with job() as again:
        assert again.restore().version == STEPS - 1


def test_no_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A job with a job_id or a shm_dir may still have some in memory."""
    assert run_command(["list", str(tmp_path)]) == 0
    (first, second, *advice), error = texts(capsys)
    assert (first, error) == (f"{tmp_path}: no checkpoints here", "")
    assert second == f"nothing in memory: looked for {memory_of(tmp_path)}"
    assert "TIERCKPT_JOB_ID and TIERCKPT_SHM_DIR" in advice[0]
    assert "if the job's path contains {node}, give it with {node}" in advice[1]
    (tmp_path / "n1").mkdir()
    assert run_command(["list", str(tmp_path / "{node}")]) == 0
    assert "contains {node}" not in capsys.readouterr().out


def memory_of(path: Path) -> Path:
    return JobDirectory.at(os.environ["TIERCKPT_SHM_DIR"], job_id_of(path)).path


def test_the_searched_places_in_memory_are_reported(
    job: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """These are also the folders to remove for a fresh start."""
    memory = memory_of(tmp_path / "ckpts")
    with job() as ended:
        ended.run(1)
    assert run_command(["list", str(tmp_path / "ckpts")]) == 0
    assert texts(capsys)[0][-1] == f"nothing in memory: looked for {memory}"
    killed(job())
    assert run_command(["list", str(tmp_path / "ckpts")]) == 0
    assert texts(capsys)[0][-1] == f"in memory: {memory}"
    assert run_command(["list", "--json", str(tmp_path / "ckpts")]) == 0
    assert json.loads(capsys.readouterr().out)["memory"] == [str(memory)]


@pytest.mark.parametrize("path", ["ckpts", "{node}/ckpts"])
def test_a_job_in_memory_alone_has_no_directory_and_is_found(path: str, tmp_path: Path) -> None:
    killed(TinyJob(tmp_path / path, agent="inline", local_every_steps=0))
    assert os.listdir(tmp_path) == []
    found = rows_of(survey_of(tmp_path / path))
    assert [(row.version, row.level) for row in found if row.next] == [(STEPS, "memory")]
    with pytest.raises(ConfigError, match="is not a directory"):
        survey_of([tmp_path / path, tmp_path / "mistyped"])


def test_a_place_without_read_permission_is_named_and_the_rest_is_shown(
    job: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A directory, with all commands. Root can read everything, so root is not tested."""
    with job() as ended:
        ended.run(STEPS)
    (closed := tmp_path / "closed").mkdir(mode=0o000)
    paths, out = [str(closed), str(tmp_path / "ckpts")], tmp_path / "out.pt"
    with as_anybody():
        assert run_command(["list", *paths]) == 1
        lines, error = texts(capsys)
        assert sum("a restart takes this" in line for line in lines) == 1
        told = [line for line in lines if line.startswith("cannot be read: ")]
        assert told == [f"cannot be read: {closed}: [Errno 13] Permission denied: '{closed}'"]
        assert error.startswith("tierckpt: not all places could be read")
        assert run_command(["verify", *paths]) == 1
        lines, error = texts(capsys)
        assert [line.rpartition(": ")[2] for line in lines] == ["sound"] * STEPS
        assert f"not all can be read: {closed}: [Errno 13]" in error
        assert run_command(["export", *paths, str(out)]) == 1
        lines, error = texts(capsys)
        assert any(line.startswith(f"skipped: {closed}: ") for line in lines)
        assert (
            error
            == f"tierckpt: not all places could be read: there may be a version after v{STEPS}\n"
        )
        assert torch.load(out, weights_only=True)["version"] == STEPS
        # An explicit version is read, and no other.
        assert run_command(["export", *paths, str(out), "--force", "--version", "5"]) == 0


@pytest.mark.parametrize("inside", ["n2", "n2/ckpts"])
def test_a_node_s_folder_that_may_not_be_looked_into_is_named(
    inside: str, job: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with job() as ended:
        ended.run(1)
    (tmp_path / "nodes").mkdir()
    shutil.move(tmp_path / "ckpts", tmp_path / "nodes" / "n1")
    (tmp_path / "nodes" / "lost+found").mkdir(mode=0o000)
    (tmp_path / "nodes" / inside).mkdir(parents=True)
    (tmp_path / "nodes" / "n2").chmod(0o000)
    try:
        with as_anybody():
            for path in ("nodes", "nodes/{node}", "nodes/n2/ckpts", "nodes/{node}/ckpts"):
                assert run_command(["list", str(tmp_path / path)]) == 1, path
                lines, _ = texts(capsys)
                told = [line for line in lines if line.startswith("cannot be read: ")]
                assert any(f"{tmp_path}/nodes/n2" in line for line in told), (path, lines)
                assert "ckpts" in path or any(line.split()[:1] == ["v1"] for line in lines)
                assert "lost+found" not in "".join(told)
    finally:
        (tmp_path / "nodes" / "n2").chmod(0o700)


@pytest.mark.parametrize("suffix", [".safetensors", ".manifest"])
def test_a_copy_that_may_not_be_read_is_not_called_damaged(
    suffix: str, job: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with job() as ended:
        ended.run(STEPS)
    (tmp_path / "ckpts" / f"{key_of(tmp_path / 'ckpts', 3).stem}{suffix}").chmod(0o000)
    with as_anybody():
        assert run_command(["verify", str(tmp_path / "ckpts")]) == 1
    lines, error = texts(capsys)
    assert "DAMAGED" not in "".join(lines)
    if suffix == ".manifest":
        assert "not all can be read" in error
    else:
        assert sum(line.endswith(": 1 cannot be read") for line in lines) == 1
        assert error == f"tierckpt: cannot be read: 1 of {STEPS} copies\n"


@pytest.mark.parametrize("path", ["on-{node}/x-{node}", "[1]{node}-{node}*", "{node}"])
def test_a_node_s_name_is_the_same_wherever_the_path_has_it(
    path: str, job: Any, tmp_path: Path
) -> None:
    with job() as ended:
        ended.run(1)
    where = tmp_path / "all" / path.replace("{node}", "n1")
    where.parent.mkdir(parents=True)
    shutil.move(tmp_path / "ckpts", where)
    assert [row.version for row in rows_of(survey_of(tmp_path / "all" / path))] == [1]


def test_an_unreadable_place_does_not_look_empty(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Missing credentials, for example. Here: a URL of an unknown kind."""
    assert run_command(["list", "nosuch://bucket/run"]) == 1
    (first, *others), error = texts(capsys)
    assert first == "nosuch://bucket/run: no readable checkpoints"
    assert others[0].startswith("cannot be read: nosuch://bucket/run: ")
    assert error.startswith("tierckpt: not all places could be read")
    assert run_command(["list", "--json", "nosuch://bucket/run"]) == 1
    out, error = capsys.readouterr()
    assert len(json.loads(out)["problems"]) == 1
    assert error.startswith("tierckpt: not all places could be read")


def test_of_many_damaged_copies_a_few_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for version in range(20):
        (tmp_path / f"v{version:010d}.g000001.s00000of00001.manifest").write_text("damaged")
    assert run_command(["list", str(tmp_path)]) == 0
    lines, _ = texts(capsys)
    told = [line for line in lines if line.startswith("cannot be read: ")]
    assert len(told) == 9
    assert told[-1] == "cannot be read: 12 more; --json shows all"


@pytest.mark.parametrize("how", [shutil.move, shutil.copytree])
def test_memory_of_another_path_is_no_restarts(
    how: Any,
    job: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A restart looks by its own path: files that were moved or copied do not have the old path's
    memory."""
    killed(job(local_every_steps=2))
    moved = tmp_path / "moved"
    how(str(tmp_path / "ckpts"), str(moved))
    assert run_command(["list", str(moved)]) == 0
    lines, _ = texts(capsys)
    taken = [line.split()[:2] for line in lines if "a restart takes this" in line]
    assert taken == [["v4", "local"]]
    assert sum("not seen by a restart from here" in line for line in lines[:-1]) == 3
    was = job_id_of(tmp_path / "ckpts")
    assert f"job {was!r}" in lines[-1]
    assert "TIERCKPT_JOB_ID" in lines[-1]
    saved = tierckpt.load(moved)
    assert saved.version == 4
    assert f"v{STEPS} is left out: memory of job {was!r}" in saved.rejected[0]
    monkeypatch.setenv("TIERCKPT_JOB_ID", was)
    assert run_command(["list", str(moved)]) == 0
    assert "a restart takes this" in texts(capsys)[0][-2]
    assert tierckpt.load(moved).version == STEPS


def test_a_directory_that_was_moved_with_nothing_in_it_lacks_no_node(
    job: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its only versions are in memory, under the old path: no other node has newer ones."""
    first = job(local_every_steps=9).run(1)
    first.checkpointer.complete()
    (claim,) = (tmp_path / "ckpts").glob(".claim.*")
    left = subprocess.check_output(["cat", str(claim)])
    first.checkpointer.abandon()
    (tmp_path / "moved").mkdir()
    (tmp_path / "moved" / claim.name).write_bytes(left)
    assert run_command(["list", str(tmp_path / "moved")]) == 0
    lines, _ = texts(capsys)
    assert lines[-1].startswith("not seen by a restart from here: memory of job 'ckpts-")


@pytest.mark.parametrize("dies", [True, False])
def test_memory_is_found_by_the_claim_that_a_killed_job_left(
    dies: bool, job: Any, tmp_path: Path, shm_dir: Path
) -> None:
    """If nothing is on disk yet, only the claim shows the job's own job_id and shm_dir."""
    (other := shm_dir / "other").mkdir()
    ended = job(job_id="mine", shm_dir=str(other), local_every_steps=2)
    ended.run(1).checkpointer.complete()
    (claim,) = (tmp_path / "ckpts").glob(".claim.*")
    # By another process: this one would drop its lock.
    left = subprocess.check_output(["cat", str(claim)])
    ended.checkpointer.abandon()
    if dies:
        claim.write_bytes(left)
    found = [(row.version, row.level) for row in rows(tmp_path) if row.next]
    assert found == ([(1, "memory")] if dies else [])


@pytest.mark.parametrize(
    ("path", "given"),
    [
        ("ckpts", {"job_id": "mine"}),
        ("{node}/ckpts", {}),
        ("{node}", {"node": "n1"}),
        ("on-{node}", {"node": "n1"}),
    ],
)
def test_memory_of_the_same_job_is_a_restarts(
    path: str, given: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job is given by job_id, or found by a path with the node's name."""
    settings = {"agent": "inline", "local_every_steps": 2, **given}
    killed(TinyJob(tmp_path / path, **settings))
    node = given.get("node", socket.gethostname())
    monkeypatch.setenv("TIERCKPT_NODE", node)
    for where in {path, path.replace("{node}", node)}:
        found = rows_of(survey_of(tmp_path / where))
        assert [(row.version, row.level) for row in found if row.next] == [(STEPS, "memory")]


# --- verify --------------------------------------------------------------------------------------


def test_every_byte_is_compared(
    job: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = tmp_path / "shared"
    with job(persistent_path=str(shared), persistent_every_steps=STEPS) as ended:
        ended.run(STEPS)
    places = [str(tmp_path / "ckpts"), str(shared)]
    assert run_command(["verify", *places]) == 0
    lines, _ = texts(capsys)
    assert [line.rpartition(": ")[2] for line in lines] == ["sound"] * (STEPS + 1)
    damage(tmp_path / "ckpts", 3)
    assert run_command(["verify", *places]) == 1
    lines, error = texts(capsys)
    assert next(line for line in lines if "DAMAGED" in line).startswith("v3 local: 1 copy")
    assert "differ from their checksum" in "".join(lines)
    assert error == f"tierckpt: damaged: 1 of {STEPS + 1} copies\n"
    assert run_command(["verify", "--version", "4", *places]) == 0
    assert run_command(["verify", "--version", "99", *places]) == 1
    assert "no v99 to verify" in texts(capsys)[1]
    (tmp_path / "empty").mkdir()
    assert run_command(["verify", str(tmp_path / "empty")]) == 1
    assert "no checkpoints to verify" in texts(capsys)[1]


@pytest.mark.parametrize(
    ("level", "missing"),
    [("local", "key"), ("persistent", "the right key"), ("local", "package")],
)
def test_a_shard_that_cannot_be_decoded_here_is_sound_as_stored(
    level: str,
    missing: str,
    job: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv(FILE_VARIABLE, raising=False)
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    shared = {"persistent_path": str(tmp_path / "shared"), "persistent_every_steps": 1}
    modules = {f"{level}_codecs": "incremental full_every=3, zstd, aes-gcm"}
    with job(**modules, **(shared if level == "persistent" else {})) as ended:
        ended.run(3)
    path = tmp_path / ("ckpts" if level == "local" else "shared")
    if missing == "package":
        monkeypatch.setitem(sys.modules, "zstandard", None)
    elif missing == "key":
        monkeypatch.delenv(KEY_VARIABLE)
    else:
        monkeypatch.setenv(KEY_VARIABLE, OTHER_KEY)
    assert run_command(["verify", str(path)]) == 0
    lines, error = texts(capsys)
    assert error == ""
    assert all("copy" in x and ": sound as stored; content not checked: " in x for x in lines)
    assert ("zstandard" if missing == "package" else "the key whose id is") in lines[0]
    files = [p for p in path.rglob("*") if p.is_file() and "manifest" not in p.name]
    flip_byte(max(files, key=lambda p: (p.stat().st_size, p.name)), -200)
    assert run_command(["verify", str(path)]) == 1
    lines, error = texts(capsys)
    assert sum("DAMAGED" in line for line in lines) == 1
    assert "differ from their checksum" in "".join(lines)
    assert "1 of " in error


def test_parity_is_compared_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Members(tmp_path, Code(3, 2, 1), [40_960] * 3) as members:
        members.protect()
    assert run_command(["verify", str(tmp_path)]) == 0
    parity, rest = texts(capsys)[0]
    assert parity.startswith("v1 parity: 3 copies")
    assert rest.startswith("not complete here, and not damaged: v1.")
    flip_byte(next((tmp_path / "node1").glob("*.parity")), 100)
    assert run_command(["verify", str(tmp_path)]) == 1
    lines, error = texts(capsys)
    assert any(f"in {tmp_path}/node1: " in line for line in lines)
    assert error.startswith("tierckpt: damaged: 1 of 3 copies")


def test_parity_under_the_name_of_another_is_not_sound(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Members(tmp_path, Code(3, 2, 1), [40_960] * 3) as members:
        members.protect(1)
        members.protect(2)
    first, second = sorted((tmp_path / "node1").glob("*.manifest"))
    shutil.copyfile(first, second)
    assert run_command(["verify", str(tmp_path)]) == 1
    out, error = texts(capsys)
    assert "says it is" in "".join([*out, error])


@pytest.mark.parametrize(
    "command", ["list", "verify", "export", "diff", "pin", "unpin", "takeover", "halt", "health"]
)
def test_a_place_that_no_process_can_read_is_refused(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = {"export": [str(tmp_path / "x.pt")], "pin": ["3"], "unpin": ["3"], "diff": ["1", "2"]}
    try:
        status = run_command([command, "memory://x", *more.get(command, [])])
    except SystemExit as ended:
        status = int(ended.code or 0)
    assert status == 2
    assert "memory://x is in the memory of one process" in texts(capsys)[1]


def test_a_manifest_that_cannot_be_read_is_not_sound(
    job: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with job() as ended:
        ended.run(STEPS)
    flip_byte(tmp_path / "ckpts" / f"{key_of(tmp_path / 'ckpts', 2).stem}.manifest", 20)
    assert run_command(["verify", str(tmp_path / "ckpts")]) == 1
    assert "not all can be read" in texts(capsys)[1]
    assert run_command(["list", str(tmp_path / "ckpts")]) == 0
    assert any(line.startswith("cannot be read: ") for line in texts(capsys)[0])


# --- latest --------------------------------------------------------------------------------------


def test_the_version_that_a_restart_takes_is_known_before_there_is_a_model(
    job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ckpts"
    assert tierckpt.latest(path) is None
    killed(job(local_every_steps=2))
    found = tierckpt.latest(path)
    assert found is not None
    assert (found.version, found.iteration, found.ranks) == (STEPS, STEPS, 1)
    assert found.levels == ("memory",)
    assert tierckpt.latest([path, tmp_path / "not made yet"]) == found
    assert [*range(found)] == [*range(STEPS)]
    with job() as back:
        assert back.restore() == found.iteration
        assert tierckpt.latest(path) == found  # also while it trains
        step_with(0.25, back)
        back.run(STEPS + 3)
        step_with(0.5, back)
    ended = tierckpt.latest(path)
    assert ended is not None
    assert (ended.iteration, ended.metric, ended.levels) == (STEPS + 4, 0.5, ("local",))
    (tmp_path / "prove").mkdir()
    ProofOrder(tmp_path / "prove" / "run", until=9).write()
    monkeypatch.setenv(PROOF_VARIABLE, str(tmp_path / "prove" / "run"))
    assert tierckpt.latest(path) is None  # a script under test must not see the user's


def test_an_unreadable_place_is_no_fresh_start(job: Any, tmp_path: Path) -> None:
    with job() as ended:
        ended.run(1)
    (tmp_path / "ckpts").chmod(0)
    try:
        with as_anybody(), pytest.raises(RestoreError, match="not all places could be read"):
            tierckpt.latest(tmp_path / "ckpts")
    finally:
        (tmp_path / "ckpts").chmod(0o755)


# --- export --------------------------------------------------------------------------------------


def test_the_model_as_safetensors(
    job: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with job(model=Layers()) as ended:
        ended.run(STEPS)
    out = tmp_path / "model.safetensors"
    assert run_command(["export", str(tmp_path / "ckpts"), str(out)]) == 0
    told = texts(capsys)[0]
    assert told[0].startswith(f"{out}: v{STEPS}, from local, ")
    assert "again.0.weight is saved as block.0.weight" in told[1]
    again = Layers()
    load_model(again, out, strict=True)  # the advice of the text
    assert same(again.state_dict(), ended.model.state_dict())
    with safe_open(out, "pt") as file:
        facts = file.metadata()
    assert (facts["format"], facts["version"], facts["iteration"]) == ("pt", "5", "5")
    assert facts["last.weight"] == "first.weight"
    save_model(again, tmp_path / "theirs.safetensors")
    assert len(load_file(out)) == len(load_file(tmp_path / "theirs.safetensors"))
    umask = os.umask(0o022)
    os.umask(umask)
    assert stat.S_IMODE(out.stat().st_mode) == 0o666 & ~umask


def test_a_value_that_safetensors_cannot_hold_is_reported(
    job: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with job(model=Speaking()) as ended:
        ended.run(STEPS)
    out = tmp_path / "model.safetensors"
    assert run_command(["export", str(tmp_path / "ckpts"), str(out)]) == 1
    assert "_extra_state is not a tensor" in texts(capsys)[1]
    assert not out.exists()


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_a_dtype_that_safetensors_lacks_is_reported_with_the_tensors_name(
    job: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = torch.nn.Sequential(tiny_model())
    model.register_buffer("spectrum", torch.zeros(3, dtype=torch.complex32))
    with job(model=model) as ended:
        ended.run(STEPS)
    out = tmp_path / "model.safetensors"
    assert run_command(["export", str(tmp_path / "ckpts"), str(out)]) == 1
    assert "spectrum has dtype complex32" in texts(capsys)[1]
    assert not out.exists()
    assert (
        run_command(["export", str(tmp_path / "ckpts"), str(tmp_path / "model.pt")]) == 0
    )  # the advice
    assert same(torch.load(tmp_path / "model.pt")["model"], ended.model.state_dict())


def test_all_as_torch_save_has_it(job: Any, tmp_path: Path) -> None:
    with job() as ended:
        ended.run(STEPS)
    out = tmp_path / "all.pt"
    assert run_command(["export", str(tmp_path / "ckpts"), str(out), "--version", "5"]) == 0
    found = torch.load(out, weights_only=True)
    assert same(found["model"], ended.model.state_dict())
    assert same(found["optimizer"], ended.optimizer.state_dict())
    assert (found["version"], found["iteration"]) == (STEPS, STEPS)


def test_nothing_is_replaced_unasked_and_nothing_half_done_is_left(
    job: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with job() as ended:
        ended.run(STEPS)
    out = tmp_path / "out.pt"
    out.write_text("mine")
    assert run_command(["export", str(tmp_path / "ckpts"), str(out)]) == 1
    assert "exists; --force replaces it" in texts(capsys)[1]
    assert out.read_text() == "mine"
    assert run_command(["export", str(tmp_path / "ckpts"), str(out), "--force"]) == 0
    assert run_command(["export", str(tmp_path / "ckpts"), str(tmp_path / "out.bin")]) == 1
    assert "unknown suffix" in texts(capsys)[1]
    missing = tmp_path / "no" / "such" / "out.pt"
    assert run_command(["export", str(tmp_path / "ckpts"), str(missing)]) == 1
    assert "cannot be written" in texts(capsys)[1]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ckpts", "out.pt"]


@pytest.mark.parametrize(("limit", "suffix"), [(200, ".pt"), (2000, ".safetensors")])
def test_an_export_to_a_full_disk_is_reported_and_leaves_nothing(
    limit: int, suffix: str, job: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with job() as ended:
        ended.run(2)
    (tmp_path / "out").mkdir()
    out = tmp_path / "out" / f"model{suffix}"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        status = run_command(["export", str(tmp_path / "ckpts"), str(out)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert status == 1
    assert f"tierckpt: {out} cannot be written: " in capsys.readouterr().err
    assert list(out.parent.iterdir()) == []


# --- file:// -------------------------------------------------------------------------------------


def test_a_file_url_is_taken_wherever_a_path_is(
    job: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    shared = f"file://{tmp_path}/shared"
    with job(persistent_path=shared, persistent_every_steps=1) as ended:
        ended.run(STEPS)
    assert tierckpt.load(shared).levels == {"persistent": 1}
    for command in ("list", "verify", "takeover", "health"):
        assert run_command([command, shared]) == 0, command
    assert run_command(["pin", shared, str(STEPS)]) == 0
    assert run_command(["unpin", shared, str(STEPS)]) == 0
    assert run_command(["export", shared, str(tmp_path / "out.pt")]) == 0
    assert run_command(["halt", shared, "--now"]) == 0
    assert (tmp_path / "shared" / "halt.json").exists()
    assert os.listdir() == [], "no folder called file:"
