"""docs/papers.md from the results files and the published values; no number is typed by hand."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib.papers import results, rule
from lib.papers.registry import PAPERS

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "papers.md"
PUBLISHED = ROOT / "benchmarks" / "lib" / "published.toml"

INTRODUCTION = (
    "# Published tables, beside Tierckpt\n\n"
    "What do published checkpoint systems cost, and what does Tierckpt cost on the same models? "
    "Their hardware is another: compare ratios and intervals, not seconds. `papers.py --write` "
    "makes this page from results files and [published values](../benchmarks/lib/published.toml). "
    "[What is still to be measured](../benchmarks/README.md#what-is-still-to-be-measured)."
)
LAUNCHERS = {"torchrun": "DDP", "horovod": "Horovod"}


@dataclass(frozen=True)
class Judged:
    """A goal, and its cases: a name, and one of `rule.WORDS`."""

    goal: str
    cases: Sequence[tuple[str, str]]

    @property
    def line(self) -> list[str]:
        """The line of the table of goals."""
        by: dict[str, str] = {}
        for word in rule.WORDS:
            names = [name for name, found in self.cases if found == word]
            is_all = len(names) == len(self.cases) > 2
            by[word] = f"all {len(names)}" if is_all else ", ".join(names)
        none = [f"{word}: {by[word]}" for word in rule.WORDS[2:] if by[word]]
        missed = f"**{by['missed']}**" if by["missed"] else "-"
        return [self.goal, by["met"] or "-", missed, "; ".join(none) or "-"]


def published() -> dict[str, Any]:
    """All published values."""
    return tomllib.loads(PUBLISHED.read_text())


def listing() -> str:
    """One paragraph for each paper, for the terminal."""
    known = published()
    lines = []
    for name, paper in PAPERS.items():
        lines += [f"{name}: {known[name]['title']}", f"    {paper.makes}"]
        lines += [f"    {paper.how}; {paper.lasts}; {coverage(name)}", ""]
    return "\n".join(lines).rstrip()


def missing_keys(name: str) -> list[results.Row]:
    """The keys of the rows that `papers.py NAME` makes, and that the results file lacks."""
    paper = PAPERS[name]
    rows = results.read(results.path_of(name))["rows"]
    known = [[str(row[part]) for part in paper.key] for row in rows if row["status"] == "ok"]
    due = list(paper.keys(paper.all_of_it()))
    return [key for key in due if [str(key[part]) for part in paper.key] not in known]


def coverage(name: str) -> str:
    """How many of its rows the results file has, and which cases lack some."""
    paper = PAPERS[name]
    due, lacking = list(paper.keys(paper.all_of_it())), missing_keys(name)
    names = ("model", "launcher") if name == "scr-exa" else ("model",)
    groups = Counter(" ".join(str(key[each]) for each in names if each in key) for key in lacking)
    gaps = ", ".join(f"{count} of {who}" for who, count in groups.items() if who)
    text = f"{len(due) - len(lacking)} of {len(due)} rows"
    return f"{text}, without {gaps}" if gaps else text


def text() -> str:
    """The whole page."""
    goals: list[list[str]] = []
    parts: list[str] = []
    not_made: list[list[str]] = [["of", "what", "why"]]
    for name, paper in PAPERS.items():
        document = results.read(results.path_of(name))
        about = published()[name]
        first, *more = about["not_made"]
        not_made += [[about["short"], *first], *(["", *each] for each in more)]
        if not document["rows"]:
            continue
        parts += [f"## {about['title']}", _context(name, document, about)]
        runs = document["runs"]
        rows = [{**row, "load": runs[row["run"]]["load_average"][0]} for row in document["rows"]]
        parts += tables(name, rows)
        goals += [each.line for each in verdicts(name, rows)]
        if paper.picture:
            parts.append(f"![{about['title']}]({paper.picture})")
    head = [
        INTRODUCTION,
        "## Which goals are met?",
        f"One rule, applied by code: {rule.TEXT} Exactness needs one job.",
        table([["goal", "met", "missed", "no verdict"], *goals]),
    ]
    tail = ["## Not made again", table(not_made)]
    return "\n\n".join([*head, *parts, *tail]) + "\n"


def terminal(name: str, rows: list[results.Row]) -> str:
    """The same tables for the terminal."""
    return "\n\n".join(tables(name, rows))


def tables(name: str, rows: list[results.Row]) -> list[str]:
    """The paragraphs and tables of a paper, and a line for each row that failed."""
    good = [row for row in rows if row["status"] == "ok"]
    failed = [
        f"- {', '.join(str(row[part]) for part in PAPERS[name].key)}: "
        f"{row['status'].splitlines()[-1]}"
        for row in rows
        if row not in good
    ]
    found = PAPERS[name].section()(good, published()[name]) if good else []
    return [*found, *failed]


def verdicts(name: str, rows: list[results.Row]) -> list[Judged]:
    """The goals that the rows of a paper say something about."""
    good = [row for row in rows if row["status"] == "ok"]
    return [each for each in PAPERS[name].verdicts()(good, published()[name]) if each.cases]


def write() -> None:
    """Write the page and its pictures."""
    PAGE.write_text(text())
    for name, paper in PAPERS.items():
        rows = results.read(results.path_of(name))["rows"]
        if rows and paper.picture:
            paper.draw()(rows, published()[name], PAGE.parent / paper.picture)


def _context(name: str, document: dict[str, Any], about: dict[str, Any]) -> str:
    """The hardware and dates of the rows, what is lacking, and the published source."""
    runs = [document["runs"][row["run"]] for row in document["rows"] if not row["simulated"]]
    machines = sorted({f"{run['cores']} cores of an {_short(run['cpu'])}" for run in runs})
    dates = sorted({run["date"][:10] for run in runs})
    span = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    numbers = f"[`papers.py {name}`](../benchmarks/results/{results.path_of(name).name})"
    return (
        f"Here: {'; '.join(machines)}, {span}, {numbers}, {coverage(name)}. "
        f"There: {about['setting']}."
    )


def _short(cpu: str) -> str:
    """A processor's name without what all of its maker's have."""
    return cpu.replace("(R)", "").removesuffix(" Processor")


def table(lines: list[list[str]]) -> str:
    """A Markdown table; the first line is the head."""
    head, *rest = lines
    lines = [f"| {' | '.join(cells)} |" for cells in [head, *rest]]
    return "\n".join([lines[0], f"|{'---|' * len(head)}", *lines[1:]])
