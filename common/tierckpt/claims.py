"""Claims: one job at a time writes to a directory of the local level, whichever machine it is on.

Ranks of one number keep each other out on one machine (`jobdirectory`). A directory that several
machines see needs more: two jobs there would go on from each other's versions. So each node's first
rank leaves a file in it and keeps that locked while it lives:

    .claim.<token>.<node>      the token is drawn for each attach, and alike on all ranks

Then it looks at the others. A file of another token that nobody has locked is a dead life's, and
goes. One that is locked is another job's, or a dying life's of this one: it is waited for, and
then this job is refused. Of two that come at once each sees the other, as both make their file
before they look. (Both are refused then, and the mistake is found at once.)

A life that hangs somewhere must not keep its own successor out. Where a launcher gives what it
starts a name, and starts it again under that name, it is in the file, and whoever has the same is
let be. Where a file system knows no locks nothing is told apart, as nothing could be told of the
dead; the job goes on.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from . import filelock, folders
from .hostid import host_id
from .plainfile import open_plain

PREFIX, NEW_SUFFIX = ".claim.", ".new"
HERE_SECONDS, ELSEWHERE_SECONDS = 15.0, 100.0
"""So long a claim is waited for that is held on this machine, where the kernel takes its time to
tear down a process, and on another one: NFS keeps the locks of a machine that is gone for 90 s."""
NAP_SECONDS = 0.1
MOST_BYTES = 4096

Notice = Callable[[str, int], None]
"""Takes text and severity."""


@dataclass(frozen=True)
class Claim:
    """What a claim's file says."""

    host: str
    pid: int
    since_seconds: float
    """Unix time."""
    machine: str
    """And boot: where the kernel that keeps the lock is the same."""
    launch: str
    """What the launcher calls what it started, alike when it starts it again; or empty."""
    memory: str = ""
    """Folder that has the job's slots on that machine."""

    def text(self) -> str:
        """For people."""
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since_seconds))
        return f"process {self.pid} on {self.host}, since {since}"


class Claims:
    """One process's claim on a directory. Training thread; `release` is for any, once."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        token: str,
        node: int,
        notice: Notice,
        environment: Mapping[str, str] = os.environ,
        memory: str | os.PathLike[str] = "",
    ) -> None:
        """`token` is alike in all of the job; `node` says which of its nodes this one is; `memory`
        is told to those who look for the job's slots."""
        self._notice = notice
        self._directory, self._token = Path(directory), token
        self._path = self._directory / f"{PREFIX}{token}.{node}"
        self._mine = Claim(
            socket.gethostname(),
            os.getpid(),
            time.time(),
            host_id(),
            launch_of(environment),
            os.fspath(memory),
        )
        self._fd: int | None = None
        self.told: set[Path] = set()
        """Folders in this machine's memory of which claims of dead lives told, gone by now."""

    def stake(self) -> str:
        """Claim the directory, and wait until nobody else has; returns "" or why it is not to be
        had, and then it is not claimed. Nor is it where nothing can be written, or locked, there,
        which is said.
        """
        try:
            return self._stake()
        except OSError as error:
            self.release()
            text = f"{self._directory} cannot be claimed ({error}): a job on another machine that"
            self._notice(f"{text} has the same path would not be found", logging.INFO)
            return ""

    def _stake(self) -> str:
        folders.make(self._directory)
        self._make()
        begin, told = time.monotonic(), False
        while others := self._others():
            path, claim = next(iter(others.items()))
            seconds = max(self._patience_seconds(each) for each in others.values())
            if time.monotonic() - begin >= seconds:
                self.release()
                return self._refusal(path, claim)
            if not told:
                told = True
                text = f"{self._directory} is in use by {claim.text()}: waiting {seconds:.0f} s"
                self._notice(f"{text} for its end, at most", logging.WARNING)
            time.sleep(NAP_SECONDS)
        return ""

    def release(self) -> None:
        """The directory is free; nothing of this claim is left."""
        fd, self._fd = self._fd, None
        if fd is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()
            filelock.let_go(self._path)
            os.close(fd)

    def _make(self) -> None:
        """Locked before it can be seen: whoever sees it without a lock may remove it."""
        new = self._path.with_name(self._path.name + NEW_SUFFIX)
        while True:
            fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            try:
                os.pwrite(fd, json.dumps(asdict(self._mine)).encode(), 0)
                if filelock.try_lock(fd):
                    os.rename(new, self._path)
                    self._fd = fd
                    filelock.hold(self._path)
                    return
            except FileNotFoundError:  # somebody took it for a dead one's
                pass
            except BaseException:
                new.unlink(missing_ok=True)
                os.close(fd)
                raise
            new.unlink(missing_ok=True)
            os.close(fd)

    def _others(self) -> dict[Path, Claim]:
        """Claims that other jobs hold; those that nobody holds any more are removed."""
        found = {}
        for name in os.listdir(self._directory):
            if name.startswith(PREFIX) and not name.startswith(f"{PREFIX}{self._token}."):
                claim = self._look(self._directory / name)
                if claim is not None:
                    found[self._directory / name] = claim
        return found

    def _look(self, path: Path) -> Claim | None:
        """None where it is nobody's, or of what this job's launcher started earlier."""
        if filelock.held_here(path):
            return self._mine
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # just gone; or another user's, who could not write here
            return None
        try:
            if filelock.try_lock(fd):
                self.told |= _memory_of(os.pread(fd, MOST_BYTES, 0))
                path.unlink(missing_ok=True)
                return None
            claim = Claim(**json.loads(os.pread(fd, MOST_BYTES, 0)))
        except OSError:
            return None
        except (ValueError, TypeError):  # it is being written, or of another version
            return Claim("a machine that it does not tell", 0, time.time(), "", "")
        finally:
            os.close(fd)
        return None if claim.launch and claim.launch == self._mine.launch else claim

    def _patience_seconds(self, claim: Claim) -> float:
        return HERE_SECONDS if claim.machine == self._mine.machine else ELSEWHERE_SECONDS

    def _refusal(self, path: Path, claim: Claim) -> str:
        return (
            f"another job is at work in {self._directory} ({claim.text()}). Two jobs cannot write "
            "to one path: give this one another path. If the other one is this job's own past and "
            f"hangs there, end it; if that cannot be, remove {path}"
        )


def memory_told(directory: str | os.PathLike[str]) -> set[Path]:
    """Folders in this machine's memory of the jobs whose claims are here, dead ones' too. None in a
    trainer's own process: the kernel drops its lock when it closes a claim that it has read."""
    found = set()
    with contextlib.suppress(OSError):
        for name in [] if filelock.any_held() else os.listdir(directory):
            if name.startswith(PREFIX):
                with contextlib.suppress(OSError), open_plain(Path(directory, name)) as file:
                    found |= _memory_of(file.read(MOST_BYTES))
    return found


def _memory_of(content: bytes) -> set[Path]:
    """The folder that a claim's file tells of, if that is in this machine's memory."""
    with contextlib.suppress(ValueError, TypeError):
        claim = Claim(**json.loads(content))
        return {Path(claim.memory)} if claim.memory and claim.machine == host_id() else set()
    return set()


def launch_of(environment: Mapping[str, str]) -> str:
    """What the launcher calls what it started, where a restart has the same name, and no other
    living job has; else empty."""
    if job := environment.get("SLURM_JOB_ID"):
        return f"Slurm job {job} of {environment.get('SLURM_CLUSTER_NAME', 'a cluster')}"
    run = environment.get("TORCHELASTIC_RUN_ID", "")
    if run not in ("", "none"):  # the latter is torchrun's own, for all that are given no name
        return f"torchrun {run}"
    address = environment.get("HOROVOD_GLOO_RENDEZVOUS_ADDR", "")
    port = environment.get("HOROVOD_GLOO_RENDEZVOUS_PORT", "")
    return f"Horovod {address}:{port}" if address and port else ""


__all__ = ["Claims", "memory_told"]
