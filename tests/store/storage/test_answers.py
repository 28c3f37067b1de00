"""A place that does not answer costs no version of another one, and no wait without an end."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.persistent_shards import s3_options
from tests.support.tiny_course import STEPS
from tierckpt.cli import run_command
from tierckpt.config import load_config
from tierckpt.errors import PersistentError, RestoreError
from tierckpt.offline import survey_of
from tierckpt.storage import answers
from tierckpt.storage.persistent import PersistentStore, RetryPolicy, backend
from tierckpt.testing import TinyJob

Hang = Callable[..., None]
ASK = 'case "$0" in {places}) while [ ! -e {gate} ]; do sleep 0.02; done;; esac'


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    return tmp_path / "gate"


@pytest.fixture
def hang(gate: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hang]:
    """Let children that ask for something in these folders hang, until the gate exists."""

    def begin(*folders: Path) -> None:
        places = "|".join(f"{folder}/*" for folder in folders)
        command = ["/bin/sh", "-c", ASK.format(places=places, gate=gate)]
        monkeypatch.setattr(answers, "_command", lambda: command)
        monkeypatch.setattr(answers, "_by_threads", False)  # as an inline job of before left it
        monkeypatch.setattr(answers, "SAY_SECONDS", 0.1)
        monkeypatch.setattr(answers, "PATIENCE_SECONDS", 0.2)
        monkeypatch.setattr(answers, "START_SECONDS", 0.3)

    yield begin
    gate.touch()
    for place, (child, _) in list(answers._asked.items()):
        child.wait(60.0)
        assert not answers.is_silent(place)


def test_a_folder_is_silent_until_it_answers(tmp_path: Path, hang: Hang, gate: Path) -> None:
    dead, sound = tmp_path / "dead", tmp_path / "sound"
    hang(dead)
    assert not answers.is_silent(str(dead)), "nobody has asked"
    assert answers.silent(map(str, (dead, sound, tmp_path / "nothing")), 0.2) == [str(dead)]
    said: list[str] = []
    with pytest.raises(answers.NoAnswerError, match=f"{dead}: it does not answer within 0.3 s"):
        answers.ensure(str(dead), 0.3, said.append)
    assert said == [f"{dead} does not answer: waiting for it, at most 0.3 s"]
    with pytest.raises(OSError, match="does not answer"):
        PersistentStore(str(dead))
    child, _ = answers._asked[str(dead)]
    gate.touch()
    child.wait(60.0)
    assert not answers.is_silent(str(dead))
    PersistentStore(str(dead)).close()


def test_a_helper_can_be_asked_again_and_left_while_it_hangs(
    tmp_path: Path, hang: Hang, gate: Path
) -> None:
    dead = str(tmp_path / "dead")
    hang(dead)
    gate.touch()
    kept = answers.keep([dead, "s3://bucket/run"])
    assert kept == [dead]
    for _ in range(3):
        assert answers.silent([dead], 60.0) == []
    gate.unlink()
    assert answers.silent([dead], 0.2) == [dead]
    assert answers.keep([dead]) == []
    answers.drop(kept)
    gate.touch()
    assert answers.silent([dead], 60.0) == []


def test_a_restart_continues_without_a_hanging_level(
    path: Path, settings: dict[str, Any], tmp_path: Path, course: dict[int, str], hang: Hang
) -> None:
    far = tmp_path / "far"
    settings |= {"persistent_path": str(far)}
    with TinyJob(path, **settings) as job:
        job.run(STEPS)
    hang(far)
    with TinyJob(path, seed=9, **settings) as job:
        assert job.restore() == STEPS
        assert job.fingerprint() == course[STEPS]
        said = [event.message for event in job.events]
        assert f"{far} does not answer: waiting for it, at most 0.3 s" in said
        assert any(f"{far}: it does not answer within 0.3 s" in text for text in said)
        job.run(STEPS + 1)


def test_but_starts_nothing_afresh(
    path: Path, settings: dict[str, Any], tmp_path: Path, hang: Hang
) -> None:
    hang(tmp_path / "far")
    settings |= {"persistent_path": str(tmp_path / "far")}
    with TinyJob(path, **settings) as job:
        with pytest.raises(RestoreError, match="does not answer within"):
            job.restore()
        job.checkpointer.abandon()


def test_a_start_waits_for_its_directory_and_not_for_events(
    path: Path,
    settings: dict[str, Any],
    tmp_path: Path,
    hang: Hang,
    gate: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    events, look = tmp_path / "events", answers.silent
    hang(path, events)

    def open_at_last(folders: Any, seconds: float) -> list[str]:
        if seconds > 0.5:
            gate.touch()
            seconds = 60.0
        return look(folders, seconds)

    monkeypatch.setattr(answers, "silent", open_at_last)
    settings |= {"events_dir": str(events)}
    with TinyJob(path, **settings) as job:
        job.run(1)
    assert job.heard("committed", "local")
    assert not events.exists()
    said = caplog.text
    assert f"{path} does not answer: the start waits for it" in said
    assert f"no events or traces are written to {events}, which does not answer" in said


def test_commands_name_the_place_and_continue(
    path: Path,
    settings: dict[str, Any],
    tmp_path: Path,
    hang: Hang,
    capsys: pytest.CaptureFixture[str],
) -> None:
    far = tmp_path / "far"
    with TinyJob(path, persistent_path=str(far), **settings) as job:
        job.run(STEPS)
    hang(far)
    for command in (["list", "--json"], ["verify"], ["watch", "--once", "--json"]):
        run_command([command[0], str(path), str(far), *command[1:]])
        shown = capsys.readouterr()
        assert f"{far}: it does not answer within 0.2 s" in shown.out + shown.err
        assert f"v{STEPS}" in shown.out or f'"version": {STEPS}' in shown.out


def test_memory_is_seen_though_the_disk_hangs(
    path: Path, settings: dict[str, Any], hang: Hang
) -> None:
    job = TinyJob(path, **settings).run(STEPS)
    job.checkpointer.wait()
    job.checkpointer.abandon()
    hang(path)
    there = survey_of(str(path), load_config(settings))
    assert {each.place.level for each in there.found} == {"memory"}
    assert "does not answer" in there.troubles[0]


@pytest.fixture(scope="module")
def client() -> None:
    """Start what the client of object stores keeps for good."""
    pytest.importorskip("obstore")
    once, nobody = RetryPolicy(tries=1), s3_options("http://127.0.0.1:9")
    with contextlib.suppress(PersistentError):
        PersistentStore("s3://bucket/run", retry=once, **nobody).versions()


@pytest.fixture
def mute(client: None) -> Iterator[str]:
    """The address of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_a_server_that_never_answers(
    mute: str,
    path: Path,
    settings: dict[str, Any],
    course: dict[int, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with TinyJob(path, **settings) as job:
        job.run(STEPS)
    options = s3_options(mute)
    monkeypatch.setattr(backend, "is_transient", lambda error: False)
    monkeypatch.setattr(answers, "SAY_SECONDS", 0.1)
    monkeypatch.setattr(answers, "PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(answers, "START_SECONDS", 0.3)
    url = "s3://bucket/run"
    settings |= {"persistent_path": url, "persistent_storage_options": options}
    with TinyJob(path, seed=9, **settings) as job:
        assert job.restore() == STEPS
        assert job.fingerprint() == course[STEPS]
        assert any(
            f"{url}: it does not answer within 0.3 s" in event.message for event in job.events
        )
        job.checkpointer.abandon()
    monkeypatch.setenv("TIERCKPT_PERSISTENT_STORAGE_OPTIONS", json.dumps(options))
    there = survey_of([str(path), url])
    assert [trouble for trouble in there.troubles if "does not answer" in trouble]
    assert there.plan() is not None
