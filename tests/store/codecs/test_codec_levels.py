"""Whole jobs with codecs on their levels: restored states are exact, or there is none."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import tierckpt
from tierckpt.agent import flusher, open_base
from tierckpt.cli import run_command
from tierckpt.codecs import FILE_VARIABLE, KEY_VARIABLE, OUR_CODECS, Base, Zstd, key_fingerprint
from tierckpt.errors import CorruptShardError, RestoreError
from tierckpt.format import Manifest, VersionId
from tierckpt.storage import ENCODED_SUFFIX, LocalStore
from tierckpt.storage.persistent import PersistentStore
from tierckpt.testing import TinyJob

STEPS = 6
KEY, OTHER_KEY = "5e" * 32, "a7" * 32
ROWS = ("zstd", "aes-gcm", "incremental", "incremental full_every=3, zstd, aes-gcm")


@pytest.fixture(autouse=True)
def a_key_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FILE_VARIABLE, raising=False)
    monkeypatch.setenv(KEY_VARIABLE, KEY)


def frozen_model() -> torch.nn.Module:
    """A model of which megabytes never change, as in an embedding."""
    torch.manual_seed(1)
    frozen = torch.nn.Linear(12, 50_000)
    head = torch.nn.Linear(12, 4)
    for parameter in frozen.parameters():
        parameter.requires_grad_(False)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen, self.head = frozen, head

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(x)

    return Model()


@pytest.fixture(scope="module")
def course() -> dict[int, str]:
    """Fingerprints after every step of a job without checkpoints."""
    job, found = TinyJob(None, model=frozen_model()), {}
    for step in range(1, 2 * STEPS + 1):
        found[step] = job.run(step).fingerprint()
    return found


@pytest.fixture
def job(tmp_path: Path, shm_dir: Path) -> Any:
    """`job(**settings)`: the same job again, in the same place, with nothing left in memory."""

    def start(**settings: Any) -> TinyJob:
        for folder in shm_dir.iterdir():
            shutil.rmtree(folder)
        given = {"shm_dir": str(shm_dir), "agent": "inline", **settings}
        return TinyJob(tmp_path / "ckpts", model=frozen_model(), **given)

    return start


def stored(folder: Path) -> dict[int, Manifest]:
    store = LocalStore(folder)
    keys = store.keys()
    return {key.id.version: Manifest.decode(store.read_manifest(key)) for key in keys}


def flushed(place: Path) -> list[int]:
    return [name.id.version for name in PersistentStore(str(place)).versions()]


# --- the local level -----------------------------------------------------------------------------


@pytest.mark.parametrize("row", ROWS[::3])
def test_a_job_continues_from_encoded_shards(
    row: str, job: Any, course: dict[int, str], tmp_path: Path
) -> None:
    with job(local_codecs=row) as first:
        first.run(STEPS)
    there = stored(tmp_path / "ckpts")
    assert max(there) == STEPS
    assert all(manifest.encoding for manifest in there.values())
    assert not list(tmp_path.rglob("*.safetensors"))
    with job(local_codecs=row) as second:
        restored = second.restore()
        assert (int(restored), restored.levels, restored.rejected) == (STEPS, {"local": 1}, ())
        assert second.fingerprint() == course[STEPS]
        assert second.run(2 * STEPS).fingerprint() == course[2 * STEPS]


def test_without_modules_files_stay_plain(job: Any, tmp_path: Path) -> None:
    with job() as first:
        first.run(2)
    assert not list(tmp_path.rglob(f"*{ENCODED_SUFFIX}"))
    text = next((tmp_path / "ckpts").glob("*.manifest")).read_text()
    assert "encoding" not in text


def test_settings_may_change_between_runs(job: Any, course: dict[int, str]) -> None:
    for number, row in enumerate(("zstd", "", "incremental, aes-gcm", "zstd level=1"), start=1):
        with job(local_codecs=row) as each:
            assert int(each.restore()) == 2 * (number - 1)
            each.run(2 * number)
            assert each.fingerprint() == course[2 * number]


def test_unchanged_blocks_are_referred_to_and_their_version_stays(
    job: Any, course: dict[int, str], tmp_path: Path
) -> None:
    folder = tmp_path / "ckpts"
    with job(local_codecs="incremental full_every=4", local_keep=2) as first:
        first.run(STEPS)
    there = stored(folder)
    whole = [v for v, manifest in there.items() if manifest.encoding.base is None]
    assert list(there) == [5, 6], "v1, which v2 to v4 referred to, went with them"
    assert (whole, there[6].encoding.base) == ([5], VersionId(there[5].id.generation, 5))
    assert there[6].image_bytes < there[5].image_bytes / 10
    with job() as second:
        second.restore()
        assert second.fingerprint() == course[STEPS]


def test_a_version_that_lost_its_base_is_skipped(job: Any, tmp_path: Path) -> None:
    folder = tmp_path / "ckpts"
    with job(local_codecs="incremental full_every=3", local_keep=6) as first:
        first.run(STEPS)
    bases = {v: m.encoding.base for v, m in stored(folder).items()}
    assert [v for v, base in bases.items() if base is None] == [1, 4]
    store = LocalStore(folder)
    store.retire(next(key for key in store.keys() if key.id.version == 4))  # noqa: SIM118
    with job() as second:
        restored = second.restore()
        assert restored.version == 3
        rejected = [e.text() for e in second.events if e.name == "rejected"]
        assert ["refers to v4" in text for text in rejected] == [True, True]


def test_flipped_bits_never_load(job: Any, course: dict[int, str], tmp_path: Path) -> None:
    """Anywhere in the file, or in the manifest: the previous version is restored."""
    folder = tmp_path / "ckpts"
    with job(local_codecs="zstd, aes-gcm", local_keep=2) as first:
        first.run(2)
    (data,) = folder.glob(f"v{2:010d}.*{ENCODED_SUFFIX}")
    (record,) = folder.glob(f"v{2:010d}.*.manifest")
    chance = random.Random(0)
    for path in [data, record]:
        sound = path.read_bytes()
        damaged = bytearray(sound)
        damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        second = job(local_every_steps=0)
        assert second.restore().version == 1
        assert second.fingerprint() == course[1]
        second.checkpointer.abandon()
        path.write_bytes(sound)
    with job() as last:
        assert last.restore().version == 2


def key_id(key: str) -> str:
    return key_fingerprint(bytes.fromhex(key))


@pytest.mark.parametrize("key", [OTHER_KEY, ""])
def test_with_another_key_or_none_nothing_starts_and_the_reason_is_reported(
    key: str, job: Any, course: dict[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even from an older version that needs no key: a continuation would retire this one."""
    with job() as first:
        first.run(1)
    with job(local_codecs="aes-gcm", local_keep=3) as first:
        first.restore()
        first.run(3)
    monkeypatch.setenv(KEY_VARIABLE, key)
    second = job(local_every_steps=0)
    before = second.fingerprint()
    with pytest.raises(RestoreError, match="v3 exists and cannot be decoded") as refused:
        second.restore()
    text = str(refused.value)
    assert f"encrypted with the key whose id is {key_id(KEY)}" in text
    assert (f"{KEY_VARIABLE} has the id {key_id(OTHER_KEY)}" if key else "no key is given") in text
    assert FILE_VARIABLE in text
    assert KEY not in text
    assert OTHER_KEY not in text
    assert second.fingerprint() == before
    assert second.restore(version=1) == 1, "asked for, it is what there is"
    assert second.fingerprint() == course[1]
    second.checkpointer.abandon()
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    with job() as last:
        assert last.restore() == 3
        assert last.fingerprint() == course[3]


def test_after_a_change_of_keys_in_mid_run_the_new_one_is_enough(
    job: Any, course: dict[int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard that refers to an older version is read with that version's key, which may be gone.
    So it does not refer to it, although only the key has changed."""
    shared = tmp_path / "shared"
    row = "incremental full_every=8, aes-gcm"
    far = {"persistent_path": str(shared), "persistent_every_steps": 1, "persistent_codecs": row}
    with job(local_codecs=row, local_keep=8, persistent_keep=8, **far) as first:
        for step in range(1, STEPS + 1):
            if step == 4:
                monkeypatch.setenv(KEY_VARIABLE, OTHER_KEY)
            first.run(step)
            first.checkpointer.wait()
    there = stored(tmp_path / "ckpts")
    bases = {v: m.encoding.base and m.encoding.base.version for v, m in there.items()}
    assert bases == {1: None, 2: 1, 3: 1, 4: None, 5: 4, 6: 4}
    shutil.rmtree(tmp_path / "ckpts")
    with job(**far) as second:
        assert second.restore() == STEPS
        assert second.fingerprint() == course[STEPS]


def test_a_run_refers_to_its_own_versions_only(
    job: Any, course: dict[int, str], tmp_path: Path
) -> None:
    """Another run's versions may have other rules, even if the agent that wrote them still runs."""
    row = "incremental full_every=8"
    far = {"persistent_path": str(tmp_path / "shared"), "persistent_every_steps": 1}
    settings = {"local_codecs": row, "persistent_codecs": row, "local_keep": 8, **far}
    with job(**settings) as both:
        both.run(2)
        both.checkpointer.wait()
        assert both.restore() == 2
        both.run(STEPS)
    there = stored(tmp_path / "ckpts")
    bases = {v: m.encoding.base and m.encoding.base.version for v, m in there.items()}
    assert bases == {1: None, 2: 1, 3: None, 4: 3, 5: 3, 6: 3}
    assert there[2].facts.run_id != there[3].facts.run_id
    assert not [e.text() for e in both.events if e.name == "failed"]
    assert flushed(tmp_path / "shared")[-1] == STEPS
    shutil.rmtree(tmp_path / "ckpts")
    with job(**far) as second:
        assert second.restore() == STEPS
        assert second.fingerprint() == course[STEPS]


def test_another_level_that_can_be_read_is_taken_instead(
    job: Any, course: dict[int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = {"persistent_path": str(tmp_path / "shared"), "persistent_every_steps": 1}
    with job(local_codecs="aes-gcm", **shared) as first:
        first.run(2)
    monkeypatch.delenv(KEY_VARIABLE)
    with job(**shared) as second:
        restored = second.restore()
        assert (restored.version, restored.levels) == (2, {"persistent": 1})
        assert "no key is given" in restored.rejected[0]
        assert second.fingerprint() == course[2]


def test_a_missing_module_is_named(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OUR_CODECS, "somebodys", OUR_CODECS["zstd"])
    monkeypatch.setattr(Zstd, "name", "somebodys")
    with job(local_codecs="somebodys") as first:
        first.run(2)
    monkeypatch.undo()
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    second = job(local_every_steps=0)
    with pytest.raises(RestoreError, match=r"codec 'somebodys' is unknown.*install"):
        second.restore()
    second.checkpointer.abandon()


def test_a_key_that_vanishes_costs_checkpoints_and_not_the_job(
    job: Any, course: dict[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with job(local_codecs="aes-gcm") as first:
        first.run(2)
        monkeypatch.delenv(KEY_VARIABLE)
        first.run(STEPS)
        assert first.fingerprint() == course[STEPS]
    failed = [e.text() for e in first.events if e.name == "failed" and e.level == "local"]
    assert failed
    assert all(KEY_VARIABLE in text and KEY not in text for text in failed)


def test_nothing_of_the_weights_or_the_key_is_on_disk_in_the_clear(
    job: Any, tmp_path: Path
) -> None:
    shared, events = tmp_path / "shared", tmp_path / "events"
    shared.mkdir()
    with job(
        local_codecs="aes-gcm",
        persistent_path=str(shared),
        persistent_every_steps=1,
        persistent_codecs="incremental, zstd, aes-gcm",
        events_dir=str(events),
    ) as first:
        first.run(3)
        weights = first.model.state_dict()["frozen.weight"].numpy().tobytes()
    assert flushed(shared)[-1] == 3
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert sum(path.suffix in (ENCODED_SUFFIX, ".shards") for path in files) >= 3
    for path in files:
        content = path.read_bytes()
        assert not any(weights[i : i + 64] in content for i in range(0, 6400, 640)), path
        assert b"frozen.weight" not in content, path
        assert bytes.fromhex(KEY) not in content, path
        assert KEY.encode() not in content, path


# --- the persistent level ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("local", "row"),
    [("zstd level=1, zstd", ""), ("", "incremental full_every=4, zstd, aes-gcm")],
)
def test_a_job_continues_from_the_persistent_level(
    local: str, row: str, job: Any, course: dict[int, str], tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    settings = {
        "local_codecs": local,
        "persistent_codecs": row,
        "persistent_path": str(shared),
        "persistent_every_steps": 1,
        "persistent_keep": 2,
    }
    with job(**settings) as first:
        for step in range(1, STEPS + 1):
            first.run(step)
            first.checkpointer.wait()
    assert flushed(shared)[-1] == STEPS
    shutil.rmtree(tmp_path / "ckpts")
    with job(**settings) as second:
        restored = second.restore()
        assert (restored.version, restored.levels) == (STEPS, {"persistent": 1})
        assert second.fingerprint() == course[STEPS]
        assert second.run(2 * STEPS).fingerprint() == course[2 * STEPS]


def encodings(folder: Path) -> dict[int, Any]:
    """Encodings by version."""
    store = PersistentStore(str(folder))
    shards = {name.id.version: store.open_shard(name, 0) for name in store.versions()}
    return {version: Manifest.decode(shard.manifest).encoding for version, shard in shards.items()}


def delta_settings(shared: Path, **more: Any) -> dict[str, Any]:
    shared.mkdir(exist_ok=True)
    return {
        "persistent_codecs": "delta full_every=3, zstd",
        "persistent_path": str(shared),
        "persistent_every_steps": 1,
        "persistent_keep": "1, every 2",
        **more,
    }


def run_each(job: TinyJob, last: int) -> None:
    for step in range(job.iteration + 1, last + 1):
        job.run(step)
        job.checkpointer.wait()  # no version waits for another, and is dropped for a newer one


def test_kept_versions_are_differences_and_all_are_exact(
    job: Any,
    course: dict[int, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shared = tmp_path / "shared"
    settings = delta_settings(shared, persistent_codecs="delta full_every=3, zstd, aes-gcm")
    with job(**settings) as first:
        run_each(first, 2 * STEPS - 1)
        assert not [e.text() for e in first.events if e.name == "failed"]
    there = encodings(shared)
    kept = [2, 4, 6, 8, 10]
    assert [*there] == [*kept, 2 * STEPS - 1], "multiples of two, and the last one"
    bases = {v: each.base and each.base.version for v, each in there.items()}
    assert bases == {2: None, 4: 2, 6: 2, 8: None, 10: 8, 11: None}
    assert [v for v, each in there.items() if each.differences] == [4, 6, 10]
    shutil.rmtree(tmp_path / "ckpts")
    capsys.readouterr()
    assert [run_command([command, str(shared)]) for command in ("verify", "list")] == [0, 0]
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    marks = {v: text.split("  ")[-1] for v, text in lines if " persistent " in f" {text}"}
    assert (marks["v2"], marks["v4"]) == ("needed by v4, v6", "refers to v2")
    assert marks["v11"] == "a restart takes this"
    for version in kept:
        again = job(**settings, local_every_steps=0)
        assert again.restore(version=version).levels == {"persistent": 1}
        assert again.fingerprint() == course[version]
        again.checkpointer.abandon()
    with job(**settings) as second:
        assert second.restore() == 2 * STEPS - 1
        assert second.run(2 * STEPS).fingerprint() == course[2 * STEPS]


def test_the_version_after_a_missing_multiple_is_kept_and_a_difference(
    job: Any, course: dict[int, str], tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    settings = delta_settings(shared, persistent_every_steps=3, persistent_keep="1, every 4")
    with job(**settings) as first:
        run_each(first, 2 * STEPS - 1)
    bases = {v: each.base and each.base.version for v, each in encodings(shared).items()}
    assert bases == {6: None, 9: 6, 2 * STEPS - 1: None}, "6 stands for 4, 9 for 8; then the end"
    shutil.rmtree(tmp_path / "ckpts")
    again = job(**settings, local_every_steps=0)
    assert again.restore(version=9) == 9
    assert again.fingerprint() == course[9]
    again.checkpointer.abandon()


def test_with_a_base_that_cannot_be_read_a_version_is_stored_whole(
    job: Any,
    course: dict[int, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shared = tmp_path / "shared"
    settings = delta_settings(shared, persistent_keep="1, every 1")

    def only_others(store: PersistentStore, base: Base) -> Any:
        if base.manifest.id.version == 4:
            raise CorruptShardError("injected")
        return open_base(store, base)

    monkeypatch.setattr(flusher, "open_base", only_others)
    with job(**settings) as first:
        run_each(first, STEPS)
    warned = [e.text() for e in first.events if "is stored whole" in e.text()]
    assert len(warned) == 1
    assert "v4 shard 0 of 1 cannot be read: injected" in warned[0]
    bases = {v: each.base and each.base.version for v, each in encodings(shared).items()}
    assert bases == {1: None, 2: 1, 3: 1, 4: None, 5: None, STEPS: 5}
    shutil.rmtree(tmp_path / "ckpts")
    (data,) = shared.glob("v0000000005.*/**/*.shards")
    sound = data.read_bytes()
    data.write_bytes(sound[: len(sound) // 2] + bytes(len(sound) - len(sound) // 2))
    assert run_command(["verify", str(shared)]) == 1
    assert "v6 shard 0 of 1 refers to v5 shard 0 of 1" in " ".join(capsys.readouterr().out.split())
    with job(**settings, local_every_steps=0) as second:
        assert second.restore() == 4, "v5 is damaged, and v6 a difference to it"
        assert second.fingerprint() == course[4]
        rejected = [e.text() for e in second.events if e.name == "rejected"]
        assert any("v6 shard 0 of 1 refers to v5 shard 0 of 1" in text for text in rejected)


# --- a state of nothing --------------------------------------------------------------------------


class Nothing(torch.nn.Module):
    """Every tensor is empty, and so is their block."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(0, 4))
        self.register_buffer("none", torch.zeros(0))


@pytest.mark.parametrize("row", ["", ROWS[3]])
def test_a_state_without_a_byte_comes_back_from_every_level(
    row: str, tmp_path: Path, shm_dir: Path
) -> None:
    def start(path: str) -> tierckpt.Checkpointer:
        model = Nothing()
        return tierckpt.Checkpointer(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            path=tmp_path / path,
            job_id="job",
            shm_dir=shm_dir,
            agent="inline",
            when_busy="wait",
            local_every_steps=1,
            local_codecs=row,
            persistent_path=tmp_path / "shared",
            persistent_every_steps=1,
            persistent_codecs=row,
        )

    with start("here") as first:
        for _ in range(STEPS):
            (optimizer,) = first._state.optimizers.values()
            optimizer.step()
            first.step()
    for path, level in (("here", "local"), ("elsewhere", "persistent")):
        for folder in shm_dir.iterdir():
            shutil.rmtree(folder)
        with start(path) as again:
            restored = again.restore()
            assert (int(restored), restored.levels) == (STEPS, {level: 1})
            again.abandon()
