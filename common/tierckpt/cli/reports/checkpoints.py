"""`tierckpt list` and `verify`."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tierckpt._text import counted, size_text, some
from tierckpt.core.copies import FoundParity, Location
from tierckpt.errors import ConfigError, CorruptShardError
from tierckpt.format.ids import ShardKey, VersionId
from tierckpt.journal.listing import JournalReach, reach_of
from tierckpt.offline.catalog import Row, rows_of, several_jobs, without_bare
from tierckpt.offline.restorability import outlook
from tierckpt.offline.survey import Survey, survey, why_elsewhere
from tierckpt.restore.progress import Progress
from tierckpt.storage.local.sibling_nodes import NODE

from ..arguments import PLACES, add_json, place, version_number
from ..columns import print_columns

if TYPE_CHECKING:
    from rich.console import Console

MOST_SHOWN = 8
TITLES = ("version", "level", "shards", "size", "taken", "iteration", "metric", "")
LEFT = ("level", "taken", "")


# --- list ----------------------------------------------------------------------------------------


def add_list(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tierckpt list PATH...`."""
    parser.description = (
        "Lists the checkpoints, and marks the one that a restart takes. Their data is "
        f"not read; `tierckpt verify` reads it. {PLACES}"
    )
    parser.add_argument("path", type=place, nargs="+", metavar="PATH")
    parser.set_defaults(run=list_versions)
    add_json(parser)


def list_versions(args: argparse.Namespace, console: Console) -> None:
    """Print a line for each version on each level. Raises ConfigError at the end if some place
    could not be read."""
    there = without_bare(survey(args.path))
    rows = rows_of(there)
    if args.json:
        listing = {
            "versions": [row.as_json() for row in rows],
            "problems": there.troubles,
            "memory": there.memory,
            "journal": asdict(reach) if (reach := _reach(rows, there)) else None,
        }
        print(json.dumps(listing, indent=1))
    else:
        _print_all(rows, there, args.path, console)
    if there.unseen:
        raise ConfigError("not all places could be read: there may be more checkpoints")


def _print_all(rows: list[Row], there: Survey, paths: Sequence[str], console: Console) -> None:
    where = ", ".join(paths)
    if rows:
        print_columns([TITLES, *map(_cells, rows)], LEFT, console)
    elif there.troubles:
        console.print(f"{where}: no readable checkpoints", soft_wrap=True)
    else:
        console.print(f"{where}: no checkpoints here", soft_wrap=True)
    for text in there.troubles[:MOST_SHOWN]:
        console.print(f"cannot be read: {text}", soft_wrap=True)
    if (more := len(there.troubles) - MOST_SHOWN) > 0:
        console.print(f"cannot be read: {more} more; --json shows all", soft_wrap=True)
    for text in outlook(there, [key for each in there.problems for key in each.keys]):
        console.print(text, soft_wrap=True)
    for text in _on_memory(rows, there, paths):
        console.print(text, soft_wrap=True)
    for text in (*there.beside, *filter(None, [several_jobs(there)])):
        console.print(text, soft_wrap=True)
    for text in _of_journal(_reach(rows, there)):
        console.print(text, soft_wrap=True)
    if (request := there.request) is not None:
        text = f"the next start goes back to v{request.version}, as {request.where} asks"
        console.print(f"{text} (tierckpt rollback)", soft_wrap=True)
    if there.origins and not rows:
        text = f"the next start begins from {there.origins[0]} (tierckpt fork)"
        console.print(text, soft_wrap=True)
    for job in sorted({row.elsewhere for row in rows} - {""}):
        console.print(f"not seen by a restart from here: {why_elsewhere(job)}", soft_wrap=True)
    for reason in dict.fromkeys(row.suspect for row in rows if row.suspect):
        numbers = dict.fromkeys(f"v{row.version}" for row in rows if row.suspect == reason)
        text = f"suspect, as replicas differed when they were taken: {some(numbers, MOST_SHOWN)}"
        console.print(f"{text}: {reason}", soft_wrap=True, markup=False)
    if any(row.suspect for row in rows):
        text = (
            'with on_drift="stop", a restart takes the newest version that is not suspect, if any'
        )
        console.print(text, soft_wrap=True, markup=False)
    own = [row for row in rows if not row.elsewhere]
    if own and not any(row.next for row in own):
        text = "no version is complete here: a restart needs the other nodes or levels"
        console.print(text, soft_wrap=True)


def _on_memory(rows: list[Row], there: Survey, paths: Sequence[str]) -> Iterator[str]:
    """Yield the memory that was searched, and how to search elsewhere if no level has a version."""
    found = {str(Path(place).parent) for r in rows if r.level == "memory" for place in r.places}
    if found:
        yield f"in memory: {some(sorted(found))}"
    elif there.memory:
        yield f"nothing in memory: looked for {some(there.memory)}"
    if there.memory and not rows:
        yield (
            "if the job sets job_id or shm_dir, set TIERCKPT_JOB_ID and TIERCKPT_SHM_DIR here to "
            "the same values"
        )
        if not any(NODE in path for path in paths):
            yield f"if the job's path contains {NODE}, give it with {NODE} here, too, in quotes"


def _reach(rows: list[Row], there: Survey) -> JournalReach | None:
    """How far the journal leads from the version that a restart takes."""
    taken = next((row for row in rows if row.next), None)
    if taken is None or there.request is not None:  # a restart that goes back repeats no steps
        return None
    id_ = VersionId(taken.generation, taken.version)
    return reach_of(there.directories, id_, taken.shards, there.began_last)


def _of_journal(reach: JournalReach | None) -> Iterator[str]:
    if reach is None:
        return
    if reach.missing:
        noun = "ranks" if reach.missing[1:] else "rank"
        yield (
            f"a journal is here, without that of {noun} {some(reach.missing, MOST_SHOWN)}: give "
            "the paths of all nodes to see how far it leads"
        )
    elif reach.records:
        yield (
            f"the journal leads on to v{reach.last}: a restart with local_journal_steps makes "
            f"{counted(reach.records, 'step', 'steps')} after v{reach.base} again"
        )


def _cells(row: Row) -> tuple[str, ...]:
    return (
        f"v{row.version}",
        row.level,
        f"{len(row.there)} of {row.shards}",
        size_text(row.nbytes),
        _time_text(row.created_seconds),
        "" if row.iteration is None else str(row.iteration),
        "" if row.metric is None else f"{row.metric:.6g}",
        ", ".join(_notes(row)),
    )


def _notes(row: Row) -> list[str]:
    notes = []
    if row.next:
        notes.append("a restart takes this")
    elif row.elsewhere:
        notes.append("not seen by a restart from here")
    elif not row.is_past:
        notes.append("abandoned: the job went back to an older version")
    elif not row.restartable:
        notes.append("not complete")
    if row.missing and row.there:
        noun = "shards" if row.missing[1:] else "shard"
        notes.append(f"{noun} {some(row.missing, MOST_SHOWN)} missing")
    if row.parities:
        notes.append(f"parity of {row.parities}")
    if row.suspect:
        notes.append("suspect")
    if row.pinned:
        notes.append("pinned")
    if row.held_for:
        notes.append(f"held for the fork {some(row.held_for, 2)}")
    if row.refers_to:
        notes.append(f"refers to {_numbers(row.refers_to)}")
    elif row.encoded:
        notes.append("encoded")
    if row.needed_by:
        notes.append(f"needed by {_numbers(row.needed_by)}")
    return notes


def _numbers(versions: Sequence[int]) -> str:
    return some([f"v{version}" for version in versions])


def _time_text(seconds: float | None) -> str:
    return "" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


# --- verify --------------------------------------------------------------------------------------


@dataclass
class _Tally:
    """Counts of one version on one level."""

    copies: int = 0
    nbytes: int = 0
    bad: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    unchecked: str = ""
    """The reason why the content of some copies could not be checked."""

    def text(self) -> str:
        """The state of the copies, for people."""
        if self.bad or self.unread:
            parts = [f"{len(self.bad)} DAMAGED"] if self.bad else []
            parts += [f"{len(self.unread)} cannot be read"] if self.unread else []
            return ", ".join(parts)
        if self.unchecked:
            return f"sound as stored; content not checked: {self.unchecked}"
        return "sound"


def add_verify(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tierckpt verify PATH...`."""
    parser.description = (
        "Reads every copy of every shard, and all parity. The exit status is 0 if all "
        "of it is sound, else 1. A shard that cannot be decoded here (no key, or a missing "
        f"package) is checked in its stored form, which shows all damage. {PLACES}"
    )
    parser.add_argument("path", type=place, nargs="+", metavar="PATH")
    parser.set_defaults(run=verify_versions)
    parser.add_argument(
        "--version",
        type=version_number,
        metavar="V",
        help="verify only version V; default: all versions",
    )


def verify_versions(args: argparse.Namespace, console: Console) -> None:
    """Read every byte. Raises CorruptShardError if one is wrong, or if something cannot be read."""
    from tierckpt.offline.verify import is_there, verify

    there = survey(args.path)
    counts: dict[str, _Tally] = {}
    bad: set[tuple[ShardKey, Location]] = set()
    with closing(Progress(Progress.wanted(0, None))) as bar:
        bar.begin("verifying")
        for verdict in verify(there, bar, args.version):
            key, place = verdict.copy.key, verdict.copy.place
            if verdict.why and not is_there(verdict.copy, there):
                continue
            kind = "parity" if isinstance(verdict.copy, FoundParity) else place.level
            tally = counts.setdefault(f"{key.id} {kind}", _Tally())
            tally.copies += 1
            tally.nbytes += verdict.nbytes
            tally.unchecked = tally.unchecked or verdict.unchecked
            if verdict.why:
                bad.add((key, place))
                failed = tally.unread if verdict.unread else tally.bad
                failed.append(f"{key} in {place.where}: {verdict.why}")
    for name, tally in counts.items():
        files = counted(tally.copies, "copy", "copies")
        text = f"{name}: {files}, {size_text(tally.nbytes) or '0 B'}: {tally.text()}"
        console.print(text, soft_wrap=True)
        for text in (*tally.bad, *tally.unread):
            console.print(f"  {text}", soft_wrap=True)
    lost = [*(key for key, _ in bad), *(key for each in there.problems for key in each.keys)]
    for text in (*outlook(there, lost, bad), *_not_complete(there, args.version, lost)):
        console.print(text, soft_wrap=True)
    _judge(args, there, counts.values())


def _not_complete(there: Survey, version: int | None, lost: Iterable[ShardKey]) -> Iterator[str]:
    """Yield a sentence about undamaged versions of which other nodes have shards."""
    ids = {copy.key.id for copy in there.copies} - {key.id for key in lost}
    wanted = [id_ for id_ in sorted(ids) if version in (None, id_.version)]
    parts = [id_ for id_ in wanted if there.plan(id_.version, abandoned=True) is None]
    if parts:
        yield (
            f"not complete here, and not damaged: {some(parts, MOST_SHOWN)}. Give the paths of all "
            "nodes and the persistent_path to see everything"
        )


def _judge(args: argparse.Namespace, there: Survey, tallies: Iterable[_Tally]) -> None:
    if there.troubles:
        raise CorruptShardError(f"not all can be read: {'; '.join(there.troubles[:MOST_SHOWN])}")
    if not (every := list(tallies)):
        which = "no checkpoints" if args.version is None else f"no v{args.version}"
        raise ConfigError(f"{', '.join(args.path)}: {which} to verify")
    copies = sum(tally.copies for tally in every)
    if bad := sum(len(tally.bad) for tally in every):
        raise CorruptShardError(f"damaged: {bad} of {counted(copies, 'copy', 'copies')}")
    if unread := sum(len(tally.unread) for tally in every):
        raise CorruptShardError(f"cannot be read: {unread} of {counted(copies, 'copy', 'copies')}")
