"""`tierckpt log`: the history of a job as a tree."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tierckpt._text import counted, some
from tierckpt.core.fork import Origin
from tierckpt.format.run_record import RunRecord

from ..arguments import add_json, place

if TYPE_CHECKING:
    from rich.console import Console

    from tierckpt.lineage.tree import ForkNode, JobNode, RunNode, VersionNode

COMMIT_LETTERS = HASH_LETTERS = 10
MOST_PROBLEMS = 8


def add_log(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tierckpt log PATH`."""
    parser.description = (
        "Shows every run of the job: the version that it restored, who started it, "
        "where and when, the launcher, the git commit, the software, and the versions that are "
        "left, with pins, the best, suspects and holds; and the forks that began from its "
        "versions, with their own histories as far as their paths lead to them from here. "
        "Nothing is changed."
    )
    text = "a job's path, or its persistent_path"
    parser.add_argument("path", type=place, metavar="PATH", help=text)
    text = "show every version, not only those with something to say"
    parser.add_argument("--all", action="store_true", help=text)
    add_json(parser)
    text = "write a picture: a line for each run, from the version that it began with"
    parser.add_argument("--plot", type=Path, metavar="FILE", help=text)
    parser.set_defaults(run=log)


def log(args: argparse.Namespace, console: Console) -> None:
    """Run the command. Raises MissingPathError if there is nothing at the path."""
    from tierckpt.lineage.tree import tree_of  # imports numpy

    job = tree_of(args.path)
    if args.plot is not None:
        from tierckpt.lineage.picture import draw

        draw(job, args.plot)
        console.print(f"{args.plot}: {counted(len(job.every_run()), 'run')}", soft_wrap=True)
    if args.json:
        print(json.dumps(job.as_json(), indent=1))
    elif args.plot is None:
        _print(job, console, args.all)


def _print(job: JobNode, console: Console, every: bool) -> None:
    for text in (job_text(job), *_drawn(_of_runs(job.runs, every))):
        console.print(text, soft_wrap=True)
    if not job.runs and not job.origin:
        console.print("no run has left anything here")
    for text in job.troubles[:MOST_PROBLEMS]:
        console.print(f"cannot be read: {text}", soft_wrap=True)


@dataclass
class Branch:
    """A line of the tree, with those below it."""

    text: str
    below: list[Branch] = field(default_factory=list)


def _of_runs(runs: Iterable[RunNode], every: bool) -> list[Branch]:
    return [Branch(run_text(run), _of_run(run, every)) for run in runs]


def _of_run(run: RunNode, every: bool) -> list[Branch]:
    found = [Branch(text) for text in version_texts(run.versions, every)]
    for fork in run.forks:
        found.append(Branch(fork_text(fork), _of_runs(fork.job.runs if fork.job else (), every)))
    return found + _of_runs(run.runs, every)


def _drawn(branches: list[Branch], before: str = "") -> Iterator[str]:
    for branch in branches:
        last = branch is branches[-1]
        yield f"{before}{'└── ' if last else '├── '}{branch.text}"
        yield from _drawn(branch.below, f"{before}{'    ' if last else '│   '}")


def job_text(job: JobNode) -> str:
    """A line about a job."""
    return f"{job.path}, a fork of {_origin_text(job.origin)}" if job.origin else job.path


def _origin_text(origin: Origin) -> str:
    parts = f" ({' and '.join(origin.parts)} only)" if origin.parts else ""
    return f"{origin}{parts}"


def run_text(run: RunNode) -> str:
    """A line about a run: what it restored, and who started it, when and how."""
    record = run.record
    begin = f"from v{run.began.version}" if run.began else "from the beginning"
    if record is None:
        return f"run {run.generation}, {begin if run.began else 'nothing noted'}"
    begin = f"from {record.fork}" if record.fork else begin
    return ", ".join([f"run {run.generation}, {begin}", *_facts(record)])


def _facts(record: RunRecord) -> Iterator[str]:
    yield time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.started_seconds))
    if record.host:
        yield f"{record.user}@{record.host}" if record.user else record.host
    nodes = f" on {counted(record.nodes, 'node')}" if record.nodes > 1 else ""
    yield f"{counted(record.ranks, 'rank')}{nodes}"
    if record.launcher:
        yield record.launcher
    if record.git:
        yield f"git {record.git[:COMMIT_LETTERS]}"
    if record.command:
        yield f"command {record.command[:HASH_LETTERS]}"
    shown = [n for n in record.software if n not in ("python", "numpy")]
    if shown:
        yield " ".join(f"{name} {record.software[name]}" for name in shown)


def version_texts(versions: list[VersionNode], every: bool) -> Iterator[str]:
    """Lines about versions: the newest and those with something to say; of others the number."""
    plain: list[VersionNode] = []
    for node in versions:
        notes = version_notes(node)
        if every or notes or node is versions[-1]:
            yield from _of_plain(plain)
            plain = []
            yield ", ".join([_version_text(node), *notes])
        else:
            plain.append(node)
    yield from _of_plain(plain)


def _of_plain(nodes: list[VersionNode]) -> Iterator[str]:
    if len(nodes) == 1:
        yield _version_text(nodes[0])
    elif nodes:
        first, last = nodes[0].id.version, nodes[-1].id.version
        yield f"v{first} to v{last}, {counted(len(nodes), 'version')}"


def _version_text(node: VersionNode) -> str:
    metric = f", metric {node.metric:.6g}" if node.metric is not None else ""
    return f"v{node.id.version} on {' and '.join(node.levels)}{metric}"


def version_notes(node: VersionNode) -> list[str]:
    """What there is to say about a version."""
    marks = {
        "a restart takes this": node.next,
        "given up": node.given_up,
        "not complete here": not (node.complete or node.given_up),
        "best": node.best,
        "pinned": node.pinned,
        "suspect": bool(node.suspect),
    }
    held = [f"held for {some(node.held_for, 2)}"] if node.held_for else []
    return [text for text, applies in marks.items() if applies] + held


def fork_text(fork: ForkNode) -> str:
    """A line about a fork."""
    child = fork.child
    text = f"fork of v{child.id.version}: {child.path or 'unknown'}"
    if fork.job is None:
        text += f", not found from here (made on {child.host})" if child.host else ", not found"
    elif fork.job.origin is not None and fork.job.origin.parts:
        text += f" ({' and '.join(fork.job.origin.parts)} only)"
    return f"{text}, has no version of its own yet" if child.held else text


__all__ = ["log"]
