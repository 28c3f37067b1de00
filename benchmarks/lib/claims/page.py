"""The figures on a page of Markdown, with their places."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

NUMBER = r"[-+]?\d+(?:,\d{3})*(?:\.\d+)?"

_FIGURE = re.compile(rf"(?<![\w.,+/#-]){NUMBER}(?![\w]|\.\d|[-+/]\w)")
_HEADING = re.compile(r"^(#+) +(.+)$", re.MULTILINE)
_NO_FIGURES = re.compile(
    r"""
    ^```.*?^```            # a block of code
    | `[^`\n]*`            # code
    | \]\([^)\n]*\)        # the target of a link
    | <!--.*?--> | <[^>\n]*>
    | ^\#.*?$              # a heading
    | \d{4}-\d\d-\d\d      # a date
    | \b(?:torch|Python|PyTorch|CUDA|Linux|Horovod|s3fs|s3rver|NVRx|Llama|Adam|commit)\ [\da-f.]+
    | \branks?\ \d+(?=\D)(?!\.)  # a rank's name
    | \b[\d,]+\ x\ [\d,]+\b  # a shape
    | \b(?:rs|xor)\ \d\+\d   # a code
    """,
    re.MULTILINE | re.DOTALL | re.VERBOSE,
)


@dataclass(frozen=True)
class Figure:
    """A number on the page; `start` and `end` are places in its plain text."""

    text: str
    start: int
    end: int
    section: str


@dataclass(frozen=True)
class Page:
    """A page without the marks of bold text: `offsets` lead back to the places in the file."""

    path: Path
    raw: str
    plain: str
    offsets: list[int]

    @classmethod
    def read(cls, path: Path) -> Page:
        """Read a file."""
        raw = path.read_text()
        places = [m.start() for m in re.finditer(re.escape("**"), raw)]
        marks = {place + more for place in places for more in (0, 1)}
        offsets = [place for place in range(len(raw)) if place not in marks]
        return cls(path, raw, "".join(raw[place] for place in offsets), offsets)

    def headings(self) -> list[tuple[int, int, str]]:
        """Place, depth and text of each heading; comments in blocks of code are none."""
        blocks = [m.span() for m in re.finditer(r"(?ms)^```.*?^```", self.plain)]
        return [
            (found.start(), len(found[1]), found[2])
            for found in _HEADING.finditer(self.plain)
            if not any(start <= found.start() < end for start, end in blocks)
        ]

    def figures(self) -> list[Figure]:
        """All numbers, in order: not in code, dates, versions, headings and targets of links."""
        text = _NO_FIGURES.sub(lambda found: " " * len(found[0]), self.plain)
        heads = self.headings()
        figures = []
        for found in _FIGURE.finditer(text):
            section = [title for place, _, title in heads if place < found.start()]
            figures.append(
                Figure(found[0], found.start(), found.end(), section[-1] if section else "")
            )
        return figures
