"""`tierckpt list`, `log`, `verify` and `diff`: the versions of a job. They change nothing.

`list` of a folder with several jobs has a line for each job, `list --files` the routed files of a
version. `log` shows the history of a job as a tree. `verify` compares every byte with its
checksum. `diff` compares two versions.
"""

from __future__ import annotations

import argparse
import json
import shlex
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field
from msgspec.structs import asdict, replace

from tierckpt._text import counted, directory_of, size_text, some
from tierckpt.core.restore_plan import FoundParity, Location
from tierckpt.errors import ConfigError, CorruptShardError
from tierckpt.format.ids import ShardKey
from tierckpt.journal.segments import JournalReach, check_journals, reach_of_restart
from tierckpt.lineage.history import Branch, branches_of, job_text, stale_holds
from tierckpt.offline.catalog import Row, outlook, rows_of, without_bare
from tierckpt.offline.survey import (
    Survey,
    hints_of,
    jobs_in,
    refuse_several_jobs,
    survey,
    why_elsewhere,
)
from tierckpt.restore.progress import Progress
from tierckpt.storage.claims import NODE

from .arguments import PLACES, Target, add_json, check_places, place, targets_of, version_number
from .output import print_columns

if TYPE_CHECKING:
    from rich.console import Console

    from tierckpt.lineage.history import JobNode
    from tierckpt.offline.comparison import Comparison, Difference, Numbers
    from tierckpt.offline.stored_version import StoredVersion

__all__ = [
    "NEWEST",
    "add_list",
    "add_log",
    "add_verify",
    "files_as_json",
    "list_versions",
    "log",
    "print_files",
    "print_jobs",
    "time_text",
    "verify_versions",
]


FILE_TITLES = ("rank", "size", "file")
NEWEST = 0
"""In place of a version's number: the one that a restart takes from disks."""


class _File(Struct, frozen=True):
    rank: int
    nbytes: int
    name: str


def files_as_json(there: Survey, paths: Sequence[str], version: int) -> dict[str, Any]:
    """The files of a version for other programs. Raises as `print_files`."""
    number, name, files = _files_of(there, paths, version)
    return {"version": number, "name": name, "files": [asdict(each) for each in files]}


def print_files(there: Survey, paths: Sequence[str], version: int, console: Console) -> None:
    """Print the files of a version. Reads the heads of its shards. `there`: the survey of these
    paths, which stays as it is. Raises RestoreError without such a version."""
    number, name, files = _files_of(there, paths, version)
    if not files:
        text = f"v{number} has no files: no program routed any (docs/files.md)"
        console.print(text, soft_wrap=True)
        return
    named = f" ({name!r})" if name not in ("", str(number)) else ""
    console.print(f"files of v{number}{named}:", soft_wrap=True)
    lines = [(str(each.rank), size_text(each.nbytes) or "0 B", each.name) for each in files]
    print_columns([FILE_TITLES, *lines], ("file",), console)


def _files_of(there: Survey, paths: Sequence[str], version: int) -> tuple[int, str, list[_File]]:
    """Number, name and files of a version; the name is the program's own, as in SCR."""
    from tierckpt.offline.stored_version import (
        leave_out_memory,  # imports torch
        open_version,
    )

    there = replace(there, unseen=[*there.unseen])
    leave_out_memory(there)
    with closing(open_version(paths, version or None, lambda nbytes: None, there)) as found:
        files = [
            _File(rank, high - low, name)
            for rank in range(len(found.shards))
            for name, (low, high) in sorted(found.files(rank).items())
        ]
        name = str((found.tree(0).get("files") or {}).get("name", ""))
        return found.manifest.id.version, name, files


JOB_TITLES = ("job", "versions", "size", "a restart takes", "taken", "metric", "")
JOB_LEFT = ("job", "a restart takes", "taken", "")


def print_jobs(jobs: Sequence[Sequence[str]], console: Console) -> None:
    """Print the table, and what to type for one of them. `jobs`: the places of each."""
    seen = [survey(places) for places in jobs]
    lines = [_job_cells(places, there) for places, there in zip(jobs, seen, strict=True)]
    print_columns([JOB_TITLES, *lines], JOB_LEFT, console)
    first = shlex.join(jobs[0])
    text = f"{len(jobs)} jobs are here; for one of them: tierckpt list {first}"
    console.print(f"{text}, tierckpt log {first}", soft_wrap=True)
    for text in dict.fromkeys(text for there in seen for text in there.troubles):
        console.print(f"cannot be read: {text}", soft_wrap=True)


def _job_cells(places: Sequence[str], there: Survey) -> tuple[str, ...]:
    rows = [row for row in rows_of(there) if not row.elsewhere]
    taken = [row for row in rows if row.next]
    newest = taken[-1] if taken else None
    levels = " and ".join(row.level for row in taken)
    return (
        " ".join(places),
        str(len({(row.version, row.generation) for row in rows})),
        size_text(sum(row.nbytes for row in rows)),
        f"v{newest.version} from {levels}" if newest else "none",
        "" if newest is None else time_text(newest.created_seconds),
        "" if newest is None or newest.metric is None else f"{newest.metric:.6g}",
        ", ".join(_job_notes(rows, there)),
    )


def _job_notes(rows: Sequence[Row], there: Survey) -> list[str]:
    notes = ["running"] if there.living else []
    notes += [f"a fork of {origin}" for origin in there.origins[:1]]
    held = sorted({f"v{row.version}" for row in rows if row.held_for})
    return notes + [f"{' and '.join(held)} held for forks"] * bool(held)


def time_text(seconds: float | None) -> str:
    """A Unix time as text; empty if it is unknown."""
    return "" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


MAX_SHOWN = 8
VERSION_TITLES = ("version", "level", "shards", "size", "taken", "iteration", "metric", "")
VERSION_LEFT = ("level", "taken", "")


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
        each = [{"places": job, **_versions_as_json(without_bare(survey(job)))} for job in jobs]
        print(json.dumps({"jobs": each}, indent=1))
    elif args.json:
        shown = _versions_as_json(there)
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


def _versions_as_json(there: Survey) -> dict[str, Any]:
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
        print_columns([VERSION_TITLES, *map(_version_cells, rows)], VERSION_LEFT, console)
    elif there.troubles:
        console.print(f"{where}: no readable checkpoints", soft_wrap=True)
    else:
        hint = hints_of(paths, there)
        text = f"{where}: no checkpoints here"
        console.print(f"{text}; {hint}" if hint else text, soft_wrap=True)
    for text in there.troubles[:MAX_SHOWN]:
        console.print(f"cannot be read: {text}", soft_wrap=True)
    if (more := len(there.troubles) - MAX_SHOWN) > 0:
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
        text = f"the next run starts from {there.origins[0]} (tierckpt fork)"
        console.print(text, soft_wrap=True)
    for job in sorted({row.elsewhere for row in rows} - {""}):
        console.print(f"not seen by a restart from here: {why_elsewhere(job)}", soft_wrap=True)
    for reason in dict.fromkeys(row.suspect for row in rows if row.suspect):
        numbers = dict.fromkeys(f"v{row.version}" for row in rows if row.suspect == reason)
        text = f"suspect, as replicas differed when they were taken: {some(numbers, MAX_SHOWN)}"
        console.print(f"{text}: {reason}", soft_wrap=True, markup=False)
    if any(row.suspect for row in rows):
        text = 'with replicas="stop", a restart takes the newest version not suspect, if any'
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
            f"a journal is here, without that of {noun} {some(reach.missing, MAX_SHOWN)}: give "
            "the paths of all nodes to see how far it leads"
        )
    elif reach.records:
        yield (
            f"the journal leads on to v{reach.last}: a restart with local_journal_steps makes "
            f"{counted(reach.records, 'step', 'steps')} after v{reach.base} again"
        )


def _version_cells(row: Row) -> tuple[str, ...]:
    return (
        f"v{row.version}",
        row.level,
        f"{len(row.there)} of {row.shards}",
        size_text(row.nbytes),
        time_text(row.created_seconds),
        "" if row.iteration is None else str(row.iteration),
        "" if row.metric is None else f"{row.metric:.6g}",
        ", ".join(_version_notes(row)),
    )


def _version_notes(row: Row) -> list[str]:
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
        notes.append(f"{noun} {some(row.missing, MAX_SHOWN)} missing")
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


MAX_PROBLEMS = 8
MIN_WIDTH = 24
"""Text is not wrapped to fewer columns than these, however deep the tree is."""
TREE_LINES = ("├── ", "└── ", "│   ", "    ")
PLAIN_TREE_LINES = ("|-- ", "`-- ", "|   ", "    ")
"""For terminals without Unicode."""


def add_log(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tierckpt log PATH`."""
    parser.description = (
        "Shows every run of the job: the version that it restored, who started it, "
        "where and when, the launcher, the git commit, the software, and the versions that are "
        "left, with pins, the best, suspects and holds; and the forks that started from its "
        "versions, with their own histories as far as their paths lead to them from here. "
        "Nothing is changed."
    )
    text = "a job's path, or its persistent_path; or a folder with several jobs"
    parser.add_argument("path", type=place, metavar="PATH", help=text)
    text = "show every version and every start, with everything known of it"
    parser.add_argument("--all", action="store_true", help=text)
    add_json(parser)
    parser.set_defaults(run=log)


def log(args: argparse.Namespace, console: Console) -> None:
    """Run the command. Raises MissingPathError if there is nothing at the path."""
    from tierckpt.lineage.tree import trees_of  # imports numpy

    jobs = trees_of(args.path)
    if args.json:
        several = {"path": args.path, "jobs": [job.as_json() for job in jobs]}
        print(json.dumps(several if jobs[1:] else jobs[0].as_json(), indent=1))
        return
    for job in jobs:
        _print_tree(job, console, args.all)


def _print_tree(job: JobNode, console: Console, every: bool) -> None:
    lines = TREE_LINES if (console.encoding or "").lower().startswith("utf") else PLAIN_TREE_LINES
    width = console.width if console.is_terminal else None
    console.print(job_text(job), soft_wrap=True)
    for text in _drawn(branches_of(job, every), lines, width):
        console.print(text, soft_wrap=True)
    if not job.runs:
        next_start = f"; the next run starts from {job.origin}" if job.origin else ""
        next_start = next_start or (f"; {job.hint}" if job.hint else "")
        console.print(f"no run has left anything here{next_start}", soft_wrap=True)
    for text in job.troubles[:MAX_PROBLEMS]:
        console.print(f"cannot be read: {text}", soft_wrap=True)
    if (more := len(job.troubles) - MAX_PROBLEMS) > 0:
        console.print(f"cannot be read: {more} more; --json shows all", soft_wrap=True)


def _drawn(
    branches: list[Branch], lines: Sequence[str], width: int | None, before: str = ""
) -> Iterator[str]:
    """Yield the lines of the tree. `width`: columns of the terminal; None: a line for each branch,
    for `grep`."""
    between, at_end, passing, blank = lines
    for branch in branches:
        is_last = branch is branches[-1]
        deeper = before + (blank if is_last else passing)
        left = max(MIN_WIDTH, width - len(deeper)) if width else 10**6
        first, *more = textwrap.wrap(
            branch.text, left, break_long_words=False, break_on_hyphens=False
        )
        yield f"{before}{at_end if is_last else between}{first}"
        for text in more:
            yield f"{deeper}{passing if branch.below else blank}{text}"
        yield from _drawn(branch.below, lines, width, deeper)


class _Tally(Struct):
    """Counts of one version on one level."""

    copies: int = 0
    nbytes: int = 0
    bad: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    unchecked: str = ""
    """The reason why the content of some copies could not be checked."""
    nouns: tuple[str, str] = ("copy", "copies")

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
        "Reads every copy of every shard, all parity, and the journal. The exit status is 0 if all "
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
    """Read every byte. Raises CorruptShardError if one is wrong, or if something cannot be read;
    of several jobs, after all of them were read."""
    there = survey(args.path)
    jobs = jobs_in(there)
    if not jobs[1:]:
        _verify(there, args, console)
        return
    damaged, without = list[str](), list[str]()
    for places in jobs:
        name = " ".join(places)
        console.print(name, soft_wrap=True)
        try:
            _verify(survey(places), args, console)
        except CorruptShardError as error:
            console.print(f"  {error}", soft_wrap=True)
            damaged.append(name)
        except ConfigError:
            without.append(name)
            console.print(f"  no v{args.version}", soft_wrap=True)
    if damaged:
        raise CorruptShardError(f"{len(damaged)} of {len(jobs)} jobs: {some(damaged, MAX_SHOWN)}")
    if len(without) == len(jobs):
        raise _nothing(args)


def _verify(there: Survey, args: argparse.Namespace, console: Console) -> None:
    from tierckpt.offline.verify import is_there, verify

    counts: dict[str, _Tally] = {}
    bad: set[tuple[ShardKey, Location]] = set()
    with closing(Progress(Progress.wanted(0, None))) as bar:
        bar.start_phase("verifying")
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
    if args.version is None:
        counts |= _journals(there)
    for name, tally in counts.items():
        files = counted(tally.copies, *tally.nouns)
        text = f"{name}: {files}, {size_text(tally.nbytes) or '0 B'}: {tally.text()}"
        console.print(text, soft_wrap=True)
        for text in (*tally.bad, *tally.unread):
            console.print(f"  {text}", soft_wrap=True)
    lost = [*(key for key, _ in bad), *(key for each in there.problems for key in each.keys)]
    for text in (*outlook(there, lost, bad), *_not_complete(there, args.version, lost)):
        console.print(text, soft_wrap=True)
    _judge(args, there, counts.values())


def _journals(there: Survey) -> dict[str, _Tally]:
    """The count of all records of journals, if there are any."""
    tally = _Tally(nouns=("record", "records"))
    for found in check_journals(there.directories):
        tally.copies += found.records
        tally.nbytes += found.nbytes
        tally.bad += found.problems
    return {"journal": tally} if tally.nbytes or tally.bad else {}


def _not_complete(there: Survey, version: int | None, lost: Iterable[ShardKey]) -> Iterator[str]:
    """Yield a sentence about undamaged versions of which other nodes have shards."""
    ids = {copy.key.id for copy in there.copies} - {key.id for key in lost}
    wanted = [id_ for id_ in sorted(ids) if version in (None, id_.version)]
    parts = [id_ for id_ in wanted if there.plan(id_.version, abandoned=True) is None]
    if parts:
        yield (
            f"not complete here, and not damaged: {some(parts, MAX_SHOWN)}. Give the paths of all "
            "nodes and the persistent_path to see everything"
        )


def _judge(args: argparse.Namespace, there: Survey, tallies: Iterable[_Tally]) -> None:
    if there.troubles:
        raise CorruptShardError(f"not all can be read: {'; '.join(there.troubles[:MAX_SHOWN])}")
    if not (every := list(tallies)):
        raise _nothing(args, there)
    copies = sum(tally.copies for tally in every)
    if bad := sum(len(tally.bad) for tally in every):
        raise CorruptShardError(f"damaged: {bad} of {counted(copies, 'copy', 'copies')}")
    if unread := sum(len(tally.unread) for tally in every):
        raise CorruptShardError(f"cannot be read: {unread} of {counted(copies, 'copy', 'copies')}")


def _nothing(args: argparse.Namespace, there: Survey | None = None) -> ConfigError:
    which = "no checkpoints" if args.version is None else f"no v{args.version}"
    hint = hints_of(args.path, there) if there else ""
    text = f"{', '.join(args.path)}: {which} to verify"
    return ConfigError(f"{text}; {hint}" if hint else text)


MAX_GAPS = 8
SHOWN = 20
"""Lines shown without `--all`."""
DIFFERENCE_TITLES = ("what differs", "elements", "largest", "relative", "norm", "")
DIFFERENCE_LEFT = ("what differs", "")


def add_diff(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tierckpt diff A B`."""
    parser.description = (
        "Compares two versions of one job (`tierckpt diff PATH 100 200`) or of two "
        "jobs (`tierckpt diff A@100 B@100`; without a number, the version that a restart takes): "
        "every tensor and every other value. Tensors with equal checksums are not read. The exit "
        "status is 0 if the versions are equal bit for bit, 1 if they differ, 2 after an error. "
        f"{PLACES}"
    )
    parser.add_argument("targets", nargs="+", metavar="PATH[@VERSION]|VERSION")
    add_json(parser)
    parser.add_argument("--all", action="store_true", help="show all lines, not just the first 20")
    parser.set_defaults(run=diff, error_status=2)


def diff(args: argparse.Namespace, console: Console) -> int:
    """Run the command; returns 1 if the versions differ, else 0. Raises ConfigError and errors of
    reading."""
    targets = targets_of(args.targets)
    check_places(target.path for target in targets)
    with ExitStack() as stack:
        bar = stack.enter_context(closing(Progress(Progress.wanted(0, None))))
        a, b, found = _compared(targets, bar, stack)
    if args.json:
        print(json.dumps(difference_as_json(found, a, b), indent=1))
    else:
        for line in summary_of_difference(found, a, b):
            console.print(line, soft_wrap=True)
        print_differences(found.differences, console, None if args.all else SHOWN)
    return 0 if found.equal else 1


def _compared(
    targets: Sequence[Target], bar: Progress, stack: ExitStack
) -> tuple[StoredVersion, StoredVersion, Comparison]:
    """Compare. If one copy proves damaged, compare again with verified copies: another may be
    sound."""
    from tierckpt.offline.comparison import compare
    from tierckpt.restore.shards import LOST

    for verify in (False, True):
        bar.start_phase("comparing")
        a, b = (_opened(target, bar.advance, stack, verify) for target in targets)
        try:
            return a, b, compare(a, b)
        except LOST:
            if verify:
                raise
    raise AssertionError


def _opened(
    target: Target, on_read: Callable[[int], None], stack: ExitStack, verify: bool
) -> StoredVersion:
    from tierckpt.offline.stored_version import open_version

    there = survey(target.path)
    if target.version is None and there.unseen:
        raise ConfigError(
            f"{target.path}: not all places could be read, so the newest version is unknown; name "
            f"one: {target.path}@VERSION. {'; '.join(there.troubles[:4])}"
        )
    found = open_version(target.path, target.version, on_read, there, verify)
    stack.callback(found.close)
    return found


# --- output --------------------------------------------------------------------------------------


def summary_of_difference(found: Comparison, a: StoredVersion, b: StoredVersion) -> Iterator[str]:
    """Yield the lines above the table."""
    yield f"A: {a.text()}"
    yield f"B: {b.text()}"
    if found.equal:
        yield f"equal, bit for bit: {found.tensors} tensors, and all other values"
        return
    names = {each.name for each in found.differences}
    tensors = sum(name in a.names() or name in b.names() for name in names)
    yield f"{tensors} of {found.tensors} tensors differ, and {len(names) - tensors} other values"


def print_differences(
    differences: Sequence[Difference], console: Console, most: int | None = None
) -> None:
    """Print a line for each difference, at most `most` lines, and the number of the rest."""
    if not differences:
        return
    shown = differences[:most]
    print_columns([DIFFERENCE_TITLES, *map(_difference_cells, shown)], DIFFERENCE_LEFT, console)
    if more := len(differences) - len(shown):
        console.print(f"{more} more; --all shows them, --json is for programs", soft_wrap=True)


def _difference_cells(row: Difference) -> tuple[str, ...]:
    of = f" (rank {some(row.ranks, 4)})" if row.ranks else ""
    if row.numbers is None:
        change = f"{row.a} -> {row.b}" if row.a or row.b else "differs"
        text = {"values": change, "shape": f"shape {change}", "dtype": f"dtype {change}"}
        return (row.name + of, "", "", "", "", text.get(row.what) or f"{row.what}: {row.a}")
    found = row.numbers
    return (
        row.name + of,
        f"{found.differing} of {found.elements}",
        *map(_figure, (found.max_absolute, found.max_relative, found.norm)),
        ", ".join(_oddities(found)),
    )


def _oddities(found: Numbers) -> Iterator[str]:
    for name, (before, after) in (("NaN", found.nans), ("Inf", found.infs)):
        if before or after:
            yield f"{name}: {before} -> {after}"


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def difference_as_json(found: Comparison, a: StoredVersion, b: StoredVersion) -> dict[str, Any]:
    """The whole comparison, for other programs."""
    return {
        "equal": found.equal,
        "a": _side(a),
        "b": _side(b),
        "tensors": found.tensors,
        "differences": [each.as_json() for each in found.differences],
    }


def _side(version: StoredVersion) -> dict[str, Any]:
    manifest = version.manifest
    return {
        "path": version.path,
        "version": manifest.id.version,
        "iteration": manifest.facts.iteration,
        "metric": manifest.facts.metric,
        "suspect": version.suspect,
        "ranks": len(version.shards),
        "levels": dict(version.levels),
    }
