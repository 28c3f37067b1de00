"""All papers of papers.py: what each makes, and which parts can be chosen."""

from __future__ import annotations

import importlib
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib.papers.results import Row


@dataclass(frozen=True)
class Paper:
    """One published system, and its tables here.

    makes: the tables. lasts: duration of the full size on two cores. choices: options of the
    command that choose a part, with all values. toy: their values at toy size. key: the names that
    identify a row. how: measured or simulated. picture: its file in docs, if there is one.
    """

    module: str
    makes: str
    lasts: str
    choices: Mapping[str, Sequence[str]]
    toy: Mapping[str, Sequence[str]]
    key: Sequence[str]
    how: str = "measured"
    picture: str = ""

    def keys(self, options: Any) -> Iterator[Row]:
        """What identifies each row of the chosen parts."""
        found: Iterator[Row] = self._module().keys(options)
        return found

    def measure(self, options: Any, key: Row) -> Row:
        """Measure a row; without its key. Raises RuntimeError if that failed."""
        found: Row = self._module().measure(options, key)
        return found

    def missing(self, options: Any) -> list[str]:
        """Why the chosen parts cannot be measured here. A simulation needs no model."""
        if getattr(options, "parts", None) == ["scale"]:
            return []
        known = importlib.import_module("lib.papers.models").MODELS  # it imports torch
        models = (known[name].missing() for name in getattr(options, "models", None) or ())
        found = [*models, *self._module().missing(options)]
        return [reason for reason in dict.fromkeys(found) if reason]

    def all_of_it(self) -> Any:
        """Options that choose every row."""
        return Namespace(**{name: [*known] for name, known in self.choices.items()}, toy=False)

    def _module(self) -> Any:
        return importlib.import_module(f"lib.papers.{self.module}")

    def section(self) -> Callable[[list[Row], dict[str, Any]], list[str]]:
        """The function that makes the paragraphs and tables of docs/papers.md from rows and the
        published values."""
        found: Callable[[list[Row], dict[str, Any]], list[str]]
        found = importlib.import_module(f"lib.papers.{self.module}_page").section
        return found

    def verdicts(self) -> Callable[[list[Row], dict[str, Any]], Iterator[Any]]:
        """The function that yields the goals with their cases (`lib.papers.page.Judged`)."""
        found: Callable[[list[Row], dict[str, Any]], Iterator[Any]]
        found = importlib.import_module(f"lib.papers.{self.module}_page").verdicts
        return found

    def draw(self) -> Callable[[list[Row], dict[str, Any], Path], None]:
        """The function that draws the picture from rows and the published values to a file."""
        found: Callable[[list[Row], dict[str, Any], Path], None]
        found = importlib.import_module(f"lib.papers.{self.module}_picture").draw
        return found


PAPERS: dict[str, Paper] = {
    "lightcheck": Paper(
        "lightcheck",
        "iterations between checkpoints at 5 % overhead, overhead there, recovery, the curve after "
        "a restart; six models; Tierckpt, torch.save, CheckFreq",
        "about 5 minutes a model",
        {
            "models": ("resnet18", "vgg16", "inception-v3", "alexnet", "gpt2", "bert"),
            "methods": ("ours-memory", "ours-local", "checkfreq", "torch-save"),
            "parts": ("frequency", "recovery"),
        },
        {"models": ("toy-cnn",), "methods": ("ours-memory",), "parts": ("recovery",)},
        ("model", "method", "part"),
        picture="papers-lightcheck.png",
    ),
    "candle": Paper(
        "candle",
        "allreduces by message size, gaps between weight updates, share of copies hidden in them; "
        "duration of a checkpoint and overhead over workers; NT3 and ResNet-18 under Horovod",
        "about 3 minutes a model and number of workers",
        {
            "models": ("nt3", "resnet18"),
            "methods": ("ours-memory", "ours-local", "torch-save"),
            "parts": ("timeline", "workers"),
            "worlds": ("1", "2", "4"),
            "samples": ("1", "4", "20"),
        },
        {"models": ("nt3-toy",), "parts": ("timeline",), "worlds": ("2",), "samples": ("4",)},
        ("model", "part", "method", "world", "samples"),
    ),
    "scr-exa": Paper(
        "scr_exa.tables",
        "overhead of one checkpoint an epoch over ranks, root checkpointing beside Tierckpt; cold "
        "restarts; lost nodes and spares; ResNet-50 and EDSR under DDP and Horovod",
        "about a minute a model, launcher, number of ranks and method",
        {
            "models": ("resnet50", "edsr"),
            "launchers": ("torchrun", "horovod"),
            "methods": ("root-shared", "ours-memory", "ours-local", "ours-flushed", "ours-xor"),
            "parts": ("epochs", "restarts", "spares", "scale"),
            "worlds": ("1", "2", "4", "8"),
            "epochs": ("4",),
        },
        {
            "models": ("edsr-toy",),
            "launchers": ("torchrun",),
            "methods": ("ours-flushed",),
            "parts": ("epochs",),
            "worlds": ("2",),
        },
        ("model", "part", "launcher", "world", "method", "epoch_steps"),
        "measured; the shared file system's bandwidth and more than 8 ranks are simulated",
    ),
    "dpu": Paper(
        "dpu",
        "overlap of redundancy (partner, xor, rs) with computing by message size, and the total "
        "time with the agent and inline",
        "about 2 minutes a size",
        {"methods": ("partner", "xor", "rs"), "sizes": ("1", "4", "16", "64")},
        {"methods": ("partner",), "sizes": ("1",)},
        ("scheme", "message_bytes"),
    ),
    "mlperf": Paper(
        "mlperf",
        "MLPerf Storage's checkpoint workload of an 8B model, by DLIO: ten writes and ten reads, "
        "Tierckpt beside DLIO's own writer",
        "about 2 minutes a writer; needs DLIO and mpirun",
        {"methods": ("ours-local", "dlio-torch"), "worlds": ("8",)},
        {"worlds": ("2",)},
        ("method", "world"),
    ),
}
