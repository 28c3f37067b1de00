"""`tierckpt report`: one HTML file about a job."""

from __future__ import annotations

import argparse
import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING

from tierckpt._text import counted, size_text
from tierckpt.errors import ConfigError

from ..arguments import place

if TYPE_CHECKING:
    from rich.console import Console


def add_report(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tierckpt report DIR [DIR]`."""
    parser.description = (
        "Writes one HTML file about a job that runs or has ended, which needs no network: where "
        "the time went, restarts, the history, the levels and what each copy cost, allreduces and "
        "the copies under them, cores in use, and differences between replicas. It shows what the "
        "job has recorded: events (events_dir) and a trace (trace_dir), and says what is missing. "
        "Nothing is changed in the job's folders. Needs the extra [plot]."
    )
    text = "a job's path, or a folder with its path, events and traces in it; two: side by side"
    parser.add_argument("job", type=place, nargs="+", metavar="DIR", help=text)
    text = "the file to write (default: %(default)s)"
    default = Path("report.html")
    parser.add_argument("-o", "--out", type=Path, default=default, metavar="FILE", help=text)
    parser.set_defaults(run=report)


def report(args: argparse.Namespace, console: Console) -> None:
    """Write the file. Raises ConfigError if matplotlib is missing, or a folder is that of no
    job."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "tierckpt report draws with matplotlib, which is not installed: "
            "pip install 'tierckpt[plot]'"
        )
    if args.job[2:]:
        raise ConfigError("tierckpt report shows two jobs beside each other at most")
    from tierckpt.report.sources import read_job

    jobs = [read_job(path) for path in args.job]
    from tierckpt.report.page import page  # imports matplotlib

    text, drawn = page(jobs)
    temporary = args.out.with_name(f".{args.out.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(args.out)
    finally:
        temporary.unlink(missing_ok=True)
    size = size_text(len(text))
    console.print(f"{args.out}: {counted(drawn, 'figure')}, {size}", soft_wrap=True)


__all__ = ["add_report", "report"]
