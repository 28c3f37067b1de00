"""All claims of the pages: read, compared with results files and pages, and written."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lib.claims.page import Page
from lib.claims.template import ClaimError, Found, Line, find
from lib.claims.values import evaluate, load, missing_context

ROOT = Path(__file__).resolve().parents[3]
CLAIMS = ROOT / "benchmarks" / "claims"
RESULTS = ROOT / "benchmarks" / "results"


@dataclass
class Report:
    """The outcome for one page.

    proved: figures with the value of a results file. names: labels of rows. given: unmeasured
    numbers, such as targets and sizes, as the file of claims lists them by section.
    problems: sentences about what is wrong, empty if the page is right.
    """

    page: Page
    proved: list[Found] = field(default_factory=list)
    names: list[Found] = field(default_factory=list)
    given: int = 0
    problems: list[str] = field(default_factory=list)


def reports(results: Path = RESULTS) -> list[Report]:
    """Check every page that has a file of claims."""
    return [check(path, results) for path in sorted(CLAIMS.glob("*.toml"))]


def check(path: Path, results: Path = RESULTS) -> Report:
    """Check the page of one file of claims."""
    document = tomllib.loads(path.read_text())
    report = Report(Page.read(ROOT / document["page"]))
    name = document["page"]
    for claim in document.get("claim", []):
        try:
            found = figures_of(claim, report.page, results)
        except ClaimError as error:
            report.problems.append(f"{name}, claim from {claim['results']}: {error}")
            continue
        report.proved += [each for each in found if each.value is not None]
        report.names += [each for each in found if each.value is None]
        report.problems += [
            f"{name}: has {each.text} where {claim['results']} gives {each.expected} "
            f"({each.value:.6g})"
            for each in found
            if each.value is not None and not each.right
        ]
    _check_files(document, results, report)
    _check_rows(document, name, report)
    _check_rest(document, name, report)
    return report


def figures_of(claim: dict[str, Any], page: Page, results: Path) -> list[Found]:
    """The figures of one claim, with a line for each of its `rows`."""
    return find([line_of(claim, row, results) for row in claim.get("rows", [{}])], page)


def line_of(claim: dict[str, Any], row: dict[str, Any], results: Path) -> Line:
    """The template of a row, and the names that it uses. `also` names further results files."""
    names: dict[str, Any] = load(results / claim["results"])
    names |= {name: load(results / file) for name, file in claim.get("also", {}).items()}
    names |= row
    for new, expression in claim.get("let", {}).items():
        try:
            names[new] = evaluate(expression, names)
        except Exception as error:
            raise ClaimError(f"{new} = {expression} has no value for {row}: {error}") from error
    return row.get("text", claim.get("text")), names


def _check_files(document: dict[str, Any], results: Path, report: Report) -> None:
    """Command, commit and hardware are in every file, or it is known which of them is missing."""
    known = document.get("without_context", {})
    claims = document.get("claim", [])
    used = {name for each in claims for name in (each["results"], *each.get("also", {}).values())}
    for name in sorted(used | set(known)):
        missing = missing_context(load(results / name))
        if missing and name not in known:
            report.problems.append(f"{name} does not name its {', '.join(missing)}")
        if name in known and not missing:
            report.problems.append(f"{name} is complete: remove it from without_context")


def _check_rows(document: dict[str, Any], name: str, report: Report) -> None:
    """Every row of a table has a figure from a results file: a row without data claims nothing."""
    chosen, page = document.get("sections"), report.page
    heads = page.headings()
    for row in re.finditer(r"(?m)^\|(?!-).*\n(?!\|-)", page.plain):
        section = [title for place, _, title in heads if place < row.start()][-1:]
        if chosen is not None and not set(section) & set(chosen):
            continue
        if not any(row.start() <= each.start < row.end() for each in report.proved):
            report.problems.append(f"{name}: no results file has the row {row[0].strip()}")


def _check_rest(document: dict[str, Any], name: str, report: Report) -> None:
    """Figures that no claim covers are those that are listed, with a reason, no more or fewer."""
    covered = {
        place for each in [*report.proved, *report.names] for place in range(each.start, each.end)
    }
    chosen = document.get("sections")
    rest = [
        figure
        for figure in report.page.figures()
        if figure.start not in covered and (chosen is None or figure.section in chosen)
    ]
    given = _given(document)
    report.given = given.total()
    found = Counter((figure.section, figure.text) for figure in rest)
    for what, extra in (
        ("no results file proves", found - given),
        ("listed, but proved or not there:", given - found),
    ):
        for section in sorted({section for section, _ in extra}):
            texts = [text for where, text in extra.elements() if where == section]
            report.problems.append(f"{name}, {section}: {what} {' '.join(texts)}")


def _given(document: dict[str, Any]) -> Counter[tuple[str, str]]:
    """Section and text of the unmeasured numbers. A reason is for the list's readers."""
    return Counter(
        (entry["section"], text)
        for entry in document.get("given", [])
        if entry["reason"]
        for text in entry["figures"].split()
    )


def write(results: Path = RESULTS) -> list[str]:
    """Put the values of the results files into the pages; return the changed figures."""
    changes = []
    for report in reports(results):
        text, offsets = report.page.raw, report.page.offsets
        for each in sorted(report.proved, key=lambda found: -found.start):
            if not each.right:
                start, end = offsets[each.start], offsets[each.end - 1] + 1
                text = text[:start] + each.expected + text[end:]
                changes.append(f"{report.page.path.name}: {each.text} became {each.expected}")
        if text != report.page.raw:
            report.page.path.write_text(text)
    return changes
