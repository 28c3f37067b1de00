"""A script's side: what it calls of a checkpointer.

All public methods are for the training thread, and all ranks call them alike.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import time
from collections.abc import Iterator
from typing import Any, SupportsIndex

import torch

from tierckpt.callbacks import Callbacks
from tierckpt.coordination.pinning import mark_everywhere
from tierckpt.core.halt_conditions import Reason
from tierckpt.errors import PinError, RestoreError, TierckptError
from tierckpt.format.ids import VersionId, on_lineage
from tierckpt.restore.progress import Progress
from tierckpt.restored import Restored
from tierckpt.resumable_loader import ResumableLoader
from tierckpt.state.extras import check_extra

from . import attach, shutdown
from .core import WAIT_SECONDS, CheckpointerCore, as_number

NOTHING_LATER = "No further version is taken until restore()"
MEET_SECONDS = 30.0
"""At the end of a process: how long to wait for the other ranks before ending alone."""


class Checkpointer(CheckpointerCore):
    """Checkpoints a replicated training state, layer by layer, while training goes on.

    Args:
        model: the module that is trained, wrapped (DDP, `torch.compile`) or not.
        optimizer: one optimizer, a sequence, or a dict of names and optimizers.
        adapter: how gradients are reduced and steps are made; None for a loop with nothing special.
            `ddp_ckpt.Checkpointer` and `horovod_ckpt.Checkpointer` have one.
        group: the job's ranks; None for a single process.
        extra: objects with `state_dict`/`load_state_dict` that are alike on all ranks (scheduler,
            scaler); also torch and numpy generators.
        extra_per_rank: objects whose state is each rank's own (a data loader).
        on_event: called with every `Event`, on the training thread.
        callbacks: see `Callbacks`; `add_callbacks` adds more.
        config_file: TOML file with settings.
        settings: any field of `Config`, by its flat name (`local_every_steps=10`).

    Raises ConfigError for bad settings, UnsupportedStateError for state that cannot be taken,
    TypeError for callbacks that cannot be called.
    Creating one is collective: all ranks do it at the same point.
    """

    def step(self, metric: float | None = None) -> None:
        """The boundary: call it once an iteration, after the optimizer's (and scheduler's) step.

        Takes a checkpoint when one is due. An iteration without an optimizer step (gradient
        accumulation, a step skipped by the GradScaler) is counted and otherwise passed over.

        `metric` is what was measured of the state as it is now, for `keep_best`; rank 0's counts.
        It does not make a checkpoint due (`save(now=True)`, called next, does). Where boundaries
        are not called so, set the attribute `metric` instead: the optimizer's next step clears it.

        With `boundary="forward"` the call takes `metric` and does nothing else; an event says so.
        """
        self.metric = self.metric if metric is None else as_number(metric)
        if not self._iterations.called():
            return
        self._own_hooks.called()
        self._active.capture.drop_streams()
        self._epoch_ends.passed()
        self.iteration, self._ahead = self.iteration + 1, 0
        if not (self._history.lineage or self._over):
            self._levels.begin_afresh()  # all ranks are here, also those that skipped the step
        if self._iterations.steps and not self._over:
            self._boundary()
        self._agreement.passed(self.iteration)

    def save(self, now: bool = False) -> None:
        """Ask for a checkpoint to memory and local, whatever the intervals say.

        From any one rank; it is taken at the boundary after all ranks learned of it. With
        `now=True` all ranks call it, between two steps, and it returns when the version is durable
        on this rank (or an event said why not).
        """
        if not isinstance(now, bool):
            raise TypeError(f"save(now=...) is True or False, not {now!r}; `path` says where to")
        self._refuse_closed("save()", TierckptError)
        if not now:
            self._agreement.ask()
            return
        if self._saving:  # a callback, at the boundary of another one
            return
        self._refuse_amid("save(now=True)", TierckptError)
        if why := self._no_moment():
            later = "" if self._agreement.parted is None else f". {NOTHING_LATER}"
            self._reports.notice(f"save(now=True) takes nothing: {why}{later}", logging.ERROR)
        else:
            self._save_now()

    def pin(self, version: int) -> tuple[str, ...]:
        """Have retention leave a version alone, on all levels; returns those that have it now.

        Waits until what is under way to the levels is there, as long as that gets on. A version
        that goes on to the persistent level only at a later boundary is pinned there when it is
        complete. All ranks call it, between steps. Raises PinError, on all ranks, when no level
        has it, or one hangs.
        """
        self._refuse_closed("pin()", PinError)
        self._refuse_amid("pin()", PinError)
        self._no_moment()  # ranks may have cast different numbers of votes
        where = (self.config, self.group, self._node)
        return mark_everywhere("pin", version, *where, self._agent)

    def unpin(self, version: int) -> tuple[str, ...]:
        """Leave a version to retention again; otherwise as `pin`."""
        self._refuse_closed("unpin()", PinError)
        self._refuse_amid("unpin()", PinError)
        self._no_moment()
        return mark_everywhere("unpin", version, self.config, self.group, self._node)

    def should_exit(self) -> bool:
        """Whether the job is to end early: a signal came to some rank, `tierckpt halt` asked for
        it, or the allocation's time is over. A last version is under way then; leave the loop and
        `close()`.

        The same on all ranks, if they ask after the same boundary. A script that never asks is
        ended all the same: all ranks close and raise SystemExit at the boundary.
        """
        return self._halt.should_exit()

    @property
    def exit_reason(self) -> str:
        """Why `should_exit()` is true, in words; empty while it is not."""
        return self._halt.reason.text()

    @property
    def interrupted(self) -> bool:
        """True when `should_exit()` is because processes (a signal) or the allocation end: the job
        is to be started again. False for what somebody asked for with `tierckpt halt`, but for
        `--seconds-left`: then it is the allocation that ends."""
        return self._halt.reason.is_interruption

    def restore(
        self,
        version: SupportsIndex | None = None,
        strict: bool = True,
        progress: bool | None = None,
    ) -> Restored:
        """Bring back the newest sound version, in place; returns the iteration to go on from.

        Looks at memory, local and parity on every node, also on those that the job is on no more,
        and at the persistent level; verifies checksums before anything is changed, and falls back
        to the next copy, then to the next older version. 0 when there is nothing.
        All ranks call it; before the first step, or later to go back.

        Args:
            version: only this version; RestoreError when it is not there.
            strict: raise StateMismatchError when the structure differs; else load what fits.
            progress: show a bar on rank 0's standard error; None: if that is a terminal.
        """
        if isinstance(version, bool) or not isinstance(version, SupportsIndex | None):
            raise TypeError(
                f"restore(version=...) takes a version's number, not {version!r}; `path`, given to "
                "the Checkpointer, says where to look"
            )
        version = None if version is None else operator.index(version)
        self._refuse_closed("restore()", RestoreError)
        self._refuse_amid("restore()", RestoreError)
        self.adapter.restore_begins()
        bar = Progress(Progress.wanted(self.group.rank, progress))
        with contextlib.closing(bar), torch.inference_mode(False):
            try:
                self.restored = self._restore(version, strict, bar)
            except RestoreError:  # on all ranks
                # The training may go on, and what is open was voted on for the last time.
                self._agreement.settle()
                raise
        for obj in (*self._state.extra.values(), *self._state.extra_per_rank.values()):
            if isinstance(obj, ResumableLoader):
                obj.restored()
        self._callbacks.call("on_restored", self.restored)
        return self.restored

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Return when all that was taken is sealed and committed, or has failed; between steps.

        Not collective. False when that took longer than `timeout_seconds`, or nothing more can be
        heard of it behind the end.
        """
        if self._closed:
            return not self._agent.committing()
        self.complete()
        some = shutdown.NOTICE_SECONDS
        if timeout_seconds is not None and timeout_seconds <= some:
            done = self._agent.wait(timeout_seconds)
        elif not (done := self._agent.wait(some)):
            self._reports.notice(f"waiting for what {self.config.directory} takes", logging.INFO)
            done = self._agent.wait(timeout_seconds and timeout_seconds - some)
        self._collect()
        return done

    def complete(self) -> None:
        """Return when the version that is being copied is sealed, or has failed, and nothing reads
        the live state any more; not collective.

        Between two steps; also in the middle of an iteration, as long as no optimizer has begun its
        step.
        """
        self._active.complete()
        self._replicas.finish()

    @property
    def closed(self) -> bool:
        """True after `close()` or `abandon()`."""
        return self._closed

    def _refuse_closed(self, what: str, error: type[TierckptError]) -> None:
        if self._closed:
            raise error(f"{what} after close() or abandon(): make another Checkpointer")
        if self._shutdown:
            raise error(f"{what} while close() or abandon() is at work")
        if self._over:
            raise error(f"{what} in a forked child: the Checkpointer is its parent's")

    @property
    def _amid(self) -> bool:
        """A callback asks that is called amid something: a step, a boundary, another method."""
        return self._saving or self._log.depth + self._callbacks.depth > 0

    def _refuse_amid(self, what: str, error: type[TierckptError]) -> None:
        """Of what takes all ranks, which hear of events at different moments."""
        if self._amid:
            raise error(
                f"{what} in the callback of an event: it takes all ranks, and they hear of events "
                "at different moments, amid a step perhaps. Call it in the loop, between two "
                "steps, or in on_step_boundary of tierckpt.Callbacks"
            )

    def close(self) -> None:
        """Take a final checkpoint, wait until it is durable, and leave nothing behind.

        All ranks call it. When the local level cannot be written, or does not answer (see
        `shutdown`), the memory level is left in place, and an event says so. No checkpoint is taken
        of what is none: where an optimizer's step or a restore did not come to its end, or ranks
        are not at the same step. Nor where `restore(version=...)` went back and no step was made:
        what is newer stays.

        With `on_drift="stop"`, ReplicaError is raised on all ranks where replicas are found to
        differ only now, after all that.

        In the callback of an event it asks for that, from any one rank: all close at the end of a
        boundary, the next but one at the latest; or when the process ends, if all asked.
        """
        if self._over:
            return
        if self._amid:
            self._agreement.close_asked = True
            return
        with self._end():
            self._halt.disarm()
            remove = self._finish()
            drifted = self._replicas.error
            self._reports.emit("closed", message=self.exit_reason or "the training's end")
            self._shut_down(remove)
        if drifted is not None:
            raise drifted

    @contextlib.contextmanager
    def _end(self) -> Iterator[None]:
        """While it lasts, callbacks are still told of events, and can begin nothing."""
        self._shutdown = True
        try:
            yield
        finally:
            self._shutdown = False

    def _finish(self) -> bool:
        """All that the end waits for. True when nothing has to stay in memory. Collective."""
        end, safe = None, False
        try:
            if why := self._no_moment():
                self._reports.notice(f"no final checkpoint is taken: {why}", logging.ERROR)
                self._commit_newest()
                return False
            if self._went_back and self._steps_made == self._history.began_at:
                text = f"no step was made behind v{self.version}: what is newer stays as it is"
                self._say(text, logging.INFO)
                return False
            end = self._begin_ending()
            safe = self._make_durable(end)
        except Exception as error:
            self._reports.notice(f"the final checkpoint failed: {error!r}", logging.ERROR)
        # The run before, if nobody restored it, may be all there is of it.
        before = not self._history.lineage and any(self._resources.job.sealed())
        error_barrier, answers = True, end is not None and end.disk_answers
        digest = self._replicas.last_digest(self.version)
        try:
            told = self.group.all_gather_object((safe, before, answers, digest))
            everyone = [each[:3] for each in told]
            self._replicas.compare_last([digest for *_, digest in told])
        except Exception as error:
            everyone, error_barrier = [(False, before, answers)], False
            self._reports.notice(f"the other ranks cannot be asked: {error!r}", logging.ERROR)
        if not (safe := all(safe for safe, _, _ in everyone)):
            left = "nothing of it is left in memory on this node"
            if any(self._resources.job.sealed()):
                left = (
                    f"what is in memory here stays there for a restart ({self._resources.job.path})"
                )
            severity = logging.ERROR if self._node.first == self.group.rank else logging.DEBUG
            text = f"v{self.version} is not durable everywhere (on some rank it is not on disk)"
            self._reports.notice(f"{text}; {left}", severity)
        whole = safe and all(answers for _, _, answers in everyone)
        self._await_others(end, error_barrier, whole)
        return safe and not any(before for _, before, _ in everyone)

    def _make_durable(self, end: shutdown.Shutdown) -> bool:
        """The final checkpoint, where there is something new. False when it did not get there."""
        if self._local_enabled() and not self._nothing_new():
            if self._made_none and self._demand.commit_as_it_is(self._begun_from_memory()):
                self.wait(end.last_call - time.monotonic())
                self._agreement.settle()
            else:
                self._save_now(end.last_call)
        if end.disk_has_all(self.wait):
            self._levels.promotion.backlog.flush_last()
        durable = self._nothing_new() or self._agreement.local.safe == self._id()
        # A job that ends early comes back; without a disk, what is in memory is all it has.
        return durable or not (self._local_enabled() or self._halt.reason < Reason.NONE)

    def _await_others(
        self, end: shutdown.Shutdown | None, error_barrier: bool, whole: bool
    ) -> None:
        """Other nodes and stores. Ranks leave `error_barrier`, where none takes longer than its
        group waits: all know by now what is durable. Where that is the `whole` of what they have,
        versions go that were kept until something newer is with other nodes."""
        try:
            if end is not None and end.disk_answers:
                end.await_others(self._collect)
                self._collect()
            if error_barrier:
                self.group.barrier()
            if whole and self._history.lineage:
                self._agreement.settle()
                self._levels.promotion.retire()
        except Exception as error:
            self._reports.notice(f"not all ranks end together: {error!r}", logging.INFO)

    def _begin_ending(self) -> shutdown.Shutdown:
        nbytes = attach.shard_bytes(self._state, self.group.size) * len(self._node.ranks)
        return shutdown.Shutdown(self.config, self._agent, self._reports, self._halt, nbytes)

    def abandon(self, commit_newest: bool = False) -> None:
        """End without a final checkpoint, leaving everything for a successor; not collective.

        In the middle of an iteration, too: the version that is being copied is completed first,
        where that takes a few seconds at most and no optimizer has begun its step. With
        `commit_newest` the newest version in memory is written to local.
        """
        if self._over:
            return
        self._refuse_amid("abandon()", TierckptError)
        with self._end():
            try:
                self._active.last_chance()
            except Exception as error:
                self._reports.notice(f"the newest version was given up: {error!r}", logging.WARNING)
            if commit_newest:
                self._commit_newest()
            self._shut_down(remove=False, abandoned=True)

    def close_or_abandon(self) -> None:
        """At the end of a process: `close()` if all ranks get here within MEET_SECONDS, else every
        rank by itself makes durable what it has. A rank may have ended with an error that cannot be
        seen from here, so this never enters a collective that could hang."""
        if self._over:
            return
        if self.group.meet(MEET_SECONDS):
            self.close()
            return
        text = (
            "no final checkpoint is taken: not all ranks have come to this end, or they cannot be "
            "asked any more, as the communication was shut down before (call close() first). What "
            f"there is up to v{self.version} stays, also in memory ({self._resources.job.path})"
        )
        self._reports.notice(text, logging.WARNING)
        self.abandon(commit_newest=True)

    def _end_with_process(self) -> None:
        """When the process ends and nobody has closed it: `abandon()`, unless a callback asked for
        the end and no boundary came behind that."""
        if self._agreement.close_asked and not shutdown.script_failed():
            self.close_or_abandon()
        else:
            self.abandon()

    def _abandon_after_error(self) -> None:
        """When an exception ended the training: `abandon()`.

        Where a signal came that was to bring the end, the error may be its work (it ended a worker
        of a DataLoader), and the node may be gone soon: the newest version in memory gets to disk.
        """
        came = self._halt.signal_name
        if came and self._local_enabled() and not self._over:
            text = (
                f"{came} came to this rank, and the training ended with an error: no further "
                "checkpoint is taken, and the newest version in memory is written to disk"
            )
            self._reports.notice(text, logging.WARNING)
        self.abandon(commit_newest=bool(came))

    def _commit_newest(self) -> None:
        self.wait(WAIT_SECONDS)
        if self._demand.commit_newest():
            self.wait(WAIT_SECONDS)

    def __enter__(self) -> Checkpointer:
        """For `with`."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *_: object
    ) -> None:
        """Close; after an exception only let go, so that the restarted job finds everything.
        `sys.exit(0)` is none, but for ranks that may not all come to it."""
        if kind is None:
            self.close()
        elif shutdown.is_orderly(error):
            self.close_or_abandon()
        else:
            self._abandon_after_error()

    def add_callbacks(self, callbacks: Callbacks) -> None:
        """Have these called from now on."""
        self._callbacks.add(callbacks)

    def register(self, name: str, obj: Any, per_rank: bool = False) -> None:
        """Add an object to `extra` after construction, before the first boundary or restore."""
        check_extra("extra_per_rank" if per_rank else "extra", name, obj)
        (self._state.extra_per_rank if per_rank else self._state.extra)[name] = obj

    def _nothing_new(self) -> bool:
        """True when no step was made since the start, or since the version restored from disk."""
        if not self._made_none:
            return False
        begun = self._history.began_at
        durable, past = self._agreement.local.safe, self._history.lineage
        if durable is None or durable.version != begun:
            return begun == 0
        return on_lineage(durable, past)

    @property
    def _made_none(self) -> bool:
        """No step was made, nor a version taken, since the start or the version restored."""
        memory = self._agreement.memory
        known = [*memory.open, *filter(None, [memory.safe])]
        taken = any(self._history.is_own(id_.generation) for id_ in known)
        return self._steps_made == self._history.began_at and not taken

    def _begun_from_memory(self) -> VersionId | None:
        """The version that this run began with, if it is in memory, of an earlier one."""
        safe, begun = self._agreement.memory.safe, self._history.began_at
        known = (
            safe is not None and safe.version == begun and on_lineage(safe, self._history.lineage)
        )
        return safe if known else None
