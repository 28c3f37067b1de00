"""Replicas: whether what all ranks are to have alike is alike, looked at as the training goes on.

At each boundary all ranks hash the same slice of parameters and optimizer state, the first time in
a run all of it (`digests`); the digest goes into the next boundary's vote, and what came of
that is read at the one after. If ranks differ, all learn it from the same vote, and give along with
the next ones which tensors differ, on which ranks (`inquiry`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence

from tierckpt.config import Config
from tierckpt.coordination.reports import Reports
from tierckpt.coordination.vote_exchange import Rows
from tierckpt.core.levels import INTERVALS
from tierckpt.core.replica_check import NONE, Finding, agree, as_vote
from tierckpt.core.votes import Vote
from tierckpt.errors import ReplicaError
from tierckpt.group import Group
from tierckpt.state.training_state import TrainingState

from .digests import Look
from .inquiry import Inquiry, Outcome
from .replicated_state import ReplicatedState
from .texts import (
    ALIKE_AGAIN,
    GONE,
    OFTEN_GONE,
    OTHER_DEVICES,
    SILENT,
    SPREAD,
    Consequences,
    drifted,
    never_alike,
    parted,
)

SILENT_ROUNDS, SILENT_MORE = 2, 4
"""So many rounds without a digest of all ranks are worth a word, and so many boundaries more."""

OUTDATED_LOOKS = 5
"""In a round, where the structure is another one at each boundary (lists that grow): to list all of
the state anew takes some 10 microseconds a tensor."""
UNKNOWN = -1
"""In place of a version."""
GONE_OFTEN = 2
"""After so many differences that were gone at the next look in a run, looks are made at the
boundary at once: weights are evidently written between it and the step, where no counter tells."""
UNSURE_BOUNDARIES = 2
"""A look at one boundary is voted on at the next one, and read at the one after."""
SPREAD_AFTER = 2
"""So many boundaries after a finding the votes are about the look at all of the state."""


class ReplicaMonitor:
    """One rank's part. Training thread; nothing here waits for another rank, but `compare_last`.

    `finish` is to be called before anything changes the state; `compare`, `vote`, `row`, `voted`
    and `begin`, in this order, at each boundary.
    """

    def __init__(
        self,
        config: Config,
        group: Group,
        state: TrainingState,
        reports: Reports,
        submit: Callable[[Look], None],
        find_apart: Callable[[], None],
        on_alike: Callable[[int], None],
        on_finding: Callable[[Finding], Consequences],
    ) -> None:
        """`submit` has a look run by another thread. `find_apart` sees whether something that
        counts as alike is each rank's own by now, and calls `forget` then. `on_alike` receives the
        newest version that is known to be alike everywhere, and `on_finding` what differs; it
        returns what became of versions."""
        used = any(config.uses(level) for level in INTERVALS)
        self.active = config.replica_check_steps > 0 and group.size > 1 and used
        self.finding: Finding | None = None
        """What differs, from when it was found until all is alike again."""
        self.error: ReplicaError | None = None
        """To be raised at the end of this boundary, on all ranks."""
        self._slices = config.replica_check_steps
        self._stop = config.on_drift == "stop"
        self._group, self._state, self._reports = group, state, reports
        self._find_apart = find_apart
        self._submit, self._on_alike, self._on_finding = submit, on_alike, on_finding
        self._complained, self._process = False, os.getpid()
        self.restart()

    def restart(self) -> None:
        """A run begins, or the state is another one now: what was seen is forgotten."""
        self._replicated: ReplicatedState | None = None
        self._structure = NONE
        self._look: Look | None = None
        """Of the last boundary."""
        self._to_vote: Look | None = None
        self._voted: Look | None = None
        """Whose digest is in the ballot."""
        self._last: Look | None = None
        self._inquiry: Inquiry | None = None
        """Under way, on all ranks."""
        self._inquired = UNKNOWN
        """The version that it is about."""
        self._place = 0
        """See `vote`; of the last boundary."""
        self._gone = 0
        """Differences that were gone when they were asked about."""
        self._at_once_from: int | None = None
        """The first version that was looked at inside of the boundary."""
        self._silent = 0
        """Boundaries in a row at which some rank had no digest."""
        self._turn = 0
        """Of the next look; counted on all ranks, also on those that fail to look."""
        self._next_all, self._look_all, self._voted_all = True, False, False
        """Whether it is, that of the last boundary was, and that in the ballot was, at all."""
        self._alike_at = [UNKNOWN] * self._slices
        """By slice: the newest version at which it was seen to be alike."""
        self._clean: int | None = None
        """The newest version that is known to be alike in all slices."""
        self._seen_apart = False
        """At the boundary whose votes were read last, ranks were in different iterations."""
        self._unsure = 0
        """Boundaries until it is known whether they are alike all the same."""
        self._spread_in = 0
        """Boundaries until all of the state, which is looked at after a finding, can be compared;
        0 if it is not to be."""
        self.finding = self.error = None

    def forget(self) -> None:
        """Other tensors are alike now, on all ranks."""
        self._replicated = None

    @property
    def refusing(self) -> bool:
        """No version is to be taken: nothing was ever alike in this run, as far as is known; or
        versions of one number are of different iterations."""
        if self.finding is not None:
            return self.finding.apart or self.finding.clean is None
        if self._unsure:
            return True
        return self._inquiry is not None and self._clean is None

    @property
    def suspicion(self) -> str:
        """What is to be said of versions that are taken now; empty if nothing is."""
        return "" if self.finding is None else self.finding.text()

    @property
    def asking(self) -> bool:
        """Whether replicas differ, or in what, will be known in a few boundaries."""
        return self._inquiry is not None or self._unsure > 0

    def raise_error(self) -> None:
        """At the end of the boundary: with `on_drift="stop"`, ReplicaError on all ranks at once."""
        error, self.error = self.error, None
        if error is not None:
            raise error

    # --- the look ------------------------------------------------------------------------------

    def begin(self, version: int) -> None:
        """The state is that of `version`, and stands still until `finish`."""
        if not self.active:
            return
        turn, self._turn = self._turn, self._turn + 1
        try:
            if turn % self._slices == 0 or self._must_look_up(turn):
                self._look_up()
        except Exception as error:
            self._replicated = None
            self._complain(error)
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
            self._complain(error)
            return
        if self._gone >= GONE_OFTEN:
            look.finish()
            self._at_once_from = version if self._at_once_from is None else self._at_once_from
        look.begin = self._submit
        self._look = look

    def _must_look_up(self, turn: int) -> bool:
        """Before a look: what is known is nothing, or proved to be another state's."""
        known = self._replicated
        often = max(self._slices // OUTDATED_LOOKS, 1)
        return known is None or (known.outdated and turn % often == 0)

    def _look_up(self) -> None:
        known = self._replicated
        if known is None or not known.stands(self._state):
            self._replicated = ReplicatedState(self._state, self._slices)
            if self._structure != self._replicated.structure or (known and known.outdated):
                self._next_all = True  # what is in which slice is another matter
            self._structure = self._replicated.structure

    def _complain(self, error: Exception) -> None:
        """Of a slice that this rank did not look at. A version that has the same trouble says so
        itself."""
        severity = logging.DEBUG if self._complained else logging.WARNING
        self._complained = True
        text = f"replicas were not compared: {type(error).__name__}: {error}"
        self._reports.notice(text, severity)

    def wake(self) -> None:
        """Layers are being reduced: a copier may hash beside that."""
        if self._look is not None:
            self._look.wake()

    def finish(self) -> None:
        """Return when the state may change."""
        look = self._look
        if look is not None and not look.over and os.getpid() == self._process:
            look.finish()  # in a fork there is no copier

    def vote(self, place: int) -> tuple[int, int, int, int]:
        """Of the look at the boundary before; before `begin` makes the next one. `place` is the
        iteration that this rank is at: ranks of which some skipped a step come to the same boundary
        at different ones."""
        look, self._look = self._look, None
        digest, self._place = NONE, place
        if look is not None:
            try:
                look.finish()  # if no step came between
                digest = look.fetch()
            except Exception as error:
                self._complain(error)
        self._to_vote = look if digest != NONE else None
        return (*as_vote(digest), place, ~place)

    def row(self) -> list[int]:
        """What is given along with that vote: empty where nothing is asked, on all ranks alike."""
        return [] if self._inquiry is None else self._inquiry.row()

    def voted(self) -> None:
        """What `vote` returned was cast, and nothing came between."""
        self._voted, self._voted_all = self._to_vote, self._look_all

    # --- what came of it -----------------------------------------------------------------------

    def compare(self, agreed: Vote, rows: Rows, place: int) -> None:
        """What all ranks' digests of the boundary before the last one are, and what was given along
        with them. `place`: see `vote`; of this boundary.

        Whether something is asked, or found, follows from the ballots alone, so that it is the same
        on all ranks, also on one that has no look, as an interrupt came between its boundaries.
        """
        look, self._voted = self._voted, None
        self._place = place
        if self._inquiry is not None:
            self._receive(rows)
        spread = self._spread_in == 1
        self._spread_in = max(self._spread_in - 1, 0)
        alike = agree(agreed.check, agreed.check_complement)
        self._see_places(agreed.apart)
        self._count_silent(alike is None)
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
                self._ask(look)
        else:
            if look is not None:
                self._mark(look, UNKNOWN)
            if not agreed.apart and spread:
                self._ask(look)

    def _see_places(self, apart: bool) -> None:
        """Once ranks are in different iterations, all of the state is looked at. They may be alike:
        some loops call `step()` more often on one rank than on another."""
        self._unsure = max(self._unsure - 1, 0)
        if apart and not self._seen_apart and self.active:
            self._next_all, self._unsure = True, UNSURE_BOUNDARIES
        self._seen_apart = apart

    def _count_silent(self, silent: bool) -> None:
        """Say it where nothing is ever compared, in so many rounds, and so nothing is found."""
        self._silent = self._silent + 1 if silent and self.active else 0
        if self._silent == SILENT_ROUNDS * self._slices + SILENT_MORE:
            self._say(SILENT.format(boundaries=self._silent), logging.WARNING)

    def last_digest(self, version: int) -> int:
        """At the end, with the state standing still: of all of it. NONE where there is none."""
        self._last = None
        try:
            if self.active:
                self._look_up()
                assert self._replicated is not None
                self._last = Look(self._replicated, range(self._slices), self._turn, version)
                self._last.finish()
                return self._last.fetch()
        except Exception as error:
            self._complain(error)
        return NONE

    def compare_last(self, digests: list[int]) -> None:
        """What `last_digest` returned, of all ranks. Collective where they differ."""
        look = self._last
        if look is None or NONE in digests:
            return
        if len(set(digests)) == 1:
            self._found_alike(look)
            return
        self._inquiry, self._unsure = None, 0
        if self.finding is None:
            self._place = 0  # all are at the end
            self._ask(look)
        while self.asking:
            self._receive(self._group.all_gather_object(self.row()))

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
        self._on_alike(self._clean)

    def _ask(self, look: Look | None) -> None:
        """Begin to ask in what ranks differ; all do."""
        stands, fresh = False, NONE
        self.finish()  # if no step came between
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
                fresh = self._look_anew(look)
        except Exception as error:
            self._replicated = None
            self._complain(error)
        self._inquired = look.version if look is not None else UNKNOWN
        self._inquiry = Inquiry(look, self._replicated, stands, self._place, fresh, self._slices)

    def _look_anew(self, look: Look) -> int:
        """The same slices as they are at this boundary, while nothing else runs."""
        anew = Look(look.replicated, look.which, look.turn, look.version)
        anew.finish()
        return anew.fetch()

    def _receive(self, rows: Rows) -> None:
        """The answers to what was asked."""
        assert self._inquiry is not None
        outcome = self._inquiry.receive(rows)
        if outcome is None:
            return
        self._inquiry = None
        if outcome.nothing:
            self._turn = self._turn if outcome.turn is None else outcome.turn
            self._next_all = True
        elif self.finding is not None:
            self._tell_spread(outcome)
        elif outcome.structure and _only_devices(outcome.structure):
            self.active = False
            self._say(OTHER_DEVICES.format(what=_by_rank(outcome.structure[:2])), logging.INFO)
        else:
            self._found(outcome, self._inquired)

    def _tell_spread(self, outcome: Outcome) -> None:
        """After a finding in one slice: what differs in all of them."""
        if outcome.names and outcome.everything:
            what = self._finding(outcome, self._inquired).what()
            self._say(SPREAD.format(version=self._inquired, what=what), logging.WARNING)

    def _finding(self, outcome: Outcome, version: int) -> Finding:
        structure = tuple(f"rank {rank}: {line}" for rank, line in enumerate(outcome.structure))
        size, clean = self._group.size, self._clean
        told = (outcome.more, structure, outcome.apart)
        return Finding(outcome.names, outcome.odd, size, version, clean, *told)

    def _found(self, outcome: Outcome, version: int) -> None:
        found = self._finding(outcome, version)
        consequences = self._on_finding(found)
        self._next_all, self._inquiry = True, None
        severity = logging.ERROR
        if outcome.gone:
            if self._at_once_from is not None and version < self._at_once_from:
                return  # it was looked at before, and said twice
            self._gone += 1
            text = GONE.format(what=found.what(), version=version, then=consequences.marked)
            text += OFTEN_GONE if self._gone == GONE_OFTEN else ""
            severity = logging.WARNING
        else:
            self.finding = found
            self._alike_at = [UNKNOWN] * self._slices
            self._spread_in = SPREAD_AFTER
            text = (drifted if found.clean is not None else never_alike)(found, consequences)
            self._stop_for(found, text)
        self._emit(version, text, severity)

    def part(self, version: int, together: int | None, at: str, missing: Sequence[int]) -> None:
        """This rank found that others do not come to the boundary of `version`.

        Args:
            version: it, by its number.
            together: the newest version at whose boundary all were in the same iteration.
            at: in words, where this rank is.
            missing: ranks that did not come, where that is known.
        """
        clean = self._clean if self.active else together
        self.finding = Finding((), None, self._group.size, version, clean, apart=True)
        self._inquiry = None
        text = parted(self.finding, self._on_finding(self.finding), at, missing)
        self._stop_for(self.finding, text)
        self._emit(version, text, logging.ERROR)

    def _stop_for(self, found: Finding, text: str) -> None:
        """With `on_drift="stop"`: the error to be raised at the end of this boundary."""
        if self._stop:
            self.error = ReplicaError(text, found.names, found.odd or ())

    def _emit(self, version: int, text: str, severity: int) -> None:
        """All ranks emit the event; rank 0 alone is loud."""
        if self._group.rank:
            severity = logging.DEBUG
        self._reports.emit("drifted", version=version, message=text, severity=severity)

    def _say(self, text: str, severity: int) -> None:
        self._reports.notice(text, logging.DEBUG if self._group.rank else severity)


def _by_rank(lines: Sequence[str]) -> str:
    return "; ".join(f"rank {rank}: {line}" for rank, line in enumerate(lines))


def _only_devices(lines: Sequence[str]) -> bool:
    """What ranks have differs in nothing but the kind of device that it is on."""
    return len({line.rpartition(" on ")[0] for line in lines}) == 1


__all__ = ["ReplicaMonitor"]
