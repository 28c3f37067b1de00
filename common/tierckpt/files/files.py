"""Files: versions of files that a program writes, on all levels, for any program."""

from __future__ import annotations

import contextlib
import operator
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Unpack

from tierckpt._text import error_text
from tierckpt.callbacks import Callbacks
from tierckpt.checkpointer import shutdown
from tierckpt.core.decisions import Reason
from tierckpt.errors import RestoreError, TierckptError
from tierckpt.events import Callback
from tierckpt.settings import Settings
from tierckpt.storage.job_directory import JobBusyError
from tierckpt.storage.routed import VersionFiles

from .job import FilesJob, Intervals, group_of
from .versions import Restart, RestoredFiles, Saving

SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE")
"""Variables in which launchers put the number of ranks."""


class Files:
    """Versions of files, for a program under MPI or of one process.

    All ranks call all methods, in the same order, from one thread, except `wait` and `abandon`. A
    version exists only if all ranks completed it. It is then in the memory of all nodes; the agents
    bring it to the other levels while the program computes.

    Args:
        path: folder of the local level, and the identity of the job, as for a `Checkpointer`.
        group: the ranks of the job: a communicator of mpi4py (`MPI.COMM_WORLD`), a
            `tierckpt.Group` (`ddp_ckpt.TorchGroup()` in a job of torch), or None for one process.
        files_dir: folder in which `route` lets the program write; None: `shm_dir`, memory. A folder
            on a disk of the node takes less memory and more time.
        on_event, callbacks, config_file: as for a `Checkpointer`.
        settings: see `tierckpt.Config`. A step, in `local_every_steps`, is a call of
            `need_checkpoint`, or a version where the program makes no such calls. Settings of a
            training (`boundary`, `release`, `replicas`, `trace_dir`) have no effect.

    Raises ConfigError on all ranks for settings that differ or are wrong, JobBusyError if another
    job uses the path.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        /,
        *,
        group: Any = None,
        files_dir: str | os.PathLike[str] | None = None,
        on_event: Callback | None = None,
        callbacks: Iterable[Callbacks] = (),
        config_file: str | os.PathLike[str] | None = None,
        **settings: Unpack[Settings],
    ) -> None:
        given: dict[str, Any] = {**settings}
        if path is not None:
            given["path"] = path
        ranks = group_of(group)
        try:
            self._job = FilesJob(ranks, given, config_file, files_dir, on_event, callbacks)
        except JobBusyError as error:
            if group is None and any(int(os.environ.get(name, 1)) > 1 for name in SIZES):
                raise JobBusyError(
                    f"{error} Several ranks were started, each as a job of its own: give "
                    "group=MPI.COMM_WORLD"
                ) from error
            raise
        self._process = os.getpid()
        self.closed = False
        """True after `close` or `abandon`."""
        self._intervals = Intervals(self._job.config)
        self._saving = Saving(self._job, self._intervals)
        self._current: VersionFiles | None = None
        self._restart: Restart | None = None
        self._refused = False
        shutdown.at_exit(self._end_with_process)

    # --- a restart ------------------------------------------------------------------------------

    def latest(self) -> str | None:
        """Name of the version that `restore` returns; None if there is none. Reads and verifies it.
        Collective; before the first version of this run."""
        restart = self._find(None)
        return restart.name if restart else None

    def restore(
        self, version: int | None = None, ranks: Sequence[int] | None = None
    ) -> RestoredFiles | None:
        """Bring the files of the newest sound version to this node; returns their paths by name.

        Reads memory, local and parity on every node, and the persistent level, as
        `Checkpointer.restore` does. None if there is no version. Collective; before the first
        version of this run.

        Args:
            version: only the version of this number; RestoreError if it does not exist.
            ranks: ranks of the former run with files for this rank; None: its own, and a
                RestoreError if the number of ranks is another one.
        """
        restart = self._find(version)
        if restart is None:
            return None
        restored = restart.load(ranks)
        self.accept()
        return restored

    def accept(self) -> None:
        """Start the run from the version that was found. `restore` does it. Collective."""
        if self._restart is None or self._restart.found is None:
            raise TierckptError("accept() without load(): no version was found")
        self._restart.start_run(self._refused)
        self._intervals.continue_from(self._job)
        self._restart.close()
        self._restart = None

    def load(self, ranks: Sequence[int] | None = None) -> RestoredFiles | None:
        """As `restore`, but the run does not start yet: `accept` or `refuse` follows. For programs
        that may find the files unusable. Collective."""
        restart = self._find(None)
        return restart.load(ranks) if restart else None

    def refuse(self) -> None:
        """Give up the version that `load` returned: the next `load` returns an older one. Once the
        older one is accepted, later runs do not take the refused one either. Collective."""
        if self._restart is not None and self._restart.found is not None:
            self._refused = True
            self._restart.refuse()

    def _find(self, version: int | None) -> Restart | None:
        self._refuse_closed("restore()")
        if self._current is not None:
            raise RestoreError("restore() while a version is being written: end it first")
        if self._job.history.lineage:
            raise RestoreError(
                "restore() after the run has started: call it before the first version, and once"
            )
        if self._restart is None:
            self._restart = Restart(self._job)
        restart = self._restart
        if restart.found is not None and version not in (None, restart.number):
            restart.close()
            self._restart = restart = Restart(self._job)
        if restart.found is None and not restart.find(version):
            self._restart = None
            return None
        return restart

    # --- versions -------------------------------------------------------------------------------

    def need_checkpoint(self) -> bool:
        """True if a version is due by the intervals (`memory_every_steps`, `local_every_seconds`
        ...), or if the job is to end; one call a step. The same on all ranks. Collective."""
        self._refuse_closed("need_checkpoint()")
        self._job.turn()
        self._intervals.step()
        due = self._intervals.due(self._job.config.uses)
        due_on_0: bool = self._job.group.all_gather_object(bool(due))[0]
        return due_on_0 or self._job.halt.reason is not Reason.NONE

    @contextlib.contextmanager
    def version(self, name: int | str | None = None) -> Iterator[VersionFiles]:
        """The context in which a program writes the files of a version. Collective.

        After it the version is complete in the memory of all ranks, or lost on all, with an event
        that says why: see `VersionFiles.complete`. An error inside it ends the version on all
        ranks, and is raised on this one.

        Args:
            name: number of the version, larger than the last one; or a name, with the next number;
                None: the next number.
        """
        files = self.begin(name)
        try:
            yield files
        except Exception as error:
            self.end(error_text(error))
            raise
        except BaseException:
            self._current = None  # an interrupt: no other rank may be there
            raise
        self.end()

    def begin(self, name: int | str | None = None) -> VersionFiles:
        """Start a version; `end` completes it. `version` does both. Collective."""
        self._refuse_closed("version()")
        if self._current is not None:
            raise TierckptError(
                f"version() inside version {self._current.name}: end that one first"
            )
        if self._restart is not None:
            self._restart.close()
            self._restart = None
        job = self._job
        if not job.history.lineage:
            job.levels.start_afresh()
        number, text = self._named(name)
        job.folders.clear()
        job.folders.drop_restored()
        self._current = VersionFiles(job.folders.routed, number, text)
        return self._current

    def end(self, trouble: str = "") -> bool:
        """Complete the version of the last `begin`, unless a rank has `trouble`; returns True on
        all ranks if it is complete. Collective.

        If the job is to end early and the program never calls `should_exit`, this closes and raises
        SystemExit, as `Checkpointer.step` does."""
        files = self._current
        if files is None:
            raise TierckptError("end() without begin(): no version is being written")
        self._current = None
        files.complete = self._saving.save(files, trouble)
        if files.complete and self._job.unattended:
            self.close()
            self._job.halt.exit()
        return files.complete

    def _named(self, name: int | str | None) -> tuple[int, str]:
        last = self._job.version
        if name is None or isinstance(name, str):
            return last + 1, name or str(last + 1)
        try:
            number = operator.index(name)
        except TypeError:
            raise TierckptError(
                f"version({name!r}): give a whole number, a name, or nothing"
            ) from None
        if number <= last:
            raise TierckptError(
                f"version({number}): the last version is {last}, and numbers must grow. Give a "
                "larger number, or none"
            )
        return number, str(number)

    @property
    def ranks_found(self) -> int:
        """Number of ranks that wrote the version that was found; 0 if none was."""
        found = self._restart.found if self._restart is not None else None
        return 0 if found is None else len(found.plan.sources)

    @property
    def begun(self) -> bool:
        """True once the run has started: from a restored version, or with its first one."""
        return bool(self._job.history.lineage)

    def warn(self, text: str) -> None:
        """Emit one warning of all ranks. Not collective."""
        self._job.warn(text)

    @property
    def current(self) -> VersionFiles | None:
        """The version being written."""
        return self._current

    # --- the end --------------------------------------------------------------------------------

    def should_exit(self) -> bool:
        """True if the job is to end early: some rank received a signal, `tierckpt halt` asked for
        it, or the allocation's time is over. The same on all ranks. Collective."""
        self._refuse_closed("should_exit()")
        self._job.turn()
        return self._job.halt.should_exit()

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until every version is committed to this node's local level, or has failed; False on
        time-out. Not collective."""
        return self._job.wait(timeout_seconds)

    def close(self) -> None:
        """Make the newest version durable, wait for the levels beyond the node, and free memory.
        Collective. If the local level cannot be written, the versions in memory stay."""
        if self.closed or os.getpid() != self._process:
            return
        self._give_up_current()
        remove = self._saving.finish()
        self._shut_down(remove)

    def abandon(self) -> None:
        """End without a wait, and leave all versions for a restart. Not collective."""
        if self.closed or os.getpid() != self._process:
            return
        self._give_up_current()
        self._shut_down(remove=False, abandoned=True)

    def _give_up_current(self) -> None:
        self._current = None
        if self._restart is not None:
            self._restart.close()
            self._restart = None

    def _shut_down(self, remove: bool, abandoned: bool = False) -> None:
        self.closed = True
        self._job.shut_down(remove, abandoned)

    def _end_with_process(self) -> None:
        self.abandon()

    def _refuse_closed(self, call: str) -> None:
        if self.closed:
            raise TierckptError(f"{call} after close() or abandon(): make another Files")
        if os.getpid() != self._process:
            raise TierckptError(f"{call} in a forked child: the Files belong to the parent")

    def __enter__(self) -> Files:
        """Enter the context: no effect."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close; after an exception `abandon`, so that a restart finds all versions."""
        if kind is None:
            self.close()
        else:
            self.abandon()


__all__ = ["Files"]
