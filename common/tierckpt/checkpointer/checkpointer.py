"""The checkpointer's methods for scripts.

All public methods are for the training thread. All ranks make the same calls.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import os
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, SupportsIndex

import torch

from tierckpt import _milestones
from tierckpt.callbacks import Callbacks
from tierckpt.coordination.pinning import mark_everywhere
from tierckpt.errors import PinError, RestoreError, TierckptError
from tierckpt.lineage.fork import ForkOrder
from tierckpt.lineage.selection import PartReport, Selection
from tierckpt.restore.progress import Progress
from tierckpt.restored import Restored
from tierckpt.resumable_loader import ResumableLoader
from tierckpt.settings import with_settings
from tierckpt.state.extras import check_extra
from tierckpt.storage.routed.folders import FileFolders
from tierckpt.storage.routed.version_files import VersionFiles

from .lifetime import CheckpointerLifetime
from .live_state import as_number

NOTHING_LATER = "No further version is taken until restore()"


@with_settings
class Checkpointer(CheckpointerLifetime):
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

    def step(self, metric: float | None = None) -> None:
        """Mark the boundary: call it once per iteration, after the optimizer's (and scheduler's)
        step.

        Takes a checkpoint if one is due. An iteration without an optimizer step (gradient
        accumulation, a step skipped by the GradScaler) only counts as an iteration.

        `metric` is a measurement of the current state, for `keep_best`; the one of rank 0 counts.
        It does not make a checkpoint due (a following `save(now=True)` does). If your loop does not
        call `step()`, set the attribute `metric` instead: the optimizer's next step clears it.

        With `boundary="forward"` the call only sets `metric`; an event reports that.
        """
        position = self._position
        if metric is not None:
            position.metric = as_number(metric)
        if not self._iterations.called():
            return
        if self._data_witness.due:  # all ranks get here, also one that skipped its first step
            self._data_witness.settle()
        self._own_hooks.called()
        self._active.capture.drop_streams()
        self._epoch_ends.passed()
        position.iteration, position.ahead = position.iteration + 1, 0
        if not (self._history.lineage or self._over):
            self._levels.begin_afresh()  # all ranks get here, including those that skipped the step
        if self._iterations.steps and not self._over:
            self._boundary()
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
        self._refuse_amid("save(now=True)", TierckptError)
        if why := self._save_now.no_moment():
            later = "" if self._agreement.parted is None else f". {NOTHING_LATER}"
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
            folders.clear()  # so a file that is opened later is an error

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
        """The newest version that is complete on each level of the job, such as `{"memory": 12,
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
        self._refuse_amid("pin()", PinError)
        self._save_now.no_moment()  # ranks may have cast different numbers of votes
        where = (self.config, self.group, self._node)
        return mark_everywhere("pin", version, *where, self._agent)

    def unpin(self, version: int) -> tuple[str, ...]:
        """End the protection of `pin`; called in the same way."""
        self._refuse_closed("unpin()", PinError)
        self._refuse_amid("unpin()", PinError)
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
        """The reason why `should_exit()` is true, in words; empty while it is false."""
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
                `fork_from`. If this job has no version of its own, it begins there, exactly. Later
                starts take this job's own versions.
            only: with a fork: take only `"model"`, `"optimizer"` or `"extra"`, or several of these.
                The job begins at iteration 0 then, and `Restored.partial` is a `PartReport`.
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
        self._refuse_amid("restore()", RestoreError)
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
            if isinstance(obj, ResumableLoader):
                obj.restored()
        self._data_witness.restored(self.restored.version)
        _milestones.reached(_milestones.RESTORED)
        self._callbacks.call("on_restored", self.restored)
        return self.restored

    def _fork_order(
        self,
        version: SupportsIndex | None,
        fork_from: str | os.PathLike[str] | None,
        only: str | Sequence[str] | None,
        map: Mapping[str, str] | None,
        strict: bool,
    ) -> ForkOrder:
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
        """Load parts of another job's version into the live state; this job goes on with its own
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
        selection = Selection.of(only, map)
        assert selection is not None
        self._refuse_closed("load_from()", RestoreError)
        self._refuse_amid("load_from()", RestoreError)
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
