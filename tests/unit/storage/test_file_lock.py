"""A file counts as locked until it is closed, however long that takes."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from tests.support.processes import end, python
from tierckpt.storage.files import file_lock


def test_a_file_is_locked_until_it_is_closed_and_others_can_be_probed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock taken during the close would be dropped by it."""
    slow, other = tmp_path / "slow", tmp_path / "other"
    other.touch()
    fd = os.open(slow, os.O_RDWR | os.O_CREAT)
    assert file_lock.lock(fd, slow)
    closing, go_on, close = threading.Event(), threading.Event(), os.close

    def hang(number: int) -> None:
        if number == fd:
            closing.set()
            assert go_on.wait(60)
        close(number)

    monkeypatch.setattr(os, "close", hang)
    thread = threading.Thread(target=file_lock.close, args=(fd,))
    thread.start()
    try:
        assert closing.wait(60)
        assert file_lock.held_here(slow)
        assert not file_lock.unlocked(slow)
        assert file_lock.unlocked(other)
    finally:
        go_on.set()
        thread.join()
    assert not file_lock.held_here(slow)
    assert file_lock.unlocked(slow)


def test_the_holder_of_a_lock_is_found_without_taking_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    assert file_lock.holder(path) is None
    with python(
        "import os, sys; from tierckpt.storage.files import file_lock; "
        "assert file_lock.lock(os.open(sys.argv[1], os.O_RDWR)); print('locked', flush=True); "
        "sys.stdin.read()",
        path,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        assert file_lock.holder(path) == process.pid
        end(process)
    assert file_lock.holder(path) is None
