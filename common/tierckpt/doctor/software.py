"""Software: Python, torch, the copy engine, frameworks, and packages of extras."""

from __future__ import annotations

import importlib
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import tierckpt
from tierckpt._children import child_command, child_environment
from tierckpt._tested_versions import PACKAGES, is_tested, numbers

from .finding import Finding, Subject, absent, cross, good, warning

OLDEST_TORCH = (2, 4)
PROBE_SECONDS = 280.0
"""Time to import torch; less than all checks have."""
INSTALL_AGAIN = "pip install --no-deps --force-reinstall --no-cache-dir"
"""Without the cache: pip keeps the wheel that it built without a compiler."""


def python(subject: Subject) -> Iterator[Finding]:
    """Versions of Tierckpt and Python."""
    folder = Path(tierckpt.__file__).parent
    where = f"{platform.python_version()}, {_short(sys.executable)}"
    yield good("tierckpt", f"{tierckpt.__version__} in {_short(str(folder))}")
    yield good("python", where)


def _short(path: str) -> str:
    home = os.path.expanduser("~")
    return "~" + path[len(home) :] if path.startswith(home + os.sep) else path


# --- torch ---------------------------------------------------------------------------------------


def torch(subject: Subject) -> Iterator[Finding]:
    """Torch, and the C library that copies its tensors."""
    done = subprocess.run(
        child_command("tierckpt.doctor.torch_probe"),
        env=child_environment(),
        capture_output=True,
        text=True,
        cwd="/",
        timeout=PROBE_SECONDS,
    )
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        reason = said[-1].strip() if said else f"its process ended with status {done.returncode}"
        missing = "No module named 'torch'" in reason
        cure = "'torch>=2.4'" if missing else "--force-reinstall torch"
        yield cross("torch", f"cannot be used: {reason}", f"pip install {cure}")
        return
    found = json.loads(done.stdout.splitlines()[-1])
    yield _torch(found, (subject.root / "dev/nvidia0").exists())
    yield _engine(found)


def _torch(found: dict[str, Any], has_gpu: bool) -> Finding:
    version, cuda, devices = found["version"], found["cuda"], found["devices"]
    if numbers(version) < OLDEST_TORCH:
        return cross("torch", f"{version} is too old", "pip install 'torch>=2.4'")
    if not cuda:
        if has_gpu:
            text = f"{version} is a build for CPUs, and this node has a GPU"
            return warning("torch", text, "install a build for CUDA: see pytorch.org, Get started")
        return good("torch", f"{version}, for CPUs")
    if not devices:
        text = f"{version} is for CUDA {cuda}, and sees no GPU"
        cure = "nvidia-smi must list the GPUs; in a container: docker run --gpus all"
        return warning("torch", text, cure) if has_gpu else good("torch", text)
    return good("torch", f"{version}, CUDA {cuda}, {devices} GPU{'s' * (devices != 1)}")


def _engine(found: dict[str, Any]) -> Finding:
    name = "copy engine"
    if found["forbidden"]:
        text = "TIERCKPT_COPY_ENGINE=torch forbids it: copies take more CPU time"
        return warning(name, text, "unset TIERCKPT_COPY_ENGINE")
    if not found["engine"]:
        return warning(name, found["copies"].partition(": ")[2] or found["copies"], engine_cure())
    if not found["layout"]:
        text = f"built; the tensors of torch {found['version']} have a layout that it does not know"
        return warning(
            name, f"{text}: Python compares them, slower", "use a torch from 2.4 to 2.13"
        )
    return good(name, "built, and knows the layout of this torch's tensors")


def engine_cure() -> str:
    """Commands that build the copy engine."""
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    root = Path(tierckpt.__file__).parents[2]
    if (root / "setup.py").exists():
        build = f"cd {root} && {sys.executable} setup.py build_ext --inplace"
    else:
        build = f"{INSTALL_AGAIN} --no-binary tierckpt tierckpt"
    if shutil.which(compiler):
        return build
    return f"install a C compiler (apt-get install gcc libc6-dev; dnf install gcc), then: {build}"


# --- packages ------------------------------------------------------------------------------------


def frameworks(subject: Subject) -> Iterator[Finding]:
    """Frameworks that have an integration, with their tested versions."""
    known: list[str] = []
    for package, (name, oldest, newest) in PACKAGES.items():
        version = _version(package)
        text = f"{name} {version}"
        if not version or text in known:
            continue
        if is_tested(version, oldest, newest):
            known.append(text)
            continue
        tested = oldest if oldest == newest else f"{oldest} to {newest}"
        cure = f"pip install '{package}~={newest}.0', or: tierckpt prove -- COMMAND"
        yield warning("frameworks", f"{text} was not tested, only {tested}", cure)
    if known:
        yield good("frameworks", f"{', '.join(known)}: tested versions")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def extras(subject: Subject) -> Iterator[Finding]:
    """Optional packages: a cross if the settings need one that is missing or broken."""
    present: list[str] = []
    missing: list[str] = []
    for module, extra, needed in (
        ("obstore", "s3", _needs_store(subject)),
        ("zstandard", "compression", "zstd" in _codecs(subject)),
        ("cryptography", "encryption", "aes-gcm" in _codecs(subject)),
    ):
        version, problem = _version(module), _import_problem(module)
        cure = f"pip install 'tierckpt[{extra}]'"
        if not problem:
            present.append(f"{module} {version}".rstrip())
        elif version:
            cure = f"pip install --force-reinstall {module}"
            yield cross(module, f"{version} cannot be imported: {problem}", cure)
        elif needed:
            yield cross(module, "is missing, and the settings need it", cure)
        else:
            missing.append(extra)
    yield from _isal(subject, present, missing)
    if present:
        yield good("extras", ", ".join(present))
    if missing:
        names = ", ".join(missing)
        yield absent("extras", f"not installed: {names}", f"pip install 'tierckpt[{names}]'")


def _isal(subject: Subject, present: list[str], missing: list[str]) -> Iterator[Finding]:
    from tierckpt.erasure import isal

    if isal.find() is not None:
        present.append("ISA-L")
    elif subject.config.peer.redundancy.startswith("rs"):
        text = "is missing: Reed-Solomon takes eight times the CPU time"
        yield warning("ISA-L", text, "pip install 'tierckpt[rs]', or apt-get install libisal2")
    else:
        missing.append("rs")


def _needs_store(subject: Subject) -> bool:
    from tierckpt.storage.persistent import object_stores

    return subject.config.persistent.path.partition("://")[0] in object_stores.SCHEMES


def _codecs(subject: Subject) -> str:
    return f"{subject.config.local.codecs} {subject.config.persistent.codecs}"


def _import_problem(module: str) -> str:
    try:
        importlib.import_module(module)
    except Exception as error:  # a broken package raises anything
        return str(error) or type(error).__name__
    return ""
