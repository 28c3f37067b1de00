"""`tierckpt list`."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tierckpt._text import counted, directory_of, size_text, some
from tierckpt.errors import ConfigError
from tierckpt.journal.listing import JournalReach, reach_of_restart
from tierckpt.lineage.holds import stale_holds
from tierckpt.offline.catalog import Row, rows_of, without_bare
from tierckpt.offline.jobs import hints_of, jobs_in, refuse_several_jobs
from tierckpt.offline.restorability import outlook
from tierckpt.offline.survey import Survey, survey, why_elsewhere
from tierckpt.storage.local.sibling_nodes import NODE

from ..arguments import PLACES, add_json, place, version_number
from ..columns import print_columns
from .file_list import NEWEST, files_as_json, print_files
from .job_list import print_jobs, time_text

if TYPE_CHECKING:
    from rich.console import Console

MOST_SHOWN = 8
TITLES = ("version", "level", "shards", "size", "taken", "iteration", "metric", "")
LEFT = ("level", "taken", "")


def add_list(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tierckpt list PATH...`."""
    parser.description = (
        "Lists the checkpoints, and marks the one that a restart takes; in a folder with several "
        "jobs, a line for each job. Their data is not read; `tierckpt verify` reads it. "
        f"{PLACES}"
    )
    parser.add_argument("path", type=place, nargs="+", metavar="PATH")
    text = "also list the routed files of a version; default: of the one that a restart takes"
    parser.add_argument(
        "--files", type=version_number, nargs="?", const=NEWEST, metavar="V", help=text
    )
    parser.set_defaults(run=list_versions)
    add_json(parser)


def list_versions(args: argparse.Namespace, console: Console) -> None:
    """Print a line for each version on each level. Raises ConfigError at the end if some place
    could not be read."""
    there = without_bare(survey(args.path))
    jobs = jobs_in(there)
    if args.files is not None:
        refuse_several_jobs(there, ", ".join(args.path))
    if args.json and jobs[1:]:
        each = [{"places": job, **_as_json(without_bare(survey(job)))} for job in jobs]
        print(json.dumps({"jobs": each}, indent=1))
    elif args.json:
        shown = _as_json(there)
        if args.files is not None:
            shown["files"] = files_as_json(there, args.path, args.files)
        print(json.dumps(shown, indent=1))
    elif jobs[1:]:
        print_jobs(jobs, console)
    else:
        _print_all(rows_of(there), there, args.path, console)
        if args.files is not None:
            print_files(there, args.path, args.files, console)
    if there.unseen:
        raise ConfigError("not all places could be read: there may be more checkpoints")


def _as_json(there: Survey) -> dict[str, Any]:
    rows = rows_of(there)
    return {
        "versions": [row.as_json() for row in rows],
        "problems": there.troubles,
        "memory": there.memory,
        "journal": asdict(reach) if (reach := reach_of_restart(there)) else None,
    }


def _print_all(rows: list[Row], there: Survey, paths: Sequence[str], console: Console) -> None:
    where = ", ".join(paths)
    if rows:
        print_columns([TITLES, *map(_cells, rows)], LEFT, console)
    elif there.troubles:
        console.print(f"{where}: no readable checkpoints", soft_wrap=True)
    else:
        hint = hints_of(paths, there)
        text = f"{where}: no checkpoints here"
        console.print(f"{text}; {hint}" if hint else text, soft_wrap=True)
    for text in there.troubles[:MOST_SHOWN]:
        console.print(f"cannot be read: {text}", soft_wrap=True)
    if (more := len(there.troubles) - MOST_SHOWN) > 0:
        console.print(f"cannot be read: {more} more; --json shows all", soft_wrap=True)
    for text in outlook(there, [key for each in there.problems for key in each.keys]):
        console.print(text, soft_wrap=True)
    for text in _on_memory(rows, there, paths):
        console.print(text, soft_wrap=True)
    for text in there.beside:
        console.print(text, soft_wrap=True)
    for text in (*_of_holds(there, paths), *_of_journal(reach_of_restart(there))):
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


def _of_holds(there: Survey, paths: Sequence[str]) -> Iterator[str]:
    """Yield holds that stay, as their source was moved, and how to end them."""
    for child in stale_holds(there):
        place = directory_of(child.where) if paths[1:] else paths[0]
        yield (
            f"v{child.id.version} is still held for the fork {child.path}, which does not need it "
            f"any more: tierckpt unpin {shlex.quote(place)} {child.id.version} --forks"
        )


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
        time_text(row.created_seconds),
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


__all__ = ["add_list", "list_versions"]
