"""The command line of stall.py, and the options that define a measurement."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from lib import models
from lib.methods.registry import METHODS
from lib.terminal import parser_of
from lib.training.launchers import LAUNCHERS

# Options that do not change the measurement.
NOT_SETTINGS = ("json", "plot", "resume", "timeout")


def arguments(argv: list[str], text: str) -> argparse.Namespace:
    """Parse the command line, and set the defaults that depend on other options."""
    parser = parser_of(
        text,
        toy="1.5 MB of state, under a minute",
        place="folder on the disk to measure, must exist",
        results="write the results here after every round",
    )
    parser.add_argument("--launcher", choices=tuple(LAUNCHERS), default="torchrun")
    parser.add_argument("--model", choices=models.NAMES, help="default: linear, on cuda gpt2")
    parser.add_argument("--batch", type=int, help="samples a rank")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--backend", choices=("gloo", "nccl"), help="default: nccl for one GPU rank"
    )
    parser.add_argument("--world", type=int, help="ranks; default 2, on cuda 1")
    parser.add_argument("--every", type=int, help="steps a checkpoint; default 4, on cuda 1")
    parser.add_argument("--steps", type=int, help="timed steps of a block; default 4 checkpoints")
    parser.add_argument("--rounds", type=int, help="visits to each method; default 5, toy 2")
    parser.add_argument("--methods", help="names, separated by commas; default: all")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one command")
    parser.add_argument("--plot", type=Path, help="draw the picture here (needs matplotlib)")
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="FILE",
        help="continue an interrupted run from its --json file",
    )
    options = parser.parse_args(argv)
    _defaults(options)
    problem = _problem(options)
    if problem:
        parser.error(problem)
    return options


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """The options that define the measurement, as JSON: runs with equal ones can be joined."""
    chosen = {name: value for name, value in vars(options).items() if name not in NOT_SETTINGS}
    return {**chosen, "dir": str(options.dir) if options.dir else None}


def _defaults(options: argparse.Namespace) -> None:
    cuda = options.device == "cuda"
    options.model = options.model or ("toy" if options.toy else "gpt2" if cuda else "linear")
    options.batch = options.batch or models.BATCHES[options.model]
    options.world = options.world or (1 if cuda else 2)
    options.backend = options.backend or ("nccl" if cuda and options.world == 1 else "gloo")
    options.every = options.every or (1 if cuda else 4)
    options.steps = options.steps or (12 if options.every == 1 else 4 * options.every)
    options.rounds = options.rounds or (2 if options.toy else 5)
    usual = (name for name, method in METHODS[options.launcher].items() if method.usual)
    options.methods = options.methods or ",".join(usual)
    options.json = options.json or options.resume


def _problem(options: argparse.Namespace) -> str | None:
    """The reason if these options cannot be run here."""
    known, names = METHODS[options.launcher], options.methods.split(",")
    unknown = [name for name in names if name not in known]
    if unknown:
        return f"unknown methods {', '.join(unknown)}; known are {', '.join(known)}"
    alone = [name for name in names if known[name].beside not in ("", *names)]
    if alone:
        needed = " and ".join(sorted({known[name].beside for name in alone}))
        return f"{', '.join(alone)}: measured against {needed}: add that to --methods"
    if options.launcher == "horovod" and options.device == "cuda":
        return "--launcher horovod runs over Gloo, on the CPU: remove --device"
    missing = LAUNCHERS[options.launcher].missing()
    if missing:
        return f"--launcher {options.launcher}: {missing}"
    if options.device == "cuda" and not torch.cuda.is_available():
        return "--device cuda: this torch finds no GPU here"
    if options.backend == "nccl" and (options.device != "cuda" or options.world > 1):
        return "nccl needs one GPU per rank: use --device cuda --world 1, or --backend gloo"
    if options.steps % options.every or options.steps < 2:
        return "--steps must be a multiple of --every, and at least 2"
    if options.dir is not None and not options.dir.is_dir():
        return f"--dir {options.dir} is not a folder"
    return None
