"""A file counts as locked until it is closed, however long that takes."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from tests.support.processes import end, python
from tierckpt.storage import file_lock


def test_a_file_is_locked_until_it_is_closed_and_others_can_be_probed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock taken during the close would be dropped by it."""
    slow, other = tmp_path / "slow", tmp_path / "other"
    other.touch()
    fd = os.open(slow, os.O_RDWR | os.O_CREAT)
    assert file_lock.lock(fd, slow)
    closing, resume, close = threading.Event(), threading.Event(), os.close

    def hang(number: int) -> None:
        if number == fd:
            closing.set()
            assert resume.wait(60)
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
        resume.set()
        thread.join()
    assert not file_lock.held_here(slow)
    assert file_lock.unlocked(slow)


def test_the_holder_of_a_lock_is_found_without_taking_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    assert file_lock.holder(path) is None
    with python(
        "import os, sys; from tierckpt.storage import file_lock; "
        "assert file_lock.lock(os.open(sys.argv[1], os.O_RDWR)); print('locked', flush=True); "
        "sys.stdin.read()",
        path,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        assert file_lock.holder(path) == process.pid
        end(process)
    assert file_lock.holder(path) is None


def test_a_lock_that_was_handed_over_is_in_no_file_of_this_process_and_ends_with_it(
    tmp_path: Path,
) -> None:
    """A process that has a file open in a file system that hangs cannot be ended."""
    path = tmp_path / "lock"
    with python(
        "import os, sys; from pathlib import Path; from tierckpt.storage import file_lock; "
        "path = Path(sys.argv[1]); fd = os.open(path, os.O_RDWR | os.O_CREAT); "
        "assert file_lock.lock_for_good(fd, path); fd = file_lock.hand_over(fd); "
        "print('locked', file_lock.held_here(path), flush=True); sys.stdin.read()",
        path,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked True\n"
        files = Path(f"/proc/{process.pid}/fd").iterdir()
        assert str(path) not in [os.readlink(each) for each in files]
        assert file_lock.holder(path) is not None
        process.kill()
        process.wait()
    end_at = time.monotonic() + 60
    while file_lock.holder(path) is not None and time.monotonic() < end_at:
        time.sleep(0.01)
    assert file_lock.holder(path) is None


def test_a_lock_that_was_handed_over_is_given_up_by_closing(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    assert file_lock.lock_for_good(fd, path)
    kept = file_lock.hand_over(fd)
    assert file_lock.held_here(path)
    file_lock.close(kept)
    assert not file_lock.held_here(path)
    assert file_lock.unlocked(path)
