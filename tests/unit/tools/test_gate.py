""".ci/run, with stand-ins for the programs that it calls."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

GATE = Path(__file__).resolve().parents[3] / ".ci" / "run"
Gate = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    """`gate(make=script, ...)`: run it where these shell scripts are all the programs there are,
    besides a few that do no harm."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("bash", "cat", "cp", "dirname", "mktemp", "rm", "sh", "sleep"):
        (programs / name).symlink_to(str(shutil.which(name)))

    def run(**scripts: str) -> subprocess.CompletedProcess[str]:
        for name, script in {"id": "echo 1000", "make": "echo $2", **scripts}.items():
            path = programs / name.replace("_", "-")
            path.write_text(f"#!/bin/sh\n{script}\n")
            path.chmod(0o755)
        # What the gate that runs these tests found is not what this one finds.
        ours = {k: v for k, v in os.environ.items() if not k.startswith("REQUIRE_")}
        environment = {**ours, "PATH": str(programs), "TMPDIR": str(tmp_path)}
        return subprocess.run(
            [programs / "bash", GATE],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
        )

    return run


def test_with_everything_the_last_word_is_that_of_the_tests(gate: Gate) -> None:
    done = gate(mpirun="", mpicxx="", make='echo "$2 $REQUIRE_MPI $REQUIRE_HOROVOD $REQUIRE_S3"')
    assert done.returncode == 0, done.stdout
    said = done.stdout.splitlines()
    assert said == [f"{x} 1 1 1" for x in ("venv", "horovod", "s3-for-tests", "test")]


def test_where_mpi_cannot_be_installed_the_last_line_reports_it(gate: Gate) -> None:
    done = gate(make='echo "$2 ${REQUIRE_MPI-optional}"')
    assert done.returncode == 0, done.stdout
    *_, tests, last = done.stdout.splitlines()
    assert tests == "test optional"
    assert "PASSED WITHOUT OPEN MPI" in last


def test_packages_that_can_be_installed_must_be(gate: Gate, tmp_path: Path) -> None:
    tries = tmp_path / "tries"
    done = gate(id="echo 0", apt_get=f'echo "$1" >> {tries}; echo "no network" >&2; exit 100')
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].startswith(
        "[ci] FAILED: apt-get could not install Open MPI"
    )
    assert "no network" in done.stdout
    assert tries.read_text().split().count("install") == 3


def test_installed_packages_are_required(gate: Gate, tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    install = f"for x in mpirun mpicxx; do cp {programs}/id {programs}/$x; done"
    done = gate(
        id="echo 0",
        apt_get=f'[ "$1" = update ] || {{ {install}; }}',
        make='echo "$2 ${REQUIRE_MPI-optional}"',
    )
    assert done.stdout.splitlines()[-1] == "test 1", done.stdout


@pytest.mark.parametrize("failing", ["horovod", "s3-for-tests"])
def test_a_failure_beside_lint_ends_the_gate_and_hides_nothing(
    failing: str, gate: Gate, tmp_path: Path
) -> None:
    """That nothing lives on is seen by the fixture that watches for processes."""
    started = tmp_path / "begun"
    make = f"""case $2 in
        lint) echo "found by lint"; : > {started}; exec sleep 1000;;
        {failing}) while [ ! -e {started} ]; do :; done; exit 3;;
    esac"""
    done = gate(mpirun="", mpicxx="", make=make)
    assert done.returncode == 3
    assert "found by lint" in done.stdout
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("tmp.")] == []


@pytest.mark.parametrize("finder", ["lint", "docs"])
def test_a_finding_of_lint_fails_the_gate_before_the_tests(gate: Gate, finder: str) -> None:
    make = f'echo "$2"; [ "$2" != {finder} ] || {{ echo "found by {finder}"; exit 2; }}'
    done = gate(mpirun="", mpicxx="", make=make)
    assert done.returncode == 1
    assert f"found by {finder}" in done.stdout
    assert "test" not in done.stdout.splitlines()


def test_a_failure_of_the_benchmarks_is_the_last_word(gate: Gate) -> None:
    make = 'echo "$2"; [ "$2" != bench ] || { echo "a broken benchmark"; exit 2; }'
    done = gate(mpirun="", mpicxx="", make=make)
    assert done.returncode == 1
    *_, tests, name, said, last = done.stdout.splitlines()
    assert (tests, name, said) == ("test", "bench", "a broken benchmark")
    assert last == "[ci] FAILED: make bench, for the reason above"


def test_a_failure_of_the_tests_does_not_wait_for_the_benchmarks(
    gate: Gate, tmp_path: Path
) -> None:
    started = tmp_path / "begun"
    make = f"""echo "$2"; case $2 in
        bench) : > {started}; exec sleep 1000;;
        test) while [ ! -e {started} ]; do :; done; exit 3;;
    esac"""
    done = gate(mpirun="", mpicxx="", make=make)
    assert done.returncode == 3
    assert done.stdout.splitlines()[-1] == "test"


def test_no_file_is_kept_from_the_linter() -> None:
    """Its own list of folders to pass over has "dist" in it, as tests/ has."""
    ruff = Path(sys.executable).with_name("ruff")
    if not ruff.exists():
        pytest.skip("ruff is not installed beside this Python")
    root = GATE.parents[1]
    told = subprocess.run(
        [ruff, "check", ".", "--show-files"], cwd=root, capture_output=True, text=True, timeout=60
    )
    linted = {Path(line).relative_to(root) for line in told.stdout.split()}
    homes = ("benchmarks", "common", "ddp_ckpt", "examples", "horovod_ckpt", "tests", "tools")
    ours = {p.relative_to(root) for home in homes for p in (root / home).rglob("*.py")}
    assert ours <= linted
