"""Claims: one job at a time writes to a directory of the local level, whichever machine it is on.

Ranks of one number keep each other out on one machine (`job_directory`). A directory that several
machines see needs more: two jobs there would go on from each other's versions. So each node's first
rank leaves a file in it and keeps that locked while it lives:

    .claim.<token>.<node>      the token is drawn for each attach, and alike on all ranks

Then it looks at the others. A file of another token that nobody has locked is a dead run's, and
goes. One that is locked is another job's, or a dying life's of this one: it is waited for, and
then this job is refused. Of two that come at once each sees the other, as both make their file
before they look. (Both are refused then, and the mistake is found at once.) One that cannot be
opened is somebody's. One of another user may be looked at only: whether it is locked is asked with
a lock that readers may have.

A run that hangs somewhere must not keep its own successor out. It is passed over when it is proved
to be over (`launch`): something that started, or was, a rank of that run has started, or is, one
of this run, and what it had there is gone; or the scheduler counts attempts, and that run is of
an earlier one. A name alone proves nothing. Where a file system knows no locks nothing is told
apart, as nothing could be told of the dead; the job goes on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from tierckpt._host import host_id
from tierckpt._text import some
from tierckpt.storage.files import durable, file_lock
from tierckpt.storage.files.mounts import locks_are_local

from .claim_file import (
    GONE,
    MOST_BYTES,
    PREFIX,
    Claim,
    memory_of,
    memory_told,
    opened,
    unreadable,
    user_name,
)
from .launch import Launch

NEW_SUFFIX = ".new"
HERE_SECONDS, ELSEWHERE_SECONDS = 15.0, 100.0
"""So long a claim is waited for that is held on this machine, where the kernel takes its time to
tear down a process, and on another one: NFS keeps the locks of a machine that is gone for 90 s."""
NAP_SECONDS = 0.1

Notice = Callable[[str, int], None]
"""Takes text and severity."""


class DirectoryClaim:
    """One process's claim on a directory. Training thread; `release` is for any, once."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        token: str,
        node: int,
        notice: Notice,
        launch: Launch = Launch(),  # noqa: B008 (frozen)
        memory: str | os.PathLike[str] = "",
        everyone: Iterable[str] = (),
    ) -> None:
        """`token` is alike in all of the job; `node` says which of its nodes this one is; `launch`
        is this process's; `memory` is told to those who look for the job's slots; `everyone`: the
        starters of all ranks."""
        self._notice = notice
        self._directory, self._token = Path(directory), token
        self._path = self._directory / f"{PREFIX}{token}.{node}"
        self._launch = launch
        self._mine = Claim(
            socket.gethostname(),
            os.getpid(),
            time.time(),
            host_id(),
            launch.name,
            os.fspath(memory),
            user_name(os.geteuid()),
            launch.job,
            launch.attempt,
            launch.starters,
            tuple(everyone) or launch.starters,
        )
        self._fd: int | None = None
        self._local_locks = ""
        """Why others' locks cannot be seen; empty where they can."""
        self._unknown: dict[Path, Claim] = {}
        """Claims of other machines of which nobody here can tell whether they are held."""
        self.told: set[Path] = set()
        """Folders in this machine's memory of which claims of dead runs told, gone by now."""

    def stake(self) -> str:
        """Claim the directory, and wait until nobody else has; returns "" or why it is not to be
        had, and then it is not claimed. Nor is it where nothing can be written, or locked, there,
        which is said.
        """
        try:
            return self._stake()
        except OSError as error:
            self.release()
            self._tell_unclaimed(error)
            return ""

    def _tell_unclaimed(self, error: OSError) -> None:
        text = f"{self._directory} cannot be claimed ({error}): a job on another machine that"
        self._notice(f"{text} has the same path would not be found", logging.INFO)

    def _stake(self) -> str:
        try:
            durable.make(self._directory)
            self._make()
        except OSError as error:
            if error.errno not in durable.NO_RIGHT:
                raise
            self._tell_unclaimed(error)  # who has it can be seen all the same
        self._local_locks = locks_are_local(self._directory)
        begin, told = float("inf"), False
        while others := self._others():
            begin = min(
                begin, time.monotonic()
            )  # a look may take longer than anybody is waited for
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
        if self._local_locks:
            self._tell_unknown()
        return ""

    def _tell_unknown(self) -> None:
        left = some([claim.text() for claim in self._unknown.values()], 2, "; ")
        those = f". There are claims of other machines: {left}" if left else ""
        self._notice(
            f"{self._local_locks}: a job on another machine that has {self._directory}, too, is "
            f"not found{those}. Give each job a path of its own, or share locks when you mount it",
            logging.WARNING,
        )

    def release(self) -> None:
        """The directory is free; nothing of this claim is left."""
        fd, self._fd = self._fd, None
        if fd is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()
            file_lock.close(fd)

    def _make(self) -> None:
        """Locked before it can be seen: whoever sees it without a lock may remove it."""
        new = self._path.with_name(self._path.name + NEW_SUFFIX)
        while True:
            fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            try:
                durable.share(fd, self._directory)
                os.pwrite(fd, self._mine.encode(), 0)
                if file_lock.lock_for_good(fd, self._path):
                    os.rename(new, self._path)
                    self._fd = fd
                    return
            except FileNotFoundError:  # somebody took it for a dead one's
                pass
            except BaseException:
                new.unlink(missing_ok=True)
                file_lock.close(fd)
                raise
            new.unlink(missing_ok=True)
            file_lock.close(fd)

    def _others(self) -> dict[Path, Claim]:
        """Claims that other jobs hold; those that nobody holds any more are removed."""
        found = {}
        for name in os.listdir(self._directory):
            if name.startswith(PREFIX) and not name.startswith(f"{PREFIX}{self._token}."):
                claim = self._look(self._directory / name)
                if claim is not None:
                    found[self._directory / name] = claim
        over = self._lives_that_are_over(found)
        return {path: claim for path, claim in found.items() if _token_of(path) not in over}

    def _lives_that_are_over(self, held: dict[Path, Claim]) -> set[str]:
        """Tokens of runs of this very launch, or of an earlier attempt of it, of which this claim
        is the successor's. See the module's text."""
        runs: dict[str, list[Claim]] = {}
        for path, claim in held.items():
            runs.setdefault(_token_of(path), []).append(claim)
        mine = set(self._mine.everyone)
        over = set()
        for token, claims in runs.items():
            at_work = {starter for claim in claims for starter in claim.starters}
            shared = mine.intersection(*(claim.everyone for claim in claims))
            attempts = [Launch(job=claim.job, attempt=claim.attempt) for claim in claims]
            if shared - at_work or all(map(self._launch.supersedes, attempts)):
                over.add(token)
        return over

    def _look(self, path: Path) -> Claim | None:
        """None where it is nobody's any more."""
        if file_lock.held_here(path):  # another checkpointer of this process has it
            return replace(self._mine, job="", starters=(), everyone=())
        try:
            fd, may_write = opened(path)
        except OSError as error:
            return None if error.errno in GONE else unreadable(path)
        try:
            if file_lock.try_lock(fd) if may_write else file_lock.free(fd):
                content = os.pread(fd, MOST_BYTES, 0)
                if self._may_be_held_elsewhere(path, content):
                    return None
                self.told |= memory_of(content)
                with contextlib.suppress(OSError):  # not ours to remove: it stays
                    path.unlink(missing_ok=True)
                return None
            return Claim.decode(os.pread(fd, MOST_BYTES, 0))
        except (ValueError, TypeError):  # it is being written
            return unreadable(path)
        finally:
            os.close(fd)

    def _may_be_held_elsewhere(self, path: Path, content: bytes) -> bool:
        """Though nobody here holds it. It stays: its job may live."""
        with contextlib.suppress(ValueError, TypeError):
            claim = Claim.decode(content)
            if self._local_locks and claim.machine != self._mine.machine:
                self._unknown[path] = claim
                return True
        return False

    def _patience_seconds(self, claim: Claim) -> float:
        return HERE_SECONDS if claim.machine == self._mine.machine else ELSEWHERE_SECONDS

    def _refusal(self, path: Path, claim: Claim) -> str:
        return (
            f"another job is at work in {self._directory} ({claim.text()}). Two jobs cannot write "
            "to one path: give this one another path. If the other one is this job's own past and "
            f"hangs there, end it; if that cannot be, remove {path}"
        )


def _token_of(path: Path) -> str:
    return path.name.removeprefix(PREFIX).partition(".")[0]


__all__ = ["PREFIX", "DirectoryClaim", "memory_told"]
