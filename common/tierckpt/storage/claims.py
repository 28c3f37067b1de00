"""Claims: only one job at a time writes to a directory of the local level, on any machine.

On one machine, ranks of the same number exclude each other (`job_directory`). A directory that
several machines see needs more: two jobs there would continue from each other's versions. So the
first rank of each node creates a file in it and keeps the file locked for the whole run (through a
small process, see `file_lock.hand_over`):

    .claim.<token>.<node>      the token is drawn at each attach; all ranks have the same one

Then it reads the other claims. An unlocked claim with another token belongs to a dead run, and is
removed. A locked one belongs to another job, or to an ending run of this job: this job waits for
it, and is refused if it stays, or if its training *finishes* meanwhile: a run of this job would die
or be halted. A launcher may start a job again that was refused in that way, when the other one has
gone: so the refused one leaves its claim, unlocked, and later starts of the same launcher find it.
If two jobs start at once, each sees the other's claim, because both create their file before they
look, and both are refused. (The mistake is then found at once.) A claim that cannot be opened
counts as held. Of another user's claim only the lock is tested, with a lock that needs no write
access.

A hanging run must not exclude its own successor. It is ignored if it is proved to have ended. A
name alone proves nothing, and neither does a launcher's name for a launch: two jobs in one Slurm
allocation have the same number, and two torchruns may be given the same `--rdzv-id`. These facts
prove it:

- *A process* that was in that run and is in this one, such as a survivor in elastic Horovod.
- *A launcher's process* that started ranks of both. torchrun's agent ends the ranks of one round
  before it starts those of the next. (The claims of those ranks must be gone, too.)
- *A scheduler's count of attempts*: Slurm ends one attempt of a job before it starts the next.

To learn these facts, nothing waits or raises: facts that cannot be read prove nothing. If the file
system has no locks, dead and living claims cannot be distinguished, and the job continues without
the check.

Folders of other nodes: `{node}` in `path` stands for the node's name, and a restarted pod may have
another name. Its folder is then another one too, and a restart does not find the versions in the
old one. `siblings_of` finds them, so that a notice can name them.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import pwd
import re
import socket
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct, field
from msgspec.structs import asdict, replace

from tierckpt._milestones import ATTEMPT_VARIABLE
from tierckpt._process import boot_id, host_id, process_stat
from tierckpt._text import directory_of, is_url, some
from tierckpt.format.ids import VersionId
from tierckpt.format.manifest import Manifest
from tierckpt.storage import answers, durable, file_lock
from tierckpt.storage.durable import locks_are_local, mounts_in, open_plain
from tierckpt.storage.job_directory import JobFinishedError

from .local import LocalStore

__all__ = [
    "CLAIM_PREFIX",
    "NODE",
    "Claim",
    "DirectoryClaim",
    "Launch",
    "Sibling",
    "claims_in",
    "is_claimed",
    "launch_of",
    "memory_folders",
    "memory_of",
    "node_named",
    "opened_claim",
    "parent_of",
    "process_mark",
    "siblings_of",
    "smallest",
    "unreadable_claim",
    "user_name",
    "words_for",
]


CLAIM_PREFIX = ".claim."
MAX_BYTES = 1 << 16
UNKNOWN = "an unknown machine"
GONE = frozenset({errno.ENOENT, errno.ESTALE})


class Claim(Struct, frozen=True):
    """Content of a claim's file. Unknown fields of a later tierckpt are ignored."""

    host: str = UNKNOWN
    pid: int = 0
    since_seconds: float = field(default_factory=time.time)
    """Unix time."""
    machine: str = ""
    """Id of the machine and its boot: the kernel that keeps the lock."""
    launch: str = ""
    """The launcher's name for this launch, for messages; may be empty."""
    memory: str = ""
    """Folder of the job's slots on that machine."""
    user: str = ""
    job: str = ""
    attempt: int = 0
    starters: tuple[str, ...] = ()
    """Starters of the process that made the claim, see `Launch`."""
    run_starters: tuple[str, ...] = ()
    """Starters of all ranks of its run."""
    persistent: str = ""
    """The job's `persistent_path`, for commands that watch the job."""
    events: str = ""
    """The job's `events_dir`, absolute, for the same commands."""
    finished: int | None = None
    """The version with which the holder's training has ended by itself, for starts that wait."""
    refused: bool = False
    """The holder was refused, because the run with that end is another training: the starters of
    this claim may not try again."""

    def encode(self) -> bytes:
        """The content as bytes."""
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def decode(content: bytes) -> Claim:
        """Raises ValueError or TypeError for other content."""
        values = json.loads(content)
        given = {name: values[name] for name in Claim.__struct_fields__ if name in values}
        for name in ("starters", "run_starters"):
            given[name] = tuple(given.get(name, ()))
        return Claim(**given)

    def text(self) -> str:
        """The claim, for messages."""
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since_seconds))
        process = f"process {self.pid} on {self.host}" if self.pid else self.host
        owner = f", of user {self.user}" if self.user else ""
        return f"{process}{owner}, since {since}" + (
            f", started by {self.launch}" if self.launch else ""
        )


def opened_claim(path: Path) -> tuple[int, bool]:
    """A descriptor, and whether it may be written to: another user's claim may be readable only."""
    how = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        return os.open(path, os.O_RDWR | how), True
    except OSError as error:
        if error.errno not in durable.NO_RIGHT:
            raise
        return os.open(path, os.O_RDONLY | how), False


def unreadable_claim(path: Path) -> Claim | None:
    """A claim of which only the owner of the file is known; None if the file has just
    disappeared."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    except OSError:
        return Claim()
    return replace(Claim(), user=user_name(found.st_uid), since_seconds=found.st_mtime)


def user_name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)


def is_claimed(directory: str | os.PathLike[str]) -> bool:
    """Whether a living process has a claim there, as far as locks show. Raises OSError. Do not call
    it for the directory that this process has claimed: closing the file would drop the lock."""
    for name in os.listdir(directory):
        if name.startswith(CLAIM_PREFIX):
            with contextlib.suppress(FileNotFoundError):
                fd = os.open(Path(directory, name), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                try:
                    if not file_lock.free(fd):
                        return True
                finally:
                    os.close(fd)
    return False


def claims_in(directory: str | os.PathLike[str]) -> list[tuple[Claim, bool]]:
    """The claims in a directory, each with True while its process lives, as far as locks show. One
    that cannot be read is left out. Empty in a trainer's own process, as `memory_folders`."""
    found = []
    with contextlib.suppress(OSError):
        for name in [] if file_lock.any_held() else sorted(os.listdir(directory)):
            if name.startswith(CLAIM_PREFIX):
                with (
                    contextlib.suppress(OSError, ValueError, TypeError),
                    open_plain(Path(directory, name)) as file,
                ):
                    held = file_lock.held(file.fileno())
                    found.append((Claim.decode(file.read(MAX_BYTES)), held))
    return found


def memory_folders(directory: str | os.PathLike[str]) -> set[Path]:
    """Folders in this machine's memory of the jobs that have claims here, dead jobs included. Empty
    in a trainer's own process: the kernel drops its lock when it closes a claim that it has read.
    """
    found = set()
    with contextlib.suppress(OSError):
        for name in [] if file_lock.any_held() else os.listdir(directory):
            if name.startswith(CLAIM_PREFIX):
                with contextlib.suppress(OSError), open_plain(Path(directory, name)) as file:
                    found |= memory_of(file.read(MAX_BYTES))
    return found


def memory_of(content: bytes) -> set[Path]:
    """The memory folder named in a claim's content, if it is on this machine."""
    with contextlib.suppress(ValueError, TypeError):
        claim = Claim.decode(content)
        return {Path(claim.memory)} if claim.memory and claim.machine == host_id() else set()
    return set()


MAX_STARTERS = 256
"""Starters kept of a run: the smallest, so that two runs that share some keep the same ones. Every
node reads the claims of all."""
_OF_A_WORKER = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "RANK")
"""Variables that torchrun sets for a worker, as MASTER_PORT; its agent does not have these values
itself."""
_LETTERS = 16


class Launch(Struct, frozen=True):
    """Origin of one process, see the module's docstring."""

    name: str = ""
    """The launcher's name for this launch, for messages; may be empty."""
    job: str = ""
    """Job of a scheduler that counts attempts and runs one at a time; else empty."""
    attempt: int = 0
    starters: tuple[str, ...] = ()
    """Hashes that identify this process and its launcher's process, across all machines."""

    def supersedes(self, other: Launch) -> bool:
        """True if the scheduler ended the attempt of `other` before it started this one."""
        return bool(self.job) and self.job == other.job and self.attempt > other.attempt


NO_LAUNCH = Launch()
"""Of a process of which nothing is known."""


def launch_of(environment: Mapping[str, str], in_use: bool = False) -> Launch:
    """The launch of this process. `in_use` means that the process is still in another run, so it
    does not prove that any run has ended."""
    slurm = _slurm_job(environment)
    restarts = environment.get("SLURM_RESTART_COUNT", "")
    attempt = int(restarts) if slurm and restarts.isdigit() else 0
    own = [] if in_use else [process_mark("self")]
    starters = tuple(filter(None, [*own, _torchrun_agent(environment)]))
    return Launch(_launch_name(environment), slurm, attempt, starters)


def smallest(starters: Iterable[str]) -> tuple[str, ...]:
    """The starters that are recorded for a run, from those of all ranks."""
    return tuple(sorted(set(starters))[:MAX_STARTERS])


def _launch_name(environment: Mapping[str, str]) -> str:
    get = environment.get
    if job := get("SLURM_JOB_ID"):
        step = get("SLURM_STEP_ID", "")
        return f"Slurm step {job}.{step}" if step else f"Slurm job {job}"
    run = get("TORCHELASTIC_RUN_ID", "")
    if run not in ("", "none"):  # "none" is torchrun's default for runs without a name
        return f"torchrun {run}"
    address, port = get("HOROVOD_GLOO_RENDEZVOUS_ADDR"), get("HOROVOD_GLOO_RENDEZVOUS_PORT")
    return f"Horovod {address}:{port}" if address and port else ""


def _slurm_job(environment: Mapping[str, str]) -> str:
    """Job of Slurm; its numbers are unique in a cluster only."""
    names = ("SLURM_CLUSTER_NAME", "SLURM_JOB_UID", "SLURM_JOB_ID")
    values = [environment.get(name, "") for name in names]
    return "/".join(values) if values[0] and values[-1] else ""


def process_mark(process: str | int) -> str:
    """Id of a process of this machine (`self` or its number) that no other process ever has. Empty
    if it cannot be read."""
    boot = boot_id()
    with contextlib.suppress(OSError, IndexError, ValueError):
        stat = Path(f"/proc/{process}/stat").read_text()
        # The name, in brackets, may contain any character.
        number, started = stat.split()[0], stat.rpartition(")")[2].split()[19]
        space = os.stat("/proc/self/ns/pid").st_ino
        text = f"{boot} {space} {number} {started}"
        return hashlib.sha256(text.encode()).hexdigest()[:_LETTERS] if boot else ""
    return ""


def _torchrun_agent(environment: Mapping[str, str]) -> str:
    """The nearest ancestor that was not started as this rank, unlike a script around it."""
    # `tierckpt run`, an ancestor started as this rank, changes the port for its later attempts.
    port = "MASTER_PORT" if environment.get(ATTEMPT_VARIABLE, "1") == "1" else ""
    names = [*_OF_A_WORKER, *filter(None, [port])]
    own_values = [environment.get(name) for name in names]
    if not own_values[0] or not _proc_is_ours():
        return ""
    process = os.getppid()
    with contextlib.suppress(OSError, IndexError, ValueError):
        while process > 0:
            values = _environment_of(process)
            if [values.get(name) for name in names] != own_values:
                return process_mark(process)
            process = int(process_stat(process)[1])
    return ""


def _proc_is_ours() -> bool:
    """Whether /proc has this process's numbering: a container may have the host's. Raises
    nothing."""
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self") == str(os.getpid())
    return False


def _environment_of(process: int) -> dict[str, str]:
    """The initial environment of a process. Raises OSError if it is another user's, or has
    ended."""
    pairs = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    return dict(os.fsdecode(pair).split("=", 1) for pair in pairs if b"=" in pair)


NEW_SUFFIX = ".new"
HERE_SECONDS, ELSEWHERE_SECONDS = 15.0, 100.0
"""How long to wait for a claim held on this machine (its kernel needs time to end a process), and
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
        launch: Launch = NO_LAUNCH,
        memory: str | os.PathLike[str] = "",
        run_starters: Iterable[str] = (),
        persistent: str = "",
        events: str = "",
        continues_from: int = 0,
        has_keeper: bool = True,
    ) -> None:
        """`token` is the same in the whole job; `node` is the number of this node in it; `launch`
        is that of this process; `memory` is the folder of the job's slots, recorded for other runs;
        `run_starters` are the starters of all ranks; `persistent` and `events` are recorded, see
        `Claim`; `continues_from`: see `stake`; `has_keeper`: a process of its own holds the claim
        open, see `file_lock.hand_over`."""
        self._notice = notice
        self._directory, self._token = Path(directory), token
        self._path = self._directory / f"{CLAIM_PREFIX}{token}.{node}"
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
        self._continues_from, self._has_keeper = continues_from, has_keeper
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
        that was waited for has finished at another version than `continues_from`. It is also
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
        start, looks = float("inf"), 0
        while others := self._others():
            self._awaited |= others.keys()
            start = min(
                start, time.monotonic()
            )  # reading the claims may take longer than the limit
            path, claim = next(iter(others.items()))
            seconds = max(self._patience_seconds(each) for each in others.values())
            if time.monotonic() - start >= seconds:
                self.release()
                return self._refusal(path, claim)
            looks += 1
            if looks == 2:  # not of a killed run: its lock is gone a moment after it
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
        names = [name for name in os.listdir(self._directory) if name.startswith(CLAIM_PREFIX)]
        return any(not name.startswith(f"{CLAIM_PREFIX}{self._token}.") for name in names)

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
            if name.startswith(CLAIM_PREFIX) and not name.startswith(
                f"{CLAIM_PREFIX}{self._token}."
            ):
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
            fd, may_write = opened_claim(path)
        except OSError as error:
            return None if error.errno in GONE else unreadable_claim(path)
        try:
            if file_lock.try_lock(fd) if may_write else file_lock.free(fd):
                content = os.pread(fd, MAX_BYTES, 0)
                if self._may_be_held_elsewhere(path, content):
                    return None
                if self._judge_end(path, content):
                    return None  # it stays
                self.found_memory |= memory_of(content)
                with contextlib.suppress(OSError):  # another user's file stays
                    path.unlink(missing_ok=True)
                return None
            return Claim.decode(os.pread(fd, MAX_BYTES, 0))
        except (ValueError, TypeError):  # it is being written
            return unreadable_claim(path)
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
        if known and claim.finished not in (None, self._continues_from):
            self._finished = claim.finished
        return bool(again)

    def _may_be_held_elsewhere(self, path: Path, content: bytes) -> bool:
        """True if a machine with locks not visible here may hold the claim. It stays: its job
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
    return path.name.removeprefix(CLAIM_PREFIX).partition(".")[0]


NODE = "{node}"
MAX_FOLDERS = 256
"""Limit of folders that are looked into; each takes one listing."""


class Sibling(Struct, frozen=True):
    """A folder of another node with a version that this run does not have."""

    node: str
    directory: Path
    newest: VersionId


def parent_of(template: str) -> Path:
    """The directory that has a name for each node in it."""
    return Path(os.path.split(template.partition(NODE)[0])[0])


def node_named(template: str, names: Iterable[str]) -> Iterator[tuple[str, Path]]:
    """The node and its directory, for each of these names in `parent_of`. The node's name is read
    from the folder's name; it is the same wherever the path has `{node}`. Pure."""
    before, _, after = template.partition(NODE)
    parent, prefix = os.path.split(before)
    suffix, slash, rest = after.partition("/")
    again = "(?P=node)".join(map(re.escape, suffix.split(NODE)))
    shape = re.compile(f"{re.escape(prefix)}(?P<node>.+){again}", re.DOTALL)
    for match in filter(None, map(shape.fullmatch, names)):
        node = match["node"]
        yield node, Path(parent, match[0] + slash + rest.replace(NODE, node))


def siblings_of(
    template: str, job: str, but: Collection[str], most: int = MAX_FOLDERS
) -> list[Sibling]:
    """Folders of other nodes, not in `but`, that have versions of `job` and no running job, newest
    first; those that can be read, of at most `most` folders."""
    if NODE not in template:
        return []
    names: list[str] = []
    with contextlib.suppress(OSError):
        parent = parent_of(template)
        hang = {
            os.path.basename(p) for p in answers.silent(mounts_in(parent), answers.PATIENCE_SECONDS)
        }
        names = sorted({*os.listdir(parent)} - hang)
    others = [(node, path) for node, path in node_named(template, names) if node not in but]
    found = []
    for node, directory in others[:most]:
        with contextlib.suppress(Exception):  # errors are reported where the folder is used
            store = LocalStore(directory)
            newest = max(store.keys(), key=lambda key: key.id)
            owner = Manifest.decode(store.read_manifest(newest)).facts.job
            if owner == job and not is_claimed(directory):
                found.append(Sibling(node, directory, newest.id))
    return sorted(found, key=lambda each: (each.newest, each.node), reverse=True)


def words_for(newer: Sequence[Sibling], here: str, found: VersionId | None) -> str:
    """Text of the notice that this run, which continues from `found` or starts from nothing, leaves
    these versions unused, with advice. Pure. `here` is the value of `{node}`."""
    first, more = newer[0], len(newer) - 1
    others = f" ({more} more folders there have newer versions than this run)" if more else ""
    course = f"continues from {found}" if found else "starts from the beginning"
    return (
        f"{first.directory} has {first.newest} of this job{others}, and no node of this run is "
        f"called {first.node!r}: here {NODE} in path stands for {here!r}, and this run {course}. "
        f"To continue from {first.newest}: end this job and restart it with node={first.node!r} "
        "(TIERCKPT_NODE), or give nodes permanent names. With peer_redundancy a node with a new "
        "name can rebuild the shards of a lost node"
    )
