"""Containers of a pod, as far as a process in them can tell: namespaces of processes, mounts and
names, a read-only root, and a user without a name and without rights. Needs root."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
USER = 10001
PROGRAMS = ("unshare", "setpriv", "mount", "hostname")


def require_pods() -> None:
    """Skip the test where pods cannot be made."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing or os.geteuid():
        pytest.skip(f"a pod needs {', '.join(missing) or 'root'}")
    tried = subprocess.run(["unshare", "-fpmu", "--mount-proc", "true"], capture_output=True)
    if tried.returncode:
        pytest.skip(f"namespaces cannot be made here: {tried.stderr.decode().strip()}")


class Pod:
    """One pod: its containers, one after the other, share volumes and a name.

    Args:
        name: host name in the pod.
        memory: folder in memory, which becomes the pod's /dev/shm.
        volumes: folders that can be written to, at the same paths in the pod.
    """

    def __init__(self, name: str, memory: Path, *volumes: Path) -> None:
        self.name, self.memory, self.volumes = name, memory, volumes
        for folder in (memory, *volumes):
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o2777)  # as a volume with fsGroup
        self._process: subprocess.Popen[bytes] | None = None

    def start(
        self, command: list[str], environment: Mapping[str, str], folder: Path, log: Path
    ) -> None:
        """Start a container: `command` becomes process 1. Its predecessor must have ended."""
        image = [Path(sys.base_prefix), Path(sys.prefix), ROOT]
        steps = [f"mount --bind {shlex.quote(str(self.memory))} /dev/shm"]
        steps += [f"mount --bind {v} {v}" for v in map(shlex.quote, map(str, self.volumes))]
        steps += _opened([*image, *self.volumes])
        steps += ["mount -o remount,bind,ro /", f"hostname {self.name}"]
        user = f"setpriv --reuid {USER} --regid {USER} --clear-groups --no-new-privs"
        steps += [f"cd {shlex.quote(str(folder))}", f"exec {user} {shlex.join(command)}"]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                ["unshare", "-fpmu", "--mount-proc", "sh", "-ec", "\n".join(steps)],
                env={**environment, "HOME": "/"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def first(self) -> int:
        """The number, outside of the pod, of its process 1."""
        assert self._process is not None
        (child,) = _children(self._process.pid)
        return child

    def signal(self, number: int) -> None:
        """Send a signal to process 1, as the node's kubelet does."""
        os.kill(self.first, number)

    def wait(self, seconds: float) -> int:
        """Wait for the end of the container, and return the status of process 1 if no signal ended
        it."""
        assert self._process is not None
        return self._process.wait(seconds)

    def processes(self) -> list[int]:
        """Numbers, outside, of all processes of the container."""
        space = os.readlink(f"/proc/{self.first}/ns/pid")
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{pid}/ns/pid") == space:
                    found.append(int(pid))
        return found

    def end(self) -> None:
        """Kill the container: the end of process 1 ends all."""
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ValueError, ProcessLookupError):
                self.signal(signal.SIGKILL)
            self._process.kill()
            self._process.wait()


def _opened(folders: Iterable[Path]) -> list[str]:
    """Commands that let the pod's user pass to these folders, as an image and volumes do: on a
    developer's machine they may be below a folder closed to others."""
    closed: dict[Path, list[Path]] = {}
    for folder in {each.resolve() for each in folders}:
        for above in reversed(folder.parents):
            if not above.stat().st_mode & 1:
                closed.setdefault(above, []).append(folder)
                break
    steps, moved = (
        ["mount -t tmpfs none /mnt"],
        [each for below in closed.values() for each in below],
    )
    for number, folder in enumerate(moved):
        steps += [f"mkdir /mnt/{number}", f"mount --bind {shlex.quote(str(folder))} /mnt/{number}"]
    steps += [f"mount -t tmpfs -o mode=755 none {shlex.quote(str(above))}" for above in closed]
    for number, folder in enumerate(moved):
        there = shlex.quote(str(folder))
        steps += [f"mkdir -p {there}", f"mount --move /mnt/{number} {there}"]
    return steps


def _children(pid: int) -> list[int]:
    return [int(x) for x in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
