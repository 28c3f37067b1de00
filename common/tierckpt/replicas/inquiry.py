"""The inquiry of the replica check: the ranks' reports on a difference. Pure.

All ranks learn of a difference from the same ballot. Each adds its answer to its next vote: a row
of numbers that all ranks read one boundary later. So a rank that comes late, or not at all, delays
the others no more than its vote does. The next question follows from the answers, which are the
same on all ranks. First come the facts, with digests of a few runs of units of the look; then
digests of parts of the first runs that differ, until the parts are single units. If ranks have
different tensors, the list of tensors is searched in the same way, and the first line that differs
is reported.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from tierckpt.coordination.ballots.vote_exchange import OWN_WIDTH, Rows
from tierckpt.core.replica_check import (
    BUCKETS,
    BUCKETS_OPENED,
    NONE,
    buckets_of,
    find,
    fold_runs,
    unlike,
)

from .digests import Look
from .replicated_state import ReplicatedState

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


__all__ = ["Facts", "Inquiry", "Outcome", "Stage"]
