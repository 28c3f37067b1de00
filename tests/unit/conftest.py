"""Fixtures that unit tests share."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def benchmark_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """`benchmark_module(name)` imports a module of the benchmarks ("lib.figures").

    Their folder is on the path during the test alone, and `lib` is in no package: after the test
    no such name is left to other tests.
    """
    monkeypatch.syspath_prepend(str(BENCHMARKS))

    def load(name: str) -> Any:
        before = set(sys.modules)
        found = importlib.import_module(name)
        for new in set(sys.modules) - before:
            path = getattr(sys.modules[new], "__file__", None)
            if path and Path(path).is_relative_to(BENCHMARKS):
                loaded.append(new)
        return found

    loaded: list[str] = []
    yield load
    for name in loaded:
        sys.modules.pop(name, None)
