"""docs/papers.md from the results files and the published values; no number is typed by hand.

A paper is a module: `keys` names the rows that options choose, `measure` makes one of them,
`section` writes its part of the page and `verdicts` yields its goals. CHOICES are the options that
choose a part, with all values, TOY their values at toy size; KEY the names that identify a row.
"""

from __future__ import annotations

import tomllib
from argparse import Namespace
from collections import Counter
from pathlib import Path
from typing import Any

from lib.papers import candle, dpu, lightcheck, mlperf, results, rule, scr_exa
from lib.papers.models import MODELS
from lib.papers.rule import Judged, table

PAPERS: dict[str, Any] = {
    "lightcheck": lightcheck,
    "candle": candle,
    "scr-exa": scr_exa,
    "dpu": dpu,
    "mlperf": mlperf,
}
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


def published() -> dict[str, Any]:
    """All published values."""
    return tomllib.loads(PUBLISHED.read_text())


def missing(paper: Any, options: Namespace) -> list[str]:
    """Why the chosen parts cannot be measured here. A simulation needs no model."""
    if getattr(options, "parts", None) == ["scale"]:
        return []
    models = (MODELS[name].missing() for name in getattr(options, "models", None) or ())
    more = paper.missing(options) if hasattr(paper, "missing") else ()
    return [reason for reason in dict.fromkeys([*models, *more]) if reason]


def all_keys(name: str) -> list[results.Row]:
    """The keys of all rows that `papers.py NAME` makes."""
    paper = PAPERS[name]
    everything = {choice: [*known] for choice, known in paper.CHOICES.items()}
    return list(paper.keys(Namespace(**everything, toy=False)))


def missing_keys(name: str) -> list[results.Row]:
    """The keys of the rows that the results file lacks."""
    key = PAPERS[name].KEY
    rows = results.read(results.path_of(name))["rows"]
    known = [[str(row[part]) for part in key] for row in rows if row["status"] == "ok"]
    return [each for each in all_keys(name) if [str(each[part]) for part in key] not in known]


def coverage(name: str) -> str:
    """How many of its rows the results file has, and which cases lack some."""
    count, lacking = len(all_keys(name)), missing_keys(name)
    names = ("model", "launcher") if name == "scr-exa" else ("model",)
    groups = Counter(" ".join(str(key[each]) for each in names if each in key) for key in lacking)
    gaps = ", ".join(f"{count} of {who}" for who, count in groups.items() if who)
    text = f"{count - len(lacking)} of {count} rows"
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
        if hasattr(paper, "PICTURE"):
            parts.append(f"![{about['title']}]({paper.PICTURE})")
    head = [
        INTRODUCTION,
        "## Which goals are met?",
        f"One rule, applied by code: {rule.TEXT} Exactness needs one job.",
        table([["goal", "met", "missed", "no verdict"], *goals]),
    ]
    tail = ["## Not made again", table(not_made)]
    return "\n\n".join([*head, *parts, *tail]) + "\n"


def tables(name: str, rows: list[results.Row]) -> list[str]:
    """The paragraphs and tables of a paper."""
    good = [row for row in rows if row["status"] == "ok"]
    return PAPERS[name].section(good, published()[name]) if good else []


def verdicts(name: str, rows: list[results.Row]) -> list[Judged]:
    """The goals that the rows of a paper say something about."""
    good = [row for row in rows if row["status"] == "ok"]
    return [each for each in PAPERS[name].verdicts(good, published()[name]) if each.cases]


def write() -> None:
    """Write the page and its pictures."""
    PAGE.write_text(text())
    for name, paper in PAPERS.items():
        if hasattr(paper, "PICTURE"):
            rows = results.read(results.path_of(name))["rows"]
            paper.draw(rows, published()[name], PAGE.parent / paper.PICTURE)


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
