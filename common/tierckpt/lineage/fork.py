"""The fork of a job: it begins where another one was, and goes on by itself.

| step | where | what a kill after it leaves |
|---|---|---|
| hold | at the source: its retention keeps the version | a hold; the next start uses it again |
| load | memory of this process | the same |
| record | beside the fork's own versions, on every node | the order to begin there, exactly |
| own version | on all ranks' disks | a job like any other; its next start ends the hold |
| note | the hold becomes a note at the source | - |

So the source's version stays until the fork needs it no more, and a fork that is killed before it
has a version of its own begins from the same version again. A version in the memory of a running
job cannot be held; then the record follows only after the own version, as a job with a record of a
version that is gone could not start.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tierckpt import _faults as faults
from tierckpt.config import Config
from tierckpt.coordination.error_barrier import ErrorBarrier
from tierckpt.coordination.reports import Reports
from tierckpt.core.fork import SETTING, ForkSource, Origin, source_of
from tierckpt.errors import RestoreError, StateTornError
from tierckpt.format.ids import VersionId
from tierckpt.group import Group, Node
from tierckpt.restore.loader import Loader
from tierckpt.restore.progress import Progress
from tierckpt.restore.session import LoadedVersion, load
from tierckpt.restore.tensor_fill import TensorPreallocator
from tierckpt.restore.verified_version import VerifiedVersion, all_finished
from tierckpt.restored import Restored
from tierckpt.state.training_state import TrainingState

from .marks import IN_MEMORY, OwnMarks, new_origin
from .partial import PartLoader
from .selection import PartReport, Selection
from .source import SourceLook, SourceReader, Wanted


@dataclass(frozen=True)
class ForkOrder:
    """What a call of `restore()` says about a fork. The same on all ranks."""

    source: str = ""
    """The source, as text; empty: what the setting or the record says."""
    selection: Selection | None = None
    """The parts to take; None: a whole version."""
    strict: bool = True


@dataclass
class Forked:
    """A version of another job in the live state."""

    found: VerifiedVersion
    loaded: LoadedVersion
    result: Restored
    """The result for the script."""

    @property
    def start(self) -> Restored:
        """The state that the run begins with, which has no version of this job."""
        start = Restored(int(self.result))
        start.version = self.result.version
        start.iteration_counts = self.result.iteration_counts
        return start


class Forks:
    """The fork of this job, if it is one, and loads from other jobs. Training thread; methods are
    collective unless they say otherwise."""

    def __init__(
        self,
        config: Config,
        group: Group,
        node: Node,
        host: str,
        state: TrainingState,
        reports: Reports,
    ) -> None:
        """`host`: the id of this rank's node."""
        self._config, self._group, self._state, self._reports = config, group, state, reports
        self._reader = SourceReader(config, group, host, reports)
        self.marks = OwnMarks(config, group, node, self._reader, reports)

    # --- a job begins --------------------------------------------------------------------------

    def begin(
        self, order: ForkOrder, bar: Progress, load_adapter: Callable[[Any], None]
    ) -> Forked | None:
        """Load the version that this job is to begin from; None if there is no such order. For a
        job without any version of its own.

        Raises RestoreError on all ranks if the orders contradict each other or the version is not
        there, and StateMismatchError if it does not fit; nothing was changed then.
        """
        record, text = self.marks.orders(order.source or self._config.fork_from)
        if record is None and not text:
            return None
        wanted = self._wanted(record, text)
        barrier = ErrorBarrier(self._group)
        with contextlib.ExitStack() as undo:
            with barrier:
                look = self._reader.look(wanted, barrier)
                id_ = look.choose(wanted, self._config.on_drift == "stop")
                origin = record or self._origin(wanted, id_, look, order.selection, barrier)
                origin = replace(origin, held=True)
                if record is None:
                    undo.callback(self.marks.let_go, origin)
                trouble = self.marks.hold(origin, look, barrier)
                found = self._reader.read(wanted, look, id_, bar, barrier)
            forked = self._load(found, wanted, order, load_adapter)
            undo.pop_all()
        faults.point("fork", op="loaded")
        fixed = record is not None or trouble != IN_MEMORY
        self.marks.note(origin, now=fixed)
        faults.point("fork", op="record")
        self._report(forked, origin, trouble, fixed)
        return forked

    def _wanted(self, record: Origin | None, text: str) -> Wanted:
        """The version to begin from. A record fixes it: a source that goes on has newer ones."""
        given = source_of(text) if text else None
        if record is None:
            assert given is not None
            return Wanted(given.path, given.version)
        cancel, path = self.marks.cancel_commands, given.path if given else record.source
        if given is not None:
            other = self._reader.template(given.path) != record.source
            if other or given.version not in (None, record.id.version):
                places = " and ".join(self.marks.recorded)
                raise RestoreError(
                    f"this job is to begin from {record}, as an earlier start or `tierckpt fork` "
                    f"noted in {places}, and {SETTING} is {text!r}. Nothing was changed",
                    f"To take the first one back: {cancel}",
                )
        kept = self.marks.kept(record)
        return Wanted(path, record.id.version, record.id, record.run_id, cancel, kept)

    def _origin(
        self,
        wanted: Wanted,
        id_: VersionId,
        look: SourceLook,
        selection: Selection | None,
        barrier: ErrorBarrier,
    ) -> Origin:
        place, own = map(self._reader.template, (wanted.path, self._config.path))
        parts = selection.parts if selection else ()
        origins: list[Origin] = barrier.all_gather_object(
            new_origin(place, look.facts[id_], own, parts)
        )
        return origins[0]

    # --- loading -------------------------------------------------------------------------------

    def _load(
        self,
        found: VerifiedVersion,
        wanted: Wanted,
        order: ForkOrder,
        load_adapter: Callable[[Any], None],
    ) -> Forked:
        make: Callable[..., Loader] = Loader
        id_ = found.plan.id
        named = str(ForkSource(wanted.path, id_.version))
        report = PartReport(named)
        if order.selection is not None:
            make = functools.partial(PartLoader, selection=order.selection, report=report)
        try:
            barrier, new = ErrorBarrier(self._group), TensorPreallocator(self._state)
            loaded = load(self._state, found, barrier, order.strict, new, make, named)
            if order.selection is None:
                try:
                    load_adapter(loaded.adapter)
                except Exception as error:
                    found.fail(error)
                    self._state.torn = True
        except BaseException:
            found.close()
            raise
        for text in loaded.notices:
            self._reports.notice(text, logging.WARNING)
        result = loaded.result if order.selection is None else Restored(0)
        result.forked_from = named
        result.partial = report if order.selection is not None else None
        return Forked(found, loaded, result)

    def load_from(self, text: str, selection: Selection, strict: bool, bar: Progress) -> PartReport:
        """Load parts of another job's version into the live state, and go on."""
        given = source_of(text)
        wanted, barrier = Wanted(given.path, given.version), ErrorBarrier(self._group)
        with barrier:
            look = self._reader.look(wanted, barrier)
            id_ = look.choose(wanted, self._config.on_drift == "stop")
            found = self._reader.read(wanted, look, id_, bar, barrier)
        order = ForkOrder(text, selection, strict)
        forked = self._load(found, wanted, order, lambda adapter: None)
        try:
            with contextlib.closing(found):
                all_finished(found, ErrorBarrier(self._group, found.incomplete))
        except StateTornError:
            self._state.torn = True
            raise
        assert forked.result.partial is not None
        return forked.result.partial

    def _report(self, forked: Forked, origin: Origin, trouble: str, fixed: bool) -> None:
        report = forked.result.partial
        what = f"{report.of_parts} of {report}" if report else str(origin)
        self._reports.notice_of_all(
            f"this job has no version of its own, and begins from {what}"
            + ("" if trouble else f". {origin} is held there until it has one on disk"),
            logging.INFO,
        )
        if trouble:
            then = "the restart fails"
            remedy = f"To keep it: tierckpt pin {shlex.quote(origin.source)} {origin.id.version}"
            if trouble == IN_MEMORY:
                then = then if fixed else "the restart begins from the newest version then"
                remedy = (
                    "To begin from one that stays, choose one on disk (tierckpt list), or have "
                    "that job write one (save(now=True), local_every_steps)"
                )
            self._reports.notice_of_all(
                f"{origin} cannot be held there: {trouble}. If it goes, and this job is restarted "
                f"before it has a version of its own on disk, {then}. {remedy}"
            )


__all__ = ["ForkOrder", "Forked", "Forks"]
