"""Output that several commands have: tables, and notes about the journal.

A table keeps each row on one line, whatever the terminal's width. A note names the steps that only
a journal has, for commands that read versions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from tierckpt.offline.survey import Survey

__all__ = ["UNLIMITED", "print_columns", "steps_after"]


UNLIMITED = 1000
"""Width of an output but no terminal: its reader is a program, and no line is broken."""


def print_columns(lines: Sequence[Sequence[str]], left: Collection[str], console: Console) -> None:
    """Print `lines`, the titles first, then the rows. Columns with a title in `left` are aligned to
    the left, all others to the right."""
    titles = lines[0]
    widths = [max(len(line[column]) for line in lines) for column in range(len(titles))]
    for line in lines:
        cells = (
            cell.ljust(width) if title in left else cell.rjust(width)
            for cell, width, title in zip(line, widths, titles, strict=True)
        )
        console.print("  ".join(cells).rstrip(), soft_wrap=True)


def steps_after(there: Survey) -> Iterator[str]:
    """Yield a sentence if the journal in a survey leads on from the version that a restart takes.
    Reads the journal's files now."""
    from tierckpt.journal.segments import reach_of_restart

    reach = reach_of_restart(there)
    if reach is not None and reach.records:
        yield (
            f"the journal leads on from v{reach.base} to v{reach.last}, and only a restart of the "
            "job itself can make its steps. It takes a version of them at its first boundary"
        )
