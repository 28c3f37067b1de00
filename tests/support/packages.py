"""Distributions of this checkout, and environments with nothing but one of them.

torch and the other requirements are not installed again: a .pth file shows those of this Python.
So the installation of Tierckpt is tested, and its use without a checkout, but not the
download of its requirements.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from collections.abc import Mapping
from pathlib import Path

import xxhash

ROOT = Path(__file__).resolve().parents[2]
# An earlier build/ or egg-info would be packed again and hide a removed file.
NOT_SOURCE = shutil.ignore_patterns(
    ".*", "__pycache__", "build", "dist", "*.egg-info", "*.so", "tests", "benchmarks", "docs"
)
ENGINE = "tierckpt/snapshot/_copy_engine.abi3.so"
WITHOUT_COMPILER = {"CC": "/no/such/compiler"}
BUILD = "import sys; from setuptools import build_meta; {}(sys.argv[1])"
"""What pip calls; it needs three more starts of Python for that."""


def compiler() -> str | None:
    """The C compiler that setuptools would call."""
    name = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    return shutil.which(name.split()[0])


def build_sdist(scratch: Path) -> Path:
    """The source distribution of a copy of this checkout."""
    tree = scratch / "tree"
    shutil.copytree(ROOT, tree, ignore=NOT_SOURCE)
    command = [sys.executable, "-c", BUILD.format("build_meta.build_sdist"), str(scratch)]
    run(command, cwd=tree)
    (built,) = scratch.glob("tierckpt-*.tar.gz")
    return built


def build_wheel(source: Path) -> Path:
    """The wheel of a source distribution, beside it."""
    into = source.parent
    with tarfile.open(source) as archive:
        archive.extractall(into / "unpacked", filter="data")
    (tree,) = (into / "unpacked").iterdir()
    run([sys.executable, "-c", BUILD.format("build_meta.build_wheel"), str(into)], cwd=tree)
    (built,) = into.glob("tierckpt-*.whl")
    return built


class Environment:
    """A virtual environment without packages of its own; requirements come from this Python."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, symlinks=True)
        self.python = folder / "bin" / "python"
        (self.site,) = (folder / "lib").glob("python*/site-packages")
        # After the environment's own folder, so what is installed there comes first.
        shared = Path(xxhash.__file__).parents[1]
        (self.site / "requirements.pth").write_text(f"{shared}\n")

    def install(
        self, *what: str | Path, missing_requirements: bool = False, **environment: str
    ) -> str:
        """pip install; returns its output. `missing_requirements`: also requirements that this
        Python does not have, or has in another version."""
        command = [sys.executable, "-m", "pip", "--python", str(self.python), "install"]
        # Bytecode of all modules costs as much as the rest of an installation.
        command += ["--disable-pip-version-check", "--no-build-isolation", "--no-compile"]
        if not missing_requirements:
            # The checkout is installed in this Python, and is no reason to install nothing.
            command += ["--no-cache-dir", "--no-deps", "--ignore-installed"]
        return run([*command, *map(str, what)], environment=environment)

    def run(self, *command: str | Path, cwd: Path, **environment: str) -> str:
        """Standard output of one of its programs, outside the checkout."""
        program, *rest = map(str, command)
        path = str(self.python.parent / program)
        return run([path, *rest], cwd=cwd, environment=environment, stderr=None)


def run(
    command: list[str],
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    stderr: int | None = subprocess.STDOUT,
) -> str:
    """Output of a command that must succeed, without this checkout on its path."""
    clean = {n: v for n, v in os.environ.items() if n != "PYTHONPATH"}
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**clean, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


__all__ = [
    "ENGINE",
    "ROOT",
    "WITHOUT_COMPILER",
    "Environment",
    "build_sdist",
    "build_wheel",
    "compiler",
    "run",
]
