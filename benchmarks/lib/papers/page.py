"""docs/papers.md from the results files and the published values; no number is typed by hand."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from lib.papers import results
from lib.papers.registry import PAPERS

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "papers.md"
PUBLISHED = ROOT / "benchmarks" / "lib" / "published.toml"

INTRODUCTION = (
    "# Published tables, made again\n\n"
    "Tierckpt answers to published systems. Each of their tables has a counterpart here, with ours "
    "beside theirs: `python benchmarks/papers.py NAME` measures it, `--list` names all. "
    "`python benchmarks/papers.py --write` writes this page from the results files and from "
    "[the published values](../benchmarks/lib/published.toml), so do not edit it by hand. Their "
    "hardware is not ours: compare ratios and intervals, not seconds."
)


def published() -> dict[str, Any]:
    """All published values."""
    return tomllib.loads(PUBLISHED.read_text())


def listing() -> str:
    """One paragraph for each paper, for the terminal."""
    known = published()
    lines = []
    for name, paper in PAPERS.items():
        lines += [f"{name}: {known[name]['title']}", f"    {paper.makes}"]
        lines += [f"    {paper.how}; {paper.lasts}", ""]
    return "\n".join(lines).rstrip()


def text() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for name, paper in PAPERS.items():
        document = results.read(results.path_of(name))
        if not document["rows"]:
            continue
        about = published()[name]
        parts += [f"## {about['title']}", _context(name, document, about)]
        runs = document["runs"]
        rows = [{**row, "load": runs[row["run"]]["load_average"][0]} for row in document["rows"]]
        parts += paper.section()(rows, about)
        if paper.picture:
            parts.append(f"![{about['title']}]({paper.picture})")
    return "\n\n".join(parts) + "\n"


def terminal(name: str, rows: list[results.Row]) -> str:
    """The same tables for the terminal."""
    return "\n\n".join(PAPERS[name].section()(rows, published()[name]))


def write() -> None:
    """Write the page and its pictures."""
    PAGE.write_text(text())
    for name, paper in PAPERS.items():
        rows = results.read(results.path_of(name))["rows"]
        if rows and paper.picture:
            paper.draw()(rows, published()[name], PAGE.parent / paper.picture)


def _context(name: str, document: dict[str, Any], about: dict[str, Any]) -> str:
    """The hardware, commands and commits of the rows, and the source of the published values."""
    runs = document["runs"]
    machines = sorted({f"{run['cores']} cores of an {run['cpu']}" for run in runs})
    software = sorted({f"torch {run['torch']}" for run in runs})
    commits = sorted({run["commit"][:8] + ("*" if run["dirty"] else "") for run in runs})
    dates = sorted({run["date"][:10] for run in runs})
    changed = " (* with local changes)" if any(run["dirty"] for run in runs) else ""
    file = results.path_of(name).name
    return (
        f"Here: {'; '.join(machines)}, {', '.join(software)}, {', '.join(dates)}, "
        f"commit {', '.join(commits)}{changed}; `python benchmarks/papers.py {name}` "
        f"([numbers, with the command of each row](../benchmarks/results/{file})). "
        f"There: {about['setting']}; values from {about['source']}."
    )


def table(lines: list[list[str]]) -> str:
    """A Markdown table; the first line is the head."""
    head, *rest = lines
    rule = ["---"] * len(head)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, rule, *rest])
