"""Replica check, the inquiry: what ranks tell each other where a look differs.

All know of it at the same boundary, so all take part. What is sent does not grow with the state: of
a look, or of the list of tensors, digests of a few runs first, and then all of the first runs that
differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .group import Group
from .replicacheck import BUCKETS_OPENED, NONE, buckets_of, find, folded, unlike
from .replicahash import Look
from .replicated import Replicated


class Answer(NamedTuple):
    """By one rank, first."""

    turn: int
    version: int
    slices: int
    """How many the look is of."""
    structure: int
    """As it was then."""
    buckets: tuple[int, ...]
    """Digests of runs of the look's."""
    now: int
    """The structure as it is at this boundary; NONE where that cannot be said."""
    tensors: int
    """How many there are now."""
    stands: bool
    """The state has the same tensors as at the look."""


def ask(group: Group, look: Look, now: Replicated | None, stands: bool) -> list[Answer]:
    """What every rank has; `now`: of the state at this boundary. Collective."""
    mine = Answer(
        look.turn,
        look.version,
        len(look.which),
        look.replicated.structure,
        folded(look.digests),
        NONE if now is None else now.structure,
        0 if now is None else len(now.lines),
        stands,
    )
    return [Answer(*each) for each in group.all_gather_object(tuple(mine))]


def of_one_boundary(answers: Sequence[Answer]) -> bool:
    """All have looked at the same slices of the same version."""
    return len({(each.turn, each.version, each.slices) for each in answers}) == 1


def comparable(answers: Sequence[Answer]) -> bool:
    """The looks were at the same tensors, on all ranks."""
    return len({each.structure for each in answers}) == 1 and all(each.stands for each in answers)


def tensors(
    group: Group, look: Look, answers: Sequence[Answer]
) -> tuple[tuple[str, ...], tuple[int, ...] | None, bool]:
    """(tensors that differ, ranks that are odd, whether there may be others). Collective."""
    differ = unlike([each.buckets for each in answers])
    runs = [buckets_of(len(look.digests))[i] for i in differ[:BUCKETS_OPENED]]
    indices = [i for run in runs for i in run]
    rows: list[list[int]] = group.all_gather_object([look.digests[i] for i in indices])
    names = [look.replicated.names[look.units[i].tensor] for i in indices]
    columns = list(zip(names, zip(*rows, strict=True), strict=True))
    found, odd = find(look.replicated.names, columns)
    return found, odd, len(differ) > BUCKETS_OPENED


def structures(group: Group, now: Replicated, answers: Sequence[Answer]) -> tuple[list[str], bool]:
    """(what each rank has of the first tensor that is not alike, whether only the kind of device
    differs). Collective."""
    count = max(each.tensors for each in answers)
    rows: list[tuple[int, ...]] = group.all_gather_object(folded(now.line_hashes, count))
    first = (unlike(rows) or [0])[0]
    mine = now.lines[buckets_of(count)[first].start : buckets_of(count)[first].stop]
    lines: list[list[str]] = group.all_gather_object(mine)
    at = (unlike(lines) or [0])[0]
    what = [row[at] if at < len(row) else "none here" for row in lines]
    kinds = {line.rpartition(" on ")[0] for line in what}
    return what, len(kinds) == 1


__all__ = ["Answer", "ask", "comparable", "of_one_boundary", "structures", "tensors"]
