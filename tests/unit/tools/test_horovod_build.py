"""make horovod: what a wheel is bound to, what the log tells, and what the cache may hold.

The build itself takes minutes and is exercised by make; here its parts are, and its failures.
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import horovod_build
import horovod_target
import make_horovod
import pytest
from horovod_log import cause, telling_lines
from horovod_target import BYTES_PER_JOB, NotPossible, Target, job_count, mpi_name

from tests.support import horovod_here
from tierckpt.doctor import Horovod, probe, understand

TARGET = Target("cpython-311", "2.13.0+cpu", True, "openmpi-4.1.4", "x86_64")
WORKS = Horovod(version="0.28.1", transports=("gloo", "mpi"))
GLOO = Horovod(version="0.28.1", transports=("gloo",))
ROOT = Path(__file__).resolve().parents[3]

# --- what a wheel is bound to --------------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [
        {"python": "cpython-312"},
        {"torch": "2.13.0+cu130"},
        {"torch": "2.13.1+cpu"},
        {"cxx11_abi": False},
        {"mpi": ""},
        {"mpi": "openmpi-5.0.3"},
        {"machine": "aarch64"},
        {"switches": ("HOROVOD_GPU_OPERATIONS=NCCL",)},
    ],
    ids=str,
)
def test_another_target_has_another_folder(other: dict[str, object]) -> None:
    assert dataclasses.replace(TARGET, **other).key != TARGET.key  # type: ignore[arg-type]


def test_a_key_is_one_readable_name() -> None:
    key = dataclasses.replace(TARGET, switches=("HOROVOD_CUDA_HOME=/usr/local/cuda",)).key
    assert "/" not in key
    assert "torch-2.13.0_cpu-openmpi-4.1.4-x86_64" in key


@pytest.mark.parametrize(
    ("macros", "name"),
    [
        (
            "#define OMPI_MINOR_VERSION 1\n#define OMPI_MAJOR_VERSION 4\n"
            "#define OMPI_RELEASE_VERSION 4\n#define MPI_VERSION 3\n",
            "openmpi-4.1.4",
        ),
        ('#define MPICH_VERSION "4.0.2"\n#define MPI_VERSION 4\n', "mpich-4.0.2"),
        ('#define I_MPI_VERSION "2021.10"\n#define MPICH_VERSION "3.3"\n', "intelmpi-2021.10"),
        ('#define MVAPICH2_VERSION "2.3.7"\n#define MPICH_VERSION "3.2.1"\n', "mvapich-2.3.7"),
        ("#define MPI_VERSION 3\n#define MPI_SUBVERSION 1\n", "mpi-3.1"),
    ],
)
def test_the_mpi_library_is_recognized_by_its_header(macros: str, name: str) -> None:
    assert mpi_name(macros) == name


@pytest.mark.parametrize(
    ("cores", "jobs_of_memory", "jobs"), [(2, 8.0, 2), (64, 4.5, 4), (8, 1.0, 1), (8, 0.2, 1)]
)
def test_jobs_are_limited_by_cores_and_by_memory(
    cores: int, jobs_of_memory: float, jobs: int
) -> None:
    assert job_count(cores, int(jobs_of_memory * BYTES_PER_JOB)) == jobs


@pytest.fixture(autouse=True)
def not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one who tests may have asked for a Horovod without MPI."""
    monkeypatch.delenv("HOROVOD_WITHOUT_MPI", raising=False)


@pytest.fixture
def bare_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with nothing on it; its only folder."""
    for variable in ("CXX", "CC", "HOROVOD_CMAKE", "HOROVOD_WITHOUT_MPI"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def program(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_everything_missing_is_named_at_once(bare_path: Path) -> None:
    program(bare_path / "gcc", "")
    with pytest.raises(NotPossible) as refused:
        horovod_target.require_tools()
    first, advice = str(refused.value).splitlines()
    assert all(name in first for name in ("g++", "cmake", "make"))
    assert "gcc" not in first
    assert "apt-get install" in advice


@pytest.mark.parametrize("variable", ["CXX", "CC"])
def test_a_blank_compiler_is_none(
    variable: str, bare_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("gcc", "g++", "cmake"):
        program(bare_path / name, "")
    monkeypatch.setenv(variable, " ")
    with pytest.raises(NotPossible) as refused:
        horovod_target.require_tools()
    assert "compiler" not in str(refused.value)
    assert horovod_target.cxx_compiler() == "g++"
    assert "CC" not in horovod_build.build_environment(TARGET, bare_path, 1)


@pytest.mark.parametrize("variable", ["CXX", "CC"])
def test_a_compiler_that_was_chosen_and_is_missing_is_named(
    variable: str, bare_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("gcc", "cc", "g++"):
        program(bare_path / name, "")
    monkeypatch.setenv(variable, "nosuch -m64")
    with pytest.raises(NotPossible, match=rf"lacks nosuch \(which {variable} names\), cmake"):
        horovod_target.require_tools()
    monkeypatch.setenv(variable, "'nosuch")
    with pytest.raises(NotPossible, match=f"^{variable} is \"'nosuch\", which can't be read"):
        horovod_target.require_tools()


def test_an_mpi_compiler_without_headers_is_refused(bare_path: Path) -> None:
    error = "hello.c:1:10: fatal error: mpi.h: No such file or directory"
    program(bare_path / "mpicxx", f"echo '{error}' >&2; exit 1")
    with pytest.raises(NotPossible, match="HOROVOD_WITHOUT_MPI=1") as refused:
        horovod_target.mpi_library()
    assert error in str(refused.value)


def test_mpi_can_be_refused(bare_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(bare_path / "mpicxx", "exit 1")
    monkeypatch.setenv("HOROVOD_WITHOUT_MPI", "1")
    assert horovod_target.mpi_library() == ""


# --- the log -------------------------------------------------------------------------------------

BEGINNING = """\
  running build_ext
  -- The CXX compiler identification is GNU 12.2.0
"""
MIDDLE = """\
  [  3%] Building CXX object third_party/gloo/gloo/CMakeFiles/gloo.dir/gather.cc.o
  cd /scratch/build && /scratch/c++ -DEIGEN_MPL2_ONLY=1 -c gather.cc
  [ 51%] Linking CXX static library libgloo.a
  [ 62%] Building CXX object horovod/torch/CMakeFiles/pytorch.dir/__/common/operations.cc.o
  warning: comparison of integer expressions
"""
END = """\
  make[2]: *** [horovod/torch/CMakeFiles/pytorch.dir/build.make:76: operations.cc.o] Error 1
  subprocess.CalledProcessError: Command '['cmake', '--build', '.']' returned exit status 2.
  error: subprocess-exited-with-error
  except ImportError as error:
      "ERROR: Can not execute `setup.py` since setuptools is not available in "
  ERROR: Failed building wheel for horovod
Failed to build horovod
"""


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("c++: fatal error: Killed signal terminated program cc1plus", "memory"),
        ("virtual memory exhausted: Cannot allocate memory", "memory"),
        ("/scratch/pip-req-build-1/a.cc:9: fatal error: mpi.h: No such file or directory", "MPI"),
        ("CMake Error: Could NOT find MPI (missing: MPI_CXX_FOUND CXX)", "MPI"),
        ("c++: error: unrecognized command-line option '-std=c++20'", "too old"),
        ("CMake Error: No CMAKE_CXX_COMPILER could be found.", "compiler"),
        ("fatal error: Python.h: No such file or directory", "python3-dev"),
        ("fatal error: error writing to /scratch/x.s: No space left on device", "disk"),
        ("ERROR: No matching distribution found for horovod==0.28.1", "network"),
    ],
)
def test_the_cause_is_named_and_the_error_shown(line: str, word: str) -> None:
    log = f"{BEGINNING}{MIDDLE}  {line}\n{END}"
    assert word in cause(log)
    assert telling_lines(log) == [line]


def test_a_log_without_errors_shows_its_end_shortened() -> None:
    assert cause(BEGINNING) == ""
    assert telling_lines(BEGINNING + "x" * 1000, count=2, width=60)[1] == "x" * 60


# --- the probe -----------------------------------------------------------------------------------


def test_an_answer_is_understood_among_other_output() -> None:
    answer = 'horovod_probe: {"version": "0.28.1", "transports": ["gloo"], "no_mpi4py": "no"}'
    found = understand(0, f"a warning\n{answer}\n", "another\n")
    assert found == Horovod("", "0.28.1", ("gloo",), "no")
    assert found.mpi_missing == "Horovod was built without MPI"


@pytest.mark.parametrize(
    ("status", "err", "reason"),
    [
        (1, "Traceback\nImportError: undefined symbol: _ZN3c10\n\n", "undefined symbol: _ZN3c10"),
        (-11, "", "SIGSEGV"),
        (3, "", "status 3"),
        (0, "", "status 0"),
    ],
)
def test_a_start_that_fails_is_a_reason(status: int, err: str, reason: str) -> None:
    found = understand(status, "", err)
    assert reason in found.missing
    assert reason in found.mpi_missing


def test_a_horovod_built_for_another_torch_is_refused(tmp_path: Path) -> None:
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").touch()
    (tmp_path / "horovod" / "metadata.json").write_text('{"pytorch": "1.0.1"}')
    missing = probe(tmp_path).missing
    assert missing.startswith("it was built for torch 1.0.1, and here is torch ")


@pytest.mark.parametrize("name", ["horovod", "mpi"])
def test_tests_are_skipped_or_fail_as_asked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(horovod_here, "_found", lambda: Horovod(missing="it is not installed"))
    ask: Callable[[], str] = getattr(horovod_here, f"{name}_missing")
    monkeypatch.delenv(f"REQUIRE_{name.upper()}", raising=False)
    assert "it is not installed" in ask()
    monkeypatch.setenv(f"REQUIRE_{name.upper()}", "1")
    with pytest.raises(pytest.fail.Exception, match="it is not installed"):
        ask()
    monkeypatch.setattr(horovod_here, "_found", lambda: WORKS)
    monkeypatch.setattr(shutil, "which", lambda _: "/usr/bin/mpirun")
    assert ask() == ""


# --- the build -----------------------------------------------------------------------------------


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """`pip(script)`: what the build takes for pip is this shell script."""

    def stand_in(script: str) -> None:
        monkeypatch.setattr(horovod_build, "PIP", (str(program(tmp_path / "pip", script)),))

    return stand_in


def test_a_missing_network_is_reported(pip: Callable[[str], None], tmp_path: Path) -> None:
    pip("echo 'ERROR: No matching distribution found for horovod==0.28.1'; exit 1")
    with pytest.raises(NotPossible, match=r"could not get its source.*check the network"):
        horovod_build.fetch(tmp_path)


def test_a_failed_build_says_why(pip: Callable[[str], None], tmp_path: Path) -> None:
    error = "c++: fatal error: Killed signal terminated program cc1plus"
    pip(f"echo '{error}'; echo $MAKEFLAGS $HOROVOD_WITH_MPI$HOROVOD_WITH_GLOO; exit 1")
    log = tmp_path / "log"
    with pytest.raises(NotPossible, match="could not be built: memory ran out") as refused:
        horovod_build.build(TARGET, tmp_path / "source", tmp_path, log)
    assert error in str(refused.value)
    first, flags = log.read_text().splitlines()
    assert first == error
    assert flags.startswith("-j")
    assert flags.endswith(" 11")


def test_an_interrupted_build_leaves_no_compilers(
    pip: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # pip and a compiler that it started; the fixture that watches for processes finds them.
    pip("sleep 1000 & echo $!; wait")
    seen = []

    def interrupted(process: subprocess.Popen[bytes], log: Path) -> int:
        while not log.read_text():  # until the compiler runs
            assert process.poll() is None
        seen.append(log.read_text())
        raise KeyboardInterrupt

    monkeypatch.setattr(horovod_build, "watch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        horovod_build.build(TARGET, tmp_path / "source", tmp_path, tmp_path / "log")
    assert seen


def test_a_long_build_reports_its_progress(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Process:
        waits = 0

        def wait(self, timeout: float) -> int:
            self.waits += 1
            if self.waits == 1:
                raise subprocess.TimeoutExpired("pip", timeout)
            return 7

    log = tmp_path / "log"
    log.write_text(BEGINNING + MIDDLE)
    assert horovod_build.watch(Process(), log) == 7  # type: ignore[arg-type]
    assert capsys.readouterr().out == (
        "[horovod]  62% of the files after 0:00, compiling operations.cc\n"
    )


# --- the cache -----------------------------------------------------------------------------------


def wheel_file(folder: Path) -> Path:
    wheel = folder / "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("horovod/__init__.py", "x = 1\n" * 1000)
    return wheel


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of TARGET in a cache of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return make_horovod.cache_folder(TARGET)


def contents(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "lock")


def test_a_cache_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc")
    with pytest.raises(NotPossible, match=r"/proc/tierckpt.*\n.*XDG_CACHE_HOME"):
        make_horovod.cache_folder(TARGET)


def test_a_user_without_a_home_gets_another_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> NoReturn:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(make_horovod.Path, "home", homeless)
    with pytest.raises(NotPossible, match=r"home directory \(set HOME\)\.\nXDG_CACHE_HOME"):
        make_horovod.cache_folder(TARGET)


def test_a_cache_that_cmake_cannot_build_in_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "c++"))
    with pytest.raises(NotPossible, match=r"trips over '\+'"):
        make_horovod.cache_folder(TARGET)


def test_a_wheel_that_works_is_used_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = wheel_file(folder)
    monkeypatch.setattr(make_horovod, "probe", lambda unpacked: WORKS)
    assert make_horovod.cached_wheel(folder, TARGET) == wheel
    assert contents(folder) == [wheel.name]


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (Horovod(missing="its start was ended by SIGSEGV"), "SIGSEGV"),
        (Horovod(version="0.28.1", transports=("gloo",)), "without mpi"),
    ],
)
def test_a_wheel_that_does_not_work_is_removed(
    folder: Path,
    found: Horovod,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    wheel_file(folder)
    monkeypatch.setattr(make_horovod, "probe", lambda unpacked: found)
    assert make_horovod.cached_wheel(folder, TARGET) is None
    assert contents(folder) == []
    assert reason in capsys.readouterr().out


TOLD_NOTHING = pytest.mark.parametrize("status", [None, -9, -15], ids=str)


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    """`ended(status)`: every probe ends with it; None: does not end in time."""

    def stand_in(status: int | None) -> None:
        def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
            if status is None:
                raise subprocess.TimeoutExpired(command, 1.0)
            return subprocess.CompletedProcess(command, status, "", "")

        monkeypatch.setattr(subprocess, "run", run)

    return stand_in


@TOLD_NOTHING
def test_a_trial_that_somebody_else_ended_is_not_held_against_a_wheel(
    status: int | None, folder: Path, ended: Callable[[int | None], None]
) -> None:
    wheel = wheel_file(folder)
    ended(status)
    with pytest.raises(NotPossible, match=r"could not be tried: (?s:.*) make horovod tries again"):
        make_horovod.cached_wheel(folder, TARGET)
    assert contents(folder) == [wheel.name]
    ended(-11)
    assert make_horovod.cached_wheel(folder, TARGET) is None
    assert contents(folder) == []


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty"])
def test_a_damaged_wheel_is_found_without_starting_it(
    folder: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = wheel_file(folder)
    content = bytearray(wheel.read_bytes())
    content[100] ^= 1
    cut = {"truncated": content[: len(content) // 2], "flipped": content, "empty": b""}[damage]
    wheel.write_bytes(cut)
    monkeypatch.delattr(make_horovod, "probe")
    assert "unpacked" in make_horovod.fault(wheel, TARGET)


def full(*_: Any, **__: Any) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_not_held_against_a_wheel(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was removed, and building another one takes minutes and more room."""
    wheel = wheel_file(folder)
    monkeypatch.setattr(zipfile.ZipFile, "extractall", full)
    with (
        pytest.raises(NotPossible, match=r"disk is full.*XDG_CACHE_HOME"),
        make_horovod.plain_errors(),
    ):
        make_horovod.cached_wheel(folder, TARGET)
    assert contents(folder) == [wheel.name]


def test_one_at_a_time_and_remains_are_removed(folder: Path) -> None:
    (folder / "scratch-of-a-killed-one" / "source").mkdir(parents=True)
    with make_horovod.only_one(folder), (folder / "lock").open("w") as another:
        assert contents(folder) == []
        with pytest.raises(BlockingIOError):
            fcntl.flock(another, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with (folder / "lock").open("w") as another:
        fcntl.flock(another, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException | None], list[Path]]:
    """`builds(error)`: a build that writes a log and a wheel, then ends so; returns the logs."""

    def stand_in(error: BaseException | None) -> list[Path]:
        logs: list[Path] = []

        def build(target: Target, source: Path, scratch: Path, log: Path) -> Path:
            logs.append(log)
            log.write_text("what the compiler said")
            wheel = wheel_file(scratch)
            if error is not None:
                raise error
            return wheel

        monkeypatch.setattr(make_horovod, "build", build)
        return logs

    monkeypatch.setattr(make_horovod, "require_tools", lambda: None)
    monkeypatch.setattr(make_horovod, "fetch", lambda scratch: scratch / "source")
    monkeypatch.setattr(make_horovod, "probe", lambda unpacked: WORKS)
    return stand_in


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(143)], ids=repr)
def test_a_stopped_build_is_not_cached_and_not_held_against_it(
    folder: Path, builds: Callable[[BaseException | None], list[Path]], error: BaseException
) -> None:
    builds(error)
    with pytest.raises(type(error)):
        make_horovod.new_wheel(folder, TARGET, again=False)
    assert contents(folder) == ["build.log"]
    builds(None)
    assert make_horovod.new_wheel(folder, TARGET, again=False).exists()


@TOLD_NOTHING
def test_a_wheel_that_could_not_be_tried_is_kept_for_the_next_run(
    status: int | None,
    folder: Path,
    builds: Callable[[BaseException | None], list[Path]],
    ended: Callable[[int | None], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    builds(None)
    monkeypatch.setattr(make_horovod, "probe", probe)
    ended(status)
    with pytest.raises(NotPossible, match="could not be tried"):
        make_horovod.new_wheel(folder, TARGET, again=False)
    monkeypatch.setattr(make_horovod, "probe", lambda unpacked: WORKS)
    assert make_horovod.cached_wheel(folder, TARGET) is not None


def test_a_failed_build_is_repeated_only_when_asked(
    folder: Path, builds: Callable[[BaseException | None], list[Path]]
) -> None:
    builds(NotPossible("memory ran out"))
    with pytest.raises(NotPossible, match=r"memory ran out\n.*failed\.log"):
        make_horovod.new_wheel(folder, TARGET, again=False)
    assert contents(folder) == ["failed.log"]
    logs = builds(None)
    with pytest.raises(NotPossible, match="failed before"):
        make_horovod.new_wheel(folder, TARGET, again=False)
    assert not logs
    assert make_horovod.new_wheel(folder, TARGET, again=True).exists()
    assert not (folder / "failed.log").exists()


# --- the command ---------------------------------------------------------------------------------


Command = Callable[..., tuple[int, str]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """`command(options)`: the status it ends with, and what it says; there is no Horovod."""
    monkeypatch.setattr(make_horovod, "probe", lambda: Horovod(missing="it is not installed"))
    monkeypatch.setattr(make_horovod.signal, "signal", lambda *_: None)

    def run(*options: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["make_horovod.py", *options])
        try:
            make_horovod.main()
        except SystemExit as end:
            return 1, f"{end.code}{capsys.readouterr().out}"
        return 0, capsys.readouterr().out

    return run


@pytest.mark.parametrize(("option", "expected"), [("--check", 1), ("--for-tests", 0)])
def test_missing_tools_are_reported_and_count_as_asked(
    option: str, expected: int, command: Command
) -> None:
    status, said = command("--check", option)
    assert status == expected
    assert "it is not installed" in said
    assert ("will NOT run" in said) == (option == "--for-tests")


@pytest.mark.parametrize("at", ["needs", "build", "wheel"])
def test_an_interruption_reports_the_remains(
    at: str,
    folder: Path,
    builds: Callable[[BaseException | None], list[Path]],
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def pip_install(python: Path, *arguments: str) -> bool:
        if at == ("wheel" if arguments[-1].endswith(".whl") else "needs"):
            raise KeyboardInterrupt
        return True

    builds(KeyboardInterrupt() if at == "build" else None)
    monkeypatch.setattr(
        make_horovod,
        "probe",
        lambda unpacked=None: WORKS if unpacked else Horovod(missing="it is not installed"),
    )
    monkeypatch.setattr(make_horovod, "this_target", lambda: TARGET)
    monkeypatch.setattr(make_horovod, "pip_install", pip_install)
    status, said = command()
    assert status == 1
    assert "[horovod] interrupted; " in said
    assert ("nothing half-made is left" in said) == (at == "build")
    assert ("may be here in part: make horovod puts it right" in said) == (at != "build")


@pytest.mark.parametrize("place", ["TemporaryDirectory", "build"])
@pytest.mark.parametrize(("options", "expected"), [([], 1), (["--for-tests"], 0)])
def test_a_full_disk_is_a_reason_like_any_other(
    place: str,
    options: list[str],
    expected: int,
    folder: Path,
    builds: Callable[[BaseException | None], list[Path]],
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    builds(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    if place == "TemporaryDirectory":
        monkeypatch.setattr(make_horovod.tempfile, place, full)
    monkeypatch.setattr(make_horovod, "this_target", lambda: TARGET)
    monkeypatch.setattr(make_horovod, "install_needs", lambda target: None)
    status, said = command(*options)
    assert status == expected
    assert "No space left on device" in said
    assert "the disk is full: XDG_CACHE_HOME names another place" in said
    assert ("will NOT run" in said) == (options == ["--for-tests"])
    assert not [name for name in contents(folder) if name.startswith(("scratch-", "failed"))]


def test_a_horovod_that_works_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(make_horovod, "probe", lambda: WORKS)
    monkeypatch.setattr(make_horovod, "mpi_compiler", lambda: "/usr/bin/mpicxx")
    monkeypatch.delattr(make_horovod, "this_target")
    make_horovod.make(again=True)
    assert "nothing to do" in capsys.readouterr().out


def test_mpi_that_came_later_is_made_use_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_horovod, "mpi_compiler", lambda: None)
    assert make_horovod.lack(GLOO) == ""
    monkeypatch.setattr(make_horovod, "mpi_compiler", lambda: "/usr/bin/mpicxx")
    assert "MPI" in make_horovod.lack(GLOO)


def test_mpi_is_left_out_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_WITHOUT_MPI", "1")
    assert "HOROVOD_WITHOUT_MPI=1" in make_horovod.lack(WORKS)
    assert make_horovod.lack(GLOO) == ""


@pytest.mark.parametrize("step", ["this_target", "install_needs", "new_wheel"])
@pytest.mark.parametrize("option", [[], ["--for-tests"]], ids=["make", "for-tests"])
def test_a_working_build_is_kept_where_mpi_cannot_be_added(
    step: str,
    option: list[str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object) -> None:
        raise NotPossible("mpi.h is missing.\nInstall it.")

    steps = {"this_target": lambda: TARGET, "install_needs": lambda target: None, "new_wheel": fail}
    for name, stand_in in {**steps, step: fail}.items():
        monkeypatch.setattr(make_horovod, name, stand_in)
    monkeypatch.setattr(make_horovod, "probe", lambda: GLOO)
    monkeypatch.setattr(make_horovod, "mpi_compiler", lambda: "/usr/bin/mpicxx")
    monkeypatch.setattr(make_horovod.signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["make_horovod.py", *option])
    make_horovod.main()
    said = capsys.readouterr().out
    assert "Horovod was built without MPI. It stays as it is" in said
    assert "*** mpi.h is missing.\n*** Install it." in said
    assert "will NOT run" not in said


def test_a_build_that_no_longer_works_is_not_called_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(again: bool) -> Horovod:
        raise NotPossible("pip was interrupted")

    answers = iter([GLOO, Horovod(missing="it is not installed")])
    monkeypatch.setattr(make_horovod, "probe", lambda: next(answers))
    monkeypatch.setattr(make_horovod, "mpi_compiler", lambda: "/usr/bin/mpicxx")
    monkeypatch.setattr(make_horovod, "mend", fail)
    with pytest.raises(NotPossible, match="interrupted"):
        make_horovod.make(again=True)


# --- the report ----------------------------------------------------------------------------------

SKIPPING = """\
import pytest

def need():
    pytest.skip("no Horovod")

def test_one(): need()
def test_other(): need()
"""


def test_every_test_not_run_is_named(tmp_path: Path) -> None:
    """Though all of them share one line that skips, as those that ask for a pool of ranks do."""
    (tmp_path / "test_pool.py").write_text(SKIPPING)
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "setup.cfg"), "--rootdir", "."]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", "."], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("test_one", "test_other"):
        assert f"SKIPPED test_pool.py::{name} - Skipped: no Horovod" in done.stdout
