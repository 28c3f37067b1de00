"""The lifetime of a checkpointer: attach, and the ends of a job."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Self, Unpack

import torch

from tierckpt import _milestones
from tierckpt._text import in_words
from tierckpt.callbacks import CallbackList, Callbacks
from tierckpt.coordination.peer_setup import redundancy_groups
from tierckpt.core.halt_conditions import Reason
from tierckpt.core.levels import MEMORY
from tierckpt.errors import TierckptError
from tierckpt.events import Callback, JobEnd, check_receiver
from tierckpt.format.ids import VersionId
from tierckpt.format.run_record import TRAINING_END
from tierckpt.group import Group, SingleGroup
from tierckpt.proof.recorder import record_if_ordered
from tierckpt.settings import Settings
from tierckpt.storage.routed.folders import FileFolders

from . import attach, shutdown
from .adapter import Adapter, Handle, check_adapter
from .core import CheckpointerCore
from .final_version import FinalVersion

MEET_SECONDS = 30.0
"""At the end of a process: time to wait for the other ranks before ending alone."""


class CheckpointerLifetime(CheckpointerCore):
    """The begin and the end of a `Checkpointer`. Training thread."""

    end: JobEnd | None = None
    """What `close()` has left on each level; None before, and after `abandon()`."""
    _folders: FileFolders | None = None
    """Folders of routed files; None before the first use."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: attach.Optimizers,
        *,
        adapter: Adapter | None = None,
        group: Group | None = None,
        extra: Mapping[str, Any] | None = None,
        extra_per_rank: Mapping[str, Any] | None = None,
        on_event: Callback | None = None,
        callbacks: Iterable[Callbacks] = (),
        config_file: str | os.PathLike[str] | None = None,
        **settings: Unpack[Settings],
    ) -> None:
        self._process = os.getpid()
        begin = time.monotonic()
        _milestones.reached(_milestones.ATTACH)
        group = group or SingleGroup()
        check_receiver(on_event)  # this and the next checks: while no rank waits for another
        adapter, registered = check_adapter(adapter), CallbackList(callbacks)
        given = model, optimizer, extra, extra_per_rank, settings, config_file
        state, config, topology = attach.agree(group, adapter, *given)
        super().__init__(group, adapter, state, config, topology)
        # Nothing has been started yet.
        groups, unprotected = redundancy_groups(config, topology, group)
        slots = config.slots or attach.usual_slots(state)
        unwell = attach.check_health(config, state, group, self._node, slots)
        with contextlib.ExitStack() as undo:  # a failed try must not disturb the next one
            undo.callback(group.close)
            self._join(topology, registered, on_event, begin, slots, undo)
            needed_bytes = attach.shard_bytes(state, group.size)
            self._resources.tell_of_room(needed_bytes, group, self._node)
            attach.report_problems(config, group, state, self._reports, unwell, unprotected)
            self._connect_levels(groups)
            self._prepare_copies(undo)
            self._watch_loop(model, undo)
            record_if_ordered(self)
            undo.callback(self._adapter_closed)
            self.adapter.attached(Handle(self))
            shutdown.at_exit(self._end_with_process)
            undo.pop_all()
        self._heartbeat.attached(self._history.job)
        _milestones.reached(_milestones.ATTACHED)

    # --- whether it has ended ---------------------------------------------------------------------

    @property
    def _over(self) -> bool:
        """True after or during the end, and in a forked child: the checkpointer belongs to the
        parent process."""
        return self._closed or self._shutdown or os.getpid() != self._process

    @property
    def closed(self) -> bool:
        """True after `close()` or `abandon()`."""
        return self._closed

    def _refuse_closed(self, call: str, error: type[TierckptError]) -> None:
        if self._closed:
            raise error(f"{call} after close() or abandon(): make another Checkpointer")
        if self._shutdown:
            raise error(f"{call} during close() or abandon()")
        if self._over:
            raise error(f"{call} in a forked child: the Checkpointer belongs to the parent")

    @property
    def _amid(self) -> bool:
        """True inside a callback: during a step, a boundary, or another method."""
        return self._save_now.saving or self._log.depth + self._callbacks.depth > 0

    def _refuse_amid(self, call: str, error: type[TierckptError]) -> None:
        """Raise `error` in a callback: ranks receive events at different times, so a collective
        call would hang."""
        if self._amid:
            raise error(
                f"{call} in the callback of an event: all ranks must call it, and they receive "
                "events at different times, perhaps during a step. Call it in the loop, between "
                "two steps, or in on_step_boundary of tierckpt.Callbacks"
            )

    # --- the end --------------------------------------------------------------------------------

    def close(self) -> JobEnd | None:
        """Take a final checkpoint, wait until it is durable, and remove all that a restart does not
        need. Returns what is stored now, level by level, as `end` does from then on.

        All ranks call it. If the local level cannot be written, or does not answer (see
        `shutdown`), the memory level stays, and an event reports it. The live state is not stored
        if it is no consistent version: if an optimizer's step or a restore was interrupted, or if
        ranks are at different steps. It is not stored either if `restore(version=...)` went back
        and no step was made since: newer versions stay.

        With `on_drift="stop"` it raises ReplicaError on all ranks, at the end, if replicas are
        found to differ only now. If a level lacks the last version, an error says so; with
        `incomplete_exit_status` it raises SystemExit then, when all is released, unless the job is
        halted.

        In the callback of an event, on any one rank, it requests the end: all ranks close at the
        end of a boundary, at the second one from now at the latest; or, if all ranks requested it,
        when the process ends.
        """
        if self._over:
            return self.end
        end = self._close()
        if status := self._exit_status:
            raise SystemExit(status)
        return end

    @property
    def _exit_status(self) -> int:
        """`incomplete_exit_status` if the training has finished, and a level lacks its last
        version; else 0."""
        halted = self._halt.reason is not Reason.NONE
        incomplete = self.end is not None and not (self.end.complete or halted)
        return self.config.incomplete_exit_status if incomplete else 0

    def _close(self) -> JobEnd | None:
        """Do the work of `close`; a framework goes on with its own end."""
        if self._over:
            return self.end
        if self._amid:
            self._agreement.close_asked = True
            return None
        with self._ending():
            begin = time.perf_counter()
            self._halt.disarm()
            remove, self.end = self._final_version().make(self._restart.went_back)
            drifted = self._replicas.error
            if drifted is None and self._halt.reason is Reason.NONE:
                self._finish()
            self._reports.emit(
                "closed",
                message=self._halt.reason.text() or TRAINING_END,
                seconds={"close": time.perf_counter() - begin},
                facts={"interrupted": self._halt.reason.is_interruption},
            )
            self._shut_down(remove)
        if drifted is not None:
            raise drifted
        return self.end

    def _finish(self) -> None:
        """The training has ended by itself: other starts at its places shall know."""
        steps = self._live.steps_made - self._history.began_at
        if self._history.lineage and (steps or not self._restart.went_back):
            last = VersionId(self._history.generation, self.version)
            self._resources.finished = self._finished.closed(last, steps)

    def _final_version(self) -> FinalVersion:
        about = self.config, self.group, self._node, self._live, self._levels
        return FinalVersion(
            *about, self._sealed, self._save_now, self._halt, self._replicas, self.wait
        )

    @contextlib.contextmanager
    def _ending(self) -> Iterator[None]:
        """Context of the end: callbacks still receive events, but cannot begin anything."""
        self._shutdown = True
        try:
            yield
        finally:
            self._shutdown = False

    def _end_here(self, unattended: bool) -> None:
        """End the job, as all ranks do at this boundary. With `unattended` nobody asks
        `should_exit()`, so that the loop would go on."""
        self.close()
        if unattended:
            self._halt.exit()

    def abandon(self, commit_newest: bool = False) -> None:
        """End without a final checkpoint, and leave all versions for a restart; not collective.

        Also in the middle of an iteration: first completes the version in progress, if that takes
        only a few seconds and no optimizer has begun its step. With `commit_newest` it writes the
        newest version in memory to local.
        """
        if self._over:
            return
        self._refuse_amid("abandon()", TierckptError)
        with self._ending():
            try:
                self._active.last_chance()
            except Exception as error:
                text = f"the newest version was given up: {in_words(error)}"
                self._reports.notice(text, logging.WARNING)
            if commit_newest:
                self._save_now.commit_newest()
            self._shut_down(remove=False, abandoned=True)

    def close_or_abandon(self) -> None:
        """End at the end of a process: `close()` if all ranks get here within MEET_SECONDS, else
        each rank alone makes its newest version durable.

        Another rank may have ended with an error unnoticed, so this enters no collective that could
        hang."""
        if self._over:
            return
        if self.group.meet(MEET_SECONDS):
            self.close()
            return
        text = (
            "no final checkpoint is taken: not all ranks have come to this end, or they do not "
            "answer because the communication was shut down before (call close() first). Versions "
            f"up to v{self.version} stay, also in memory ({self._resources.job.path})"
        )
        self._reports.notice(text, logging.WARNING)
        self.abandon(commit_newest=True)

    def _end_with_process(self) -> None:
        """End an open checkpointer when the process ends: `abandon()`, with a warning if the script
        has just not closed it, unless a callback requested the end and no boundary came after
        that."""
        failed = shutdown.script_failed()
        if self._agreement.close_asked and not failed:
            self.close_or_abandon()
            return
        made = self.version > 0 and not (self._over or self._final_version().nothing_new())
        if made and not failed and self.group.rank == 0:
            in_memory = (
                f"; newer ones are in memory alone ({self._resources.job.path}), which a "
                "reboot clears"
            )
            text = (
                "the script ends without ckpt.close(): no final checkpoint is taken, and "
                f"{self.config.directory} has the versions that the intervals put there"
                f"{in_memory if self.config.uses(MEMORY) else ''}. Call close() at the end, or use "
                "the checkpointer in a with block"
            )
            self._reports.notice(text, logging.WARNING)
        self.abandon()

    def _abandon_after_error(self) -> None:
        """Call `abandon()` after an exception ended the training.

        If a signal that ends the job came before, the signal may be the cause (it ended a worker of
        a DataLoader) and the node may be lost soon: the newest version in memory goes to disk.
        """
        signal_name = self._halt.signal_name
        if signal_name and self.config.uses("local") and not self._over:
            text = (
                f"this rank received {signal_name}, and the training ended with an error: no "
                "further checkpoint is taken; the newest version in memory is written to disk"
            )
            self._reports.notice(text, logging.WARNING)
        if self._history.lineage and not self._over:
            self._reports.failed_after(self.version)
        self.abandon(commit_newest=bool(signal_name))

    def __enter__(self) -> Self:
        """Enter the context: no effect."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *_: object
    ) -> None:
        """Close; after an exception only `abandon()`, so that the restarted job finds all versions.
        `sys.exit(0)` is a normal end, but perhaps not of all ranks."""
        if kind is None:
            self.close()
        elif shutdown.is_orderly(error):
            self.close_or_abandon()
        else:
            self._abandon_after_error()

    # --- what an end releases ---------------------------------------------------------------------

    def _shut_down(self, remove: bool, abandoned: bool = False) -> None:
        self._levels.run_notes.end(self._halt.reason.text(), abandoned, self.version)
        self._adapter_closed()
        self._closed = True
        self._halt.close()
        self._own_hooks.close()
        # The copier would wait for layers that are never released.
        self._active.give_up("the job ended in the middle of an iteration")
        self._agreement.close()  # the copier may wait for the vote of a rank that ended
        self._active.close()
        self._journal.close(remove)
        self._replicas.restart()  # also frees its references to the state
        self._levels.drift.wait()
        if self._folders is not None:
            self._folders.close()
        self._agent.close(abandoned=abandoned)
        self._forks.marks.settle(self._agreement.local.safe, self._agreement.memory.safe)
        self._forks.marks.close()
        self._job.leave(remove)
        if self._trace is not None:
            self._trace.close()
        if abandoned:
            self._heartbeat.ended()
        self._job.close_log()

    def _adapter_closed(self) -> None:
        try:
            self.adapter.closed()
        except Exception as error:
            self._reports.notice(f"the adapter could not detach: {in_words(error)}", logging.ERROR)


__all__ = ["CheckpointerLifetime"]
