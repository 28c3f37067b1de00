"""The replica monitor: compares the state that all ranks share, during training.

At each boundary all ranks hash the same slice of parameters and optimizer state; the first time in
a run they hash all of it (`replicated_state.Look`). The digest goes into the next boundary's vote,
and the result is read at the boundary after that. If ranks differ, all learn it from the same
ballot, and with their next votes they report which tensors differ, and on which ranks: the
inquiry, which is pure.

`Drift` has what follows for versions: a thread marks those that may be mixtures, wherever they are,
so that a hanging disk or store delays nothing. Retention always keeps one version known to be equal
on all ranks: a difference is seen up to one round of looks late, and then all newer versions may be
suspect.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tierckpt import _process
from tierckpt._text import error_text
from tierckpt.config import Config
from tierckpt.coordination.agreement import Agreement
from tierckpt.coordination.ballots import Rows
from tierckpt.coordination.job_history import JobHistory
from tierckpt.coordination.versions import Reports
from tierckpt.core.levels import INTERVALS
from tierckpt.core.parts import Boundary, Part, VoteField
from tierckpt.core.retention import Spared
from tierckpt.errors import ReplicaError
from tierckpt.format.ids import VersionId
from tierckpt.group import Group, Node
from tierckpt.state.training_state import TrainingState
from tierckpt.storage.inventory import open_persistent
from tierckpt.storage.job_directory import JobDirectory
from tierckpt.storage.local import LocalStore
from tierckpt.storage.marks import local_suspects, persistent_suspects

from .replica_check import (
    ALIKE_AGAIN,
    GONE,
    NONE,
    OFTEN_GONE,
    OTHER_DEVICES,
    SILENT,
    SPREAD,
    Consequences,
    Finding,
    Inquiry,
    Outcome,
    agree,
    as_vote,
    drifted,
    never_alike,
    text_of_divergence,
)
from .replicated_state import Look, ReplicatedState

if TYPE_CHECKING:
    import torch

    from tierckpt.checkpointer.loop import TrainingJob

__all__ = ["Drift", "ReplicaMonitor"]


SILENT_ROUNDS, SILENT_MORE = 2, 4
"""After this many rounds without a digest of all ranks, and this many boundaries more, a warning is
given."""

OUTDATED_LOOKS = 5
"""Limit per round, if the structure changes at each boundary (lists that grow): listing the whole
state takes some 10 microseconds per tensor."""
UNKNOWN = -1
"""Stands for an unknown version."""
GONE_OFTEN = 2
"""After this many differences in a run that were gone at the next look, looks are made at the
boundary at once: the script evidently writes weights between the boundary and the step, where no
counter shows it."""
UNSURE_BOUNDARIES = 2
"""A look at one boundary is voted on at the next, and read at the one after."""
SPREAD_AFTER = 2
"""Boundaries from a finding until the votes are about the look at the whole state."""


MARKS_SECONDS = 10.0
"""Time to wait for the marks when the job ends because of them."""


class Drift:
    """One rank's part. The constructor's arguments stay their owners'. Training thread."""

    def __init__(
        self,
        config: Config,
        group: Group,
        node: Node,
        job: JobDirectory,
        history: JobHistory,
        agreement: Agreement,
        spared: Spared,
        reports: Reports,
    ) -> None:
        self._config, self._group, self._job = config, group, job
        self._is_first = node.first == group.rank
        self._history, self._agreement, self._spared = history, agreement, spared
        self._reports = reports
        self._thread: threading.Thread | None = None

    def alike(self, version: int) -> None:
        """All ranks were equal at that version of this run."""
        self._spared.alike(self._history.generation, version)

    def found(self, finding: Finding) -> Consequences:
        """Mark the versions that may be mixtures; returns the consequences, as text."""
        agreement, history = self._agreement, self._history
        self._spared.drifted()
        known = {id_ for ledger in agreement.ledgers.values() for id_ in ledger.open}
        known |= {id_ for id_ in (agreement.memory.safe, agreement.local.safe) if id_ is not None}
        clean = finding.clean if finding.clean is not None else history.start_version
        self._start_marking(known, clean, finding.text())
        marked = f"Versions after v{clean} are marked as suspect"
        if finding.clean is None:
            marked = "Versions taken before this was known are marked as suspect"
        return Consequences(marked, self._way_back(), history.start_version > 0, history.nodes)

    def _way_back(self) -> str:
        where = self._config.directory
        if (clean := self._spared.version) is not None:
            how = (
                f"with restore(version={clean.version}); or with "
                'replicas="stop" (TIERCKPT_REPLICAS=stop), and restore() takes it by itself'
            )
            if self._config.stops_on_drift:
                how = 'and restore() takes it by itself, as replicas says "stop"'
            return (
                f"v{clean.version} is the newest version on disk known to be equal on all "
                f"ranks. Restart the job {how}"
            )
        return (
            "no version on the nodes' disks is known to be equal on all ranks. To list other "
            f"versions and their marks: tierckpt list {shlex.quote(where)}"
        )

    def _start_marking(self, ids: Iterable[VersionId], clean: int, text: str) -> None:
        run_id = self._history.name
        suspects = {i for i in ids if self._history.is_own(i.generation) and i.version > clean}
        earlier = self._thread

        def work() -> None:
            if earlier is not None and earlier.is_alive():
                earlier.join()  # it may write the mark of the same version
            try:
                if self._is_first:
                    self._mark_here(suspects, clean, text)
                if self._group.rank == 0 and self._config.persistent.path:
                    self._mark_there(clean, run_id, text)
            except Exception as error:
                why = f"suspect versions could not be marked: {error}"
                self._reports.notice_later(why, logging.ERROR)

        self._thread = threading.Thread(target=work, name="tierckpt-suspects", daemon=True)
        with contextlib.suppress(RuntimeError):  # the system's limit of threads is reached
            self._thread.start()

    def _mark_here(self, ids: set[VersionId], clean: int, text: str) -> None:
        """Mark versions in this node's memory and on its disk, and those on the way there."""
        in_memory = {manifest.id for _, manifest in self._job.sealed()}
        on_disk = set[VersionId]()
        if self._config.uses("local"):
            keys = LocalStore(self._config.directory).keys()
            on_disk = {key.id for key in keys}
        every, is_own = in_memory | on_disk, self._history.is_own
        seen = {i for i in every if is_own(i.generation) and i.version > clean}
        for folder in (self._job.path, Path(self._config.directory)):
            if folder.is_dir():
                local_suspects(folder).mark(ids | seen, text)

    def _mark_there(self, clean: int, run_id: str, text: str) -> None:
        """Mark versions on the persistent level. Later arrivals are marked by the agent that writes
        them."""
        with contextlib.closing(open_persistent(self._config.persistent)) as store:
            for name in store.versions():
                of_us = self._history.is_own(name.id.generation) and name.run_id == run_id
                if of_us and name.id.version > clean:
                    persistent_suspects(store).mark([name], text)

    def wait(self, timeout_seconds: float = MARKS_SECONDS) -> None:
        """Wait until the marks are written, or the time is over."""
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(timeout_seconds)


class ReplicaMonitor(Part):
    """One rank's part. Training thread. Only `compare_last` waits for other ranks."""

    votes = VoteField("check", NONE), VoteField("check_complement", NONE)
    """The digest of the slice hashed at the previous boundary, see `replica_check.as_vote`."""

    @classmethod
    def of(cls, job: TrainingJob) -> Self:
        """Of a job of several ranks."""
        config, group, reports = job.config, job.group, job.reports
        levels = job.history, job.agreement, job.levels.promotion.spared
        drift = Drift(config, group, job.node, job.resources.job, *levels, reports)
        submit = job.active.submit
        return cls(config, group, job.state, reports, submit, job.live.keep_apart, drift)

    def __init__(
        self,
        config: Config,
        group: Group,
        state: TrainingState,
        reports: Reports,
        submit: Callable[[Look], None],
        find_apart: Callable[[], None],
        drift: Drift,
    ) -> None:
        """`submit` makes another thread run a look. `find_apart` checks whether some state that
        counts as shared has become each rank's own, and then calls `shared_changed`. `drift` learns
        the newest version known to be equal everywhere, and of differences."""
        used = any(config.uses(level) for level in INTERVALS)
        self.active = config.compared_steps > 0 and group.size > 1 and used
        self.finding: Finding | None = None
        """The difference, from its detection until all is equal again."""
        self.error: ReplicaError | None = None
        """The error to raise at the end of this boundary, on all ranks."""
        self._slices = config.compared_steps
        self._stop = config.stops_on_drift
        self._group, self._state, self._reports = group, state, reports
        self._find_apart = find_apart
        self._submit, self._drift = submit, drift
        self._complained, self._process = False, os.getpid()
        if not self.active:
            self.sleep("voted")
            self.wait_for_looks("read", "vote")
        self.forget()

    def forget(self) -> None:
        """A run starts, or the state was replaced: forget all observations."""
        self.rest_no_longer()
        if not self.active:
            self.rests_until = sys.maxsize
        self._replicated: ReplicatedState | None = None
        self._structure = NONE
        self._number: int | None = None
        """The boundary of the last vote that the part has seen."""
        self._look: Look | None = None
        """The look at the last boundary."""
        self._to_vote: Look | None = None
        self._voted: Look | None = None
        """The look with its digest in the ballot."""
        self._last: Look | None = None
        self._inquiry: Inquiry | None = None
        """In progress on all ranks."""
        self._inquired = UNKNOWN
        """The version that it is about."""
        self._place = 0
        """The `place` of the last boundary; see `vote`."""
        self._gone = 0
        """Number of differences that were gone when the inquiry asked."""
        self._at_once_from: int | None = None
        """The first version that was looked at inside the boundary."""
        self._silent = 0
        """Boundaries in a row at which some rank had no digest."""
        self._turn = 0
        """The turn of the next look: of boundaries, on all ranks, also after a failed look."""
        self._next_all, self._look_all, self._voted_all = True, False, False
        """Whether the next look, that of the last boundary, and that in the ballot cover all
        slices."""
        self._alike_at = [UNKNOWN] * self._slices
        """By slice: the newest version at which it was seen to be equal."""
        self._clean: int | None = None
        """The newest version known to be equal in all slices."""
        self._seen_apart = False
        """Whether ranks were in different iterations at the boundary of the last votes read."""
        self._unsure = 0
        """Boundaries until it is known whether they are equal nevertheless."""
        self._spread_in = 0
        """Boundaries until the look at the whole state, made after a finding, can be compared; 0 if
        there is none."""
        self.finding = self.error = None

    def shared_changed(self) -> None:
        """Look the tensors up again."""
        self._replicated = None
        self.rest_no_longer()

    @property
    def refusing(self) -> bool:
        """True if no version may be taken: nothing is known to have been equal in this run, or
        versions of one number are from different iterations."""
        if self.finding is not None:
            return self.finding.apart or self.finding.clean is None
        if self._unsure:
            return True
        return self._inquiry is not None and self._clean is None

    def suspicion(self) -> str:
        """That replicas differ."""
        return "" if self.finding is None else self.finding.text()

    @property
    def asking(self) -> bool:
        """True if a few boundaries will show whether replicas differ, or how."""
        return self._inquiry is not None or self._unsure > 0

    def failure(self) -> ReplicaError | None:
        """With `replicas="stop"`, that replicas differ."""
        error, self.error = self.error, None
        return error

    def boundary_ends(self, at: Boundary) -> None:
        """Raise the error, on all ranks at once."""
        if self.error is not None:
            self._drift.wait()
            raise_error, self.error = self.error, None
            raise raise_error

    def end(self, remove: bool) -> None:
        """Free the references to the state."""
        self.forget()
        self._drift.wait()

    # --- the look ------------------------------------------------------------------------------

    def voted(self, at: Boundary) -> None:
        """Start the look at this boundary. A copier may hash from now on if layers are copied
        `early`, else when one is released."""
        self._voted, self._voted_all = self._to_vote, self._look_all
        if not self.active:
            self.rests_until = sys.maxsize
            return
        turn = self._turn + self._passed(at) - 1
        self._turn, self._number = turn + 1, at.number
        self._start_look(turn, at)
        self.rests_until = at.number + 1 + self._idle_boundaries()

    def _passed(self, at: Boundary) -> int:
        """The boundaries since the last vote that the part has seen: more than one if it rested."""
        return 1 if self._number is None else at.number - self._number

    def _idle_boundaries(self) -> int:
        """How many boundaries the part has nothing to do at, if no rank has news."""
        replicated, looks = self._replicated, (self._look, self._to_vote, self._voted)
        if replicated is None or replicated.outdated or any(looks):
            return 0
        if self._next_all or self._look_all or self._voted_all:
            return 0
        if self.finding or self._inquiry or self._seen_apart or self._unsure or self._spread_in:
            return 0
        return -self._turn % replicated.stride

    def _start_look(self, turn: int, at: Boundary) -> None:
        version = at.id.version
        try:
            if turn % self._slices == 0 or self._must_look_up(turn):
                self._look_up()
        except Exception as error:
            self._replicated = None
            self._report_failure(error)
        self._look_all, self._next_all = self._next_all, False
        if self._replicated is None:
            return
        stride, first = self._replicated.stride, turn % self._slices
        which = range(first, first + stride)
        if self._look_all:
            which = range(self._slices)
        elif first % stride:
            return
        try:
            look = Look(self._replicated, which, turn, version)
        except Exception as error:
            self._replicated = None
            self._report_failure(error)
            return
        if self._gone >= GONE_OFTEN:
            look.finish()
            self._at_once_from = version if self._at_once_from is None else self._at_once_from
        look.submit = self._submit
        self._look = look
        if at.early:
            look.wake()

    def _must_look_up(self, turn: int) -> bool:
        """Whether the list of tensors is missing, or was found to be outdated."""
        current = self._replicated
        often = max(self._slices // OUTDATED_LOOKS, 1)
        return current is None or (current.outdated and turn % often == 0)

    def _look_up(self) -> None:
        current = self._replicated
        if current is None or not current.stands(self._state):
            with _process.collector_paused():
                self._replicated = ReplicatedState(self._state, self._slices)
            if self._structure != self._replicated.structure or (current and current.outdated):
                self._next_all = True  # the slices contain other tensors now
            self._structure = self._replicated.structure

    def _report_failure(self, error: Exception) -> None:
        """Report that this rank did not look at a slice. A version with the same problem reports it
        itself."""
        severity = logging.DEBUG if self._complained else logging.WARNING
        self._complained = True
        text = f"replicas were not compared: {error_text(error)}"
        self._reports.notice(text, severity)

    def released(
        self,
        params: Sequence[torch.Tensor],
        version: int,
        reduction: Any,
        launched_seconds: float | None,
    ) -> None:
        """A copier may hash at the same time."""
        if self._look is not None:
            self._look.wake()

    def settle(self) -> None:
        """Hash the rest of the look."""
        look = self._look
        if look is not None and not look.over and os.getpid() == self._process:
            look.finish()  # a forked process has no copier

    def vote(self, at: Boundary) -> Sequence[int]:
        """The digest of the look at the boundary before. If some ranks skipped a step, ranks come
        to the same boundary at different iterations."""
        if self._inquiry is not None:
            at.row = self._inquiry.row()
        look, self._look = self._look, None
        self._place = at.place
        if look is None:
            self._to_vote = None
            return NONE, NONE
        digest = NONE
        try:
            look.finish()  # if no step came between
            digest = look.fetch()
        except Exception as error:
            self._report_failure(error)
        self._to_vote = look if digest != NONE else None
        return as_vote(digest)

    def _inquiry_row(self) -> list[int]:
        """The row to send with that vote; empty, on all ranks, if no inquiry is in progress."""
        return [] if self._inquiry is None else self._inquiry.row()

    # --- results -------------------------------------------------------------------------------

    def read(self, at: Boundary, least: Sequence[int]) -> None:
        """Compare the ranks' digests of the boundary before the last one, and take their rows; then
        refuse a version if there is a difference.

        Whether an inquiry starts, or ends, follows from the ballots alone. So it is the same on all
        ranks, also on a rank without a look, after an interrupt between its boundaries.
        """
        calm = self._voted is None and self.finding is None and self._inquiry is None
        if at.again and calm and not (self._unsure or self._seen_apart or self._spread_in):
            # No rank has a digest in these votes.
            self._place = at.place
            self._next_all |= self._voted_all
            self._count_silent(True, self._passed(at))
            return
        self._compare(at, *least)
        if self.refusing:
            at.sound, at.postponed = False, self.asking
            details = self.suspicion() or "the details are known in a few steps"
            at.why = f"replicas differ: {details}"

    def _compare(self, at: Boundary, check: int, check_complement: int) -> None:
        look, self._voted = self._voted, None
        self._place = at.place
        if not (self.active or self._inquiry or self.finding or self._unsure):
            return  # on all ranks: no digest was in the votes
        if self._inquiry is not None:
            self._receive(at.rows)
        spread = self._spread_in == 1
        self._spread_in = max(self._spread_in - 1, 0)
        agreed, alike = at.agreed, agree(check, check_complement)
        if (apart := agreed.apart) or self._unsure or self._seen_apart:
            self._see_places(apart)
        self._count_silent(alike is None, self._passed(at))
        if look is None or alike is None:
            self._next_all |= self._voted_all
        if alike is None:
            return
        if alike:
            if look is not None:
                self._found_alike(look)
        elif self.finding is None and agreed.apart:
            self._found(Outcome(apart=True), look.version if look is not None else UNKNOWN)
        elif self.finding is None:
            if self._inquiry is None:
                self._start_inquiry(look)
        else:
            if look is not None:
                self._mark(look, UNKNOWN)
            if not agreed.apart and spread:
                self._start_inquiry(look)

    def _see_places(self, apart: bool) -> None:
        """Look at the whole state once ranks are in different iterations. They may be equal: some
        loops call `step()` more often on one rank than on another."""
        self._unsure = max(self._unsure - 1, 0)
        if apart and not self._seen_apart and self.active:
            self._next_all, self._unsure = True, UNSURE_BOUNDARIES
        self._seen_apart = apart

    def _count_silent(self, silent: bool, boundaries: int) -> None:
        """Warn if no comparison was possible for several rounds, so that no difference can be
        found."""
        before, most = self._silent, SILENT_ROUNDS * self._slices + SILENT_MORE
        self._silent = before + boundaries if silent and self.active else 0
        if before < most <= self._silent:
            self._say(SILENT.format(boundaries=self._silent), logging.WARNING)

    def drifted(self) -> Sequence[int] | None:
        """The ranks in the minority, while replicas differ."""
        return None if self.finding is None else (self.finding.odd or ())

    def last_digest(self, version: int | None) -> int:
        """The digest of the whole state; NONE if there is none."""
        self._last = None
        try:
            if self.active and version is not None:
                self._look_up()
                assert self._replicated is not None
                # Not `_turn`: a rank that rests is behind one that has just looked at everything.
                self._last = Look(self._replicated, range(self._slices), 0, version)
                self._last.finish()
                return self._last.fetch()
        except Exception as error:
            self._report_failure(error)
        return NONE

    def compare_last(self, digests: Sequence[int]) -> None:
        """Collective if they differ."""
        look = self._last
        if look is None or NONE in digests:
            return
        if len(set(digests)) == 1:
            self._found_alike(look)
            return
        self._inquiry, self._unsure = None, 0
        if self.finding is None:
            self._place = 0  # all are at the end
            self._start_inquiry(look)
        while self.asking:
            self._receive(self._group.all_gather_object(self._inquiry_row()))

    def _mark(self, look: Look, version: int) -> None:
        for number in look.which:
            self._alike_at[number] = version

    def _found_alike(self, look: Look) -> None:
        self._mark(look, look.version)
        oldest = min(self._alike_at)
        if oldest == UNKNOWN:
            return
        self._clean = oldest
        if self.finding is not None:
            self._say(ALIKE_AGAIN.format(version=self._clean), logging.WARNING)
            self.finding = None
        self._drift.alike(self._clean)

    def _start_inquiry(self, look: Look | None) -> None:
        """Start to find the tensors that differ; all ranks do."""
        self.rest_no_longer()
        stands, fresh = False, NONE
        self.settle()  # if no step came between
        try:
            self._find_apart()
            stands = (
                look is not None
                and self._replicated is not None
                and look.replicated.stands(self._state)
            )
            if not stands:
                self._replicated = ReplicatedState(self._state, self._slices)
            elif look is not None:
                fresh = self._look_again(look)
        except Exception as error:
            self._replicated = None
            self._report_failure(error)
        self._inquired = look.version if look is not None else UNKNOWN
        self._inquiry = Inquiry(look, self._replicated, stands, self._place, fresh, self._slices)

    def _look_again(self, look: Look) -> int:
        """A digest of the same slices at this boundary. Nothing else runs."""
        again = Look(look.replicated, look.which, look.turn, look.version)
        again.finish()
        return again.fetch()

    def _receive(self, rows: Rows) -> None:
        """Take the answers of all ranks."""
        assert self._inquiry is not None
        outcome = self._inquiry.receive(rows)
        if outcome is None:
            return
        self._inquiry = None
        if outcome.nothing:
            if outcome.turn is not None:  # that of the next boundary
                self._turn, self._number = outcome.turn, None
                self.rest_no_longer()
            self._next_all = True
        elif self.finding is not None:
            self._report_spread(outcome)
        elif outcome.structure and _only_devices(outcome.structure):
            self.active = False
            devices = _by_rank(outcome.structure[:2])
            self._say(OTHER_DEVICES.format(devices=devices), logging.INFO)
        else:
            self._found(outcome, self._inquired)

    def _report_spread(self, outcome: Outcome) -> None:
        """Report the differences in all slices, after a finding in one of them."""
        if outcome.names and outcome.everything:
            difference = self._finding(outcome, self._inquired).what()
            text = SPREAD.format(version=self._inquired, difference=difference)
            self._say(text, logging.WARNING)

    def _finding(self, outcome: Outcome, version: int) -> Finding:
        structure = tuple(f"rank {rank}: {line}" for rank, line in enumerate(outcome.structure))
        size, clean = self._group.size, self._clean
        details = (outcome.more, structure, outcome.apart)
        return Finding(outcome.names, outcome.odd, size, version, clean, *details)

    def _found(self, outcome: Outcome, version: int) -> None:
        found = self._finding(outcome, version)
        consequences = self._drift.found(found)
        self._next_all, self._inquiry = True, None
        severity = logging.ERROR
        if outcome.gone:
            if self._at_once_from is not None and version < self._at_once_from:
                return  # the look was made before that, and the text appeared twice
            self._gone += 1
            text = GONE.format(difference=found.what(), version=version, then=consequences.marked)
            text += OFTEN_GONE if self._gone == GONE_OFTEN else ""
            severity = logging.WARNING
        else:
            self.finding = found
            self._alike_at = [UNKNOWN] * self._slices
            self._spread_in = SPREAD_AFTER
            text = (drifted if found.clean is not None else never_alike)(found, consequences)
            self._stop_for(found, text)
        self._emit(version, text, severity)

    def diverged(self, version: int, together: int | None, at: str, missing: Sequence[int]) -> None:
        """Report it as a difference."""
        self.rest_no_longer()
        clean = self._clean if self.active else together
        self.finding = Finding((), None, self._group.size, version, clean, apart=True)
        self._inquiry = None
        text = text_of_divergence(self.finding, self._drift.found(self.finding), at, missing)
        self._stop_for(self.finding, text)
        self._emit(version, text, logging.ERROR)

    def _stop_for(self, found: Finding, text: str) -> None:
        """With `replicas="stop"`, prepare the error for the end of this boundary."""
        if self._stop:
            self.error = ReplicaError(text, found.names, found.odd or ())

    def _emit(self, version: int, text: str, severity: int) -> None:
        """All ranks emit the event; only rank 0 logs it loudly."""
        if self._group.rank:
            severity = logging.DEBUG
        self._reports.emit("drifted", version=version, message=text, severity=severity)

    def _say(self, text: str, severity: int) -> None:
        self._reports.notice_of_all(text, severity)


def _by_rank(lines: Sequence[str]) -> str:
    return "; ".join(f"rank {rank}: {line}" for rank, line in enumerate(lines))


def _only_devices(lines: Sequence[str]) -> bool:
    """Whether ranks differ only in the kind of device of the tensor."""
    return len({line.rpartition(" on ")[0] for line in lines}) == 1
