"""Replicas: whether what all ranks are to have alike is alike, looked at as the training goes on.

At each boundary all ranks hash the same slice of parameters and optimizer state, the first time in
a life all of it (`replicahash`); the digest goes into the next boundary's vote, and what came of
that is read at the one after. If ranks differ, all learn it at the same boundary, so they may tell
each other more there: which tensors, on which ranks.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from . import replicainquiry as inquiry
from .config import Config
from .errors import ReplicaError
from .group import Group
from .modulenames import parameter_of
from .policy import Vote
from .replicacheck import NONE, Finding, agree, as_vote
from .replicahash import Look
from .replicainquiry import Answer
from .replicated import Replicated
from .reports import Reports
from .state import TrainingState

NEVER_ALIKE = (
    "ranks train apart: {what}, seen at v{version}. No version is taken while that is so, as each "
    "rank stores a part of it: what is restored would be a mosaic, the state of no rank. Wrap the "
    "model in DistributedDataParallel (under Horovod: hvd.DistributedOptimizer), or all_reduce "
    "each gradient before the optimizer's step; and have all ranks begin with the same weights. "
    "What is to differ from rank to rank is named in the setting forward_changes (here: "
    "{names!r}): of that each rank stores its own"
)
DRIFTED = (
    "replicas differ: {text}. Versions since then are suspect: a part of each is of one rank, a "
    "part of another. A bit may have flipped in memory, a device compute wrongly, or code change "
    "the state on some ranks only. {way_out}"
)
SPREAD = "in all of the state, what differed at v{version} is {what}"
ALIKE_AGAIN = (
    "replicas are alike again, since v{version} at the latest: versions from here on are no "
    "suspects. What differed: {what}"
)
OTHER_DEVICES = (
    "ranks have their state on devices of different kinds ({what}): replicas are not compared"
)
SILENT = (
    "replicas were not compared at the last {boundaries} boundaries: on some rank weights or "
    "optimizer state change between each boundary and the next optimizer step (are weights clipped "
    "there, broadcast, or swapped for averages?). Do that before the boundary, step() of the "
    "checkpointer; or set replica_check_steps=0, and nothing is looked at"
)
SILENT_ROUNDS, SILENT_MORE = 2, 4
"""So many rounds without a digest of all ranks are worth a word, and so many boundaries more."""

OUTDATED_LOOKS = 5
"""In a round, where the structure is another one at each boundary (lists that grow): to list all of
the state anew takes some 10 microseconds a tensor."""
UNKNOWN = -1
"""In place of a version."""


class Replicas:
    """One rank's part. Training thread; `compare` is collective where ranks differ.

    `finish` is to be called before anything changes the state; `compare`, `vote`, `voted` and
    `begin`, in this order, at each boundary.
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
        on_finding: Callable[[Finding], str],
    ) -> None:
        """`submit` has a look run by another thread. `find_apart` sees whether something that
        counts as alike is each rank's own by now, and calls `forget` then. `on_alike` receives the
        newest version that is known to be alike everywhere, and `on_finding` of what differs; it
        says in words which version to go back to, if there is one."""
        used = any(config.uses(level) for level in ("memory", "local", "persistent"))
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
        """A life begins, or the state is another one now: what was seen is forgotten."""
        self._replicated: Replicated | None = None
        self._structure = NONE
        self._look: Look | None = None
        """Of the last boundary."""
        self._to_vote: Look | None = None
        self._voted: Look | None = None
        """Whose digest is in the ballot."""
        self._last: Look | None = None
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
        self._spread_due = False
        """After a finding all of the state is to be looked at once."""
        self.finding = self.error = None

    def forget(self) -> None:
        """Other tensors are alike now, on all ranks."""
        self._replicated = None

    @property
    def refusing(self) -> bool:
        """No version is to be taken: nothing was ever alike in this life."""
        return self.finding is not None and self.finding.clean is None

    @property
    def suspicion(self) -> str:
        """What is to be said of versions that are taken now; empty if nothing is."""
        return "" if self.finding is None else self.finding.text()

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
            self._replicated = Replicated(self._state, self._slices)
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
        at different ones, and whoever asked the others there would wait for ever."""
        look, self._look = self._look, None
        digest = NONE
        if look is not None:
            try:
                look.finish()  # if no step came between
                digest = look.fetch()
            except Exception as error:
                self._complain(error)
        self._to_vote = look if digest != NONE else None
        return (*as_vote(digest), place, ~place)

    def voted(self) -> None:
        """What `vote` returned was cast, and nothing came between."""
        self._voted, self._voted_all = self._to_vote, self._look_all

    # --- what came of it -----------------------------------------------------------------------

    def compare(self, agreed: Vote) -> None:
        """What all ranks' digests of the boundary before the last one are. Collective where they
        differ, which all ranks learn at the same boundary."""
        look, self._voted = self._voted, None
        alike = agree(agreed.check, agreed.check_complement)
        together = agreed.place == ~agreed.place_complement
        self._count_silent(alike is None)
        if alike is None or look is None:
            self._next_all |= self._voted_all
        elif alike:
            self._found_alike(look)
        elif self.finding is None and not together:
            self._found(look, (), None, False, apart=True)
        elif self.finding is None:
            self._differs(look)
        else:
            self._mark(look, UNKNOWN)
            if together and self._spread_due and len(look.which) == self._slices:
                self._tell_spread(look)

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
        elif self.finding is None:
            self._differs(look)

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
            text = ALIKE_AGAIN.format(version=self._clean, what=self.finding.what())
            self._say(text, logging.WARNING)
            self.finding = None
        self._on_alike(self._clean)

    def _differs(self, look: Look) -> None:
        answers = self._ask(look)
        if not inquiry.of_one_boundary(answers):
            self._turn = max(each.turn for each in answers) + 2  # an interrupt came between
            self._next_all = True
        elif any(each.now == NONE for each in answers):
            self._next_all = True  # a rank does not know what it has
        elif len({each.now for each in answers}) > 1:
            self._find_structure(look, answers)
        elif not inquiry.comparable(answers):
            self._next_all = True  # looked at before all had noticed that it is another one
        else:
            self._found(look, *inquiry.tensors(self._group, look, answers))

    def _ask(self, look: Look) -> list[Answer]:
        """What all ranks have. Collective."""
        stands = False
        try:
            self._find_apart()
            stands = self._replicated is not None and (look.replicated.stands(self._state))
            if not stands:
                self._replicated = Replicated(self._state, self._slices)
        except Exception as error:
            self._replicated = None
            self._complain(error)
        return inquiry.ask(self._group, look, self._replicated, stands)

    def _tell_spread(self, look: Look) -> None:
        """After a finding in one slice: what differs in all of them. Collective."""
        self._spread_due = False
        answers = self._ask(look)
        if not (inquiry.of_one_boundary(answers) and inquiry.comparable(answers)):
            return
        names, odd, more = inquiry.tensors(self._group, look, answers)
        what = Finding(names, odd, self._group.size, look.version, more=more).what()
        self._say(SPREAD.format(version=look.version, what=what), logging.WARNING)

    def _find_structure(self, look: Look, answers: list[Answer]) -> None:
        """Ranks have different tensors."""
        assert self._replicated is not None  # as all have
        what, only_devices = inquiry.structures(self._group, self._replicated, answers)
        each = tuple(f"rank {rank}: {line}" for rank, line in enumerate(what))
        if only_devices:
            self.active = False
            self._say(OTHER_DEVICES.format(what="; ".join(each[:2])), logging.INFO)
        else:
            self._found(look, (), None, True, each)

    def _found(
        self,
        look: Look,
        names: tuple[str, ...],
        odd: tuple[int, ...] | None,
        more: bool,
        structure: tuple[str, ...] = (),
        apart: bool = False,
    ) -> None:
        clean = self._clean
        ranks = self._group.size
        self.finding = found = Finding(
            names, odd, ranks, look.version, clean, more, structure, apart
        )
        self._alike_at = [UNKNOWN] * self._slices
        self._next_all = self._spread_due = True
        way_out = self._on_finding(found)
        if clean is None:
            own = ", ".join(dict.fromkeys(parameter_of(name) for name in names[:4])) or "..."
            text = NEVER_ALIKE.format(what=found.what(), version=look.version, names=own)
        else:
            text = DRIFTED.format(text=found.text(), way_out=way_out)
        severity = logging.ERROR if self._group.rank == 0 else logging.DEBUG
        self._reports.emit("drifted", version=look.version, message=text, severity=severity)
        if self._stop:
            self.error = ReplicaError(text, found.names, found.odd or ())

    def _say(self, text: str, severity: int) -> None:
        self._reports.notice(text, logging.DEBUG if self._group.rank else severity)


__all__ = ["Replicas"]
