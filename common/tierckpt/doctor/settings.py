"""Settings: TIERCKPT_ variables, their values together, and agents of running jobs."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from tierckpt import __version__
from tierckpt._children import package_root_of
from tierckpt._event_files import event_files
from tierckpt._text import counted, near_names, some
from tierckpt.agent.address import AgentFiles
from tierckpt.config import NOT_SETTINGS, PREFIX, Config, known_settings, load_config
from tierckpt.errors import ConfigError
from tierckpt.exporters.prometheus import LOOPBACK, PrometheusPort
from tierckpt.exporters.setting import exporters_of
from tierckpt.halt.preemption import service_of
from tierckpt.halt.signals import too_long
from tierckpt.storage.files import file_lock
from tierckpt.storage.memory.job_directory import JobDirectory, jobs_at

from .finding import Finding, Subject, absent, cross, good, warning

INTERNAL = ("TIERCKPT_AGENT_FINGERPRINT",)
"""Variables that processes of Tierckpt give each other."""
FAULTS = "TIERCKPT_FAULTS"
TO_INSTALL = "; run: "
"""Comes before the command in errors about a package that is not installed."""
PLACES = ("CONFIG", "PATH", "SHM_DIR", "PERSISTENT_PATH", "PERSISTENT_STORAGE_OPTIONS", "NODE")
MOST_AGENTS = 8
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
    from tierckpt.goodput.records import read
    from tierckpt.goodput.spans import usual_step_seconds

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
    for index in range(MOST_AGENTS):
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
