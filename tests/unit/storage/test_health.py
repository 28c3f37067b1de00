"""An unhealthy node is reported by name, and in bounded time."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tierckpt import _faults
from tierckpt.cli import run_command
from tierckpt.storage import PROBE_BYTES, Need, check_directory, check_memory, examine, size_text

POINTS = ["room", "write", "read"]


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """`fault("eio@health:op=write")`: here, and in the checking processes."""
    marks = tmp_path / "marks"
    marks.mkdir()

    def ask(rule: str) -> Path:
        monkeypatch.setenv(_faults.FAULTS_VARIABLE, rule)
        monkeypatch.setenv(_faults.FIRED_VARIABLE, str(marks))
        monkeypatch.setattr(_faults, "_rules", _faults.parse(rule))
        return marks

    return ask


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "ckpts").mkdir()
    return tmp_path / "ckpts"


def test_a_well_node_has_nothing_to_say_and_keeps_nothing(place: Path) -> None:
    needs = [Need(str(place)), Need(str(place / "made" / "here"), make=True), Need("/dev/shm")]
    assert examine(needs, memory_bytes=1) == []
    assert sorted(place.rglob("*")) == [place / "made", place / "made" / "here"]


def test_where_a_file_system_has_to_be_mounted_one_folder_is_made(place: Path) -> None:
    need = Need(str(place / "us" / "job"), make=True, parents=False)
    assert check_directory(need).endswith(f": there is no directory {place / 'us'}")
    (place / "us").mkdir()
    assert check_directory(need) == ""


@pytest.mark.parametrize("op", POINTS)
@pytest.mark.parametrize("processes", [True, False])
def test_an_error_of_the_device_is_reported(
    op: str, processes: bool, fault: Any, place: Path
) -> None:
    marks = fault(f"eio@health:op={op}")
    (problem,) = examine([Need(str(place))], processes=processes)
    assert problem.startswith(f"{place}: [Errno 5]")
    assert list(marks.iterdir())
    assert list(place.iterdir()) == []


def test_bytes_that_come_back_wrong_are_found(place: Path, monkeypatch: Any) -> None:
    read = os.pread

    def flipped(*arguments: int) -> bytes:
        found = bytearray(read(*arguments))
        found[12345] ^= 4
        return bytes(found)

    monkeypatch.setattr(os, "pread", flipped)
    said = check_directory(Need(str(place)))
    assert said.startswith(f"{place}: 1 of {PROBE_BYTES} bytes were read back wrong")
    monkeypatch.setattr(os, "pread", lambda *arguments: read(*arguments)[:-7])
    assert "7 of" in check_directory(Need(str(place)))


def test_a_place_that_hangs_is_named_and_the_others_are_checked(fault: Any, place: Path) -> None:
    """The first of the two to write is stopped, like a process on a dead file system."""
    other = place / "other"
    other.mkdir()
    marks = fault("stop@health:op=write")
    problems = examine([Need(str(place)), Need(str(other)), Need("/nowhere")], timeout_seconds=3)
    assert len(problems) == 2
    assert re.fullmatch(r"/.* did not answer within 3 s; its file system hangs", problems[0])
    assert problems[1].startswith("/nowhere: there is no directory /nowhere")
    assert list(marks.iterdir())
    assert list(place.rglob("*")) == [other], "what was stopped left nothing when it was killed"


def test_room_is_counted(place: Path) -> None:
    found = os.statvfs(place)
    everything = found.f_blocks * found.f_frsize
    assert check_directory(Need(str(place), needed_bytes=everything // 10**6)) == ""
    said = check_directory(Need(str(place), needed_bytes=everything))
    assert re.fullmatch(rf"{place}: [\d.]+ \wiB are free and [\d.]+ \wiB needed; free space", said)


def test_memory_is_counted() -> None:
    assert check_memory(0) == ""
    said = check_memory(10**18)
    assert re.fullmatch(r".+: [\d.]+ \wiB of memory are available and 888.2 PiB needed", said)


def test_a_check_that_crashes_is_a_problem(place: Path, fault: Any) -> None:
    fault("kill@health:op=read")
    (problem,) = examine([Need(str(place))])
    assert problem == f"{place}: the check ended with status -9"


def test_sizes() -> None:
    assert [size_text(n) for n in (0, 1023, 1536, 2**41)] == [
        "0 bytes",
        "1023 bytes",
        "1.5 KiB",
        "2 TiB",
    ]


def test_the_command_is_for_prologue_scripts(
    place: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TIERCKPT_NODE", "node17")
    assert run_command(["health", str(place), "/dev/shm", "--free", "1K", "--memory", "1M"]) == 0
    assert capsys.readouterr().out == f"node node17 is well: {place}, /dev/shm\n"
    assert run_command(["health", str(place), str(place / "gone"), "--free", "8000P"]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"tierckpt: node node17: {place}: ")
    assert f"\nnode node17: {place / 'gone'}: there is no directory " in said
    assert run_command(["health", str(place), "--free", "plenty"]) == 1
    assert "'plenty' is not a size" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["nan", "inf", "0", "-5"])
def test_the_command_refuses_an_invalid_time(
    seconds: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["health", str(place), "--seconds", seconds]) == 1
    assert "must be from 0.1 to 86400 (a day)" in capsys.readouterr().err


def test_ctrl_c_is_an_exit_status(place: Path, fault: Any) -> None:
    """The terminal sends it to the command and all its child processes."""
    script = (
        "import signal, sys; from tierckpt.storage import health; "
        "from tierckpt.cli import main as cli; "
        # A shell ignores it for background commands, and their child processes inherit that.
        "signal.signal(signal.SIGINT, signal.default_int_handler); "
        "wait = health._outcome; "
        "health._outcome = lambda *a: print('here', flush=True) or wait(*a); "
        "sys.exit(cli.main(['health', sys.argv[1]]))"
    )
    fault("stop@health:op=read")
    line, pipe = [sys.executable, "-c", script, str(place)], subprocess.PIPE
    with subprocess.Popen(
        line, start_new_session=True, stdout=pipe, stderr=pipe, text=True
    ) as command:
        assert command.stdout is not None
        assert command.stdout.readline() == "here\n"
        os.killpg(command.pid, signal.SIGINT)
        out, error = command.communicate(timeout=60)
    assert (command.returncode, out, error) == (130, "", "")


def test_the_bytes_read_back_come_from_the_device(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the page cache's bytes: they can be dropped only once the device has them."""
    calls: list[str] = []
    for name in ("fsync", "posix_fadvise", "pread"):
        real = getattr(os, name)

        def call(*args: Any, name: str = name, real: Any = real) -> Any:
            calls.append(name if name != "posix_fadvise" else f"{name} {args[3]}")
            return real(*args)

        monkeypatch.setattr(os, name, call)
    assert check_directory(Need(str(place))) == ""
    assert calls == ["fsync", f"posix_fadvise {os.POSIX_FADV_DONTNEED}", "pread"]
