"""The persistent level, for a process that sees only that: the lease, and unfinished versions.

The files of a version that is being flushed show how far all nodes are together, and whose shards
are missing, wherever the watcher runs.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass

from tierckpt._text import some
from tierckpt.format.version_names import GROUP, RETIRED, VersionName, parse_run
from tierckpt.storage.persistent import PersistentStore

from .view import Work

LABEL = re.compile(r"(\d{5,})of(\d{5,})")
MOST_VERSIONS = 2
"""Number of unfinished versions that are looked into, the newest ones."""
MOST_GROUPS = 16
"""Number of their unfinished groups that are looked into."""


@dataclass(frozen=True)
class LeaseView:
    """The job that uses the place, by its lease."""

    owner: str
    expires_seconds: float
    """Unix time by the clock of the holder."""


@dataclass(frozen=True)
class PlaceView:
    """One place of the persistent level."""

    url: str
    lease: LeaseView | None
    work: tuple[Work, ...]


def look_at(url: str, store: PersistentStore) -> PlaceView:
    """Read the lease and list unfinished versions. Closes `store`. Raises the store's errors."""
    with closing(store):
        record = store.lease_record()
        lease = LeaseView(record.owner, record.expires_seconds) if record else None
        names = [name for name in store.incomplete() if not _retired(store, name)]
        newest = [name for name in names if record and name.run_id == record.run_id]
        work = [_work(store, name) for name in newest[-MOST_VERSIONS:]]
        return PlaceView(
            url, lease, tuple(each for each in work if each.done_shards < each.total_shards)
        )


def _retired(store: PersistentStore, name: VersionName) -> bool:
    try:
        store.backend.size(name.stem + RETIRED)
    except FileNotFoundError:
        return False
    return True


def _work(store: PersistentStore, name: VersionName) -> Work:
    missing, unseen = _missing(store, name)
    done = name.shards - len(missing) - unseen
    waits_for = f"shards {_ranges(missing)}" if missing and not unseen else ""
    version = name.id.version
    counts = {"done_shards": done, "total_shards": name.shards}
    return Work("", "persistent", version, None, 0.0, **counts, waits_for=waits_for)


def _missing(store: PersistentStore, name: VersionName) -> tuple[list[int], int]:
    """Shards that are not stored yet, and the number of others of which that is not known."""
    there = store.backend.sizes(name.stem)
    counts = [int(found[2]) for found in map(LABEL.match, there) if found]
    if not counts:
        return list(range(name.shards)), 0
    count = counts[0]
    per_group = -(-name.shards // count)
    open_groups = [g for g in range(count) if f"{g:05d}of{count:05d}{GROUP}" not in there]
    missing, unseen = list[int](), 0
    for number, group in enumerate(open_groups):
        members = range(group * per_group, min((group + 1) * per_group, name.shards))
        if number >= MOST_GROUPS or f"{group:05d}of{count:05d}/" not in there:
            unseen += len(members)  # in shared files, which do not show their records
            continue
        files = store.backend.sizes(f"{name.stem}/{group:05d}of{count:05d}")
        stored = _stored(files)
        missing += [shard for shard in members if shard not in stored]
    return missing, unseen


def _stored(files: Iterable[str]) -> set[int]:
    runs = (run for run in map(parse_run, files) if run is not None)
    return set(itertools.chain.from_iterable(runs))


def _ranges(shards: list[int]) -> str:
    """`0-7, 12` for sorted numbers."""
    runs = list[list[int]]()
    for shard in shards:
        if runs and shard == runs[-1][-1] + 1:
            runs[-1].append(shard)
        else:
            runs.append([shard])
    return some([f"{r[0]}-{r[-1]}" if r[1:] else str(r[0]) for r in runs], 4)


__all__ = ["LeaseView", "PlaceView", "look_at"]
