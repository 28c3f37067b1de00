"""Passes over a framework's loader, which `ResumableLoader` resumes in the framework's own way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


class Pass:
    """The batches of one pass. A subclass says how it skips some of them."""

    def __init__(self, loader: Any) -> None:
        self._loader, self._batches = loader, iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._batches)

    def skip(self, count: int) -> int:
        """Skip batches without loading them, before the first one; returns how many, 0 where that
        would not be exact."""
        raise NotImplementedError


class Passes:
    """The passes over a loader, each begun by `begin(loader)`."""

    def __init__(self, loader: Any, begin: Callable[[Any], Pass], evaluated: Any = None) -> None:
        """`evaluated`: data of evaluations, whose generators are looked for as well."""
        self._loader, self._begin, self._evaluated = loader, begin, evaluated

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return self._begin(self._loader)


__all__ = ["Pass", "Passes"]
