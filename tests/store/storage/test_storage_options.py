"""Storage options: the given options reach the store, and nothing else does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.persistent_shards import s3_options
from tests.support.s3_server import Proxy
from tierckpt.cli import run_command
from tierckpt.config import STORAGE_OPTIONS
from tierckpt.errors import RestoreError
from tierckpt.testing import TinyJob

VARIABLE = f"TIERCKPT_{STORAGE_OPTIONS.upper()}"
STEPS = 3
WRONG = "another-secret-than-the-server-has"


@pytest.fixture
def url(tmp_path: Path, served: Path) -> str:
    (tmp_path / "bucket").mkdir()
    return f"s3://{(tmp_path / 'bucket').relative_to(served)}"


@pytest.fixture
def job(url: str, tmp_path: Path, shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`job(**settings)`; neither the environment nor the home directory helps the client."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "nobody"))

    def start(**settings: Any) -> TinyJob:
        given = {
            "shm_dir": str(shm_dir),
            "persistent_path": url,
            "persistent_every_steps": 1,
            "events_dir": str(tmp_path / "events"),
            **settings,
        }
        return TinyJob(tmp_path / "ckpts", **given)

    return start


def given_as(how: str, options: dict[str, Any], folder: Path, patch: pytest.MonkeyPatch) -> Any:
    """Settings that pass the options in each of the possible ways."""
    if how == "arguments":
        return {STORAGE_OPTIONS: options}
    if how == "environment":
        patch.setenv(VARIABLE, json.dumps(options))
        return {}
    lines = ["[persistent.storage_options]"]
    lines += [f"{k} = {json.dumps(v)}" for k, v in options.items() if isinstance(v, str)]
    (folder / "tierckpt.toml").write_text("\n".join(lines))
    return {"config_file": folder / "tierckpt.toml"}


@pytest.mark.parametrize(
    ("how", "agent"),
    [("arguments", "process"), ("environment", "inline"), ("file", "inline")],
)
def test_they_reach_the_store_for_writing_and_for_reading(
    how: str,
    agent: str,
    job: Any,
    url: str,
    endpoint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = given_as(how, s3_options(endpoint), tmp_path, monkeypatch)
    with job(agent=agent, **settings) as first:
        first.run(STEPS)
        fingerprint = first.fingerprint()
    shutil.rmtree(tmp_path / "ckpts")
    with job(agent=agent, **settings) as second:
        restored = second.restore()
        assert (restored.version, restored.levels) == (STEPS, {"persistent": 1})
        assert second.fingerprint() == fingerprint
    there = [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".toml"]
    assert len(there) > 3
    for path in there:
        assert s3_options(endpoint)["secret_access_key"].encode() not in path.read_bytes(), path


def test_a_wrong_one_is_an_error_that_does_not_repeat_it(
    job: Any, proxy: Proxy, tmp_path: Path
) -> None:
    """The options decide: the server refuses the job, which continues, and names the place to
    look."""
    options = {**s3_options(proxy.url), "secret_access_key": WRONG}
    with job(agent="inline", **{STORAGE_OPTIONS: options}) as first:
        first.run(STEPS)
        assert WRONG not in repr(first.checkpointer.config)
    failed = first.heard("failed", "persistent")
    assert failed
    assert proxy.requests, "the endpoint that was given was asked"
    assert all("credentials" in event.text() for event in failed)
    assert all(WRONG not in event.text() for event in first.events)
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or WRONG.encode() not in path.read_bytes(), path


def test_a_job_does_not_start_afresh_beside_files_that_it_may_not_see(
    job: Any, proxy: Proxy, tmp_path: Path
) -> None:
    right = s3_options(proxy.url)
    with job(agent="inline", **{STORAGE_OPTIONS: right}) as first:
        first.run(STEPS)
        fingerprint = first.fingerprint()
    shutil.copytree(tmp_path / "ckpts", tmp_path / "copy")
    shutil.rmtree(tmp_path / "ckpts")
    with job(
        agent="inline", **{STORAGE_OPTIONS: {**right, "secret_access_key": WRONG}}
    ) as shut_out:
        with pytest.raises(RestoreError, match="credentials") as refused:
            shut_out.restore()
        with pytest.raises(RestoreError, match=r"v2 was found on any level; .* could not be read"):
            shut_out.restore(version=2)
    assert "does not start from the beginning" in str(refused.value)
    assert "s3://" in str(refused.value)
    assert WRONG not in str(refused.value)
    with job(agent="inline", **{STORAGE_OPTIONS: right}) as second:
        assert second.restore().levels == {"persistent": 1}
        assert second.fingerprint() == fingerprint
    # If another level has a version, the job continues from it and reports the unreadable
    # locations.
    shutil.rmtree(tmp_path / "ckpts")
    shutil.move(tmp_path / "copy", tmp_path / "ckpts")
    with job(agent="inline", **{STORAGE_OPTIONS: {**right, "secret_access_key": WRONG}}) as third:
        restored = third.restore()
    assert restored.levels == {"local": 1}
    assert any("credentials" in text for text in restored.rejected)


def test_a_directory_takes_some_of_its_own(job: Any, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    settings = {"agent": "inline", "persistent_path": str(shared)}
    with job(**settings, **{STORAGE_OPTIONS: {"shared_writes": False}}) as first:
        first.run(1)
    assert list(shared.rglob("s00000-00000.shards"))
    with job(**settings, **{STORAGE_OPTIONS: {"key": WRONG}}) as second:
        second.restore()
        second.run(2)
    (failed, *_) = second.heard("failed", "persistent")
    assert "a directory: its storage options are direct and shared_writes" in failed.text()
    assert WRONG not in failed.text()


def test_a_directory_is_read_whatever_options_the_environment_has_for_a_url(
    job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = str(tmp_path / "shared")
    with job(agent="inline", persistent_path=shared) as first:
        first.run(1)
    monkeypatch.setenv(VARIABLE, json.dumps({"key": WRONG}))
    assert run_command(["list", shared]) == 0
    assert " kB " in capsys.readouterr().out.splitlines()[1]
    assert run_command(["verify", shared]) == 0
    assert run_command(["export", shared, str(tmp_path / "out.pt")]) == 0
    assert run_command(["pin", shared, "1"]) == 0
    assert run_command(["takeover", shared]) == 0
