"""The replica monitor: compares the state that all ranks share, during training.

At each boundary all ranks hash the same slice of parameters and optimizer state; the first time in
a run they hash all of it (`replicated_state.Look`). The digest goes into the next boundary's vote,
and the result is read at the boundary after that. If ranks differ, all learn it from the same
ballot, and with their next votes they report which tensors differ, and on which ranks: the
inquiry, which is pure.

All ranks learn of a difference from the same ballot. Each adds its answer to its next vote: a row
of numbers that all ranks read one boundary later. So a rank that comes late, or not at all, delays
the others no more than its vote does. The next question follows from the answers, which are the
same on all ranks. First come the facts, with digests of a few runs of units of the look; then
digests of parts of the first runs that differ, until the parts are single units. If ranks have
different tensors, the list of tensors is searched in the same way, and the first line that differs
is reported.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from tierckpt import _process
from tierckpt._text import in_words
from tierckpt.config import Config
from tierckpt.coordination.ballots import OWN_WIDTH, Rows
from tierckpt.coordination.versions import Reports
from tierckpt.core.decisions import Vote
from tierckpt.core.levels import INTERVALS
from tierckpt.core.replica_check import (
    BUCKETS,
    BUCKETS_OPENED,
    NONE,
    Finding,
    agree,
    as_vote,
    buckets_of,
    find,
    fold_runs,
    unlike,
)
from tierckpt.errors import ReplicaError
from tierckpt.group import Group
from tierckpt.state.training_state import TrainingState

from .drift import (
    ALIKE_AGAIN,
    GONE,
    OFTEN_GONE,
    OTHER_DEVICES,
    SILENT,
    SPREAD,
    Consequences,
    drifted,
    never_alike,
    text_of_divergence,
)
from .replicated_state import Look, ReplicatedState

__all__ = ["Facts", "Inquiry", "Outcome", "ReplicaMonitor", "Stage"]


TEXT_BYTES = 7
"""Bytes of a line's text in each number of a row."""


class Stage(IntEnum):
    """The content of a row: its first number."""

    NOTHING = 0
    """A rank has no answer, because an interrupt came between its boundaries."""
    FACTS = 1
    UNITS = 2
    LINES = 3
    TEXT = 4


class Facts(NamedTuple):
    """The first answer of a rank."""

    turn: int
    version: int
    place: int
    """The rank's iteration at this boundary."""
    slices: int
    """Number of slices in the look."""
    structure: int
    """The structure at the time of the look."""
    now: int
    """The structure at this boundary; NONE if unknown."""
    tensors: int
    """Number of tensors at this boundary."""
    stands: int
    """1 if the state has the same tensors as at the look."""
    fresh: int
    """A digest of the same slices, hashed at this boundary; NONE if there is none."""


@dataclass(frozen=True)
class Outcome:
    """The result of an inquiry; the same on all ranks."""

    nothing: bool = False
    """The looks cannot be compared: everything must be looked at again."""
    turn: int | None = None
    """The turn of the next look, if it must be set."""
    apart: bool = False
    """Ranks reached the boundary at different iterations."""
    names: tuple[str, ...] = ()
    """The first tensors that differ."""
    odd: tuple[int, ...] | None = None
    """The ranks in the minority; None without a majority."""
    more: bool = False
    """Other tensors may differ, too."""
    gone: bool = False
    """At the inquiry's boundary the slices of the look were equal."""
    everything: bool = False
    """The look covered all slices."""
    structure: tuple[str, ...] = ()
    """Each rank's line for the first tensor in which the lists differ."""


class Inquiry:
    """One rank's part. Training thread. Call `row`, then `receive`, until that returns an
    outcome."""

    def __init__(
        self,
        look: Look | None,
        now: ReplicatedState | None,
        stands: bool,
        place: int,
        fresh: int,
        slices: int,
    ) -> None:
        """`look`: the one that differs, None if this rank has none. `now`: the state at this
        boundary. `slices`: their total number. The other arguments are those of `Facts`."""
        self._look, self._now, self._slices = look, now, slices
        self._stage = Stage.FACTS
        self._lists = False
        """True if the list of tensors is searched, not the tensors."""
        self._rounds = 0
        self._gone = self._everything = self._more = False
        self._values: Sequence[int] = look.digests if look is not None else ()
        """The values that are searched for a difference."""
        self._runs = buckets_of(len(self._values))
        """The runs with a digest in the row."""
        self._facts: Facts | None = None
        if look is not None:
            self._facts = Facts(
                look.turn,
                look.version,
                place,
                len(look.which),
                look.replicated.structure,
                NONE if now is None else now.structure,
                0 if now is None else len(now.lines),
                int(stands),
                fresh,
            )

    def row(self) -> list[int]:
        """This rank's answer: OWN_WIDTH numbers."""
        if self._facts is None:
            return [Stage.NOTHING] * OWN_WIDTH
        if self._stage is Stage.TEXT:
            answer = _packed(self._line())
        else:
            answer = fold_runs(self._values, self._runs)
            if self._stage is Stage.FACTS:
                answer = [*self._facts, *answer]
        row = [int(self._stage), *answer]
        return row + [0] * (OWN_WIDTH - len(row))

    def receive(self, rows: Rows) -> Outcome | None:
        """Take all ranks' answers; returns None if another round is needed."""
        self._rounds += 1
        if self._facts is None or any(not row or row[0] != self._stage for row in rows) or not rows:
            return Outcome(nothing=True)
        if self._stage is Stage.TEXT:
            return self._outcome(structure=tuple(_unpacked(row[1:]) for row in rows))
        digests = [row[1:] for row in rows]
        if self._stage is Stage.FACTS:
            size = len(Facts._fields)
            outcome = self._judge([Facts(*row[:size]) for row in digests])
            if outcome is not None or self._lists:
                return outcome
            digests = [row[size:] for row in digests]
        return self._narrow([row[: len(self._runs)] for row in digests])

    def _judge(self, facts: Sequence[Facts]) -> Outcome | None:
        """Decide by the facts: an outcome, or a search of the tensors or of their list."""
        if len({(each.turn, each.version, each.slices) for each in facts}) > 1:
            turn = max(each.turn for each in facts) + 2 + self._rounds
            return Outcome(nothing=True, turn=turn)  # an interrupt came between
        if len({each.place for each in facts}) > 1:
            return Outcome(apart=True)
        if any(each.now == NONE for each in facts):
            return Outcome(nothing=True)  # a rank does not know its tensors
        if len({each.now for each in facts}) > 1:
            assert self._now is not None
            self._lists, self._stage, self._values = True, Stage.LINES, self._now.line_hashes
            self._runs = buckets_of(max(each.tensors for each in facts))
            return None
        if len({each.structure for each in facts}) > 1 or not all(each.stands for each in facts):
            return Outcome(nothing=True)  # the look came before all ranks noticed the change
        fresh = {each.fresh for each in facts}
        self._gone = len(fresh) == 1 and fresh != {NONE}
        self._everything = facts[0].slices == self._slices
        return None

    def _narrow(self, rows: Sequence[Sequence[int]]) -> Outcome | None:
        """Split the runs with different digests."""
        differ = [self._runs[i] for i in unlike(rows)]
        if not differ:  # the runs are equal in 62 bits, the digests made of them are not
            return Outcome(nothing=True)
        single = all(len(run) == 1 for run in self._runs)
        if single and not self._lists:
            return self._tensors(rows)
        opened = differ[: 1 if self._lists else BUCKETS_OPENED]
        self._more |= len(differ) > len(opened)
        if single:
            self._stage, self._runs = Stage.TEXT, opened
            return None
        if self._stage is Stage.FACTS:
            self._stage = Stage.UNITS
        self._runs = [part for run in opened for part in _parts(run, BUCKETS // len(opened))]
        return None

    def _tensors(self, rows: Sequence[Sequence[int]]) -> Outcome:
        assert self._look is not None
        names, units = self._look.replicated.names, self._look.units
        columns: list[tuple[str, Sequence[Hashable]]] = [
            (names[units[run.start].tensor], column)
            for run, column in zip(self._runs, zip(*rows, strict=True), strict=True)
        ]
        found, odd = find(names, columns)
        return self._outcome(names=found, odd=odd)

    def _outcome(
        self,
        names: tuple[str, ...] = (),
        odd: tuple[int, ...] | None = None,
        structure: tuple[str, ...] = (),
    ) -> Outcome:
        return Outcome(
            names=names,
            odd=odd,
            structure=structure,
            more=self._more or bool(structure),
            gone=self._gone,
            everything=self._everything,
        )

    def _line(self) -> str:
        """This rank's line at the position found."""
        assert self._now is not None
        at = self._runs[0].start
        return self._now.lines[at] if at < len(self._now.lines) else "none here"


def _parts(run: range, count: int) -> list[range]:
    """Split a run into at most `count` parts."""
    size = -(-len(run) // count)
    return [run[at : at + size] for at in range(0, len(run), size)]


def _packed(text: str) -> list[int]:
    """As much of a line as a row holds."""
    content = text.encode()[: (OWN_WIDTH - 1) * TEXT_BYTES]
    parts = [content[at : at + TEXT_BYTES] for at in range(0, len(content), TEXT_BYTES)]
    return [int.from_bytes(part.ljust(TEXT_BYTES, b"\0"), "little") for part in parts]


def _unpacked(row: Sequence[int]) -> str:
    content = b"".join(number.to_bytes(TEXT_BYTES, "little") for number in row)
    return content.rstrip(b"\0").decode(errors="replace")


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


class ReplicaMonitor:
    """One rank's part. Training thread. Only `compare_last` waits for other ranks.

    The caller must call `finish` before anything changes the state, and at each boundary `compare`,
    `vote`, `row` and `begin`, in this order.
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
        """`submit` makes another thread run a look. `find_apart` checks whether some state that
        counts as shared has become each rank's own, and then calls `forget`. `on_alike` receives
        the newest version that is known to be equal everywhere. `on_finding` receives a difference
        and returns its consequences for versions."""
        used = any(config.uses(level) for level in INTERVALS)
        self.active = config.replica_check_steps > 0 and group.size > 1 and used
        self.finding: Finding | None = None
        """The difference, from its detection until all is equal again."""
        self.error: ReplicaError | None = None
        """The error to raise at the end of this boundary, on all ranks."""
        self._slices = config.replica_check_steps
        self._stop = config.on_drift == "stop"
        self._group, self._state, self._reports = group, state, reports
        self._find_apart = find_apart
        self._submit, self._on_alike, self._on_finding = submit, on_alike, on_finding
        self._complained, self._process = False, os.getpid()
        self.restart()

    def restart(self) -> None:
        """A run begins, or the state was replaced: forget all observations."""
        self._replicated: ReplicatedState | None = None
        self._structure = NONE
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
        """The turn of the next look. It is counted on all ranks, also after a failed look."""
        self._next_all, self._look_all, self._voted_all = True, False, False
        """Whether the next look, that of the last boundary, and that in the ballot cover all
        slices."""
        self._alike_at = [UNKNOWN] * self._slices
        """By slice: the newest version at which it was seen to be equal."""
        self._clean: int | None = None
        """The newest version that is known to be equal in all slices."""
        self._seen_apart = False
        """Whether ranks were in different iterations at the boundary of the last votes read."""
        self._unsure = 0
        """Boundaries until it is known whether they are equal nevertheless."""
        self._spread_in = 0
        """Boundaries until the look at the whole state, made after a finding, can be compared; 0 if
        there is none."""
        self.finding = self.error = None

    def forget(self) -> None:
        """The set of shared tensors has changed, on all ranks."""
        self._replicated = None

    @property
    def refusing(self) -> bool:
        """True if no version may be taken: nothing is known to have been equal in this run, or
        versions of one number are from different iterations."""
        if self.finding is not None:
            return self.finding.apart or self.finding.clean is None
        if self._unsure:
            return True
        return self._inquiry is not None and self._clean is None

    @property
    def suspicion(self) -> str:
        """The suspicion to record with versions taken now; empty if there is none."""
        return "" if self.finding is None else self.finding.text()

    @property
    def asking(self) -> bool:
        """True if a few boundaries will show whether replicas differ, or how."""
        return self._inquiry is not None or self._unsure > 0

    def raise_error(self) -> None:
        """With `on_drift="stop"`, raise ReplicaError at the end of the boundary, on all ranks at
        once."""
        error, self.error = self.error, None
        if error is not None:
            raise error

    # --- the look ------------------------------------------------------------------------------

    def begin(self, version: int, early: bool) -> None:
        """The result of `vote` was cast, and nothing came between: start the look at `version`. Its
        state does not change until `finish`. `early`: a copier may hash from now on, as after
        `wake`."""
        self._voted, self._voted_all = self._to_vote, self._look_all
        if not self.active:
            return
        turn, self._turn = self._turn, self._turn + 1
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
        look.begin = self._submit
        self._look = look
        if early:
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
        text = f"replicas were not compared: {in_words(error)}"
        self._reports.notice(text, severity)

    def wake(self) -> None:
        """Layers are being reduced: a copier may hash at the same time."""
        if self._look is not None:
            self._look.wake()

    def finish(self) -> None:
        """Return when the state may change."""
        look = self._look
        if look is not None and not look.over and os.getpid() == self._process:
            look.finish()  # a forked process has no copier

    def vote(self, place: int) -> tuple[int, int, int, int]:
        """The vote on the look at the boundary before. Call it before `begin` makes the next look.
        `place` is this rank's iteration: if some ranks skipped a step, ranks come to the same
        boundary at different iterations."""
        look, self._look = self._look, None
        self._place = place
        if look is None:
            self._to_vote = None
            return NONE, NONE, place, ~place
        digest = NONE
        try:
            look.finish()  # if no step came between
            digest = look.fetch()
        except Exception as error:
            self._report_failure(error)
        self._to_vote = look if digest != NONE else None
        return (*as_vote(digest), place, ~place)

    def row(self) -> list[int]:
        """The row to send with that vote; empty, on all ranks, if no inquiry is in progress."""
        return [] if self._inquiry is None else self._inquiry.row()

    # --- results -------------------------------------------------------------------------------

    def compare(self, agreed: Vote, rows: Rows, place: int) -> None:
        """Take the ranks' digests of the boundary before the last one, and their rows. `place`: as
        in `vote`, for this boundary.

        Whether an inquiry starts, or ends, follows from the ballots alone. So it is the same on all
        ranks, also on a rank without a look, after an interrupt between its boundaries.
        """
        look, self._voted = self._voted, None
        self._place = place
        if not (self.active or self._inquiry or self.finding or self._unsure):
            return  # on all ranks: no digest was in the votes
        if self._inquiry is not None:
            self._receive(rows)
        spread = self._spread_in == 1
        self._spread_in = max(self._spread_in - 1, 0)
        alike = agree(agreed.check, agreed.check_complement)
        if (apart := agreed.apart) or self._unsure or self._seen_apart:
            self._see_places(apart)
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

    def _count_silent(self, silent: bool) -> None:
        """Warn if no comparison was possible for several rounds, so that no difference can be
        found."""
        self._silent = self._silent + 1 if silent and self.active else 0
        if self._silent == SILENT_ROUNDS * self._slices + SILENT_MORE:
            self._say(SILENT.format(boundaries=self._silent), logging.WARNING)

    def last_digest(self, version: int) -> int:
        """The digest of the whole state, at the end, while it does not change; NONE if there is
        none."""
        self._last = None
        try:
            if self.active:
                self._look_up()
                assert self._replicated is not None
                self._last = Look(self._replicated, range(self._slices), self._turn, version)
                self._last.finish()
                return self._last.fetch()
        except Exception as error:
            self._report_failure(error)
        return NONE

    def compare_last(self, digests: list[int]) -> None:
        """Compare the results of `last_digest` of all ranks. Collective if they differ."""
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

    def _start_inquiry(self, look: Look | None) -> None:
        """Start to find the tensors that differ; all ranks do."""
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
            self._turn = self._turn if outcome.turn is None else outcome.turn
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
        consequences = self._on_finding(found)
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

    def diverge(self, version: int, together: int | None, at: str, missing: Sequence[int]) -> None:
        """This rank found that other ranks do not come to the boundary of `version`.

        Args:
            version: the number of the version.
            together: the newest version at whose boundary all were in the same iteration.
            at: this rank's position, in words.
            missing: the ranks that did not come, if known.
        """
        clean = self._clean if self.active else together
        self.finding = Finding((), None, self._group.size, version, clean, apart=True)
        self._inquiry = None
        text = text_of_divergence(self.finding, self._on_finding(self.finding), at, missing)
        self._stop_for(self.finding, text)
        self._emit(version, text, logging.ERROR)

    def _stop_for(self, found: Finding, text: str) -> None:
        """With `on_drift="stop"`, prepare the error for the end of this boundary."""
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
