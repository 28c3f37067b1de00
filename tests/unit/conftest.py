"""What unit tests share."""

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
    """`benchmark_module(name)`: one of the benchmarks' modules, which are scripts' own and in no
    package. Their names ("options") are none to leave to others: after the test they are gone."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))

    def load(name: str) -> Any:
        before = set(sys.modules)
        found = importlib.import_module(name)
        for new in set(sys.modules) - before:
            path = getattr(sys.modules[new], "__file__", None)
            if path and Path(path).parent == BENCHMARKS:
                loaded.append(new)
        return found

    loaded: list[str] = []
    yield load
    for name in loaded:
        sys.modules.pop(name, None)
