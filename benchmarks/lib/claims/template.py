"""Text with {expressions} in place of its figures, compared with a page.

The page decides how a figure is rounded: it is right if the value, rounded to as many decimals,
gives it. So a template has no formats, and one expression serves 0.86 and 506.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

from lib.claims.page import NUMBER, Page
from lib.claims.values import PARTS, evaluate

Line = tuple[str, dict[str, Any]]
"""A template, and the names that its expressions use."""

_PLACEHOLDER = re.compile(r"\{([^{}]+)\}")
_RANGE = rf"({NUMBER}) to ({NUMBER})"
_SPREAD = rf"({NUMBER}) \({_RANGE}\)"


class ClaimError(Exception):
    """A template that cannot be compared with its page."""


@dataclass(frozen=True)
class Found:
    """A figure on the page with its value from the file; places are those of the plain text.

    A label of a row has no value. Numbers in it are names, such as "2 nodes".
    """

    text: str
    value: float | None
    start: int
    end: int

    @property
    def expected(self) -> str:
        """The value in the style of the page: decimals, sign, and commas for thousands."""
        if self.value is None:
            return self.text
        decimals = len(self.text.partition(".")[2])
        step = Decimal(1).scaleb(-decimals)
        rounded = Decimal(repr(float(self.value))).quantize(step, ROUND_HALF_UP)
        if rounded == 0:
            rounded = abs(rounded)
        sign = "+" if self.text.startswith("+") and rounded >= 0 else ""
        comma = "," if "," in self.text or (abs(rounded) >= 10000) else ""
        return f"{sign}{rounded:{comma}}"

    @property
    def right(self) -> bool:
        """Whether the page has the rounded value."""
        if self.value is None:
            return True
        return float(self.text.replace(",", "")) == float(self.expected.replace(",", ""))


def find(lines: list[Line], page: Page) -> list[Found]:
    """The figures of the only place where the page has the lines, one after the other.

    Raises ClaimError if there is no such place, with the first missing line, or several.
    """
    patterns: list[str] = []
    values: list[float | None] = []
    for line in lines:
        pattern, own = pattern_of(line)
        patterns.append(pattern)
        values += own
    places = list(re.finditer(r"\s+".join(patterns), page.plain))
    if len(places) != 1:
        raise ClaimError(_why(lines, patterns, page) or f"{len(places)} places have this text")
    (place,) = places
    return [
        Found(place[group], value, place.start(group), place.end(group))
        for group, value in enumerate(values, 1)
    ]


def _why(lines: list[Line], patterns: list[str], page: Page) -> str:
    for count, (template, names) in enumerate(lines, 1):
        if not re.search(r"\s+".join(patterns[:count]), page.plain):
            label = f" of {names['label']}" if "label" in names else ""
            return f"the page has no such text{label}: {template.strip()}"
    return ""


def pattern_of(line: Line) -> tuple[str, list[float | None]]:
    """A regular expression for a template, and the values of its groups; None for a label."""
    template, names = line
    pattern = ""
    values: list[float | None] = []
    for index, piece in enumerate(_PLACEHOLDER.split(template.strip())):
        if index % 2 == 0:
            pattern += _literal(piece)
            continue
        if re.fullmatch(r"[\d.\s+*/-]+", piece):
            raise ClaimError(f"{{{piece}}} names no value of the file")
        try:
            value = evaluate(piece, names)
        except Exception as error:
            raise ClaimError(f"{{{piece}}} has no value: {error}") from error
        if isinstance(value, str):
            pattern += f"({_literal(value)})"
            values.append(None)
        elif value is None:
            pattern += "-"
        elif isinstance(value, dict):
            parts = [value[name] for name in PARTS if name in value]
            values += parts
            pattern += _RANGE if len(parts) == 2 else _SPREAD
        else:
            values.append(float(value))
            pattern += f"({NUMBER})"
    return pattern, values


def _literal(text: str) -> str:
    parts = re.split(r"\s+", text.replace("**", ""))
    return r"\s+".join(re.escape(part) for part in parts)
