"""Claims: only one job at a time writes to a directory of the local level, on any machine.

On one machine, ranks of the same number exclude each other (`job_directory`). A directory that
several machines see needs more: two jobs there would continue from each other's versions. So the
first rank of each node creates a file in it and keeps the file locked for the whole run (through a
small process, see `file_lock.hand_over`):

    .claim.<token>.<node>      the token is drawn at each attach; all ranks have the same one

Then it reads the other claims. An unlocked claim with another token belongs to a dead run, and is
removed. A locked one belongs to another job, or to a run of this job that is still ending: this job
waits for it, and is refused if it stays, or if its training *finishes* meanwhile: a run of this job
would die or be halted. A launcher may start a job again that was refused in that way, when the
other one has gone: so the refused one leaves its claim, unlocked, and later starts of the same
launcher find it. If two jobs start at once, each sees the other's claim,
because both create their file before they look, and both are refused. (The mistake is then found at
once.) A claim that cannot be opened counts as held. Of another user's claim only the lock is
tested, with a lock that needs no write access.

A hanging run must not exclude its own successor. It is ignored if it is proved to have ended
(`launch`): a process that was in that run, or started one of its ranks, is in this run or started
one of its ranks, and that process's claims of the old run are gone; or the scheduler counts
attempts, and that run belongs to an earlier one. A name alone proves nothing. If the file system
has no locks, dead and living claims cannot be distinguished, and the job continues without the
check.
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
from tierckpt._text import directory_of, is_url, some
from tierckpt.storage.files import answers, durable, file_lock
from tierckpt.storage.files.mounts import locks_are_local
from tierckpt.storage.memory.job_directory import JobFinishedError

from .claim_file import (
    GONE,
    MOST_BYTES,
    PREFIX,
    Claim,
    memory_folders,
    memory_of,
    opened,
    unreadable,
    user_name,
)
from .launch import Launch, process_mark

NEW_SUFFIX = ".new"
HERE_SECONDS, ELSEWHERE_SECONDS = 15.0, 100.0
"""How long to wait for a claim held on this machine, whose kernel needs time to end a process, and
for one held on another machine: NFS keeps the locks of a lost machine for 90 s."""
NAP_SECONDS = 0.1
RELEASE_SECONDS = 1.0
"""At the end, a directory that does not answer within this time keeps its claim."""

Notice = Callable[[str, int], None]
"""Called with a text and a severity."""


class DirectoryClaim:
    """One process's claim on a directory. Training thread; any thread may call `release`, once."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        token: str,
        node: int,
        notice: Notice,
        launch: Launch = Launch(),  # noqa: B008 (frozen)
        memory: str | os.PathLike[str] = "",
        run_starters: Iterable[str] = (),
        persistent: str = "",
        events: str = "",
        goes_on_from: int = 0,
        has_keeper: bool = True,
    ) -> None:
        """`token` is the same in the whole job; `node` is the number of this node in it; `launch`
        is that of this process; `memory` is the folder of the job's slots, recorded for other runs;
        `run_starters` are the starters of all ranks; `persistent` and `events` are recorded, see
        `Claim`; `goes_on_from`: see `stake`; `has_keeper`: a process of its own holds the claim
        open, see `file_lock.hand_over`."""
        self._notice = notice
        self._directory, self._token = Path(directory), token
        self._path = self._directory / f"{PREFIX}{token}.{node}"
        self._launch = launch
        self._own = Claim(
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
            tuple(run_starters) or launch.starters,
            persistent if is_url(persistent) else _absolute(persistent),
            _absolute(events),
        )
        self._goes_on_from, self._has_keeper = goes_on_from, has_keeper
        self._fd: int | None = None
        self._awaited: set[Path] = set()
        """Claims that were held when this process came."""
        self._finished: int | None = None
        """The version at which the training of such a claim has finished meanwhile."""
        self._local_locks = ""
        """Why locks of other machines cannot be seen; empty if they can."""
        self._unknown: dict[Path, Claim] = {}
        """Claims of other machines of which this machine cannot see whether they are held."""
        self.found_memory: set[Path] = set()
        """Memory folders on this machine that were named in removed claims of dead runs."""

    def stake(self) -> str:
        """Claim the directory, after waiting for other claims to end. Returns "" or the reason for
        a refusal; after a refusal the directory is not claimed. Raises JobFinishedError if a run
        that was waited for has finished at another version than `goes_on_from`. It is also
        unclaimed, with a notice, if the claim cannot be written or locked."""
        try:
            return self._stake()
        except OSError as error:
            self.release()
            self._report_unclaimed(error)
            return ""

    def _report_unclaimed(self, error: OSError) -> None:
        text = f"{self._directory} cannot be claimed ({error}): a job on another machine with"
        self._notice(f"{text} the same path would not be noticed", logging.INFO)

    def _stake(self) -> str:
        try:
            durable.make(self._directory)
            self._make()
        except OSError as error:
            if error.errno not in durable.NO_RIGHT:
                raise
            self._report_unclaimed(error)  # another holder can be seen all the same
        self._local_locks = locks_are_local(self._directory)
        begin, looks = float("inf"), 0
        while others := self._others():
            self._awaited |= others.keys()
            begin = min(
                begin, time.monotonic()
            )  # reading the claims may take longer than the limit
            path, claim = next(iter(others.items()))
            seconds = max(self._patience_seconds(each) for each in others.values())
            if time.monotonic() - begin >= seconds:
                self.release()
                return self._refusal(path, claim)
            looks += 1
            if looks == 2:  # not of a killed run, whose lock is gone a moment after it
                text = f"{self._directory} is in use by {claim.text()}: waiting at most"
                self._notice(f"{text} {seconds:.0f} s for its end", logging.WARNING)
            time.sleep(NAP_SECONDS)
        if self._local_locks:
            self._report_unknown()
        return ""

    def _report_unknown(self) -> None:
        left = some([claim.text() for claim in self._unknown.values()], 2, "; ")
        those = f". Other machines have claims there: {left}" if left else ""
        self._notice(
            f"{self._local_locks}: a job on another machine that also uses {self._directory} is "
            f"not noticed{those}. Give each job its own path, or mount it with shared locks",
            logging.WARNING,
        )

    def release(self, finished: int | None = None) -> None:
        """Free the directory: removes the claim. `finished`: the version with which the training
        has ended by itself. If others wait for the claim, it stays, unlocked, and says so. A
        directory that does not answer is freed by the end of the process."""
        fd, self._fd = self._fd, None
        if fd is not None:
            if answers.silent([str(self._directory)], RELEASE_SECONDS):
                return
            with contextlib.suppress(OSError):
                if finished is None or not self._is_awaited():
                    self._path.unlink()
                else:
                    self._path.write_bytes(replace(self._own, finished=finished).encode())
            file_lock.close(fd)

    def _is_awaited(self) -> bool:
        """True if there are claims of other runs."""
        names = [name for name in os.listdir(self._directory) if name.startswith(PREFIX)]
        return any(not name.startswith(f"{PREFIX}{self._token}.") for name in names)

    def leave_refused(self, finished: int) -> None:
        """After a refusal because a training has finished: leave an unlocked claim for later starts
        of this launcher. Raises nothing."""
        launchers = tuple(each for each in self._launch.starters if each != process_mark("self"))
        if launchers:
            left = replace(self._own, finished=finished, refused=True, starters=launchers)
            with contextlib.suppress(OSError):
                self._path.write_bytes(left.encode())

    def _make(self) -> None:
        """Create the claim. It is locked before it becomes visible, as unlocked claims may be
        removed."""
        new = self._path.with_name(self._path.name + NEW_SUFFIX)
        while True:
            fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            try:
                durable.share(fd, self._directory)
                os.pwrite(fd, self._own.encode(), 0)
                if file_lock.lock_for_good(fd, self._path):
                    os.rename(new, self._path)
                    self._fd = file_lock.hand_over(fd) if self._has_keeper else fd
                    return
            except FileNotFoundError:  # another process took it for a dead run's
                pass
            except BaseException:
                new.unlink(missing_ok=True)
                file_lock.close(fd)
                raise
            new.unlink(missing_ok=True)
            file_lock.close(fd)

    def _others(self) -> dict[Path, Claim]:
        """Claims that other jobs hold. Removes claims that are not held any more."""
        found = {}
        for name in os.listdir(self._directory):
            if name.startswith(PREFIX) and not name.startswith(f"{PREFIX}{self._token}."):
                claim = self._look(self._directory / name)
                if claim is not None:
                    found[self._directory / name] = claim
        if self._finished is not None:
            self.release()
            raise JobFinishedError(str(self._directory), self._finished)
        ended = self._ended_runs(found)
        return {path: claim for path, claim in found.items() if _token_of(path) not in ended}

    def _ended_runs(self, held: dict[Path, Claim]) -> set[str]:
        """Tokens of ended runs: those of this launch, or of an earlier attempt of it, that this run
        succeeds. See the module's docstring."""
        runs: dict[str, list[Claim]] = {}
        for path, claim in held.items():
            runs.setdefault(_token_of(path), []).append(claim)
        own_starters = set(self._own.run_starters)
        ended = set()
        for token, claims in runs.items():
            at_work = {starter for claim in claims for starter in claim.starters}
            shared = own_starters.intersection(*(claim.run_starters for claim in claims))
            attempts = [Launch(job=claim.job, attempt=claim.attempt) for claim in claims]
            if shared - at_work or all(map(self._launch.supersedes, attempts)):
                ended.add(token)
        return ended

    def _look(self, path: Path) -> Claim | None:
        """The claim in the file; None if it is not held any more."""
        if file_lock.held_here(path):  # another checkpointer of this process has it
            return replace(self._own, job="", starters=(), run_starters=())
        try:
            fd, may_write = opened(path)
        except OSError as error:
            return None if error.errno in GONE else unreadable(path)
        try:
            if file_lock.try_lock(fd) if may_write else file_lock.free(fd):
                content = os.pread(fd, MOST_BYTES, 0)
                if self._may_be_held_elsewhere(path, content):
                    return None
                if self._judge_end(path, content):
                    return None  # it stays
                self.found_memory |= memory_of(content)
                with contextlib.suppress(OSError):  # another user's file stays
                    path.unlink(missing_ok=True)
                return None
            return Claim.decode(os.pread(fd, MOST_BYTES, 0))
        except (ValueError, TypeError):  # it is being written
            return unreadable(path)
        finally:
            os.close(fd)

    def _judge_end(self, path: Path, content: bytes) -> bool:
        """True if the claim is of a training that was waited for and has finished, or shows that
        this launcher's job was refused for that reason before: this job is refused."""
        try:
            claim = Claim.decode(content)
        except (ValueError, TypeError):
            return False
        again = claim.refused and set(claim.starters) & set(self._launch.starters)
        known = again or (path in self._awaited and not claim.refused)
        if known and claim.finished not in (None, self._goes_on_from):
            self._finished = claim.finished
        return bool(again)

    def _may_be_held_elsewhere(self, path: Path, content: bytes) -> bool:
        """True if a machine whose locks are not visible here may hold the claim. It stays: its job
        may be alive."""
        with contextlib.suppress(ValueError, TypeError):
            claim = Claim.decode(content)
            if self._local_locks and claim.machine != self._own.machine:
                self._unknown[path] = claim
                return True
        return False

    def _patience_seconds(self, claim: Claim) -> float:
        return HERE_SECONDS if claim.machine == self._own.machine else ELSEWHERE_SECONDS

    def _refusal(self, path: Path, claim: Claim) -> str:
        return (
            f"another job uses {self._directory} ({claim.text()}). Two jobs cannot write to one "
            "path: give this job another path. If the other one is an earlier run of this job "
            f"that hangs, end it; if it cannot be ended, remove {path}"
        )


def _absolute(path: str) -> str:
    """The path for a process in another folder; an empty one stays."""
    return os.path.abspath(directory_of(path)) if path else ""


def _token_of(path: Path) -> str:
    return path.name.removeprefix(PREFIX).partition(".")[0]


__all__ = ["PREFIX", "DirectoryClaim", "memory_folders"]
