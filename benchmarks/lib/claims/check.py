"""All claims of the pages: read, compared with results files and pages, and written."""

from __future__ import annotations

import tomllib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lib.claims.page import Figure, Page
from lib.claims.template import ClaimError, Found, find
from lib.claims.values import evaluate, load, missing_context

ROOT = Path(__file__).resolve().parents[3]
CLAIMS = ROOT / "benchmarks" / "claims"
RESULTS = ROOT / "benchmarks" / "results"


@dataclass
class Report:
    """The outcome for one page.

    proved: figures with the value of a results file. unproved: figures by section that are listed
    as such. problems: sentences about what is wrong, empty if the page is right.
    """

    page: Page
    proved: list[Found] = field(default_factory=list)
    unproved: Counter[str] = field(default_factory=Counter)
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
        report.proved += found
        report.problems += [
            f"{name}: has {each.text} where {claim['results']} gives {each.expected} "
            f"({each.value:.6g})"
            for each in found
            if not each.right
        ]
    _check_files(document, results, report)
    _check_rest(document, name, report)
    return report


def figures_of(claim: dict[str, Any], page: Page, results: Path) -> list[Found]:
    """The figures of one claim; a claim with `rows` has a line for each of them."""
    fields = load(results / claim["results"])
    lines = []
    for row in claim.get("rows", [{}]):
        names: dict[str, Any] = {**fields, **row}
        for new, expression in claim.get("let", {}).items():
            try:
                names[new] = evaluate(expression, names)
            except Exception as error:
                raise ClaimError(f"{new} = {expression} has no value for {row}: {error}") from error
        lines.append((row.get("text", claim.get("text")), names))
    return find(lines, page)


def _check_files(document: dict[str, Any], results: Path, report: Report) -> None:
    """Command, commit and hardware are in every file, or it is known which of them is missing."""
    known = document.get("without_context", {})
    used = {claim["results"] for claim in document.get("claim", [])}
    for name in sorted(used | set(known)):
        missing = missing_context(load(results / name))
        if missing and name not in known:
            report.problems.append(f"{name} does not name its {', '.join(missing)}")
        if name in known and not missing:
            report.problems.append(f"{name} is complete: remove it from without_context")


def _check_rest(document: dict[str, Any], name: str, report: Report) -> None:
    """Figures that no claim covers are those that are listed, with a reason, no more or fewer."""
    covered = {place for each in report.proved for place in range(each.start, each.end)}
    rest: dict[str, list[Figure]] = {}
    for figure in report.page.figures():
        if figure.start not in covered:
            rest.setdefault(figure.section, []).append(figure)
    skipped = document.get("no_measurements", {})
    listed: dict[str, Counter[str]] = {}
    for entry in document.get("unproved", []):
        listed.setdefault(entry["section"], Counter()).update(entry["figures"].split())
    for section in {*rest, *listed, *skipped}:
        found = Counter(figure.text for figure in rest.get(section, []))
        if section in skipped:
            if not found:
                report.problems.append(f"{name}, {section}: has no numbers, so list it nowhere")
            continue
        known = listed.get(section, Counter())
        report.unproved[section] += (found & known).total()
        for what, extra in (
            ("no results file proves", found - known),
            ("listed as unproved, but proved or not there:", known - found),
        ):
            if extra:
                report.problems.append(f"{name}, {section}: {what} {' '.join(extra.elements())}")


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
