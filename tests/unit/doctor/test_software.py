"""Software: missing, broken, too old or of two kinds, with its cures."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tierckpt.config import load_config
from tierckpt.doctor import Finding, Horovod, Mark, Subject, software


@pytest.mark.parametrize(
    ("error", "cure"),
    [
        ("ImportError('libcudart.so.12: no such file')", "pip install --force-reinstall torch"),
        ("ModuleNotFoundError(\"No module named 'torch'\")", "pip install 'torch>=2.4'"),
    ],
)
def test_a_torch_that_cannot_be_imported_is_one_cross(
    error: str, cure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text(f"raise {error}")
    monkeypatch.syspath_prepend(str(tmp_path))  # the check hands its module path on
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}")
    (found,) = software.torch(Subject())
    assert (found.name, found.mark, found.cure) == ("torch", Mark.CROSS, cure)
    assert found.text.startswith(f"cannot be used: {error.partition('(')[0]}: ")
    (horovod,) = software.horovod(Subject())
    assert horovod.mark is Mark.ABSENT


def test_an_mpi_that_cannot_start_is_not_cured_by_a_new_build(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last line of Open MPI without its `orted` on PATH, or without a temporary directory."""
    said = "[vm:7] Local abort before MPI_INIT completed completed successfully, but am not able"
    monkeypatch.setattr(software, "probe", lambda: Horovod(said))
    (found,) = software.horovod(Subject())
    assert (found.mark, found.text) == (Mark.CROSS, "cannot start, as its MPI cannot")
    assert "mpirun -np 1 true" in found.cure


def test_torch_and_the_copy_engine_are_found() -> None:
    found = {each.name: each for each in software.torch(Subject())}
    assert found["torch"].mark is Mark.GOOD
    engine = found["copy engine"]
    assert engine.mark is Mark.GOOD or "TIERCKPT_COPY_ENGINE" in engine.text, engine


@pytest.mark.parametrize(
    ("probed", "mark", "text", "cure"),
    [
        ({"version": "2.3.1"}, Mark.CROSS, "too old", "torch>=2.4"),
        ({"cuda": "12.8", "devices": 8}, Mark.GOOD, "CUDA 12.8, 8 GPUs", ""),
        ({}, Mark.WARNING, "this node has a GPU", "CUDA"),
        ({"cuda": "12.8"}, Mark.WARNING, "sees no GPU", "--gpus all"),
    ],
)
def test_torch_fits_the_machine(
    probed: dict[str, object], mark: Mark, text: str, cure: str
) -> None:
    plain = {"version": "2.13.0", "cuda": "", "devices": 0}
    found = software._torch({**plain, **probed}, has_gpu=True)
    assert (found.mark, text in found.text, cure in found.cure) == (mark, True, True), found


def test_a_missing_engine_has_a_cure_for_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    probed = {"engine": False, "forbidden": False, "copies": "versions are copied by torch: why"}
    monkeypatch.setenv("CC", "/no/such/compiler")
    found = software._engine(probed)
    assert (found.mark, found.text) == (Mark.WARNING, "why")
    assert found.cure.startswith("install a C compiler (apt-get install gcc")
    monkeypatch.setenv("CC", sys.executable)  # any program
    assert "install a C compiler" not in software._engine(probed).cure


def test_a_framework_of_an_untested_version_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"lightning": "2.9.0", "accelerate": "1.15.2"}
    monkeypatch.setattr(software, "_version", lambda name: versions.get(name, ""))
    warned, known = software.frameworks(Subject())
    assert warned.text == "Lightning 2.9.0 was not tested, only 2.4 to 2.6"
    assert warned.cure.startswith("pip install 'lightning~=2.6.0'")
    assert known.text == "Accelerate 1.15.2: tested versions"


def test_a_package_that_the_settings_need_is_a_cross(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "_version", lambda name: "")
    monkeypatch.setattr(software, "_import_problem", lambda name: "missing")
    config = load_config({"persistent_path": "s3://bucket/run"}, {})
    found = {each.name: each for each in software.extras(Subject(config))}
    assert found["obstore"].mark is Mark.CROSS
    assert found["obstore"].cure == "pip install 'tierckpt[s3]'"
    assert found["extras"].cure.startswith("pip install 'tierckpt[compression, encryption")


def test_a_broken_package_is_a_cross(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "_version", lambda name: "1.0")
    monkeypatch.setattr(software, "_import_problem", lambda name: "GLIBC_2.38 not found")
    found = [each for each in software.extras(Subject()) if each.mark is Mark.CROSS]
    assert found[0].text == "1.0 cannot be imported: GLIBC_2.38 not found"


# --- MPI -----------------------------------------------------------------------------------------


def of_mpi(
    answer: str, library: tuple[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Finding:
    """The finding with a launcher that answers `answer`."""
    program = folder / "mpirun"
    program.write_text(f"#!/bin/sh\ncat <<'EOF'\n{answer}\nEOF\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(software, "_library", lambda: library)
    (found,) = software.mpi(Subject())
    return found


OPEN_MPI = "mpirun (Open MPI) 4.1.4\n\nReport bugs to http://www.open-mpi.org/community/help/"
HYDRA = "HYDRA build details:\n    Version:                                 4.1.2"
INTEL = "Intel(R) MPI Library for Linux* OS, Version 2021.11 Build 20231005"


@pytest.mark.parametrize(
    ("answer", "library", "mark", "text"),
    [
        (OPEN_MPI, "mpi4py 4.1 with Open MPI 4.1.4", Mark.GOOD, "mpirun, mpi4py 4.1"),
        (HYDRA, "mpi4py 4.1 with MPICH 4.2", Mark.GOOD, "mpirun"),
        (INTEL, "mpi4py 4.1 with Intel MPI 2021.11", Mark.GOOD, "mpirun"),
        (HYDRA, "mpi4py 4.1 with Open MPI 4.1.4", Mark.CROSS, "mpirun is of MPICH 4.1.2"),
        (OPEN_MPI, "", Mark.ABSENT, "Open MPI 4.1.4; mpi4py is not installed"),
    ],
)
def test_launcher_and_library_must_be_of_one_kind(
    answer: str,
    library: str,
    mark: Mark,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = of_mpi(answer, (library, ""), tmp_path, monkeypatch)
    assert found.mark is mark
    assert text in found.text
    assert bool(found.cure) == (mark is not Mark.GOOD)


def test_an_mpi4py_without_its_library_is_a_cross(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = of_mpi(OPEN_MPI, ("", "libmpi.so.40: cannot open"), tmp_path, monkeypatch)
    assert found.mark is Mark.CROSS
    assert "libmpi.so.40" in found.text
