"""Event files: their form, damage, and places."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.event_stream import EventStream
from tierckpt.errors import ConfigError
from tierckpt.events import event_files
from tierckpt.goodput import read_records


def started(folder: Path, rank: int = 0) -> EventStream:
    stream = EventStream(folder, rank)
    stream.start(0, 1, 2, 3)
    stream.progress(5, 1, begun=0, run="one")
    return stream


def test_a_run_after_half_a_line(tmp_path: Path) -> None:
    stream = started(tmp_path)
    with stream.path.open("a") as file:
        file.write('{"name":"progress","time_sec\n[3]\n')
    stream.start(10, 11, 12, 13)
    runs, notes = read_records([stream.path])
    assert [run.process for run in runs] == [0, 10]
    assert notes == [f"{stream.path}: 2 unreadable lines were left out"]


def test_a_record_that_lacks_its_fields_is_left_out(tmp_path: Path) -> None:
    stream = started(tmp_path)
    stream.write("attached", 6)
    stream.write("started", 7, facts={"host": 3})
    stream.write("something new", 8, facts={"a": [1]})
    (run,), notes = read_records([stream.path])
    assert run.last == 8
    assert notes == [f"{stream.path}: 2 unreadable lines were left out"]


def test_a_file_given_twice_counts_once(tmp_path: Path) -> None:
    stream = started(tmp_path)
    assert event_files([tmp_path, stream.path]) == [stream.path]


def test_events_before_the_first_start_are_left_out(tmp_path: Path) -> None:
    stream = EventStream(tmp_path)
    stream.write("sealed", 0, version=7)
    started(tmp_path)
    (run,), notes = read_records([stream.path])
    assert run.spans[-1].newest == 1
    assert notes == [f"{stream.path}: 1 event before the first start was left out"]


def test_folders_and_files(tmp_path: Path) -> None:
    one, other = started(tmp_path / "a"), started(tmp_path / "b", 1)
    assert event_files([tmp_path / "a", other.path]) == [one.path, other.path]


def test_a_folder_without_events_names_those_below_it(tmp_path: Path) -> None:
    started(tmp_path / "process-set-1")
    with pytest.raises(ConfigError, match=r"there are some in .*process-set-1; give the folder"):
        event_files([tmp_path])


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.jsonl cannot be read: .*No such file"):
        read_records([tmp_path / "none.jsonl"])


@pytest.mark.parametrize("text", ["", "words\n", '{"a":1}\n'])
def test_a_file_without_a_run(tmp_path: Path, text: str) -> None:
    path = tmp_path / "events-r00000.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match="no run of a job is recorded there"):
        read_records([path])
