"""Machine: shared memory, memory, and limits of processes."""

from __future__ import annotations

import contextlib
import os
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tierckpt.storage import health
from tierckpt.storage.files.mounts import MEMORY, mount_of
from tierckpt.storage.health import Need, size_text
from tierckpt.storage.memory import image_file
from tierckpt.storage.memory.job_directory import job_directory

from .finding import Finding, Subject, cross, good, warning

DOCKERS_BYTES = 64 * 1024 * 1024
"""Size of /dev/shm in a container of Docker by default."""
NAME = "shm_dir"
OPEN_FILES = 1024
"""Enough for an agent that talks to hundreds of nodes."""


def slots_of(subject: Subject) -> int:
    """Slots of each rank: as set; else two, three with a GPU."""
    gpus = (subject.root / "dev/nvidia0").exists() or (subject.root / "dev/kfd").exists()
    return subject.config.slots or (3 if gpus else 2)


def shared_memory(subject: Subject) -> Iterator[Finding]:
    """Room for slots in `shm_dir`, which must be a memory file system."""
    place = subject.config.shm_dir
    if problem := health.examine([Need(place)], timeout_seconds=20.0):
        cure = f"give write permission on {place}, or set TIERCKPT_SHM_DIR to a place in memory"
        yield cross(NAME, problem[0], cure)
        return
    kind = mount_of(place).kind
    if kind and kind not in MEMORY:
        text = f"{place} is {kind}, not memory: slots there are written to a device, slowly"
        yield cross(NAME, text, f"mount -t tmpfs -o size=50% tmpfs {place}")
    elif image_file.expected(subject.config):
        yield good(NAME, f"{place} is hardly used: slots are files in {subject.config.directory}")
    else:
        yield _room(subject, place)


def _room(subject: Subject, place: str) -> Finding:
    found, slots = os.statvfs(place), slots_of(subject)
    free, total = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    has = f"{place}: {size_text(free)} of {size_text(total)} free"
    if subject.state_bytes:
        needed = slots * subject.node_bytes
        text = f"{has}; {slots} slots of the state need {size_text(needed)}"
        held = _own_bytes(subject)
        return (
            good(NAME, text)
            if free + held >= needed
            else cross(NAME, text, _larger(subject, needed))
        )
    room = health.memory_room(subject.root)
    usable = min(free, room.nbytes) if room else free
    nodes = "" if subject.nodes == 1 else f" on {subject.nodes} nodes"
    fits = f"{has}, for a state up to {size_text(usable * subject.nodes // slots)}{nodes}"
    text = f"{fits} ({slots} slots)"
    return cross(NAME, text, _larger(subject, 0)) if total <= DOCKERS_BYTES else good(NAME, text)


def _own_bytes(subject: Subject) -> int:
    """Bytes that slots of this job hold there already."""
    held = 0
    for path in job_directory(subject.config).segments():
        with contextlib.suppress(OSError):
            held += path.lstat().st_blocks * 512
    return held


def _larger(subject: Subject, needed_bytes: int) -> str:
    """Commands that make shared memory larger, for this kind of container."""
    place = subject.config.shm_dir
    gib = -(-needed_bytes // 2**30)
    number = str(gib + 1) if needed_bytes else "N"
    where = "" if needed_bytes else "; N GiB: slots x state / nodes"
    container = container_of(subject)
    if container == "Kubernetes":
        volume = f"medium: Memory and sizeLimit: {number}Gi"
        return f"mount an emptyDir with {volume} at {place}{where}"
    if container == "Apptainer":
        return f"apptainer exec --bind {place}, to have that of the node"
    if container:
        return f"start the container with --shm-size={number}g, or --ipc=host{where}"
    larger = f"mount -o remount,size={number}g {place}"
    return f"{larger}, more nodes, or a larger TIERCKPT_SHM_DIR{where}"


def container_of(subject: Subject) -> str:
    """Kind of container that this process is in; empty outside."""
    if subject.environment.get("KUBERNETES_SERVICE_HOST"):
        return "Kubernetes"
    if (subject.root / ".dockerenv").exists():
        return "Docker"
    if (subject.root / "run/.containerenv").exists():
        return "Podman"
    if subject.environment.get("APPTAINER_CONTAINER"):
        return "Apptainer"
    return ""


def memory(subject: Subject) -> Iterator[Finding]:
    """Available memory. Files in shared memory count, too."""
    room = health.memory_room(subject.root)
    if room is None:
        return
    limited = "" if room.where == "this node" else f", by the limit of {room.where}"
    text = f"{size_text(room.nbytes)} available{limited}"
    needed = slots_of(subject) * subject.node_bytes
    if needed > room.nbytes:
        cure = "raise the limit of the control group (docker run --memory, sbatch --mem)"
        cure = cure if limited else "use more nodes, or a node with more memory"
        yield cross("memory", f"{text}; the slots need {size_text(needed)}", cure)
        return
    yield good("memory", text + (f" ({container_of(subject)})" if container_of(subject) else ""))


def temporary(subject: Subject) -> Iterator[Finding]:
    """A warning if no temporary directory can be written, as with a read-only root."""
    with contextlib.suppress(FileNotFoundError):
        tempfile.gettempdir()
        return
    cures = {
        "Kubernetes": "mount an emptyDir at /tmp",
        "Docker": "docker run --tmpfs /tmp",
        "Podman": "podman run --tmpfs /tmp",
        "Apptainer": "apptainer exec --writable-tmpfs, or --bind /tmp",
    }
    text = "none can be written: Open MPI, workers of a DataLoader and torch.compile need one"
    cure = cures.get(container_of(subject), "give write permission on /tmp, or set TMPDIR")
    yield warning("temporary", text, cure)


def limits(subject: Subject) -> Iterator[Finding]:
    """Limits of open files and of locked memory."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    text = f"open files {_limit(files)}, locked memory {_limit(locked, True)}"
    if files != resource.RLIM_INFINITY and files < OPEN_FILES:
        cure = f"ulimit -n {OPEN_FILES}"
        yield warning("limits", f"{text}: too few files for an agent and its peers", cure)
    elif _has_infiniband(subject.root) and locked != resource.RLIM_INFINITY:
        cure = "ulimit -l unlimited"
        if hard != resource.RLIM_INFINITY:
            cure = "a line in /etc/security/limits.conf: * - memlock unlimited"
            cure += " (docker run --ulimit memlock=-1)"
        yield warning("limits", f"{text}: Infiniband needs more locked memory", cure)
    else:
        yield good("limits", text)


def _has_infiniband(root: Path) -> bool:
    return any((root / "sys/class/infiniband").glob("*"))


def _limit(value: int, is_size: bool = False) -> str:
    if value == resource.RLIM_INFINITY:
        return "unlimited"
    return size_text(value) if is_size else str(value)
