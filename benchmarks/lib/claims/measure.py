"""Measures the results files again, and sets the new values beside the pages."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lib.claims.check import CLAIMS, RESULTS, ROOT, figures_of, line_of
from lib.claims.page import Page
from lib.claims.template import ClaimError, pattern_of

RUNS = ROOT / "benchmarks" / "figures.toml"
FOLDER = ROOT / "build" / "figures"
GRACE_SECONDS = 20


@dataclass(frozen=True)
class Run:
    """One command, and the results files that it makes again."""

    script: str
    options: str
    minutes: float
    results: list[str]

    @property
    def command(self) -> str:
        """The command as it is shown."""
        return f"python benchmarks/{self.script} {self.options}".rstrip()


def runs(quick: bool) -> list[Run]:
    """All runs in order."""
    found = tomllib.loads(RUNS.read_text())["run"]
    names = ("quick", "quick_minutes") if quick else ("options", "minutes")
    return [
        Run(each["script"], each[names[0]], each[names[1]], each["results"])
        for each in found
        if names[0] in each
    ]


def measure(quick: bool, folder: Path = FOLDER) -> list[str]:
    """Run everything; return sentences about runs without a result. One that was stopped has one
    if its script writes its file row by row, as most do.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    failed = []
    chosen = runs(quick)
    for place, run in enumerate(chosen, 1):
        print(f"\n[{place} of {len(chosen)}, at most {run.minutes} min] {run.command}", flush=True)
        path = folder / run.results[0]
        before = time.monotonic()
        status = _execute(run, path)
        print(f"{(time.monotonic() - before) / 60:.1f} min", flush=True)
        if status:
            print(f"{run.command} {status}", flush=True)
        if not path.exists():
            failed.append(f"{run.command} {status or 'ended'}, and wrote no results")
        for name in run.results[1:]:
            if path.exists():
                shutil.copy(path, folder / name)
    return failed


def _execute(run: Run, path: Path) -> str:
    """Nothing, or how the command failed. All of its processes are stopped in time."""
    arguments = [sys.executable, str(ROOT / "benchmarks" / run.script), *shlex.split(run.options)]
    process = subprocess.Popen([*arguments, "--json", str(path)], start_new_session=True, cwd=ROOT)
    try:
        code = process.wait(60 * run.minutes)
        return f"failed with status {code}" if code else ""
    except subprocess.TimeoutExpired:
        return f"was stopped after {run.minutes} minutes"
    finally:
        _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, number)
            try:
                process.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                continue


def comparison(folder: Path = FOLDER) -> Iterator[str]:
    """For each claim with files made again, the figures of the page and the new ones."""
    for path in sorted(CLAIMS.glob("*.toml")):
        document = tomllib.loads(path.read_text())
        page = Page.read(ROOT / document["page"])
        for claim in document.get("claim", []):
            files = [claim["results"], *claim.get("also", {}).values()]
            if all((folder / name).exists() for name in files):
                yield from _lines(claim, page, folder, document["page"])


def _lines(claim: dict[str, Any], page: Page, folder: Path, name: str) -> Iterator[str]:
    """A line for each row, if the new file has it."""
    on_page = iter(figures_of(claim, page, RESULTS))
    for row in claim.get("rows", [{}]):
        count = len(pattern_of(line_of(claim, row, RESULTS))[1])
        old = [next(on_page) for _ in range(count)]
        label = row.get("label", claim.get("text", ""))[:60].strip().replace("\n", " ")
        try:
            values = pattern_of(line_of(claim, row, folder))[1]
        except ClaimError:
            yield f"{name}, {claim['results']}, {label}: not in this run"
            continue
        if len(values) != count:
            yield f"{name}, {claim['results']}, {label}: this run has other columns"
            continue
        figures = [
            (each.text, replace(each, value=value).expected)
            for each, value in zip(old, values, strict=True)
            if value is not None and each.value is not None
        ]
        yield (
            f"{name}, {claim['results']}, {label}:\n"
            f"    page {' '.join(text for text, _ in figures)}\n"
            f"    here {' '.join(text for _, text in figures)}"
        )
