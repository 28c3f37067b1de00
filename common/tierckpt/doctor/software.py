"""Software and its settings: what is installed here, and how Tierckpt is set.

Software: Python, torch, the copy engine, frameworks, packages of extras, Horovod and MPI.
Settings: TIERCKPT_ variables, their values together, and agents of running jobs.

Findings of checks, and the subject that checks examine.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import Any

from msgspec import Struct, field

import tierckpt
from tierckpt import __version__
from tierckpt._children import child_command, child_environment, package_root_of
from tierckpt._text import counted, near_names, some
from tierckpt._version import PACKAGES, is_tested, version_numbers
from tierckpt.agent.address import AgentFiles
from tierckpt.config import NOT_SETTINGS, PREFIX, Config, known_settings, load_config
from tierckpt.errors import ConfigError
from tierckpt.events import event_files
from tierckpt.exporters.exporter import exporters_of
from tierckpt.exporters.prometheus import LOOPBACK, PrometheusPort
from tierckpt.halt.preemption import service_of
from tierckpt.halt.signals import too_long
from tierckpt.storage import file_lock
from tierckpt.storage.job_directory import JobDirectory, jobs_at

from .probes import LAUNCHERS, WITH_PARENT, probe


class Mark(StrEnum):
    """Meaning of a finding; only a cross makes the exit status 1."""

    GOOD = "good"
    ABSENT = "absent"
    """Optional, and not there."""
    WARNING = "warning"
    """Works, but slower or less safely than it could."""
    CROSS = "cross"
    """Does not work."""


class Finding(Struct, frozen=True):
    """One fact."""

    name: str
    """A few letters, e.g. `torch`."""
    mark: Mark
    text: str
    cure: str = ""
    """Commands or settings that change a mark to good; empty if there is nothing to do."""


class Subject(Struct, frozen=True):
    """The job, node and environment to examine."""

    config: Config = field(default_factory=Config)
    """Its settings, as far as they are valid."""
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    arguments: Mapping[str, str] = field(default_factory=dict)
    """Settings that replace the environment's."""
    state_bytes: int = 0
    """Bytes of parameters and optimizer state of the whole job; 0: unknown."""
    nodes: int = 1
    """Number of nodes of the job."""
    towards: str = ""
    """Host name of another node; empty: unknown."""
    root: Path = Path("/")
    """Root of /proc, /sys and /run."""

    @property
    def node_bytes(self) -> int:
        """Bytes of one copy of this node's shards; 0: unknown."""
        return -(-self.state_bytes // self.nodes)

    def read(self, path: str) -> str:
        """Content of a file of /proc or /sys; empty if it cannot be read."""
        try:
            return (self.root / path).read_text(errors="replace").strip()
        except OSError:
            return ""


Check = Callable[[Subject], Iterable[Finding]]
"""May raise anything, and may hang."""


def good(name: str, text: str) -> Finding:
    """A finding that needs no cure."""
    return Finding(name, Mark.GOOD, text)


def absent(name: str, text: str, cure: str = "") -> Finding:
    """A missing optional thing."""
    return Finding(name, Mark.ABSENT, text, cure)


def warning(name: str, text: str, cure: str = "") -> Finding:
    """A limited thing."""
    return Finding(name, Mark.WARNING, text, cure)


def cross(name: str, text: str, cure: str = "") -> Finding:
    """A thing that does not work."""
    return Finding(name, Mark.CROSS, text, cure)


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
        child_command("tierckpt.doctor.probes"),
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
    if version_numbers(version) < OLDEST_TORCH:
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
    """Optional packages: a cross if the settings need a missing or broken one."""
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
    from tierckpt.erasure import kernels

    if kernels.find_isal() is not None:
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


BUILD = "in a checkout of Tierckpt: python tools/make_horovod.py"
NOT_THERE, NO_TORCH = "it is not installed", "torch cannot be imported"
"""Answers of the probe."""
_MPI_LIBRARY = (
    f"{WITH_PARENT}import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; "
    "print(mpi4py.__version__, MPI.Get_library_version().splitlines()[0], sep='\\n')"
)
_MPI_SECONDS = 60.0
_MPI_KINDS = {
    "open mpi|open-mpi|openrte": "Open MPI",
    "intel\\(r\\) mpi": "Intel MPI",
    "mpich|hydra": "MPICH",
}
"""Patterns for the answers of MPI libraries and of their launchers, the special ones first."""


def horovod(subject: Subject) -> Iterator[Finding]:
    """Horovod, started alone in a process, and its transports."""
    found = probe()
    if found.missing == NOT_THERE:
        yield absent("horovod", "not installed", BUILD)
    elif found.missing.startswith(NO_TORCH):
        yield absent("horovod", f"not tested: {NO_TORCH}")
    elif "mpi_init" in found.missing.lower():
        cure = "put the bin folder of its MPI on PATH; mpirun -np 1 true shows the error"
        yield cross("horovod", "cannot start, as its MPI cannot", cure)
    elif found.missing:
        yield cross("horovod", found.missing, BUILD)
    else:
        built = [*found.transports, *(["nccl"] if found.nccl else [])]
        text = f"{found.version}, built for this torch, with {', '.join(built) or 'no transport'}"
        yield good("horovod", text) if built else cross("horovod", text, BUILD)


def mpi(subject: Subject) -> Iterator[Finding]:
    """The MPI launcher, and the library that mpi4py uses: they must be of one kind."""
    launcher, library = _launcher(), _library()
    installed, problem = library
    if not launcher and not installed and not problem:
        yield absent("mpi", "no mpirun, no mpi4py", "apt-get install openmpi-bin libopenmpi-dev")
    elif problem:
        cure = "install the MPI library that it was built for, or: pip install --force-reinstall"
        yield cross("mpi", f"mpi4py cannot be imported: {problem}", f"{cure} mpi4py")
    elif not installed:
        yield absent("mpi", f"{launcher}; mpi4py is not installed", "pip install 'tierckpt[mpi]'")
    elif not launcher:
        cure = "put the bin folder of that MPI on PATH, or: apt-get install openmpi-bin"
        yield absent("mpi", f"{installed}; no mpirun", cure)
    elif _kind(launcher) != _kind(installed):
        text = f"mpirun is of {launcher}, and {installed}: each rank would be a job of its own"
        cure = "put the mpirun of mpi4py's library first on PATH, or build mpi4py for this one: "
        yield cross("mpi", text, f"{cure}pip install --force-reinstall --no-binary mpi4py mpi4py")
    else:
        yield good("mpi", f"mpirun, {installed}")


def _launcher() -> str:
    """Kind and version of mpirun; empty without one."""
    if shutil.which("mpirun") is None:
        return ""
    done = subprocess.run(
        ["mpirun", "--version"],
        capture_output=True,
        text=True,
        timeout=_MPI_SECONDS,
        stdin=subprocess.DEVNULL,
    )
    return _named((done.stdout + done.stderr).strip())


def _library() -> tuple[str, str]:
    """mpi4py and its library, empty without it; and the reason why it cannot be imported."""
    environment = {n: v for n, v in child_environment().items() if not n.startswith(LAUNCHERS)}
    done = subprocess.run(
        [sys.executable, "-c", _MPI_LIBRARY],
        capture_output=True,
        text=True,
        timeout=_MPI_SECONDS,
        env=environment,
        cwd="/",
    )
    lines = done.stdout.splitlines()
    if done.returncode == 0 and len(lines) >= 2:
        return f"mpi4py {lines[0]} with {_named(lines[1])}", ""
    said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    if said and "No module named 'mpi4py'" in said[-1]:
        return "", ""
    return "", said[-1] if said else f"its process ended with status {done.returncode}"


def _named(answer: str) -> str:
    """`Open MPI 4.1.4` of the first line that a library or launcher prints."""
    first = answer.splitlines()[0] if answer else ""
    version = re.search(r"\d+(?:\.\d+)+", answer)
    kind = _kind(answer) or first[:40]
    return f"{kind} {version[0]}" if version else kind


def _kind(text: str) -> str:
    for pattern, kind in _MPI_KINDS.items():
        if re.search(pattern, text, re.IGNORECASE):
            return kind
    return ""


INTERNAL = ("TIERCKPT_AGENT_FINGERPRINT",)
"""Variables that processes of Tierckpt give each other."""
FAULTS = "TIERCKPT_FAULTS"
TO_INSTALL = "; run: "
"""Comes before the command in errors about a missing package."""
PLACES = ("CONFIG", "PATH", "SHM_DIR", "PERSISTENT_PATH", "PERSISTENT_STORAGE_OPTIONS", "NODE")
MAX_AGENTS = 8
"""Limit of places of agents that are looked at in a job's folder."""


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """Variables with the prefix that no job understands."""
    known = {*NOT_SETTINGS, *(name.upper() for name in known_settings())}
    given = [name for name in environment if name.startswith(PREFIX) and name not in INTERNAL]
    return sorted(name for name in given if name.removeprefix(PREFIX) not in known)


def variables(subject: Subject) -> Iterator[Finding]:
    """The variables that are set. Values are not shown: they may be secret."""
    environment = subject.environment
    unknown = unknown_variables(environment)
    candidates = [*map(str.upper, known_settings()), *NOT_SETTINGS]
    for name in unknown:
        near = near_names(name.removeprefix(PREFIX), candidates, cutoff=0.6)
        meant = " or ".join(PREFIX + each for each in near)
        cure = f"unset {name}" + (f", or do you mean {meant}?" if near else "")
        yield cross("variables", f"{name} is no setting: a job would refuse to start", cure)
    known = sorted(n for n in environment if n.startswith(PREFIX) and n not in unknown)
    known = [name for name in known if name not in INTERNAL]
    if environment.get(FAULTS):
        text = f"{FAULTS} is set: faults are injected on purpose"
        yield warning("variables", text, f"unset {FAULTS}")
    if known:
        yield good("variables", f"set: {some(known, 6)}")
    elif not unknown:
        yield absent("variables", "no TIERCKPT_ variable is set: all settings are defaults")


def configuration(subject: Subject) -> Iterator[Finding]:
    """Values and conflicts of all settings, in the words of a job that starts with them."""
    environment = _without(subject.environment, unknown_variables(subject.environment))
    try:
        config = load_config(subject.arguments, environment)
    except ConfigError as error:
        text, _, command = str(error).partition(TO_INSTALL)
        yield cross("settings", text, command or "change this setting: see docs/settings.md")
        return
    if config.idle:
        text = f"without persistent_path no effect: {', '.join(config.idle)}"
        yield warning("settings", text, "set TIERCKPT_PERSISTENT_PATH")
    yield good("settings", f"valid; levels: {', '.join(_levels(config))}")
    for port in exporters_of(config.export):
        if isinstance(port, PrometheusPort):
            yield _who_reads(port)


def _who_reads(port: PrometheusPort) -> Finding:
    at = f"{port.address}:{port.port}"
    if port.address == LOOPBACK:
        others = f"export = 'prometheus *:{port.port}' opens it to others"
        return good("export", f"Prometheus reads {at} on this machine alone; {others}")
    text = f"everybody who reaches {at} reads the metrics, without a password"
    return warning("export", text, "let a firewall or a network policy admit Prometheus alone")


def _levels(config: Config) -> list[str]:
    names = ("memory", "local", "peer", "persistent")
    return [name for name in names if config.uses(name)] or ["none"]


def _without(environment: Mapping[str, str], names: list[str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in names}


def valid_config(arguments: Mapping[str, str], environment: Mapping[str, str]) -> Config:
    """The settings if they are valid; else the places alone, as far as these are valid."""
    places = {PREFIX + name for name in PLACES}
    known = _without(environment, unknown_variables(environment))
    few = {name: value for name, value in known.items() if name in places}
    without_file = _without(few, [f"{PREFIX}CONFIG"])
    for variables in (known, few, without_file, {}):
        with contextlib.suppress(ConfigError):
            return load_config(arguments, variables)
    return Config()


def notices(subject: Subject) -> Iterator[Finding]:
    """The cloud's metadata service, asked once for a notice."""
    found = service_of(subject.config.halt_notices, subject.environment)
    if found is None:
        return
    name, cloud, service = found
    try:
        notice = cloud.look(service)
    except Exception as error:  # as the job's own thread: a service may answer anything
        text = f"{service.endpoint} does not answer as {name} does ({error}): no notice is seen"
        cure = "unset TIERCKPT_HALT_NOTICES, unless this is a machine of that cloud"
        hops = "; in a container: aws ec2 modify-instance-metadata-options --instance-id ID "
        more = f"{hops}--http-put-response-hop-limit 2" if name == "aws" else ""
        yield warning("notices", text, cure + more)
        return
    if notice is None:
        yield good("notices", f"{name} answers at {service.endpoint}, and announces no end")
    else:
        text = f"{name} takes this machine away ({notice.action})"
        yield cross("notices", text, "start jobs on another machine")


def iterations(subject: Subject) -> Iterator[Finding]:
    """Whether two iterations fit into a signal's grace period, by the job's own records."""
    from tierckpt.goodput.account import usual_step_seconds
    from tierckpt.goodput.records import read

    folder, grace = subject.config.events_dir, subject.config.halt_grace_seconds
    try:
        runs, _ = read(event_files([Path(folder)])) if folder else ([], [])
    except ConfigError:  # no job has written there yet
        return
    spans = [span for run in sorted(runs, key=lambda run: run.last) for span in run.spans]
    known = [seconds for span in spans if (seconds := usual_step_seconds(span)) is not None]
    if not known:
        return
    if text := too_long(known[-1], grace):
        what, cure = text.split(". ", 1)
        yield warning("iterations", what, cure)
    else:
        yield good("iterations", f"{known[-1]:.3g} s: two fit into halt_grace_seconds ({grace:g})")


# --- agents --------------------------------------------------------------------------------------


def agents(subject: Subject) -> Iterator[Finding]:
    """Agents of this user's jobs on this machine, and the Tierckpt that each of them runs."""
    same: list[str] = []
    for job in jobs_at(subject.config.shm_dir):
        for pid in _agents_of(job):
            version, root = _version_of(pid)
            name = f"{job.path.name} (process {pid})"
            if version in ("", __version__):
                same.append(name)
                continue
            text = f"the agent of {name} runs Tierckpt {version} of {root}; here is {__version__}"
            cure = f"restart the job with one version on all nodes, or: kill {pid}"
            yield warning("agents", text, cure)
    if same:
        text = f"{counted(len(same), 'running agent')} of this version: {some(same, 2)}"
        yield good("agents", text)


def _agents_of(job: JobDirectory) -> Iterator[int]:
    """Process ids of a job's running agents."""
    for index in range(MAX_AGENTS):
        with contextlib.suppress(OSError):
            if pid := file_lock.holder(AgentFiles(job, index).lock):
                yield pid


def _version_of(pid: int) -> tuple[str, str]:
    """Version and folder of the Tierckpt of a process; empty if they cannot be found."""
    with contextlib.suppress(OSError, ValueError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        root = package_root_of([os.fsdecode(part) for part in command])
        text = Path(root, "tierckpt", "_version.py").read_text()
        return str(json.loads(text.rpartition("=")[2])), root
    return "", ""
