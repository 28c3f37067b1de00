"""No step is lost without a word: a restart that cannot use a journal names it, and a run that goes
on from elsewhere takes a version that its own journal follows."""

from __future__ import annotations

import functools
import logging
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import tierckpt
from tests.store.journal.test_repeated_steps import Loop, attach, train
from tierckpt.cli import run_command
from tierckpt.format import PAGE_BYTES
from tierckpt.journal import FOLDER, names_in, recorder

STEPS = 6
adam = functools.partial(torch.optim.Adam, lr=0.01)


def killed_run(path: Path, shm_dir: Path, **settings: Any) -> Loop:
    """A run that dies at v6, with v1 on disk and a journal of the rest."""
    loop = Loop(adam)
    ckpt = attach(loop, path, shm_dir, **settings)
    train(loop, ckpt, STEPS)
    ckpt.abandon()
    return loop


def restart(
    path: Path, shm_dir: Path, strict: bool = True, **settings: Any
) -> tuple[Loop, tierckpt.Checkpointer, list[str]]:
    """Start again. Returns the loop, its checkpointer, and warnings about unused steps."""
    loop, events = Loop(adam), list[tierckpt.Event]()
    ckpt = attach(loop, path, shm_dir, on_event=events.append, **settings)
    ckpt.restore(strict=strict)
    warned = [event.message for event in events if event.severity == logging.WARNING]
    return loop, ckpt, [text for text in warned if "are lost" in text]


@pytest.mark.parametrize(
    ("changed", "why", "remedy"),
    [
        ({"local_journal_steps": 0}, "local_journal_steps is not set", "with local_journal_steps"),
        ({"strict": False}, "restore(strict=False) makes no steps again", "with strict=True"),
    ],
)
def test_a_restart_that_does_not_use_the_journal_names_it(
    changed: dict[str, Any], why: str, remedy: str, tmp_path: Path, shm_dir: Path
) -> None:
    path = tmp_path / "ckpts"
    killed = killed_run(path, shm_dir)
    _, ckpt, texts = restart(path, shm_dir, **changed)
    assert ckpt.version == 1
    ckpt.abandon()
    (text,) = texts
    expected = (
        f"leads from v1 on to v6, and {why}: the steps after v1 are lost. Start again {remedy}"
    )
    assert expected in text
    again, ckpt, texts = restart(path, shm_dir)  # the remedy
    assert (ckpt.version, texts) == (STEPS, [])
    assert again.image() == killed.image()
    ckpt.abandon()


def test_without_the_setting_files_go_when_no_restart_takes_them(
    tmp_path: Path, shm_dir: Path
) -> None:
    """The journal leads on from v1, and stays as long as v1 may be needed."""
    path = tmp_path / "ckpts"
    killed_run(path, shm_dir)
    settings = {"local_journal_steps": 0, "local_every_steps": 3, "local_keep": 3}
    loop, ckpt, _ = restart(path, shm_dir, **settings)
    for left in (True, True, False):
        while ckpt.version % 3:
            train(loop, ckpt, 1)
        train(loop, ckpt, 2)  # their ballots say that the version is complete
        for thread in threading.enumerate():
            if thread.name == "tierckpt-old-journal":
                thread.join()
        assert bool(names_in(path / FOLDER)) == left
    ckpt.abandon()


def test_without_the_setting_files_go_with_the_end_of_the_job(
    tmp_path: Path, shm_dir: Path
) -> None:
    path = tmp_path / "ckpts"
    killed_run(path, shm_dir)
    _, ckpt, _ = restart(path, shm_dir, local_journal_steps=0)
    ckpt.close()
    assert names_in(path / FOLDER) == []


def test_a_journal_of_another_number_of_ranks_is_named_and_goes_with_the_versions(
    tmp_path: Path, shm_dir: Path
) -> None:
    path = tmp_path / "ckpts"
    killed_run(path, shm_dir)
    (name,) = names_in(path / FOLDER)
    for shard in (0, 1):
        other = str(name).replace("s00000of00001", f"s{shard:05d}of00002")
        shutil.copy(path / FOLDER / str(name), path / FOLDER / other)
    os.unlink(path / FOLDER / str(name))
    loop, ckpt, texts = restart(path, shm_dir)
    assert ckpt.version == 1
    (text,) = texts
    assert "leads from v1 on to v6, and it is of 2 rank(s), this job has 1" in text
    assert "Start again with 2 rank(s)" in text
    train(loop, ckpt, 1)
    ckpt.close()
    assert names_in(path / FOLDER) == []


def test_a_run_from_memory_takes_a_version_that_its_journal_follows(
    tmp_path: Path, shm_dir: Path
) -> None:
    """The killed run's last records were not written yet: its own journal does not lead to the
    version in memory, which a reboot takes away."""
    path = tmp_path / "ckpts"
    killed_run(path, shm_dir, memory_every_steps=1)
    (name,) = names_in(path / FOLDER)
    os.truncate(path / FOLDER / str(name), (path / FOLDER / str(name)).stat().st_size // 2)
    loop, ckpt, _ = restart(path, shm_dir, memory_every_steps=1)
    assert [*ckpt.restored.levels] == ["memory"]
    train(loop, ckpt, 3)
    steps = ckpt.version
    ckpt.abandon()
    shutil.rmtree(shm_dir)  # as a reboot does
    shm_dir.mkdir()
    again, ckpt, texts = restart(path, shm_dir)
    assert (ckpt.version, texts) == (steps, [])
    assert again.image() == loop.image()
    ckpt.abandon()


def test_a_journal_that_somebody_removes_is_reported(tmp_path: Path, shm_dir: Path) -> None:
    path, events = tmp_path / "ckpts", list[tierckpt.Event]()
    loop = Loop(adam)
    ckpt = attach(loop, path, shm_dir, on_event=events.append, local_journal_steps=6)
    train(loop, ckpt, 3)
    shutil.rmtree(path / FOLDER)
    train(loop, ckpt, 6)
    ckpt.abandon()
    (error,) = [event.message for event in events if event.severity >= logging.ERROR]
    assert "the journal ends at v3: " in error
    assert "somebody removed it" in error
    _, ckpt, _ = restart(path, shm_dir)
    assert ckpt.version == 9, "it began again with v7"
    ckpt.abandon()


def test_verify_reads_the_journal(
    tmp_path: Path, shm_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ckpts"
    killed_run(path, shm_dir)
    assert run_command(["verify", str(path)]) == 0
    assert "journal: 5 records, " in capsys.readouterr().out
    (name,) = names_in(path / FOLDER)
    data = bytearray((path / FOLDER / str(name)).read_bytes())
    data[len(data) // 2 + 8] ^= 1  # the head of a frame, or in an image
    (path / FOLDER / str(name)).write_bytes(data)
    assert run_command(["verify", str(path)]) == 1
    out = capsys.readouterr().out
    assert ": 1 DAMAGED" in out
    assert str(name) in out


def test_commands_that_read_versions_name_the_steps_after_them(
    tmp_path: Path, shm_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, named = tmp_path / "ckpts", "the journal leads on from v1 to v6, and only a restart"
    killed_run(path, shm_dir)
    assert run_command(["watch", str(path), "--once"]) == 0
    assert "its journal leads on to v6" in capsys.readouterr().out.replace("\n", " ")
    assert run_command(["export", str(path), str(tmp_path / "all.pt")]) == 0
    assert named in capsys.readouterr().out
    assert run_command(["fork", str(path), str(tmp_path / "other")]) == 0
    assert named in capsys.readouterr().out
    assert run_command(["export", str(path), str(tmp_path / "v1.pt"), "--version", "1"]) == 0
    assert "journal" not in capsys.readouterr().out


@pytest.mark.parametrize("limit", ["MAX_STEPS", "MAX_BYTES"])
def test_gradients_of_many_steps_are_not_kept_in_memory(
    limit: str, tmp_path: Path, shm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop calls `step()` too rarely: the journal ends, not the training."""
    monkeypatch.setattr(recorder, limit, 4 if limit == "MAX_STEPS" else 5 * PAGE_BYTES)
    loop, events = Loop(adam), list[tierckpt.Event]()
    ckpt = attach(loop, tmp_path / "ckpts", shm_dir, on_event=events.append)
    train(loop, ckpt, 2)
    for _ in range(8):
        loop.iterate()
    train(loop, ckpt, 1)
    ckpt.abandon()
    (text,) = [event.message for event in events if "without a boundary" in event.message]
    steps = 4 if limit == "MAX_STEPS" else 6
    assert f"the journal ends at v2: {steps} optimizer steps were made without a boundary" in text
    assert "Call step() of the checkpointer more often" in text
