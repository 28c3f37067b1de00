"""Tierckpt as pip installs it into an environment of its own, used outside the checkout."""

from __future__ import annotations

import configparser
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

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
from tierckpt._version import __version__

needs_compiler = pytest.mark.skipif(compiler() is None, reason="there is no C compiler")


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_sdist(tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path) -> Path:
    return build_wheel(sdist, sdist.parent)


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


def test_a_source_distribution_without_a_compiler_copies_with_torch_until_there_is_one(
    sdist: Path, tmp_path: Path
) -> None:
    environment = Environment(tmp_path / "venv")
    environment.install(sdist, **WITHOUT_COMPILER)
    assert not (environment.site / ENGINE).exists()
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
    environment.install(*cure, "--no-index", "--find-links", sdist.parent)
    assert (environment.site / ENGINE).exists()
    say = "from tierckpt.snapshot import copy_engine; print(copy_engine.find() is not None)"
    assert environment.run("python", "-c", say, cwd=tmp_path) == "True\n"


def test_metadata_of_a_wheel_have_all_that_an_index_shows(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        text = archive.read(metadata).decode()
    for package in ("tierckpt", "ddp_ckpt", "horovod_ckpt"):
        assert f"{package}/py.typed" in names
    assert "Description-Content-Type: text/markdown" in text
    assert text.endswith((ROOT / "README.md").read_text())


def test_a_description_renders(wheel: Path, sdist: Path) -> None:
    pytest.importorskip("twine")
    command = [sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(sdist)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@needs_compiler
def test_a_wheel_runs_on_the_systems_that_its_tag_may_name(wheel: Path) -> None:
    """glibc 2.17 or later, as manylinux2014 demands: `auditwheel repair` only renames the wheel."""
    with ZipFile(wheel) as archive:
        library = archive.read(ENGINE)
    versions = {tuple(map(int, v.split(b"."))) for v in re.findall(rb"GLIBC_(\d+\.\d+)", library)}
    assert versions
    assert max(versions) <= (2, 17)


EXTRAS = configparser.ConfigParser(interpolation=None)
EXTRAS.read(ROOT / "setup.cfg")


@on_demand("asks the package index for each extra")
def test_each_extra_can_be_had(of_wheel: Environment, wheel: Path) -> None:
    command = [sys.executable, "-m", "pip", "--python", str(of_wheel.python), "install"]
    command += ["--disable-pip-version-check", "--dry-run"]
    for extra in EXTRAS["options.extras_require"]:
        done = subprocess.run([*command, f"{wheel}[{extra}]"], capture_output=True, text=True)
        assert done.returncode == 0, f"{extra}: {done.stderr}"
