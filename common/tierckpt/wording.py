"""How lists are told in a sentence."""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice
from typing import Any


def some(things: Collection[Any], shown: int = 3, between: str = ", ") -> str:
    """The first few by name, the others by number: `a, b, c and 5 more`."""
    more = f" and {len(things) - shown} more" if len(things) > shown else ""
    return between.join(map(str, islice(things, shown))) + more
