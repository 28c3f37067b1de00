"""Which torch `make venv` ends up with; pip, Python and the GPU are played."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bootstrap
import pytest
from bootstrap import TORCH

CPU_BUILD = ["torch", "sympy", "filelock"]
CUDA_BUILD = ["torch", "nvidia-cublas", "nvidia_cudnn_cu13", "cuda-bindings", "triton"]


class Machine:
    """What is on it, and what pip was asked for."""

    def __init__(self) -> None:
        self.torch: str | None = None
        """Version that `import torch` finds."""
        self.pip = "25.1.1"
        self.gpu = False
        self.build = CPU_BUILD
        """What pip would bring with torch."""
        self.fails: str | None = None
        """pip does, where it is asked for this."""
        self.installed: list[list[str]] = []
        self.asked: list[list[str]] = []
        """With --dry-run."""

    def output(self, *command: str | Path) -> str | None:
        if "import torch" in str(command[-1]):
            return self.torch
        return self.pip if "import pip" in str(command[-1]) else "Python 3.11.2"

    def uv_install(self, python: Path, *arguments: str) -> bool:
        self.installed.append(["uv", *arguments])
        return self.fails != "uv"

    def pip_install(self, python: Path, *arguments: str, progress: bool = False) -> bool:
        if self.fails in arguments:
            return False
        if "--dry-run" in arguments:
            self.asked.append(list(arguments))
            report = Path(arguments[arguments.index("--report") + 1])
            steps = [{"metadata": {"name": name}} for name in self.build]
            report.write_text(json.dumps({"install": steps}))
            return True
        self.installed.append(list(arguments))
        if any(word == TORCH for word in arguments):
            self.torch = TORCH.removeprefix("torch==")
        return True

    def install_torch(self) -> None:
        bootstrap.install_torch(Path("python"))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(bootstrap, "output", made.output)
    monkeypatch.setattr(bootstrap, "pip_install", made.pip_install)
    monkeypatch.setattr(bootstrap, "uv_install", made.uv_install)
    monkeypatch.setattr(bootstrap, "has_gpu", lambda: made.gpu)
    monkeypatch.delenv("TORCH_INSTALL_ARGS", raising=False)
    return made


# --- which torch ---------------------------------------------------------------------------------


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("have", ["2.4.0", "2.13.0+cpu", "2.13.0+cu130", "2.14.0a0+git1234", "3.0"])
def test_an_installed_torch_new_enough_is_used(have: str, gpu: bool, machine: Machine) -> None:
    machine.torch, machine.gpu, machine.build = have, gpu, CUDA_BUILD
    machine.install_torch()
    assert machine.asked == machine.installed == []


@pytest.mark.parametrize("have", [None, "1.13.1", "2.3.1+cu121", "nonsense"])
def test_else_the_tested_version_is_installed(have: str | None, machine: Machine) -> None:
    machine.torch = have
    machine.install_torch()
    assert machine.installed == [[TORCH]]
    assert machine.asked[0][-1] == TORCH, "without a GPU pip is asked first what it would bring"


def test_with_a_gpu_the_build_for_it_is_taken_unasked(machine: Machine) -> None:
    machine.gpu, machine.build = True, CUDA_BUILD
    machine.install_torch()
    assert (machine.asked, machine.installed) == ([], [[TORCH]])


@pytest.mark.parametrize("have", [None, "2.3.1"])
def test_without_a_gpu_nothing_made_for_one_is_installed(
    have: str | None, machine: Machine
) -> None:
    machine.torch, machine.build = have, CUDA_BUILD
    with pytest.raises(SystemExit) as stopped:
        machine.install_torch()
    assert machine.installed == []
    assert "pip would bring 3 CUDA packages" in str(stopped.value)
    assert f"TORCH_INSTALL_ARGS='{TORCH}'" in str(stopped.value), "the way to have it all the same"


def test_where_pip_cannot_report_its_plan_nothing_is_installed(machine: Machine) -> None:
    machine.fails = "--dry-run"
    with pytest.raises(SystemExit, match="pip could not get torch"):
        machine.install_torch()
    assert machine.installed == []


# --- TORCH_INSTALL_ARGS --------------------------------------------------------------------------

INDEX = "--index-url https://user:secret@host/whl/cpu"
TORCH_IS_NAMED = {
    "torch": ["torch"],
    "torch==2.9.1": ["torch==2.9.1"],
    "'torch >= 2.9'": ["torch >= 2.9"],
    "'torch[opt]<3'": ["torch[opt]<3"],
    "'torch @ https://host/torch-2.9.1.whl'": ["torch @ https://host/torch-2.9.1.whl"],
    "wheels/torch-2.9.1-cp311-linux_x86_64.whl": ["wheels/torch-2.9.1-cp311-linux_x86_64.whl"],
    "https://host/torch-2.9.1+cpu.whl#sha256=12": ["https://host/torch-2.9.1+cpu.whl#sha256=12"],
    f"{INDEX} torch==2.9.1": [*INDEX.split(), "torch==2.9.1"],
}
IT_IS_NOT = ["--pre", INDEX, "torchvision", "torch-optimizer", "--find-links torch-wheels"]


@pytest.mark.parametrize("have", [None, "2.13.0"])
@pytest.mark.parametrize("words", TORCH_IS_NAMED)
def test_the_wanted_torch_is_installed_and_no_other(
    words: str, have: str | None, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.torch, machine.build = have, CUDA_BUILD
    monkeypatch.setenv("TORCH_INSTALL_ARGS", words)
    machine.install_torch()
    assert (machine.asked, machine.installed) == ([], [TORCH_IS_NAMED[words]])


@pytest.mark.parametrize("words", IT_IS_NOT)
def test_where_none_is_named_it_is_the_tested_version(
    words: str, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_INSTALL_ARGS", words)
    machine.install_torch()
    assert machine.installed == [[TORCH, *words.split()]]


def test_an_indexs_password_is_not_shown(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCH_INSTALL_ARGS", INDEX)
    machine.install_torch()
    machine.fails = TORCH
    with pytest.raises(SystemExit) as stopped:
        machine.install_torch()
    told = capfd.readouterr()
    assert "TORCH_INSTALL_ARGS" in told.out
    assert "secret" not in told.out + told.err + str(stopped.value)


# --- the machine ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "listed", "found"),
    [
        (None, "GPU 0: H100", False),
        ("/usr/bin/nvidia-smi", None, False),
        ("/usr/bin/nvidia-smi", "", False),
        ("/usr/bin/nvidia-smi", "GPU 0: H100", True),
    ],
    ids=["no driver", "a program without a driver", "a driver without a GPU", "a GPU"],
)
def test_a_gpu_is_one_that_the_driver_lists(
    program: str | None, listed: str | None, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap.shutil, "which", lambda name: program)
    monkeypatch.setattr(bootstrap, "output", lambda *command: listed)
    monkeypatch.setattr(Path, "exists", lambda self: False)
    assert bootstrap.has_gpu() is found


def test_so_is_one_with_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap.shutil, "which", lambda name: None)
    monkeypatch.setattr(Path, "exists", lambda self: str(self) == "/dev/nvidia0")
    assert bootstrap.has_gpu()


# --- the environment around it -------------------------------------------------------------------


@pytest.fixture
def made_with(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """How virtual environments were made."""
    commands: list[list[str]] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        python = Path(command[-1]) / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.touch()
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(bootstrap.subprocess, "run", run)
    return commands


@pytest.mark.parametrize(
    ("torch", "prefix", "shared"),
    [("2.9.0", "/usr", True), ("2.3.0", "/usr", False), ("2.9.0", "/home/venv", False)],
    ids=["the system's", "too old", "another virtual environment's"],
)
def test_the_systems_torch_is_seen_from_a_new_environment(
    torch: str,
    prefix: str,
    shared: bool,
    machine: Machine,
    made_with: list[list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine.torch = torch
    monkeypatch.setattr(sys, "prefix", prefix)
    monkeypatch.setattr(sys, "base_prefix", "/usr")
    assert bootstrap.make_venv(tmp_path / "venv") == tmp_path / "venv" / "bin" / "python"
    assert ["--system-site-packages" in command for command in made_with] == [shared]


def test_an_existing_one_is_completed_and_not_made_again(
    machine: Machine, made_with: list[list[str]], tmp_path: Path
) -> None:
    bootstrap.make_venv(tmp_path / "venv")
    bootstrap.make_venv(tmp_path / "venv")
    assert len(made_with) == 1
    assert machine.installed == []


@pytest.mark.parametrize("pip", ["22.3", "23.0.1", "9", "23.1", "26.0b1"])
def test_a_pip_that_cannot_report_its_plan_is_updated(
    pip: str, machine: Machine, made_with: list[list[str]], tmp_path: Path
) -> None:
    machine.pip = pip
    bootstrap.make_venv(tmp_path / "venv")
    old = pip in ("22.3", "23.0.1", "9")
    assert machine.installed == ([["--upgrade", "pip"]] if old else [])


Run = Callable[[], None]


@pytest.fixture
def run(
    machine: Machine,
    made_with: list[list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Run:
    monkeypatch.setattr(sys, "argv", ["bootstrap.py", str(tmp_path / "venv"), "demo"])
    return bootstrap.main


@pytest.mark.parametrize("uv_works", [True, False])
def test_torch_comes_before_packages_that_would_bring_another(
    run: Run, machine: Machine, uv_works: bool
) -> None:
    """The extras require a torch: pip alone would take any. Where uv fails, pip continues."""
    machine.fails = None if uv_works else "uv"
    run()
    rest = ["--editable", ".[demo]"]
    assert machine.installed == [[TORCH], ["uv", *rest], *([] if uv_works else [rest])]


def test_a_torch_that_cannot_be_used_in_the_end_is_an_error(
    run: Run, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_INSTALL_ARGS", "torch==2.3.1")
    machine.torch = "2.3.1"
    with pytest.raises(SystemExit, match=r"can't be imported, or is older than 2\.4"):
        run()


def test_tools_that_cannot_be_installed_are_an_error(
    run: Run, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap, "uv_install", lambda *_: False)
    machine.fails = ".[demo]"
    with pytest.raises(SystemExit, match="the demo extra"):
        run()
