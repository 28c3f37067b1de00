"""Bytes that the disk cannot read cause an error, not the end of the process."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tierckpt.storage import MappedFile

PAGES = 300
SIZE = PAGES * mmap.PAGESIZE + 17


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "file"
    made.write_bytes(os.urandom(SIZE))
    return made


@pytest.fixture
def file(path: Path) -> Iterator[MappedFile]:
    with path.open("rb") as opened:
        made = MappedFile(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY))
    yield made
    made.close()


@pytest.mark.parametrize(
    ("low", "high"), [(0, SIZE), (5, 6), (4096, 8192), (SIZE - 1, SIZE), (0, SIZE + 10**6), (7, 7)]
)
def test_pages_of_an_existing_file_are_loaded(
    low: int, high: int, file: MappedFile, path: Path
) -> None:
    file.ask(low, high)
    file.bring(low, high)
    assert file.view[low:high] == path.read_bytes()[low:high]


def test_an_unreadable_page_is_an_error_and_the_others_are_not(
    file: MappedFile, path: Path
) -> None:
    """Touching the page instead would end this process."""
    whole = path.read_bytes()
    os.truncate(path, 100 * mmap.PAGESIZE)
    file.bring(0, 100 * mmap.PAGESIZE)
    assert file.view[: 100 * mmap.PAGESIZE] == whole[: 100 * mmap.PAGESIZE]
    with pytest.raises(OSError, match="bytes 409600 to 409700 cannot be read: the disk fails"):
        file.bring(409600, 409700)
    with pytest.raises(OSError, match="cannot be read"):
        file.bring(0, SIZE)


def test_it_can_be_closed_while_somebody_holds_a_part(file: MappedFile) -> None:
    held = file.view[:10]
    file.close()
    assert len(bytes(held)) == 10
    held.release()
