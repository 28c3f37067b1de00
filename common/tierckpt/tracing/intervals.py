"""Interval arithmetic on half-open intervals `(begin, end)` of integers. Pure."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[int, int]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points as disjoint intervals in order; empty ones vanish. O(n log n)."""
    found: list[Interval] = []
    for begin, end in sorted(i for i in intervals if i[0] < i[1]):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def intersection(one: list[Interval], other: list[Interval]) -> list[Interval]:
    """What two unions have in common, as a union; a sweep over both. O(n)."""
    found: list[Interval] = []
    i = j = 0
    while i < len(one) and j < len(other):
        begin, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if begin < end:
            found.append((begin, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def length(intervals: Iterable[Interval]) -> int:
    """Of a union: all of it together."""
    return sum(end - begin for begin, end in intervals)


def overlap(intervals: Iterable[Interval], cover: list[Interval]) -> int:
    """How much of these, each counted by itself, lies under the union `cover`.

    Two threads that copy at the same time have copied for twice the time.
    """
    return sum(length(intersection([i], cover)) for i in intervals if i[0] < i[1])


def lanes(intervals: list[Interval]) -> list[int]:
    """A lane for each, so that none overlaps another in its lane; first come, lowest lane.

    They are given in the order in which they begin.
    """
    free_from: list[int] = []
    chosen = []
    for begin, end in intervals:
        lane = next((k for k, since in enumerate(free_from) if since <= begin), len(free_from))
        free_from[lane:] = [end, *free_from[lane + 1 :]]
        chosen.append(lane)
    return chosen
