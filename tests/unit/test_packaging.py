"""The wheel has all packages for users, and no other file of the repository."""

import os
import subprocess
import sys
import venv
from email import message_from_bytes
from email.message import Message
from pathlib import Path
from zipfile import ZipFile

import pytest
import xxhash
from packaging.requirements import Requirement

from tests.support.packages import (
    ENGINE,
    ROOT,
    WITHOUT_COMPILER,
    build_sdist,
    build_wheel,
    compiler,
)
from tierckpt._version import PACKAGES as TESTED
from tierckpt.storage import LocalStore

# Import package -> where it lies in the repository.
PACKAGES = {"tierckpt": "common/tierckpt", "ddp_ckpt": "ddp_ckpt", "horovod_ckpt": "horovod_ckpt"}


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_sdist(tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """From the source distribution: a file that it lacks is missing here."""
    return build_wheel(sdist, tmp_path_factory.mktemp("packaging"))


@pytest.fixture(scope="module")
def wheel_without_compiler(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(sdist, tmp_path_factory.mktemp("without"), WITHOUT_COMPILER)


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return message_from_bytes(archive.read(name))


def test_the_wheel_holds_exactly_the_packages(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    sources = set()
    for package, folder in PACKAGES.items():
        for path in [*(ROOT / folder).rglob("*.py"), ROOT / folder / "py.typed"]:
            sources.add(f"{package}/{path.relative_to(ROOT / folder).as_posix()}")
    assert packed - {ENGINE} == sources
    assert (ENGINE in packed) == (compiler() is not None)
    assert "tierckpt/testing/__init__.py" in packed


@pytest.mark.skipif(compiler() is None, reason="there is no C compiler")
def test_one_wheel_serves_all_versions_of_python(wheel: Path, tmp_path: Path) -> None:
    assert "-cp311-abi3-" in wheel.name
    with ZipFile(wheel) as archive:
        library = archive.extract(ENGINE, tmp_path)
    symbols = Path(library).read_bytes()
    assert b"tierckpt_run" in symbols
    assert b"PyObject" not in symbols
    assert b"libpython" not in symbols


def test_without_a_compiler_the_wheel_has_all_but_the_library(wheel_without_compiler: Path) -> None:
    with ZipFile(wheel_without_compiler) as archive:
        assert not [name for name in archive.namelist() if name.endswith((".so", ".c"))]
        assert "tierckpt/snapshot/copy_engine.py" in archive.namelist()


def test_common_is_a_source_root_and_no_package() -> None:
    assert not (ROOT / "common" / "__init__.py").exists()


def test_the_metadata_names_licence_and_extras(wheel: Path, metadata: Message) -> None:
    assert metadata["Name"] == "tierckpt"
    assert metadata["License-Expression"] == "Apache-2.0"
    with ZipFile(wheel) as archive:
        (licence,) = [name for name in archive.namelist() if name.endswith("/LICENSE")]
        assert archive.read(licence) == (ROOT / "LICENSE").read_bytes()
    extras = {"dev", "demo", "docs", "bench", "horovod", "mpi", "plot", "rs", "s3", "s3-tests"}
    extras |= {"compression", "encryption", "accelerate", "lightning", "transformers"}
    extras |= {"prometheus", "opentelemetry", "tensorboard", "wandb", "mlflow", "simulate"}
    extras |= {"completion"}
    assert set(metadata.get_all("Provides-Extra", [])) == extras


def test_extras_and_pages_of_frameworks_name_the_tested_versions(metadata: Message) -> None:
    needs = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    for package in ("accelerate", "lightning", "transformers"):
        name, oldest, newest = TESTED[package]
        (need,) = [
            each
            for each in needs
            if each.name == package and each.marker and each.marker.evaluate({"extra": package})
        ]
        assert str(need.specifier) == f">={oldest}"
        page = (ROOT / "docs" / f"{package}.md").read_text()
        assert f"Versions: {name} {oldest} to {newest}" in page


def test_a_plain_install_needs_little(metadata: Message) -> None:
    needs = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    assert {need.name for need in needs if need.marker is None} == {
        "torch",
        "numpy",
        "xxhash",
        "rich",
    }


def test_the_version_is_the_one_in_the_source(metadata: Message) -> None:
    namespace: dict[str, str] = {}
    exec((ROOT / "common/tierckpt/_version.py").read_text(), namespace)
    assert metadata["Version"] == namespace["__version__"]


def test_importing_tierckpt_does_not_import_torch() -> None:
    # The agent and the command line start without the seconds and the memory that torch takes.
    program = "import sys, tierckpt; print(tierckpt.__version__, 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT / "common", capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "False"


# --- installed -----------------------------------------------------------------------------------

TO_DISK = """
import sys
from tierckpt.testing import TinyJob
import tierckpt
print(tierckpt.__file__)
with TinyJob("ckpts", shm_dir=sys.argv[1]) as job:
    job.run(1)
print([event.text() for event in job.events if event.severity >= 30])
from tierckpt.snapshot import copy_engine
print(copy_engine.describe())
"""


@pytest.mark.parametrize("built", ["wheel", "wheel_without_compiler"])
def test_an_installed_one_writes_to_disk_beside_a_backport_of_the_standard_library(
    built: str, request: pytest.FixtureRequest, tmp_path: Path, shm_dir: Path
) -> None:
    """PyPI's pathlib, for one, is older than the library's, and lies in the agent's own folder."""
    wheel = request.getfixturevalue(built)
    venv.create(tmp_path / "venv", symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    with ZipFile(wheel) as archive:
        archive.extractall(site)
    (site / "torch_is_there.pth").write_text(f"{Path(xxhash.__file__).parents[1]}\n")
    for name in ("pathlib", "dataclasses", "typing", "socket"):
        (site / f"{name}.py").write_text("raise ImportError('not the library')")
    environment = {n: v for n, v in os.environ.items() if n != "PYTHONPATH"}
    command = [str(python), "-c", TO_DISK, str(shm_dir)]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    where, warnings, copies = done.stdout.splitlines()
    assert (where, warnings) == (str(site / "tierckpt" / "__init__.py"), "[]")
    has_library = built == "wheel" and compiler() is not None
    assert (str(site / ENGINE) if has_library else "copied by torch") in copies
    store = LocalStore(tmp_path / "ckpts")
    versions = [key.id.version for key in store.keys()]  # noqa: SIM118
    assert versions == [1]
