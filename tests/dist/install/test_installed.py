"""Tierckpt's distributions, and what pip installs from them into environments of their own, used
outside the checkout."""

from __future__ import annotations

import configparser
import json
import re
import subprocess
import sys
from email import message_from_bytes
from email.message import Message
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement

from tests.support.packages import (
    ENGINE,
    ROOT,
    WITHOUT_COMPILER,
    Environment,
    build_sdist,
    build_wheel,
    compiler,
)
from tests.support.thorough import on_demand
from tierckpt._version import PACKAGES as TESTED
from tierckpt._version import __version__
from tierckpt.storage import LocalStore

# Import package -> where it lies in the repository.
PACKAGES = {"tierckpt": "common/tierckpt", "ddp_ckpt": "ddp_ckpt", "horovod_ckpt": "horovod_ckpt"}
needs_compiler = pytest.mark.skipif(compiler() is None, reason="there is no C compiler")


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_sdist(tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path) -> Path:
    """From the source distribution: a file that it lacks is missing here."""
    return build_wheel(sdist)


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return message_from_bytes(archive.read(name))


@pytest.fixture(scope="module")
def needs(metadata: Message) -> list[Requirement]:
    return [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]


# --- the files -----------------------------------------------------------------------------------


def test_the_wheel_holds_exactly_the_packages(wheel: Path) -> None:
    """And no other file of the repository."""
    with ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    sources = set()
    for package, folder in PACKAGES.items():
        for path in [*(ROOT / folder).rglob("*.py"), ROOT / folder / "py.typed"]:
            sources.add(f"{package}/{path.relative_to(ROOT / folder).as_posix()}")
    assert packed - {ENGINE} == sources
    assert (ENGINE in packed) == (compiler() is not None)
    assert "tierckpt/testing/__init__.py" in packed


@needs_compiler
def test_one_wheel_serves_all_versions_of_python_and_systems(wheel: Path) -> None:
    """glibc 2.17 or later, as manylinux2014 demands: `auditwheel repair` only renames the wheel."""
    assert "-cp311-abi3-" in wheel.name
    with ZipFile(wheel) as archive:
        library = archive.read(ENGINE)
    assert b"tierckpt_run" in library
    assert b"PyObject" not in library
    assert b"libpython" not in library
    versions = {tuple(map(int, v.split(b"."))) for v in re.findall(rb"GLIBC_(\d+\.\d+)", library)}
    assert versions
    assert max(versions) <= (2, 17)


def test_common_is_a_source_root_and_no_package() -> None:
    assert not (ROOT / "common" / "__init__.py").exists()


def test_the_metadata_have_all_that_an_index_shows(wheel: Path, metadata: Message) -> None:
    assert metadata["Name"] == "tierckpt"
    assert metadata["Version"] == __version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload() == (ROOT / "README.md").read_text()
    with ZipFile(wheel) as archive:
        (licence,) = [name for name in archive.namelist() if name.endswith("/LICENSE")]
        assert archive.read(licence) == (ROOT / "LICENSE").read_bytes()
    extras = {"dev", "demo", "docs", "bench", "horovod", "mpi", "plot", "rs", "s3", "s3-tests"}
    extras |= {"compression", "encryption", "accelerate", "lightning", "transformers"}
    extras |= {"prometheus", "opentelemetry", "tensorboard", "wandb", "mlflow", "simulate"}
    extras |= {"completion"}
    assert set(metadata.get_all("Provides-Extra", [])) == extras


def test_extras_and_pages_of_frameworks_name_the_tested_versions(needs: list[Requirement]) -> None:
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


def test_a_plain_install_needs_little(needs: list[Requirement]) -> None:
    plain = {need.name for need in needs if need.marker is None}
    assert plain == {"torch", "msgspec", "numpy", "xxhash", "rich"}


def test_a_description_renders(wheel: Path, sdist: Path) -> None:
    pytest.importorskip("twine")
    command = [sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(sdist)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


# --- installed -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def of_wheel(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    made = Environment(tmp_path_factory.mktemp("of_wheel") / "venv")
    made.install(wheel)
    return made


def findings(environment: Environment, folder: Path) -> dict[str, Any]:
    """Findings of `tierckpt doctor`, by name."""
    out = environment.run("tierckpt", "doctor", "--path", folder / "x", "--json", cwd=folder)
    (report,) = json.loads(out)
    return {each["name"]: each for each in report["findings"]}


@needs_compiler
def test_a_wheel_gives_the_command_and_doctor_finds_nothing_wrong(
    of_wheel: Environment, tmp_path: Path
) -> None:
    assert of_wheel.run("tierckpt", "--version", cwd=tmp_path) == f"tierckpt {__version__}\n"
    found = findings(of_wheel, tmp_path)
    assert found["tierckpt"]["text"].endswith(str(of_wheel.site / "tierckpt"))
    assert found["copy engine"]["mark"] == "good"
    assert found["torch"]["mark"] == "good"


TRAIN = """
import os, signal
import torch, torch.distributed as dist
import ddp_ckpt, tierckpt
from tierckpt.snapshot import copy_engine
from tierckpt.testing.tiny_job import CLASSES, IN_FEATURES, raw_bytes, tiny_model
from torch.nn.parallel import DistributedDataParallel

STEPS = 20

def train(path):
    torch.manual_seed(0)
    net = DistributedDataParallel(tiny_model())
    optimizer = torch.optim.Adam(net.parameters())
    data = torch.Generator().manual_seed(dist.get_rank())
    inputs = torch.randn(STEPS, 8, IN_FEATURES, generator=data)
    targets = torch.randint(CLASSES, (STEPS, 8), generator=data)
    with ddp_ckpt.Checkpointer(net, optimizer, path=path) as ckpt:
        start = ckpt.restore()
        for step in range(start, STEPS):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(net(inputs[step]), targets[step]).backward()
            if path == "killed_job" and step == 12 and dist.get_rank() == 1 and not start:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            ckpt.step()
    return int(start), b"".join(raw_bytes(p) for p in net.parameters())

dist.init_process_group("gloo")
start, bits = train("killed_job")
_, undisturbed = train("undisturbed_job")
if dist.get_rank() == 0:
    print("RESULT", start, bits == undisturbed, copy_engine.find() is not None, tierckpt.__file__)
dist.destroy_process_group()
"""
LAUNCH = (
    *("-m", "torch.distributed.run", "--standalone"),
    *("--nproc-per-node", "2", "--max-restarts", "1", "-m", "tierckpt.run"),
)


@needs_compiler
def test_a_killed_job_of_two_ranks_resumes_exactly(
    of_wheel: Environment, tmp_path: Path, shm_dir: Path
) -> None:
    """Its ranks copy with the engine of the wheel, and its agent is found outside the checkout."""
    (tmp_path / "train.py").write_text(TRAIN)
    out = of_wheel.run(
        *("python", *LAUNCH, "train.py"), cwd=tmp_path, TIERCKPT_SHM_DIR=str(shm_dir)
    )
    (line,) = [line for line in out.splitlines() if line.startswith("RESULT")]
    _, start, *same = line.split()
    assert int(start) in (11, 12)  # the last copy may have been complete
    assert same == ["True", "True", str(of_wheel.site / "tierckpt" / "__init__.py")]


TO_DISK = """
import sys
import tierckpt
print(tierckpt.__file__, "torch" in sys.modules)
from tierckpt.testing import TinyJob
with TinyJob("ckpts", shm_dir=sys.argv[1]) as job:
    job.run(1)
print([event.text() for event in job.events if event.severity >= 30])
from tierckpt.snapshot import copy_engine
print(copy_engine.describe())
"""


def written_by(environment: Environment, folder: Path, shm_dir: Path) -> str:
    """How an installed one copies, which writes a version to disk in `folder`. Backports of the
    standard library, as PyPI's pathlib, are older than that, and lie in the agent's own folder."""
    backports = [
        environment.site / f"{x}.py" for x in ("pathlib", "dataclasses", "typing", "socket")
    ]
    for each in backports:
        each.write_text("raise ImportError('not the library')")
    out = environment.run("python", "-c", TO_DISK, str(shm_dir), cwd=folder)
    for each in backports:
        each.unlink()
    where, warnings, copies = out.splitlines()
    assert where == f"{environment.site / 'tierckpt' / '__init__.py'} False", "torch takes seconds"
    assert warnings == "[]"
    store = LocalStore(folder / "ckpts")
    assert [key.id.version for key in store.keys()] == [1]  # noqa: SIM118
    return copies


@needs_compiler
def test_an_installed_wheel_writes_to_disk(
    of_wheel: Environment, tmp_path: Path, shm_dir: Path
) -> None:
    assert str(of_wheel.site / ENGINE) in written_by(of_wheel, tmp_path, shm_dir)


def test_a_source_distribution_without_a_compiler_copies_with_torch_until_there_is_one(
    sdist: Path, wheel: Path, tmp_path: Path, shm_dir: Path
) -> None:
    environment = Environment(tmp_path / "venv")
    environment.install(sdist, **WITHOUT_COMPILER)
    assert not [path for path in environment.site.rglob("*") if path.suffix in (".so", ".c")]
    assert (environment.site / "tierckpt" / "snapshot" / "copy_engine.py").exists()
    assert "copied by torch" in written_by(environment, tmp_path, shm_dir)
    found = findings(environment, tmp_path)["copy engine"]
    assert found["mark"] == "warning"
    assert (
        found["text"] == "the copy engine is not built; install Tierckpt again, with a C compiler"
    )
    cure = found["cure"].rpartition("pip install ")[2].split()
    assert cure[-1] == "tierckpt"
    if compiler() is None:
        assert "install a C compiler" in found["cure"]
        return
    # The cure; Tierckpt is found in a folder, as it is at no index.
    environment.install(*cure, "--no-index", "--find-links", wheel.parent)
    assert (environment.site / ENGINE).exists()
    say = "from tierckpt.snapshot import copy_engine; print(copy_engine.find() is not None)"
    assert environment.run("python", "-c", say, cwd=tmp_path) == "True\n"


EXTRAS = configparser.ConfigParser(interpolation=None)
EXTRAS.read(ROOT / "setup.cfg")


@on_demand("asks the package index for each extra")
def test_each_extra_can_be_had(of_wheel: Environment, wheel: Path) -> None:
    command = [sys.executable, "-m", "pip", "--python", str(of_wheel.python), "install"]
    command += ["--disable-pip-version-check", "--dry-run"]
    for extra in EXTRAS["options.extras_require"]:
        done = subprocess.run([*command, f"{wheel}[{extra}]"], capture_output=True, text=True)
        assert done.returncode == 0, f"{extra}: {done.stderr}"
