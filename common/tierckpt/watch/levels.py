"""Levels: the rows of the catalog, reduced to one line a level."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice, product
from pathlib import Path

from tierckpt._text import is_url
from tierckpt.agent.protocol import LevelStatus
from tierckpt.core.levels import LOCAL, MEMORY, PEER, PERSISTENT, RANK
from tierckpt.format.ids import ShardKey, VersionId
from tierckpt.format.version_names import MANIFEST, VersionName
from tierckpt.offline.catalog import Row
from tierckpt.storage.local.store import LocalStore

from .view import EventsView, LevelView, Restart

MOST_MANIFESTS = 256
"""Number of names at which the manifests of one version are looked for, to find its age."""


def level_views(
    rows: Sequence[Row],
    now: float,
    agents: Iterable[LevelStatus],
    events: EventsView | None,
    write_rates: Mapping[str, float],
) -> tuple[LevelView, ...]:
    """One view for each level of which something is seen, the cheapest first. `write_rates` are
    those of events, for levels whose agent is not seen."""
    results = list(agents)
    rates = {**write_rates, **_write_rates(results)}
    own = [row for row in rows if not row.elsewhere and row.is_past]
    parities = [
        replace(row, level=PEER.value, nbytes=0, places=[], there=set(range(row.parities)))
        for row in own
        if row.parities and row.level == LOCAL
    ]
    found = []
    for level in sorted({row.level for row in (*own, *parities)}, key=lambda name: RANK[name]):
        on_level = [row for row in (*own, *parities) if row.level == level and row.there]
        if on_level:
            found.append(_view(level, on_level, own, now, results, rates.get(level)))
    return tuple(_with_counts(view, events) for view in found)


def _view(
    level: str,
    rows: list[Row],
    all_rows: Sequence[Row],
    now: float,
    results: Sequence[LevelStatus],
    write_rate: float | None,
) -> LevelView:
    newest = max([row for row in rows if not row.missing] or rows, key=_id)
    taken = _taken_seconds(newest, all_rows)
    since = {_id(row): _durable_since(row, results) for row in rows}
    times = {_id(row): _taken_seconds(row, all_rows) or since[_id(row)] for row in rows}
    return LevelView(
        level=level,
        version=newest.version,
        shards_seen=len(newest.there),
        shards=newest.shards,
        versions=len(rows),
        nbytes=newest.nbytes,
        age_seconds=None if taken is None else max(now - taken, 0.0),
        durable_since_seconds=since[_id(newest)],
        bytes_per_second=_rate(newest, times),
        write_bytes_per_second=write_rate,
    )


def _id(row: Row) -> VersionId:
    return VersionId(row.generation, row.version)


def _taken_seconds(row: Row, rows: Sequence[Row]) -> float | None:
    """Unix time of the version, also by its copies on other levels."""
    same = [row, *(each for each in rows if (_id(each), each.run_id) == (_id(row), row.run_id))]
    return next((each.created_seconds for each in same if each.created_seconds), None)


def _durable_since(row: Row, results: Sequence[LevelStatus]) -> float | None:
    """Unix time when the last shard seen was committed."""
    if row.level == MEMORY:
        return None
    for result in results:
        if result.level == row.level and result.newest == _id(row):
            return result.newest_at_seconds
    found = []
    with suppress(OSError):
        if row.level == LOCAL:
            keys = [ShardKey(_id(row), shard, row.shards) for shard in sorted(row.there)]
            for place, key in islice(product(row.places, keys), MOST_MANIFESTS):
                with suppress(OSError):
                    found.append(LocalStore(place).committed_seconds(key))
        elif row.level == PERSISTENT and not is_url(row.places[0]):
            stem = VersionName(_id(row), row.shards, row.run_id).stem
            found.append(Path(row.places[0], stem + MANIFEST).stat().st_mtime)
    return max(found, default=None)


def _rate(newest: Row, times: Mapping[VersionId, float | None]) -> float | None:
    """Bytes a second, from the times of the two newest versions of one run."""
    end = times.get(_id(newest))
    earlier = [
        each
        for id_, each in times.items()
        if each is not None and end is not None and each < end
        if id_.generation == newest.generation
    ]
    if end is None or not earlier or not newest.nbytes:
        return None
    return newest.nbytes / (end - max(earlier))


def _write_rates(results: Sequence[LevelStatus]) -> dict[str, float]:
    return {
        each.level: each.last_bytes / each.last_seconds
        for each in results
        if each.last_bytes and each.last_seconds > 0
    }


def _with_counts(view: LevelView, events: EventsView | None) -> LevelView:
    if events is None:
        return view
    stored = "sealed" if view.level == MEMORY else "committed"

    def count(name: str) -> int:
        return events.counts.get(f"{name}/{view.level}", 0)

    return replace(view, stored=count(stored), skipped=count("skipped"), failed=count("failed"))


def restart_of(rows: Sequence[Row], now: float) -> Restart | None:
    """The version that a restart takes; None if none is complete here."""
    taken = [row for row in rows if row.next]
    if not taken:
        return None
    created = _taken_seconds(taken[0], rows)
    age = None if created is None else max(now - created, 0.0)
    iteration = next((row.iteration for row in taken if row.iteration is not None), None)
    return Restart(taken[0].version, iteration, tuple(row.level for row in taken), age)


def steps_per_second(rows: Sequence[Row], now: float) -> float | None:
    """The pace of the training, by the two newest versions in memory, and by the time since then:
    that of a job that hangs goes to 0."""
    times = {
        _id(row): row.created_seconds
        for row in rows
        if row.level == MEMORY and row.created_seconds and not row.elsewhere
    }
    newest = sorted(times)[-2:]
    if len(newest) < 2 or newest[0].generation != newest[1].generation:
        return None
    seconds = max(times[newest[1]] - times[newest[0]], now - times[newest[1]])
    return (newest[1].version - newest[0].version) / seconds if seconds > 0 else None


__all__ = ["level_views", "restart_of", "steps_per_second"]
