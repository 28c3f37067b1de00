"""Notes about the runs of this job, for `tierckpt log` (see `format.records`).

They have facts of this process that explain a run to people: who started it, how, and with what,
and how it ended.

Nothing that may be secret: of the command line only a hash, of the environment only the launcher's
name for the launch, of an error only its type. Nothing is imported or started for it, and unknown
facts are empty.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import re
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tierckpt._text import is_url
from tierckpt._version import __version__
from tierckpt.config import Config
from tierckpt.coordination.settings_check import JobTopology
from tierckpt.coordination.versions import Reports
from tierckpt.core.levels import LOCAL, PERSISTENT
from tierckpt.format.ids import VersionId
from tierckpt.format.records import TRAINING_END, RunEnd, RunRecord
from tierckpt.group import Group
from tierckpt.storage import answers
from tierckpt.storage.claims import launch_of, user_name
from tierckpt.storage.inventory import open_persistent
from tierckpt.storage.notes import RunRecords

__all__ = [
    "RunNotes",
    "command_hash",
    "end_reason",
    "facts_here",
    "git_commit",
    "launcher",
    "software",
]


FRAMEWORKS = ("torch", "horovod", "lightning", "transformers", "accelerate", "numpy")
"""Modules with versions worth knowing, if the script has imported them."""
LAUNCHERS = {
    "TORCHELASTIC_RUN_ID": "torchrun",
    "HOROVOD_RANK": "horovodrun",
    "OMPI_COMM_WORLD_RANK": "mpirun",
    "PMI_RANK": "mpirun",
    "SLURM_PROCID": "srun",
}
"""Launchers by a variable that each one sets."""
_COMMIT = re.compile(r"[0-9a-f]{40,64}")


def facts_here(node: str = "") -> dict[str, Any]:
    """The facts of this process, as fields of a `RunRecord`. `node` is the node's name in the
    settings. Raises nothing."""
    script = Path(sys.argv[0] if sys.argv and sys.argv[0] else ".")
    return {
        "host": node or socket.gethostname(),
        "user": user_name(os.getuid()),
        "launcher": launcher(os.environ),
        "command": command_hash(sys.argv),
        "git": git_commit(script.parent),
        "software": software(),
    }


def launcher(environment: Mapping[str, str]) -> str:
    """The launcher's own name for this launch, or its kind; empty without one."""
    kind = next((text for name, text in LAUNCHERS.items() if name in environment), "")
    name = launch_of(environment, in_use=True).name
    return name if not kind or name.startswith(kind) else f"{kind}, {name}" if name else kind


def command_hash(arguments: Sequence[str]) -> str:
    """SHA-256 of the arguments: equal for equal command lines, and nothing else can be read."""
    return hashlib.sha256("".join(f"{each}\0" for each in arguments).encode()).hexdigest()


def end_reason(asked: str, abandoned: bool) -> tuple[str, bool]:
    """The reason why the training ends, as text, and whether an error ended it. `asked`: why it
    was asked to end early, if it was; `abandoned`: it ends without a last version."""
    error = (getattr(sys, "last_value", None) or sys.exc_info()[1]) if abandoned else None
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        return f"sys.exit({code})", code != 0
    if error is not None:
        return type(error).__name__, True
    return asked or ("no last version" if abandoned else TRAINING_END), False


def git_commit(folder: Path) -> str:
    """The commit checked out around a folder, read from git's files; empty without one."""
    with contextlib.suppress(OSError, UnicodeDecodeError, RuntimeError):
        resolved = folder.resolve()
        for each in (resolved, *resolved.parents):
            if (each / ".git").exists():
                return _commit_of(each / ".git")
    return ""


def _commit_of(place: Path) -> str:
    if place.is_file():  # a worktree, or a submodule
        place = place.parent / place.read_text().removeprefix("gitdir:").strip()
    shared = place
    if (place / "commondir").is_file():
        shared = place / (place / "commondir").read_text().strip()
    head = (place / "HEAD").read_text().strip()
    if not head.startswith("ref:"):
        return head if _COMMIT.fullmatch(head) else ""
    name = head.removeprefix("ref:").strip()
    for folder in (place, shared):
        if (folder / name).is_file():
            return (folder / name).read_text().strip()
    lines = (shared / "packed-refs").read_text().splitlines()
    found = (line.split() for line in lines if not line.startswith(("#", "^")))
    return next((words[0] for words in found if words[1:] == [name]), "")


def software() -> dict[str, str]:
    """Versions of Python, this package, and the frameworks that are imported."""
    found = {"python": platform.python_version(), "tierckpt": __version__}
    for name in FRAMEWORKS:
        version = getattr(sys.modules.get(name), "__version__", None)
        if version is not None:
            found[name] = str(version)
    return found


CLOSE_SECONDS = 2.0
"""Time that the end of the job waits for a record on its way to a slow place."""
ERROR_SECONDS = 0.5
"""The same after an error: a restart waits for the end of this process."""


class RunNotes:
    """Writes a record when a run starts, and when it ends: on the local level of each node, and on
    rank 0 to the persistent level. A thread does it, so that no start waits for a disk. Training
    thread.

    After an error any rank writes, the first one for all of its node, and only to the local level:
    the restart must not wait for a store."""

    def __init__(
        self, config: Config, group: Group, topology: JobTopology, reports: Reports
    ) -> None:
        """Nothing is written yet."""
        node = topology.node(group.rank)
        self._config, self._reports, self._rank = config, reports, group.rank
        self._ranks, self._nodes = group.size, node.count
        self._is_first = node.first == group.rank
        self._record: RunRecord | None = None
        self._threads: list[threading.Thread] = []
        self._close_seconds = CLOSE_SECONDS
        self.started_from: VersionId | None = None
        """The version of this job that the run restores; None: it starts without one."""
        self.fork = ""
        """The version of another job that the run starts from; empty: none."""

    def write(self, run_id: str, generation: int) -> None:
        """Note that a run started. Raises nothing: a failure is reported."""
        if not (self._config.uses(LOCAL) or self._far):
            return
        self._record = RunRecord(
            run_id=run_id,
            generation=generation,
            started_from=self.started_from,
            fork=_whole(self.fork),
            started_seconds=time.time(),
            ranks=self._ranks,
            nodes=self._nodes,
            best=self._config.best,
            events=_whole(self._config.events_dir),
            traces=_whole(self._config.trace_dir),
            persistent=self._config.persistent.path if self._config.uses(PERSISTENT) else "",
            **facts_here(self._config.node),
        )
        self._write_record(None, self._config.uses(LOCAL) and self._is_first, self._far)

    def end(self, asked: str, abandoned: bool, version: int) -> None:
        """Note that the run ends, and how; only once, and only if its start was noted. Raises
        nothing. For `asked` and `abandoned` see `end_reason`."""
        if self._record is None:
            return
        reason, failed = end_reason(asked, abandoned)
        end = RunEnd(self._record.run_id, time.time(), reason, self._rank, failed, version)
        local = self._config.uses(LOCAL) and (self._is_first or failed)
        self._write_record(end, local, self._far and not (failed and local))
        self._record = None
        self._close_seconds = ERROR_SECONDS if failed else CLOSE_SECONDS

    @property
    def _far(self) -> bool:
        return self._config.uses(PERSISTENT) and self._rank == 0

    def _write_record(self, end: RunEnd | None, local: bool, far: bool) -> None:
        if self._record is None or not (local or far):
            return
        self._threads = [each for each in self._threads if each.is_alive()]
        thread = threading.Thread(
            target=self._write,
            args=(self._record, end, local, far, [*self._threads]),
            name="tierckpt-run-record",
            daemon=True,
        )
        with contextlib.suppress(RuntimeError):  # the limit of threads: the training matters more
            thread.start()
            self._threads.append(thread)

    def _write(
        self,
        record: RunRecord,
        end: RunEnd | None,
        local: bool,
        far: bool,
        earlier: list[threading.Thread],
    ) -> None:
        for each in earlier:
            each.join()
        try:
            if local:
                answers.ensure(self._config.directory, CLOSE_SECONDS)
                _add(RunRecords(self._config.directory), record, end)
            if far:
                place = self._config.persistent
                answers.ensure(place.path, CLOSE_SECONDS)
                with contextlib.closing(open_persistent(place, tries=3)) as store:
                    store.create()
                    _add(RunRecords(store), record, end)
        except Exception as error:  # a client's own errors, too
            what = "end" if end else "record"
            text = (
                f"the {what} of this run could not be noted, and `tierckpt log` lacks it: {error}"
            )
            self._reports.notice_later(text, logging.INFO)

    def close(self) -> None:
        """Wait a little for records on their way."""
        for thread in self._threads:
            thread.join(self._close_seconds)


def _whole(source: str) -> str:
    """A source, perhaps with its version, as an absolute path; a URL as it is."""
    return os.path.abspath(source) if source and not is_url(source) else source


def _add(there: RunRecords, record: RunRecord, end: RunEnd | None) -> None:
    if end is None:
        there.add(record)
    else:
        there.add_end(record, end)
