"""Machine: memory and limits of processes, the clock, the places of the levels, the network.

Memory: shared memory, memory, temporary files, limits. Clock: whether the kernel's clock follows a
time server; no decision depends on a clock, but wrong clocks spoil timelines, and the times that
`list` shows. Places: directories of the levels, and the persistent level's store. Network: the
interface that agents of other nodes would reach, its speed, and faster ones.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from msgspec import Struct

from tierckpt._text import is_url
from tierckpt.errors import ConfigError
from tierckpt.net.addresses import address_of, own_host
from tierckpt.storage import health, slots
from tierckpt.storage import slots as image_file
from tierckpt.storage.durable import LAYERS, MEMORY_KINDS, SHARED_KINDS, Mount, mount_of
from tierckpt.storage.guarantees import Guarantees, of_directory
from tierckpt.storage.health import Need, size_text
from tierckpt.storage.job_directory import job_directory
from tierckpt.storage.persistent.backend import Backend

from .software import Finding, Subject, absent, cross, good, warning

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
    if kind and kind not in MEMORY_KINDS:
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


_UNSYNCHRONIZED = 0x40
"""STA_UNSYNC of <linux/timex.h>."""
CLOCK_CURE = "start a time service: systemctl start chronyd (or systemd-timesyncd)"


class _Timex(ctypes.Structure):
    """The start of `struct timex`, and room for the rest."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 256),
    )


def kernel_clock() -> tuple[bool, float]:
    """True if the clock follows a server, and the bound of its error in seconds. Raises OSError
    where the kernel does not say (some containers)."""
    state = _Timex()
    library = ctypes.CDLL(None, use_errno=True)
    if library.adjtimex(ctypes.byref(state)) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return not state.status & _UNSYNCHRONIZED, state.maxerror / 1e6


def synchronized(subject: Subject) -> Iterator[Finding]:
    """The state of the clock, by the kernel, or by chrony if that only watches it."""
    try:
        follows, error_seconds = kernel_clock()
    except OSError as error:
        yield absent("clock", f"the kernel does not say whether it is synchronized ({error})")
        return
    if follows:
        yield good("clock", f"synchronized, within {1000 * error_seconds:.3g} ms")
    elif chrony := _chrony():
        yield good("clock", f"synchronized by chrony: {chrony}")
    else:
        text = "follows no time server: timelines of several nodes do not match"
        yield warning("clock", text, CLOCK_CURE)


def _chrony() -> str:
    """The state that chrony reports; empty if it is not there, or follows no server."""
    if shutil.which("chronyc") is None:
        return ""
    done = subprocess.run(
        ["chronyc", "-n", "tracking"], capture_output=True, text=True, timeout=10.0
    )
    lines = dict(line.split(":", 1) for line in done.stdout.splitlines() if ":" in line)
    found = {name.strip(): value.strip() for name, value in lines.items()}
    return found.get("System time", "") if found.get("Leap status") == "Normal" else ""


PLACE_SECONDS = 20.0
"""Time for a directory to answer."""
FOR_LOCAL = ("locks", "exclusive creation", "renames")
FOR_PERSISTENT = ("exclusive creation", "links", "renames")
"""Guarantees without which a level does not work."""


def local(subject: Subject) -> Iterator[Finding]:
    """The directory of the local level: on the node's own disk, with room and locks."""
    directory, name = subject.config.directory, "path"
    if not subject.config.uses("local"):
        yield absent(name, "the settings use no local level", "set TIERCKPT_LOCAL_EVERY_SECONDS")
        return
    # The oldest version goes after the newest is complete.
    copies = subject.config.local.retention.keep_last + 1
    if slots.expected(subject.config):
        copies = slots.most_files(subject.config, subject.config.slots or 2)
    found = of_directory(Need(directory, copies * subject.node_bytes), PLACE_SECONDS)
    yield from _directory(subject, name, directory, found, FOR_LOCAL)
    mount = _mount(found)
    if mount.kind in MEMORY_KINDS:
        text = f"{mount.point} is {mount.kind}: versions survive a process, not the machine"
        cure = "set TIERCKPT_PATH to a disk, or use another level: TIERCKPT_PERSISTENT_PATH"
        yield warning(name, text, cure)
    elif mount.kind in SHARED_KINDS:
        text = f"{mount.point} is {mount.kind}, shared by all nodes and slower than a disk"
        yield warning(name, text, "set TIERCKPT_PATH to a disk of the node's own")
    elif mount.kind in LAYERS:
        yield _layer(subject, name, mount)


def _layer(subject: Subject, name: str, mount: Mount) -> Finding:
    text = f"is in the container's own layer ({mount.kind}), and is removed with the container"
    return warning(name, text, _volume(container_of(subject)))


def _volume(container: str) -> str:
    """Advice to use a folder from outside of the container."""
    how = {"Kubernetes": "a hostPath volume", "Apptainer": "apptainer exec --bind /scratch"}
    docker = f"{container.lower() or 'docker'} run -v /scratch:/scratch"
    return f"mount a folder of the node there: {how.get(container, docker)}"


def persistent(subject: Subject) -> Iterator[Finding]:
    """The persistent level's directory or store, if it is set."""
    path, name = subject.config.persistent.path, "persistent"
    if not path:
        text = "no persistent_path: nothing survives the loss of all nodes"
        yield absent(name, text, "set TIERCKPT_PERSISTENT_PATH to a directory or URL")
        return
    if is_url(path):
        yield _store(subject, name)
        return
    copies = subject.config.persistent.retention.keep_last + 1
    found = of_directory(Need(path, copies * subject.state_bytes), PLACE_SECONDS)
    yield from _directory(subject, name, path, found, FOR_PERSISTENT, parents=False)
    mount = _mount(found)
    if mount.kind in LAYERS:
        yield _layer(subject, name, mount)
    elif mount.kind in MEMORY_KINDS:
        text = f"{mount.point} is {mount.kind}: nothing there survives this machine"
        yield warning(name, text, "set TIERCKPT_PERSISTENT_PATH to a parallel file system")
    elif mount.keeps_locks:
        text = f"other machines do not see locks: {mount.keeps_locks}"
        yield warning(name, text, "mount it with locks; no lock is needed by the level itself")


def _mount(found: Guarantees) -> Mount:
    try:
        return mount_of(found.place) if found.place else Mount()
    except OSError:
        return Mount()


def _directory(
    subject: Subject,
    name: str,
    path: str,
    found: Guarantees,
    needs: tuple[str, ...],
    parents: bool = True,
) -> Iterator[Finding]:
    """Findings of one directory. `parents`: the job makes missing parents, too."""
    there, kind = found.place or path, _mount(found).kind
    if found.missing and not parents and found.missing > 1:
        yield cross(name, f"{path}: its parent is missing; is it mounted?", f"mkdir -p {path}")
        return
    if found.problem:
        text = found.problem if path in found.problem else f"{there}: {found.problem}"
        container, text = container_of(subject), text.removesuffix("; free space")
        yield cross(name, text, _cure(there, found.problem, _mount(found), container))
        return
    broken = {what: why for what, why in found.broken.items() if what in needs}
    if broken:
        text = ", ".join(f"no {what} ({why})" for what, why in broken.items())
        cure = "mount it with locks, or use another file system" if "locks" in broken else ""
        yield cross(name, f"{there} ({kind}): {text}", cure or "use another file system")
        return
    made = " (to be made)" if found.missing else ""
    room = f"{size_text(found.free_bytes)} free"
    yield good(name, f"{path}{made}: {kind}, {room}, {_abilities(found)}")
    if "durable names" in found.broken:
        text = f"folders cannot be synced ({found.broken['durable names']})"
        cure = "use another file system if power may fail"
        yield warning(name, f"{text}: a loss of power may take the newest versions", cure)


def _cure(there: str, problem: str, mount: Mount, container: str) -> str:
    if "may not write" in problem:
        return f"chown {os.getuid()} {there}, or another path"
    if "did not answer" in problem:
        return "take the node out of use, or mount the file system again"
    if "needed" in problem:
        return "free space there, or another path on a larger file system"
    if "read-only" in problem and container and (mount.point == "/" or mount.kind in LAYERS):
        return _volume(container)
    if "read-only" in problem:
        return f"mount -o remount,rw {mount.point}, or another path"
    return "another path"


def _abilities(found: Guarantees) -> str:
    direct = "O_DIRECT" if found.direct else "no O_DIRECT"
    names = [name for name in ("locks", "links", "renames") if name not in found.broken]
    return f"{direct}, {', '.join(names)}"


# --- stores --------------------------------------------------------------------------------------


def _store(subject: Subject, name: str) -> Finding:
    """Write an object twice, read it, and delete it."""
    from tierckpt.storage.persistent.backends import open_backend

    there = subject.config.persistent
    cure = "check keys, region and endpoint: TIERCKPT_PERSISTENT_STORAGE_OPTIONS"
    try:
        with closing(open_backend(there.path, **there.options())) as backend:
            backend.create()
            probe = f"tierckpt-probe-{secrets.token_hex(4)}"
            content = secrets.token_bytes(16)
            backend.put(probe, lambda: iter([memoryview(content)]), len(content), exclusive=True)
            try:
                same = backend.read(probe) == content
                exclusive = _refuses(backend, probe)
            finally:
                backend.delete(probe)
    except Exception as error:  # clients raise errors of their own kinds
        text = " ".join(str(error).split()) or type(error).__name__
        return cross(name, text[:300], cure)
    if not same:
        return cross(name, f"{there.path} returns other bytes than were written", "another store")
    if not exclusive:
        text = f"{there.path} replaces objects that must be new: two jobs are not kept apart"
        return warning(name, text, "never start two jobs at one persistent_path")
    return good(name, f"{there.path}: written, read and deleted; conditional writes")


def _refuses(backend: Backend, probe: str) -> bool:
    """True if the store refuses to create an object that exists."""
    try:
        backend.put(probe, lambda: iter([memoryview(b"2")]), 1, exclusive=True)
    except FileExistsError:
        return True
    return False


ELSEWHERE = ("203.0.113.1", "2001:db8::1")
"""Addresses of no machine (RFC 5737, RFC 3849): the route there is the default route. Nothing is
sent."""
_LOOPBACK_TYPE, _INFINIBAND_TYPE = "772", "32"
"""Values of `type`, from <linux/if_arp.h>."""
FAST_MBITS = 25_000
"""An interface faster than most with an unknown speed (a virtual machine's)."""


class Interface(Struct, frozen=True):
    """One network interface, as /sys/class/net shows it."""

    name: str
    address: str
    """Empty if it has none that peers could use."""
    mbits: int | None
    """Speed in Mbit/s; None: unknown."""
    is_up: bool
    is_real: bool
    """A device, a bond or a VLAN; not a bridge or a container's end of a cable."""
    is_infiniband: bool

    @property
    def speed(self) -> str:
        """Speed, as text."""
        if self.mbits is None:
            return "speed unknown"
        gbits = self.mbits / 1000
        return f"{gbits:g} Gbit/s" if gbits >= 1 else f"{self.mbits} Mbit/s"


def interfaces(root: Path = Path("/")) -> list[Interface]:
    """All interfaces of this network namespace, except loopback. `root` is the root of /sys."""
    names = [name for _, name in socket.if_nameindex()]
    found = [_interface(name, root / "sys/class/net" / name) for name in names]
    return [each for each in found if each is not None]


def _interface(name: str, folder: Path) -> Interface | None:
    kind = _read(folder / "type")
    if kind == _LOOPBACK_TYPE or name == "lo":
        return None
    speed = _read(folder / "speed")
    device_type = re.search(r"^DEVTYPE=(\w+)", _read(folder / "uevent"), re.MULTILINE)
    is_virtual = "virtual" in folder.resolve().parts
    return Interface(
        name,
        _address(name),
        int(speed) if speed.isdigit() and speed != "0" else None,  # -1: unknown
        _read(folder / "operstate") == "up",
        not is_virtual or (device_type is not None and device_type[1] in ("bond", "vlan")),
        kind == _INFINIBAND_TYPE,
    )


def _address(name: str) -> str:
    try:
        return address_of(name)
    except (ConfigError, OSError):
        return ""


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def interface(subject: Subject) -> Iterator[Finding]:
    """The interface of the peer level, as its agents choose it, and a faster one."""
    try:
        host = _own_host(subject)
    except ConfigError as error:
        needed = subject.config.uses("peer") or subject.nodes > 1
        kind = cross if needed else absent
        yield kind("interface", str(error).partition(";")[0], "connect this node to a network")
        return
    found = interfaces(subject.root)
    ours = next((each for each in found if each.address == host), None)
    if ours is None and _is_loopback(host):
        yield _loopback(subject, host, found)
        return
    text = f"peers use {host}" + (f" on {ours.name}, {ours.speed}" if ours else "")
    faster = [each for each in found if ours is not None and _is_faster(each, ours)]
    if faster and not subject.config.peer.device:
        best = max(faster, key=lambda each: each.mbits or 0)
        kind_name = "Infiniband" if best.is_infiniband else "an interface"
        text = f"{text}; {best.name} is up, {kind_name} of {best.speed}"
        cure = f"if it leads to all nodes: TIERCKPT_PEER_INTERFACE={best.name}"
        yield warning("interface", text, cure)
    else:
        chosen = " (peer_interface)" if subject.config.peer.device else ""
        yield good("interface", f"{text}{chosen}")


def _own_host(subject: Subject) -> str:
    """The address that this node's agent would listen at. Raises ConfigError."""
    chosen = subject.config.peer.device
    if chosen or subject.towards:
        return own_host(chosen, subject.towards or "localhost")
    try:
        return own_host("", ELSEWHERE[0])
    except ConfigError as error:
        try:
            return own_host("", ELSEWHERE[1])
        except ConfigError:
            raise error from None


def _loopback(subject: Subject, host: str, found: list[Interface]) -> Finding:
    usable = [each for each in found if each.is_up and each.address]
    text = f"other nodes cannot reach {host}"
    if not usable:
        return cross("interface", text, "connect this node to a network")
    best = max(usable, key=lambda each: (each.is_real, each.mbits or 0))
    return cross("interface", text, f"set TIERCKPT_PEER_INTERFACE={best.name}")


def _is_loopback(host: str) -> bool:
    return host.startswith("127.") or host == "::1"


def _is_faster(other: Interface, ours: Interface) -> bool:
    if not (other.is_up and other.is_real and other.address) or other.name == ours.name:
        return False
    if ours.mbits is None:
        return (other.mbits or 0) >= FAST_MBITS
    return (other.mbits or 0) > ours.mbits


def infiniband(subject: Subject) -> Iterator[Finding]:
    """Infiniband ports that are active but have no network interface with an address: the peer
    level speaks TCP."""
    names = {each.name for each in interfaces(subject.root) if each.is_up and each.address}
    for port in sorted((subject.root / "sys/class/infiniband").glob("*/ports/*")):
        if "ACTIVE" not in _read(port / "state") or "thernet" in _read(port / "link_layer"):
            continue
        device = port.parents[1]
        if not names & {each.name for each in (device / "device/net").glob("*")}:
            text = f"{device.name} is active ({_read(port / 'rate')}), without an IP address"
            cure = "give its interface an address (IPoIB): modprobe ib_ipoib"
            yield warning("infiniband", text, cure)
