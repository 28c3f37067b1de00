"""`tierckpt log`: the history of a job as a tree."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tierckpt.lineage.branches import Branch, branches_of, job_text

from ..arguments import add_json, place

if TYPE_CHECKING:
    from rich.console import Console

    from tierckpt.lineage.nodes import JobNode

MOST_PROBLEMS = 8
LEAST_WIDTH = 24
"""Text is not wrapped to fewer columns than these, however deep the tree is."""
LINES = ("├── ", "└── ", "│   ", "    ")
PLAIN_LINES = ("|-- ", "`-- ", "|   ", "    ")
"""For terminals without Unicode."""


def add_log(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tierckpt log PATH`."""
    parser.description = (
        "Shows every run of the job: the version that it restored, who started it, "
        "where and when, the launcher, the git commit, the software, and the versions that are "
        "left, with pins, the best, suspects and holds; and the forks that began from its "
        "versions, with their own histories as far as their paths lead to them from here. "
        "Nothing is changed."
    )
    text = "a job's path, or its persistent_path; or a folder with several jobs"
    parser.add_argument("path", type=place, metavar="PATH", help=text)
    text = "show every version and every start, with all that is known of it"
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
        _print(job, console, args.all)


def _print(job: JobNode, console: Console, every: bool) -> None:
    lines = LINES if (console.encoding or "").lower().startswith("utf") else PLAIN_LINES
    width = console.width if console.is_terminal else None
    console.print(job_text(job), soft_wrap=True)
    for text in _drawn(branches_of(job, every), lines, width):
        console.print(text, soft_wrap=True)
    if not job.runs:
        begins = f"; the next start begins from {job.origin}" if job.origin else ""
        begins = begins or (f"; {job.hint}" if job.hint else "")
        console.print(f"no run has left anything here{begins}", soft_wrap=True)
    for text in job.troubles[:MOST_PROBLEMS]:
        console.print(f"cannot be read: {text}", soft_wrap=True)
    if (more := len(job.troubles) - MOST_PROBLEMS) > 0:
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
        left = max(LEAST_WIDTH, width - len(deeper)) if width else 10**6
        first, *more = textwrap.wrap(
            branch.text, left, break_long_words=False, break_on_hyphens=False
        )
        yield f"{before}{at_end if is_last else between}{first}"
        for text in more:
            yield f"{deeper}{passing if branch.below else blank}{text}"
        yield from _drawn(branch.below, lines, width, deeper)


__all__ = ["add_log", "log"]
