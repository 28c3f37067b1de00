"""Make the virtual environment that the Makefile's targets run in: bootstrap.py DIRECTORY EXTRA.

torch is the one requirement that pip alone gets wrong: on Linux its newest wheel brings several
GB of CUDA libraries, GPU or not. So a torch that this Python has already is used, and without a GPU
nothing made for one is downloaded unasked. The rest is an extra in setup.cfg, `demo` or `dev`. uv
installs it in a twentieth of pip's time; where uv cannot (it does not read pip's settings), pip
does.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
TORCH = "torch==2.13.0"  # the newest tested; setup.cfg says what is supported
OLDEST_TORCH = (2, 4)
MEGABYTES = {"demo": 50, "dev": 330}
"""The extras, with what their packages weigh as wheels."""
OLDEST_PIP = (23, 1)  # has `install --dry-run --report`; Debian 12 brings an older one

OWN_TORCH = """
import importlib.metadata, sys
torch = importlib.metadata.distribution("torch")
print(torch.version if str(torch.locate_file("")).startswith(sys.prefix) else "")
"""

NO_VENV = """\
could not make {venv} with {python}.
Either its `venv` or `ensurepip` is missing (on Debian and Ubuntu: install python3-venv),
or the directory is broken (remove it). Then run make again."""

NO_TORCH = """\
pip could not get torch for Python {version}, for the reason above.
Check the network, choose another Python (make PYTHON=/path/to/python), or say what pip is to
install (export TORCH_INSTALL_ARGS='...', for example 'torch==2.9.1'). Then run make again."""

CUDA_FOR_NOTHING = """\
pip would bring {count} CUDA packages, several GB, and there is no GPU here.
Choose one and run make again:
  - take a CPU build: PyTorch's page "Get started" shows the index to name for compute platform CPU;
    export TORCH_INSTALL_ARGS='--index-url <that index>'
  - use a Python that has torch already: make PYTHON=/path/to/python, or, for that of a virtual
    environment, which is completed then: make VENV="$VIRTUAL_ENV"
  - take the CUDA build all the same: export TORCH_INSTALL_ARGS='{torch}'"""

NO_TOOLS = """\
the {extra} extra of setup.cfg could not be installed, for the reason above.
Check the network and run make again."""

BROKEN_TORCH = """\
torch is installed but can't be imported, or is older than {oldest}: try {python} -c 'import torch'.
TORCH_INSTALL_ARGS chooses another build. Then run make again."""


def say(step: str) -> None:
    print(f"[venv] {step}", flush=True)


def fail(what: str) -> NoReturn:
    sys.exit(f"[venv] {what}")


def output(*command: str | Path) -> str | None:
    """What the command prints, or None if it fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def release(version: str) -> tuple[int, int]:
    """(2, 13) of 2.13.0+cpu; what cannot be read is older than anything."""
    found = re.match(r"(\d+)(?:\.(\d+))?", version)
    return (int(found[1]), int(found[2] or 0)) if found else (0, 0)


def torch_version(python: str | Path) -> str | None:
    """The version of a torch that this Python can import and Tierckpt can use."""
    version = output(python, "-c", "import torch; print(torch.__version__)")
    return version if version and release(version) >= OLDEST_TORCH else None


def pip_version(python: Path) -> tuple[int, int] | None:
    if not python.exists():
        return None
    version = output(python, "-c", "import pip; print(pip.__version__)")
    return release(version) if version else None


def pip_install(python: Path, *arguments: str, progress: bool = False) -> bool:
    """Let pip install that. `progress`: show it on a terminal; else errors only, as each step has
    its own line here."""
    quiet = [] if progress and sys.stderr.isatty() else ["-qq"]
    command = [str(python), "-P", "-m", "pip", "install", *quiet, "--disable-pip-version-check"]
    return subprocess.run([*command, *arguments], cwd=ROOT).returncode == 0


def uv_install(python: Path, *arguments: str) -> bool:
    """Let uv install that beside the present torch; False if it cannot. uv sees only the
    environment's own packages, so it would download a second torch beside a shared one."""
    torch = output(python, "-c", OWN_TORCH)
    if not torch or not pip_install(python, "uv"):
        return False
    quiet = [] if sys.stderr.isatty() else ["--quiet"]
    command = [str(python), "-m", "uv", "pip", "install", *quiet, "--python", str(python)]
    # With this requirement no other package brings another torch.
    return subprocess.run([*command, *arguments, f"torch=={torch}"], cwd=ROOT).returncode == 0


def make_venv(venv: Path) -> Path:
    """An existing directory is completed, never cleared: it may be the user's own."""
    python = venv.absolute() / "bin" / "python"
    pip = pip_version(python)
    if pip is None:
        options = []
        # Only the system's torch can be seen from .venv, not that of another virtual environment.
        if sys.prefix == sys.base_prefix and torch_version(sys.executable):
            options = ["--system-site-packages"]
        say(f"making {venv} with {sys.executable}" + (" and its torch" if options else ""))
        subprocess.run([sys.executable, "-m", "venv", *options, str(venv)])
        pip = pip_version(python)
    if pip is None:
        fail(NO_VENV.format(venv=venv, python=sys.executable))
    if pip < OLDEST_PIP:
        say("updating pip")
        if not pip_install(python, "--upgrade", "pip"):
            fail("pip could not update itself, for the reason above. Mend that, run make again.")
    return python


def has_gpu() -> bool:
    """Of NVIDIA's; the program that lists them may be there without any."""
    if any(Path(path).exists() for path in ("/dev/nvidia0", "/proc/driver/nvidia")):
        return True
    return bool(shutil.which("nvidia-smi") and output("nvidia-smi", "-L"))


def cuda_packages(python: Path) -> list[str]:
    """What pip would bring along with TORCH for a GPU's sake; with a CPU build, nothing."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        if not pip_install(python, "--dry-run", "--report", str(report), TORCH):
            fail(NO_TORCH.format(version=sys.version.split()[0]))
        names = [step["metadata"]["name"] for step in json.loads(report.read_text())["install"]]
    return [name for name in names if re.match(r"(nvidia|cuda)[-_.]", name, re.IGNORECASE)]


def names_torch(word: str) -> bool:
    """True for a requirement of torch, or a wheel of it; not for torchvision, nor for an option."""
    file = word.split("#")[0].rpartition("/")[2]
    return bool(
        re.match(r"torch *($|[\[@=<>!~;])", word) or re.fullmatch(r"torch-\d.*\.(whl|gz)", file)
    )


def install_torch(python: Path) -> None:
    """What TORCH_INSTALL_ARGS says, else a present torch, else the tested version."""
    chosen = shlex.split(os.environ.get("TORCH_INSTALL_ARGS", ""))
    if chosen:
        # Its words are not printed: an index's address may carry a password.
        say("installing torch as TORCH_INSTALL_ARGS says")
    elif have := torch_version(python):
        say(f"using torch {have}")
        return
    else:
        if not has_gpu():
            say(f"no GPU here: asking pip whether its {TORCH} is a CPU build")
            if cuda := cuda_packages(python):
                fail(CUDA_FOR_NOTHING.format(count=len(cuda), torch=TORCH))
        say(f"installing {TORCH}: 200 MB or more to download")
    named = any(map(names_torch, chosen))
    if not pip_install(python, *([] if named else [TORCH]), *chosen, progress=True):
        fail(NO_TORCH.format(version=sys.version.split()[0]))


def main() -> None:
    if len(sys.argv) != 3 or sys.argv[2] not in MEGABYTES:
        fail(f"usage: bootstrap.py DIRECTORY {{{','.join(MEGABYTES)}}}")
    python, extra = make_venv(Path(sys.argv[1])), sys.argv[2]
    install_torch(python)
    say(f"installing Tierckpt and its {extra} extra: {MEGABYTES[extra]} MB to download at first")
    if not uv_install(python, "--editable", f".[{extra}]"):
        say("uv could not do that: pip installs it, which takes minutes")
        if not pip_install(python, "--editable", f".[{extra}]", progress=True):
            fail(NO_TOOLS.format(extra=extra))
    torch = torch_version(python)
    if torch is None:
        fail(BROKEN_TORCH.format(oldest=".".join(map(str, OLDEST_TORCH)), python=python))
    say(f"ready: {output(python, '--version')}, torch {torch}")


if __name__ == "__main__":
    main()
