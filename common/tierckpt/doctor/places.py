"""Places: directories of the levels, and the persistent level's store."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import closing

from tierckpt._text import is_url
from tierckpt.storage.files.mounts import LAYERS, MEMORY, SHARED, Mount, mount_of
from tierckpt.storage.guarantees import Guarantees, of_directory
from tierckpt.storage.health import Need, size_text
from tierckpt.storage.memory import image_file
from tierckpt.storage.persistent.backend import Backend

from .finding import Finding, Subject, absent, cross, good, warning
from .machine import container_of

LIMIT_SECONDS = 20.0
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
    copies = subject.config.local.keep_last + 1  # the oldest goes after the newest is complete
    if image_file.expected(subject.config):
        copies = image_file.most_files(subject.config, subject.config.slots or 2)
    found = of_directory(Need(directory, copies * subject.node_bytes), LIMIT_SECONDS)
    yield from _directory(subject, name, directory, found, FOR_LOCAL)
    mount = _mount(found)
    if mount.kind in MEMORY:
        text = f"{mount.point} is {mount.kind}: versions survive a process, not the machine"
        cure = "set TIERCKPT_PATH to a disk, or use another level: TIERCKPT_PERSISTENT_PATH"
        yield warning(name, text, cure)
    elif mount.kind in SHARED:
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
    copies = subject.config.persistent.keep_last + 1
    found = of_directory(Need(path, copies * subject.state_bytes), LIMIT_SECONDS)
    yield from _directory(subject, name, path, found, FOR_PERSISTENT, parents=False)
    mount = _mount(found)
    if mount.kind in LAYERS:
        yield _layer(subject, name, mount)
    elif mount.kind in MEMORY:
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
