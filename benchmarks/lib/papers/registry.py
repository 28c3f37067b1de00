"""All papers of papers.py: what each makes, and which parts can be chosen."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lib.papers.results import Row

Measure = Callable[[Any], Iterator[list[Row]]]


@dataclass(frozen=True)
class Paper:
    """One published system, and its tables here.

    makes: the tables. lasts: duration of the full size on two cores. choices: options of the
    command that choose a part, with all values. toy: their values at toy size. key: the names that
    identify a row.
    """

    module: str
    makes: str
    lasts: str
    choices: Mapping[str, Sequence[str]]
    toy: Mapping[str, Sequence[str]]
    key: Sequence[str]
    simulated: bool = False
    notes: Sequence[str] = field(default_factory=tuple)

    def measure(self) -> Measure:
        """The function that yields finished rows."""
        found: Measure = importlib.import_module(f"lib.papers.{self.module}").measure
        return found

    def section(self) -> Callable[[list[Row], dict[str, Any]], list[str]]:
        """The function that makes the paragraphs and tables of docs/papers.md from rows and the
        published values."""
        found: Callable[[list[Row], dict[str, Any]], list[str]]
        found = importlib.import_module(f"lib.papers.{self.module}_page").section
        return found


PAPERS: dict[str, Paper] = {
    "lightcheck": Paper(
        "lightcheck",
        "iterations between checkpoints at 5 % overhead, overhead there, recovery, the curve after "
        "a restart; six models; ours, torch.save, CheckFreq",
        "about 4 minutes a model",
        {
            "models": ("resnet18", "vgg16", "inception-v3", "alexnet", "gpt2", "bert"),
            "methods": ("ours-memory", "ours-local", "checkfreq", "torch-save"),
            "parts": ("frequency", "recovery"),
        },
        {"models": ("toy-cnn",), "methods": ("ours-memory",)},
        ("model", "method"),
    ),
}
