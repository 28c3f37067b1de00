"""The checkpointer's methods for scripts, its attach, and the ends of a job.

All public methods are for the training thread. All ranks make the same calls.

Scripts with an unchanged loop get a restore at the start, and a checkpoint at the end.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import operator
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self, SupportsIndex, Unpack

import torch

from tierckpt import _milestones
from tierckpt._text import error_text
from tierckpt.callbacks import CallbackList, Callbacks
from tierckpt.config import load_config
from tierckpt.coordination.error_barrier import ErrorBarrier
from tierckpt.coordination.peers import redundancy_groups
from tierckpt.coordination.pinning import mark_everywhere
from tierckpt.coordination.proof_order import order_here, redirected
from tierckpt.core.decisions import Reason
from tierckpt.core.levels import MEMORY
from tierckpt.core.parts import Boundary, Part, VoteField, call
from tierckpt.errors import ConfigError, PinError, RestoreError, TierckptError
from tierckpt.events import Callback, JobEnd, check_receiver
from tierckpt.format.ids import VersionId
from tierckpt.format.records import TRAINING_END
from tierckpt.goodput.heartbeat import Heartbeat
from tierckpt.group import Group, SingleGroup
from tierckpt.halt.controller import HaltController
from tierckpt.hooks.epoch_ends import EpochEnds
from tierckpt.hooks.unsaved_objects import Unsaved
from tierckpt.journal import Journaled
from tierckpt.replicas.unchanged import Unchanged
from tierckpt.restore.progress import Progress
from tierckpt.restored import Restored
from tierckpt.settings import Settings, with_settings
from tierckpt.state.extras import LoaderPlace, check_extra
from tierckpt.state.names import unwrap
from tierckpt.state.training_state import label_optimizers
from tierckpt.storage import job_directory
from tierckpt.storage.notes import ORIGIN
from tierckpt.storage.routed import FileFolders, VersionFiles

from . import shutdown, start
from .adapter import Adapter, Handle, check_adapter
from .live_state import as_number
from .loop import CheckpointerCore, TrainingJob
from .save_now import FinalVersion
from .start import DataWitness

if TYPE_CHECKING:
    from tierckpt.lineage.fork import Forked, ForkOrder, Forks, PartReport, Selection

__all__ = ["Checkpointer"]


class UserCallbacks(Part):
    """Callbacks of the script, at the moments that are not events."""

    STEPPED = "released", "boundary_ends"
    """Moments of each step."""

    def __init__(self, callbacks: CallbackList) -> None:
        self._callbacks = callbacks
        if not callbacks:
            self.sleep(*self.STEPPED)
            callbacks.on_added = partial(self.wake, *self.STEPPED)

    @classmethod
    def of(cls, job: TrainingJob) -> Self:
        """Of every job: callbacks may be added later."""
        return cls(job.callbacks)

    def released(
        self,
        params: Sequence[torch.Tensor],
        version: int,
        reduction: Any,
        launched_seconds: float | None,
    ) -> None:
        """Call `on_allreduce_launched`."""
        self._callbacks.call("on_allreduce_launched", params)

    def boundary_ends(self, at: Boundary) -> None:
        """Call `on_step_boundary`."""
        self._callbacks.call("on_step_boundary", at.id.version)

    def restored(self, result: Restored) -> None:
        """Call `on_restored`."""
        self._callbacks.call("on_restored", result)


class Traced(Part):
    """The recorder of a trace; few jobs load it."""

    @classmethod
    def of(cls, job: TrainingJob) -> Part | None:
        """A `Trace`, if the setting asks for it."""
        if not job.config.trace_dir:
            return None
        from tierckpt.tracing.recorder import open_trace

        return open_trace(job.config, job.group.rank, job.state.name_of, job.log)


class Compared(Part):
    """The check that replicas are equal; a job of one rank does not load it."""

    votes = VoteField("check"), VoteField("check_complement")
    """See `ReplicaMonitor`."""

    @classmethod
    def of(cls, job: TrainingJob) -> Part | None:
        """A `ReplicaMonitor`, if there are several ranks."""
        if job.group.size == 1:
            return None
        from tierckpt.replicas.monitor import ReplicaMonitor

        return ReplicaMonitor.of(job)


class OtherJobs(Part):
    """Forks and parts of other jobs' versions, for a job that may need neither: a restore that
    does puts `Forks` in the place of this part."""

    def __init__(self, job: TrainingJob) -> None:
        self._job = job

    @classmethod
    def of(cls, job: TrainingJob) -> Part:
        """The `Forks` at once, if the setting names a version to begin from."""
        return cls(job)._forks() if job.config.fork_from else cls(job)

    def found_versions(self) -> None:
        """An earlier start may have left a hold at the source."""
        if self._has_record():
            self._forks().found_versions()

    def start_elsewhere(
        self,
        order: ForkOrder | None,
        strict: bool,
        bar: Progress,
        load_adapter: Callable[[Any], None],
    ) -> Forked | None:
        """Do as `Forks.start_elsewhere`, if some rank has an order or a record."""
        config, group = self._job.config, self._job.group
        asked = order is not None or bool(config.persistent.path) or self._has_record()
        if not any(group.all_gather_object(asked)):
            return None
        with ErrorBarrier(group):
            forks = self._forks()
        return forks.start_elsewhere(order, strict, bar, load_adapter)

    def load_parts(
        self, text: str, selection: Selection, strict: bool, bar: Progress
    ) -> PartReport:
        """Do as `Forks.load_parts`."""
        with ErrorBarrier(self._job.group):
            forks = self._forks()
        return forks.load_parts(text, selection, strict, bar)

    def _has_record(self) -> bool:
        """Whether a record of the job's origin is on this node, or cannot be looked for."""
        for place in (self._job.config.directory, self._job.resources.job.path):
            try:
                os.lstat(os.path.join(place, ORIGIN))
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError:
                pass
            return True
        return False

    def _forks(self) -> Forks:
        from tierckpt.lineage.fork import Forks

        forks = Forks.of(self._job)
        if self.owner is not None:
            self.owner.replace(self, forks)
        return forks


PARTS: tuple[type[Part], ...] = (
    Unsaved,
    DataWitness,
    EpochEnds,
    Traced,
    Heartbeat,
    OtherJobs,
    Journaled,
    UserCallbacks,
    Unchanged,
    Compared,
    HaltController,
)
"""The features, in the order in which each moment calls them. A new one is a row here."""

MEET_SECONDS = 30.0
"""At the end of a process: time to wait for the other ranks before ending alone."""


NOTHING_LATER = "No further version is taken until restore()"


@with_settings
class Checkpointer(CheckpointerCore):
    """Checkpoints a replicated training state, layer by layer, during training.

    Args:
        model: the trained module; it may be wrapped (DDP, `torch.compile`).
        optimizer: one optimizer, a sequence, or a dict of names and optimizers.
        adapter: the way in which the loop's library reduces gradients and makes steps; None for a
            plain loop. `ddp_ckpt.Checkpointer` and `horovod_ckpt.Checkpointer` set it.
        group: the job's ranks; None for a single process.
        extra: objects with `state_dict`/`load_state_dict` and the same state on all ranks
            (scheduler, scaler); also torch and numpy generators.
        extra_per_rank: the same for objects with a different state on each rank (a data loader).
        on_event: called with every `Event`, on the training thread.
        callbacks: see `Callbacks`; `add_callbacks` adds more.
        config_file: TOML file with settings.
        settings: any of `Settings`, which `help()` of this class explains.

    Raises ConfigError for bad settings, UnsupportedStateError for state that cannot be stored, and
    TypeError for callbacks that are not callable.
    The constructor is collective: all ranks call it at the same point.
    """

    _restored_paths: Mapping[str, str] | None = MappingProxyType({})
    """Paths of restored files by name; None before they are written."""
    end: JobEnd | None = None
    """What `close()` has left on each level; None before, and after `abandon()`."""
    _folders: FileFolders | None = None
    """Folders of routed files; None before the first use."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: start.Optimizers,
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
        started = time.monotonic()
        _milestones.reached(_milestones.ATTACH)
        group = group or SingleGroup()
        check_receiver(on_event)  # this and the next checks: while no rank waits for another
        adapter, registered = check_adapter(adapter), CallbackList(callbacks)
        given = model, optimizer, extra, extra_per_rank, settings, config_file
        state, config, topology = start.agree(group, PARTS, adapter, *given)
        super().__init__(group, adapter, state, config, topology, PARTS)
        # Nothing has been started yet.
        groups, unprotected = redundancy_groups(config, topology, group)
        slots = config.slots or start.usual_slots(state)
        with contextlib.ExitStack() as undo:  # a failed try must not disturb the next one
            undo.callback(group.close)
            self._join(topology, registered, on_event, started, slots, undo)
            needed_bytes = start.shard_bytes(state, group.size)
            self._resources.tell_of_room(needed_bytes, group, self._node)
            start.report_problems(config, group, state, self._reports, unprotected)
            self._connect_levels(groups)
            self._prepare_copies(undo)
            self._watch_loop(model, undo)
            if (order := order_here()) is not None:
                from tierckpt.proof.recorder import Recorder

                unsaved, data = self._parts.find(Unsaved), self._parts.find(DataWitness)
                assert unsaved is not None
                assert data is not None
                self._callbacks.add(Recorder(order, self, unsaved, data))
            undo.callback(self._adapter_closed)
            self.adapter.attached(Handle(self))
            shutdown.at_exit(self._end_with_process)
            undo.pop_all()
        call(self._parts.attached, self._job)
        _milestones.reached(_milestones.ATTACHED)

    # --- in the loop ------------------------------------------------------------------------------

    def step(self, metric: float | None = None) -> None:
        """Mark the boundary: call it once per iteration, after the optimizer's (and scheduler's)
        step.

        Takes a checkpoint if one is due. An iteration without an optimizer step (gradient
        accumulation, a step skipped by the GradScaler) only counts as an iteration.

        `metric` is a measurement of the current state, for `best` in `local_keep` and
        `persistent_keep`; the one of rank 0 counts. It does not make a checkpoint due (a following
        `save(now=True)` does). If your loop does not call `step()`, set the attribute `metric`
        instead: the optimizer's next step clears it.

        With `boundary="forward"` the call only sets `metric`; an event reports that.
        """
        position = self._position
        if metric is not None:
            position.metric = as_number(metric)
        if not self._iterations.called():
            return
        self._own_hooks.called()
        self._active.capture.drop_streams()
        for ends in self._parts.iteration_ends:
            ends()
        position.iteration, position.ahead = position.iteration + 1, 0
        if not (self._history.lineage or self._over):
            self._levels.start_afresh()  # all ranks get here, including those that skipped the step
        if self._iterations.since and not self._over:
            self._boundary()
        if self._agreement.reported != position.iteration:
            self._agreement.passed(position.iteration)

    def save(self, now: bool = False) -> None:
        """Request a checkpoint on memory and local, independent of the intervals.

        One rank may call it; the checkpoint is taken at the boundary after all ranks know of the
        request. With `now=True` all ranks call it, between two steps, and it returns when the
        version is durable on this rank (or an event gave the reason why it is not).
        """
        if not isinstance(now, bool):
            raise TypeError(
                f"save(now=...) is True or False, not {now!r}; the setting `path` is the place"
            )
        self._refuse_closed("save()", TierckptError)
        if not now:
            self._agreement.ask()
            return
        if self._save_now.saving:  # called by a callback, at the boundary of another save
            return
        self._refuse_in_callback("save(now=True)", TierckptError)
        if why := self._save_now.no_moment():
            later = "" if self._agreement.diverged is None else f". {NOTHING_LATER}"
            self._reports.notice(f"save(now=True) stores nothing: {why}{later}", logging.ERROR)
        else:
            self._save_now.save()

    @contextlib.contextmanager
    def files(self) -> Iterator[VersionFiles]:
        """The context in which a program writes files that belong to the state, each rank its own::

            with ckpt.files() as f:
                torch.save(index, f.route("index.pt"))
            ckpt.step()

        From the next boundary on they are part of every version, with the tensors of the same
        boundary, until another `files()` replaces all of them; after a restart `restored_files`
        has their paths. Not collective. The copier copies them with each version, so files of many
        bytes need longer intervals. If the block raises, the earlier files stay.
        """
        self._refuse_closed("files()", TierckptError)
        folders = self._file_folders()
        folders.clear()
        routed = VersionFiles(folders.routed, self.version + 1, "of the next boundary")
        try:
            yield routed
            sources = routed.sources(lambda text: self._reports.notice(text, logging.WARNING))
            if self._restored_paths is None:  # they are not there any more
                self._restored_paths = {}
            self._state.routed.replace(sources)
            routed.complete = True
        finally:
            routed.complete = bool(routed.complete)
            folders.clear()  # so a later `open` is an error

    @property
    def restored_files(self) -> Mapping[str, str]:
        """Paths of this rank's files in the version that was restored last, by name; empty if it
        has none, or was written by another number of ranks. Ask for it before `files()` replaces
        them. The files are copies, and stay until the end."""
        if self._restored_paths is None:
            folder = self._file_folders().restored(self.group.rank)
            self._restored_paths = self._state.routed.write(folder)
        return self._restored_paths

    def _file_folders(self) -> FileFolders:
        if self._folders is None:
            where = self.config.shm_dir, self._resources.job, self.group.rank
            self._folders = FileFolders(*where)
        return self._folders

    @property
    def newest(self) -> Mapping[str, int | None]:
        """The newest complete version on each level of the job, such as `{"memory": 12,
        "local": 10, "persistent": 8}`; None: no version yet.

        What this rank knows since the last boundary, without a look at any place; after `close()`,
        what that has left. More may be there already: ranks agree on a version one boundary after
        it is complete, and nodes see the end of a flush at different times.
        """
        return self._reports.newest_by_level() if self.end is None else self.end.newest

    def pin(self, version: int) -> tuple[str, ...]:
        """Protect a version from retention, on all levels; returns the levels that have it now.

        Waits for versions on their way to the levels, as long as there is progress. A version that
        goes to the persistent level at a later boundary is pinned there when it is complete. All
        ranks call it, between steps. Raises PinError, on all ranks, if no level has the version or
        if a level does not answer.
        """
        self._refuse_closed("pin()", PinError)
        self._refuse_in_callback("pin()", PinError)
        self._save_now.no_moment()  # ranks may have cast different numbers of votes
        where = (self.config, self.group, self._node)
        return mark_everywhere("pin", version, *where, self._agent)

    def unpin(self, version: int) -> tuple[str, ...]:
        """End the protection of `pin`; called in the same way."""
        self._refuse_closed("unpin()", PinError)
        self._refuse_in_callback("unpin()", PinError)
        self._save_now.no_moment()
        return mark_everywhere("unpin", version, self.config, self.group, self._node)

    def should_exit(self) -> bool:
        """True if the job is to end early: some rank received a signal, `tierckpt halt` asked for
        the end, or the allocation's time is over. A last version is in progress then; leave the
        loop and call `close()`.

        Returns the same on all ranks, if they call it after the same boundary. A script that never
        calls it is ended anyway: all ranks close and raise SystemExit at the boundary.
        """
        return self._halt.should_exit()

    @property
    def exit_reason(self) -> str:
        """The reason why `should_exit()` is true, as text; empty while it is false."""
        return self._halt.reason.text()

    @property
    def interrupted(self) -> bool:
        """True if the reason of `should_exit()` is a signal or the end of the allocation: the job
        is to be started again. False after `tierckpt halt`, except with `--seconds-left`, which
        announces the end of the allocation."""
        return self._halt.reason.is_interruption

    def restore(
        self,
        version: SupportsIndex | None = None,
        strict: bool = True,
        progress: bool | None = None,
        *,
        fork_from: str | os.PathLike[str] | None = None,
        only: str | Sequence[str] | None = None,
        map: Mapping[str, str] | None = None,
    ) -> Restored:
        """Restore the newest sound version in place; returns the iteration to continue with.

        Reads memory, local and parity on every node, including nodes that the job has left, and the
        persistent level. Verifies checksums before it changes anything, and falls back to the next
        copy, then to the next older version. Returns 0 if there is no version.
        All ranks call it, before the first step, or later to go back.

        Args:
            version: restore only this version; RestoreError if it does not exist.
            strict: raise StateMismatchError if the structure differs; False: load the part that
                fits.
            progress: show a progress bar on the standard error of rank 0; None: if it is a
                terminal.
            fork_from: another job's path or persistent_path, or `PATH@v4000`; default: the setting
                `fork_from`. If this job has no version of its own, it starts there, exactly. Later
                starts take this job's own versions.
            only: with a fork: take only `"model"`, `"optimizer"` or `"extra"`, or several of these.
                The job starts at iteration 0 then, and `Restored.partial` is a `PartReport`.
            map: with a fork: new names for tensors of the model, `{"backbone.*": "encoder.*"}`.
        """
        order = self._fork_order(version, fork_from, only, map, strict)
        if isinstance(version, bool) or not isinstance(version, SupportsIndex | None):
            raise TypeError(
                f"restore(version=...) takes a version's number, not {version!r}; the place is the "
                "Checkpointer's setting `path`"
            )
        version = None if version is None else operator.index(version)
        self._refuse_closed("restore()", RestoreError)
        self._refuse_in_callback("restore()", RestoreError)
        self.adapter.restore_begins()
        bar = Progress(Progress.wanted(self.group.rank, progress))
        with contextlib.closing(bar), torch.inference_mode(False):
            try:
                self.restored = self._restart.restore(version, strict, bar, order)
                self._restored_paths = None if self._state.routed.kept else {}
            except RestoreError:  # on all ranks
                # The training may continue, and open versions get no further votes.
                self._agreement.settle()
                raise
        for obj in (*self._state.extra.values(), *self._state.extra_per_rank.values()):
            if isinstance(obj, LoaderPlace):
                obj.restored()
        _milestones.reached(_milestones.RESTORED)
        call(self._parts.restored, self.restored)
        return self.restored

    def _fork_order(
        self,
        version: SupportsIndex | None,
        fork_from: str | os.PathLike[str] | None,
        only: str | Sequence[str] | None,
        map: Mapping[str, str] | None,
        strict: bool,
    ) -> ForkOrder | None:
        if fork_from is None and only is None and not map:
            return None
        from tierckpt.lineage.fork import ForkOrder, Selection

        selection = Selection.of(only, map)
        source = "" if fork_from is None else os.fspath(fork_from)
        if source and version is not None:
            raise ValueError(
                "restore(version=..., fork_from=...) names two versions: version is one of this "
                'job, and the source\'s is named in fork_from="PATH@VERSION"'
            )
        if selection is not None and not (source or self.config.fork_from):
            raise ValueError(
                "only= and map= choose parts of another job's version: give fork_from=, too. Into "
                "a job with versions of its own, load_from() loads parts"
            )
        return ForkOrder(source, selection, strict)

    def load_from(
        self,
        source: str | os.PathLike[str],
        only: str | Sequence[str] = "model",
        map: Mapping[str, str] | None = None,
        strict: bool = True,
        progress: bool | None = None,
    ) -> PartReport:
        """Load parts of another job's version into the live state; this job continues with its own
        iterations and versions.

        For populations that copy the weights of the best member, and for weights trained elsewhere.
        Every level of the other job is read, its memory included, also while it runs. Nothing is
        noted or held there: this job's own next version has the result. All ranks call it, between
        two steps.

        Population based training: Jaderberg et al., 2017 (arXiv:1711.09846).

        Args:
            source: the other job's path or persistent_path, or `PATH@v4000`; without a number, its
                newest complete version.
            only: `"model"`, `"optimizer"` or `"extra"`, or several of these.
            map: new names for tensors of the model, `{"backbone.*": "encoder.*"}`.
            strict: raise StateMismatchError, with nothing changed, if these parts do not match
                tensor by tensor; False: load what fits. The report has the rest.
            progress: as for `restore`.

        Raises RestoreError on all ranks, with nothing changed, if there is no such version, or in
        the middle of a gradient accumulation: its gradients belong to the weights before.
        """
        from tierckpt.lineage.fork import Selection

        selection = Selection.of(only, map)
        assert selection is not None
        self._refuse_closed("load_from()", RestoreError)
        self._refuse_in_callback("load_from()", RestoreError)
        bar = Progress(Progress.wanted(self.group.rank, progress))
        with contextlib.closing(bar), torch.inference_mode(False):
            return self._restart.load_from(os.fspath(source), selection, strict, bar)

    def add_callbacks(self, callbacks: Callbacks) -> None:
        """Call these callbacks from now on."""
        self._callbacks.add(callbacks)

    def register(self, name: str, obj: Any, per_rank: bool = False) -> None:
        """Add an object to `extra` after construction, before the first boundary or restore."""
        check_extra("extra_per_rank" if per_rank else "extra", name, obj)
        (self._state.extra_per_rank if per_rank else self._state.extra)[name] = obj
        if (ends := self._parts.find(EpochEnds)) is not None:
            ends.find_places()

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
    def _in_callback(self) -> bool:
        """True inside a callback: during a step, a boundary, or another method."""
        return self._save_now.saving or self._log.depth + self._callbacks.depth > 0

    def _refuse_in_callback(self, call: str, error: type[TierckptError]) -> None:
        """Raise `error` in a callback: ranks receive events at different times, so a collective
        call would hang."""
        if self._in_callback:
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

        With `replicas="stop"` it raises ReplicaError on all ranks, at the end, if replicas are
        found to differ only now. If a level lacks the last version, an error says so; with
        `requeue_exit_status` it raises SystemExit then, when all is released, unless the job is
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
        """`requeue_exit_status` if the training has finished, and a level lacks its last
        version; else 0."""
        halted = self._halt.reason is not Reason.NONE
        incomplete = self.end is not None and not (self.end.complete or halted)
        return self.config.requeue_exit_status if incomplete else 0

    def _close(self) -> JobEnd | None:
        """Do the work of `close`; a framework continues with its own end."""
        if self._over:
            return self.end
        if self._in_callback:
            self._agreement.ask_close()
            return None
        with self._ending():
            started = time.perf_counter()
            self._halt.disarm()
            remove, self.end = self._final_version().make(self._restart.went_back)
            failure = self._parts.first_failure()
            if failure is None and self._halt.reason is Reason.NONE:
                self._finish()
            self._reports.emit(
                "closed",
                message=self._halt.reason.text() or TRAINING_END,
                seconds={"close": time.perf_counter() - started},
                facts={"interrupted": self._halt.reason.is_interruption},
            )
            self._shut_down(remove)
        if failure is not None:
            raise failure
        return self.end

    def _finish(self) -> None:
        """The training has ended by itself: other starts at its places shall know."""
        steps = self._live.steps_made - self._history.start_version
        if self._history.lineage and (steps or not self._restart.went_back):
            last = VersionId(self._history.generation, self.version)
            self._resources.finished = self._finished.closed(last, steps)

    def _final_version(self) -> FinalVersion:
        about = self.config, self.group, self._node, self._live, self._levels
        return FinalVersion(
            *about, self._sealed, self._save_now, self._halt, self._parts, self.wait
        )

    @contextlib.contextmanager
    def _ending(self) -> Iterator[None]:
        """Context of the end: callbacks still receive events, but cannot start anything."""
        self._shutdown = True
        try:
            yield
        finally:
            self._shutdown = False

    def _end_here(self, unattended: bool) -> None:
        """End the job, as all ranks do at this boundary. With `unattended` nobody asks
        `should_exit()`, so the loop would continue."""
        self.close()
        if unattended:
            self._halt.exit()

    def abandon(self, commit_newest: bool = False) -> None:
        """End without a final checkpoint, and leave all versions for a restart; not collective.

        Also in the middle of an iteration: first completes the version in progress, if that takes
        only a few seconds and no optimizer has started its step. With `commit_newest` it writes the
        newest version in memory to local.
        """
        if self._over:
            return
        self._refuse_in_callback("abandon()", TierckptError)
        with self._ending():
            try:
                self._active.last_chance()
            except Exception as error:
                text = f"the newest version was given up: {error_text(error)}"
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
        self._own_hooks.close()
        # The copier would wait for layers that are never released.
        self._active.give_up("the job ended in the middle of an iteration")
        self._agreement.close()  # the copier may wait for the vote of a rank that ended
        self._active.close()
        self._end_parts(remove)
        if self._folders is not None:
            self._folders.close()
        self._agent.close(abandoned=abandoned)
        self._job.leave(remove)
        call(self._parts.left, abandoned)
        self._job.close_log()

    def _adapter_closed(self) -> None:
        try:
            self.adapter.closed()
        except Exception as error:
            self._reports.notice(
                f"the adapter could not detach: {error_text(error)}", logging.ERROR
            )


_served: weakref.WeakSet[Checkpointer] = weakref.WeakSet()
_ends: list[Callable[[], Checkpointer | None]] = []
"""The arguments of `close_at_exit`."""


def attach_to_script(checkpointer: Checkpointer, restore: bool, ends_with_script: bool) -> None:
    """Restore now, if `restore`, and close at the end of the process, if `ends_with_script`. Raises
    the errors of `Checkpointer.restore`; the checkpointer is abandoned then."""
    _served.add(checkpointer)
    if restore:
        try:
            checkpointer.restore()
        except BaseException:
            checkpointer.abandon()  # the script has no reference to it
            raise
    if ends_with_script:
        close_at_exit(lambda: checkpointer)


def give_attribute(checkpointer: Checkpointer) -> None:
    """Set the attribute `checkpointer` of each optimizer that the script has given."""
    for each in checkpointer._state.given.values():
        each.checkpointer = checkpointer  # type: ignore[attr-defined]


def refuse_second(model: torch.nn.Module, optimizer: Any, settings: Mapping[str, Any]) -> None:
    """Raise ConfigError if an open checkpointer has the same model, optimizer or path.

    A second checkpointer for a job's second optimizer could restore it at a different step.
    """
    ours = [id(each) for each in label_optimizers(optimizer).values()]
    for other in [ckpt for ckpt in _served if not ckpt.closed]:
        theirs = [id(each) for each in other._state.given.values()]
        if unwrap(model) is other._state.model:
            taken = "this model has"
        elif not set(ours).isdisjoint(theirs):
            taken = "this optimizer has"
        elif _same_place(other, settings):
            taken = f"the job at {other.config.path} has"
        else:
            continue
        raise ConfigError(
            f"{taken} a checkpointer already, from an earlier call. Several optimizers go into one "
            "call, {'name': optimizer, 'other name': ...}; so do models that train together, "
            "torch.nn.ModuleDict({'name': model, ...}). A job of its own needs another path; to "
            "start again, close() the attribute `checkpointer` first"
        )


def _same_place(other: Checkpointer, settings: Mapping[str, Any]) -> bool:
    names = {
        name: settings[name] for name in ("path", "job_id", "shm_dir", "node") if name in settings
    }
    try:
        config = redirected(load_config(names, config_file=settings.get("config_file")))
    except ConfigError:
        return False  # the Checkpointer raises it again, on all ranks
    return job_directory.job_directory(config) == job_directory.job_directory(other.config)


def close_at_exit(current: Callable[[], Checkpointer | None]) -> Callable[[], None]:
    """At the end of the process, close the checkpointer that `current()` returns then, if any.

    Closes as `Checkpointer.close_or_abandon` does, because a script may have shut its communication
    down before.

    Returns the function that was registered with `atexit`, which calls in reverse order. After a
    new start of the communication library register it again, so that it runs before the library's
    own shutdown.
    """

    def close() -> None:
        checkpointer = current()
        if checkpointer is None:
            return
        if shutdown.script_failed():
            checkpointer._abandon_after_error()
        else:
            shutdown.end_now(checkpointer.close_or_abandon)

    _ends.append(current)
    return atexit.register(close)


def close_now() -> None:
    """Close all checkpointers of `close_at_exit` now: for a script that shuts its communication
    library down before it ends. After that, ranks could not end together.

    Closes also while an exception is being handled: the script may end in this way on purpose (its
    data is used up, or Ctrl-C). If only some ranks get here, the meeting fails, and each ends
    alone."""
    for current in tuple(_ends):
        checkpointer = current()
        if checkpointer is not None:
            checkpointer.close_or_abandon()
