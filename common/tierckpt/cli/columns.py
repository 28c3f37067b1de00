"""Tables for output that keep each row on one line, whatever the terminal's width."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


UNLIMITED = 1000
"""Width of an output that is no terminal: its reader is a program, and no line is broken."""


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
