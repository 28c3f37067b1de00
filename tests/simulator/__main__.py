"""python -m tests.simulator [--seed N] [--count N | --minutes M]: histories from a seed on."""

from __future__ import annotations

import argparse
import faulthandler
import os
import re
import resource
import sys
import time
from collections.abc import Iterator
from itertools import count, islice, zip_longest
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .history import Outcome, Plan

HANG_SECONDS = 300
"""A history that takes longer ends this process, with the stack of what runs."""

_FD = re.compile(r"(?<=/fd/)\d+")
"""A descriptor's number depends on what other histories have left open."""


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulator")
    parser.add_argument("--seed", type=int, default=1, help="the first seed")
    parser.add_argument("--count", type=int, default=100, help="number of histories")
    parser.add_argument("--minutes", type=float, help="in place of --count")
    parser.add_argument("--sweep", help="one history, with this fault at each call in turn")
    parser.add_argument("--every", type=int, default=1, help="of a sweep, only each N-th call")
    parser.add_argument("--twice", action="store_true", help="each must be the same again")
    parser.add_argument("--record", help="a file to which all system calls are added")
    parser.add_argument("--plant", help="a fault that must be found, see plants.py")
    parser.add_argument("--verbose", action="store_true", help="print all that ranks say")
    parser.add_argument("--go-on", action="store_true", help="do not stop at a finding")
    return parser.parse_args()


def _plans(options: argparse.Namespace) -> Iterator[Plan]:
    """The plans to run, without an end unless --count or --sweep has one."""
    from .history import Plan, sweep

    if options.sweep:
        yield from islice(sweep(options.seed, options.sweep), 0, None, options.every)
        return
    seeds = count(options.seed)
    for seed in seeds if options.minutes else islice(seeds, options.count):
        yield Plan.drawn(seed)


def _difference(first: Outcome, second: Outcome) -> str:
    """Where two runs of one plan differ; empty if all their system calls are the same."""
    calls = zip_longest(first.record, second.record, fillvalue="(the end)")
    for number, (one, other) in enumerate(calls, 1):
        if _FD.sub("", one) != _FD.sub("", other):
            return f"call {number}: {one}\n  {other}"
    return ""


def main() -> int:
    """Run histories until one goes wrong; print that one, shrunk. Returns the exit status."""
    options = _options()
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets is a part of a seed
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulator", *sys.argv[1:]])
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 65536), most))
    import torch
    import torch._dynamo

    torch.set_num_threads(1)
    from . import image
    from .history import happen, reference, shrunk

    if options.plant:
        image.planting.append(options.plant)
    references = reference(64)
    start, done, versions, launches, found = time.perf_counter(), 0, 0, 0, []
    for plan in _plans(options):
        faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
        outcome = happen(plan, references, options.twice or bool(options.record))
        if options.record:
            with open(options.record, "a") as file:
                print(plan, *(_FD.sub("N", each) for each in outcome.record), sep="\n", file=file)
        if options.twice and (text := _difference(outcome, happen(plan, references, True))):
            print(f"NOT THE SAME: {plan}\n  {text}")
            return 1
        done += 1
        versions, launches = versions + outcome.versions, launches + outcome.launches
        if options.verbose:
            print(plan, "->", outcome.wrong or "right", outcome.launches, "starts", outcome.calls)
            print(*outcome.said, outcome.output, sep="\n")
        if outcome.wrong:
            found.append(plan.seed)
            print(f"WRONG: {outcome.wrong}\n  {plan}")
            if not (options.go_on or options.plant):
                faulthandler.cancel_dump_traceback_later()
                small = shrunk(plan, references)
                outcome = happen(small, references)
                print(f"shrunk: {small}\n  {outcome.wrong}", *outcome.said[-80:], sep="\n")
            if not options.go_on:
                break
        left = (options.minutes or 0) - (time.perf_counter() - start) / 60
        if options.minutes and left <= 0:
            break
    seconds = time.perf_counter() - start
    print(
        f"{done} histories in {seconds:.1f} s ({60 * done / seconds:.0f} a minute), {versions} "
        f"versions, {launches} starts; wrong: {len(found)} {found[:20]}"
    )
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
