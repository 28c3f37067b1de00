"""`tierckpt verify`."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tierckpt._text import counted, size_text, some
from tierckpt.core.copies import FoundParity, Location
from tierckpt.errors import ConfigError, CorruptShardError
from tierckpt.format.ids import ShardKey
from tierckpt.journal.listing import check_journals
from tierckpt.offline.jobs import hints_of, jobs_in
from tierckpt.offline.restorability import outlook
from tierckpt.offline.survey import Survey, survey
from tierckpt.restore.progress import Progress

from ..arguments import PLACES, place, version_number

if TYPE_CHECKING:
    from rich.console import Console

MOST_SHOWN = 8


@dataclass
class _Tally:
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
        raise CorruptShardError(f"{len(damaged)} of {len(jobs)} jobs: {some(damaged, MOST_SHOWN)}")
    if len(without) == len(jobs):
        raise _nothing(args)


def _verify(there: Survey, args: argparse.Namespace, console: Console) -> None:
    from tierckpt.offline.verify import is_there, verify

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
            f"not complete here, and not damaged: {some(parts, MOST_SHOWN)}. Give the paths of all "
            "nodes and the persistent_path to see everything"
        )


def _judge(args: argparse.Namespace, there: Survey, tallies: Iterable[_Tally]) -> None:
    if there.troubles:
        raise CorruptShardError(f"not all can be read: {'; '.join(there.troubles[:MOST_SHOWN])}")
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


__all__ = ["add_verify", "verify_versions"]
