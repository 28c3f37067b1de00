"""All papers of papers.py: what each makes, and which parts can be chosen."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib.papers.results import Row

Measure = Callable[[Any], Iterator[list[Row]]]


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

    def draw(self) -> Callable[[list[Row], dict[str, Any], Path], None]:
        """The function that draws the picture from rows and the published values to a file."""
        found: Callable[[list[Row], dict[str, Any], Path], None]
        found = importlib.import_module(f"lib.papers.{self.module}_picture").draw
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
        },
        {"models": ("nt3-toy",), "parts": ("timeline",)},
        ("model", "part", "method", "world"),
    ),
    "scr-exa": Paper(
        "scr_exa.tables",
        "overhead of one checkpoint an epoch over ranks, root checkpointing beside ours; cold "
        "restarts; lost nodes and spares; ResNet-50 and EDSR under DDP and Horovod",
        "about a minute a model, launcher, number of ranks and method",
        {
            "models": ("resnet50", "edsr"),
            "launchers": ("torchrun", "horovod"),
            "methods": ("root-shared", "ours-memory", "ours-local", "ours-flushed", "ours-xor"),
            "parts": ("epochs", "restarts", "spares"),
            "worlds": ("1", "2", "4", "8"),
        },
        {
            "models": ("edsr-toy",),
            "launchers": ("torchrun",),
            "methods": ("ours-flushed",),
            "parts": ("epochs",),
            "worlds": ("2",),
        },
        ("model", "part", "launcher", "world", "method", "epoch_steps"),
        "measured; the bandwidth of the shared file system is simulated",
    ),
    "dpu": Paper(
        "dpu",
        "overlap of redundancy (partner, xor, rs) with computing by message size, and the total "
        "time with the agent and inline",
        "about 2 minutes a size",
        {"methods": ("partner", "xor", "rs"), "sizes": ("1", "4", "16", "64")},
        {"methods": ("partner",), "sizes": ("1",)},
        ("method", "message_bytes"),
    ),
    "mlperf": Paper(
        "mlperf",
        "MLPerf Storage's checkpoint workload of an 8B model, by DLIO: ten writes and ten reads, "
        "ours beside DLIO's own writer",
        "about 2 minutes a writer; needs DLIO and mpirun",
        {"methods": ("ours-local", "dlio-torch"), "worlds": ("8",)},
        {"worlds": ("2",)},
        ("method", "world"),
    ),
}
