"""python -m tests.simulator [--seed N] [--count N | --minutes M]: histories from a seed on."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time


def _plain(text: str) -> str:
    return re.sub(r"tierckpt-world-\w+|-[0-9a-f]{12}", "", text)


def main() -> int:
    """Run histories until one goes wrong; print that one, shrunk."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulator")
    parser.add_argument("--seed", type=int, default=1, help="the first seed")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--minutes", type=float, help="in place of --count")
    parser.add_argument("--twice", action="store_true", help="each must be the same again")
    parser.add_argument("--plant", help="a fault that must be found, see plants.py")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--go-on", action="store_true", help="do not stop at a finding")
    options = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets is a part of a seed
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulator", *sys.argv[1:]])
    import faulthandler
    import resource

    faulthandler.dump_traceback_later(int(os.environ.get("LIMIT", "600")), exit=True)

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536), hard))
    import torch
    import torch._dynamo

    torch.set_num_threads(1)
    from . import image
    from .history import Plan, happen, reference, shrunk

    if options.plant:
        image.planting.append(options.plant)
    references = reference(64)
    begin, done, versions, launches, found = time.perf_counter(), 0, 0, 0, []
    while True:
        seconds = time.perf_counter() - begin
        if (options.minutes and seconds > 60 * options.minutes) or (
            not options.minutes and done >= options.count
        ):
            break
        plan = Plan.drawn(options.seed + done)
        outcome = happen(plan, references)
        if options.twice:
            again = happen(plan, references)
            for one, other in zip(outcome.said, again.said, strict=False):
                if _plain(one) != _plain(other):
                    print(f"NOT THE SAME: {plan}\n  {one}\n  {other}")
                    return 1
            if outcome.calls != again.calls:
                print(f"NOT THE SAME: {plan}\n  {outcome.calls} calls, {again.calls} calls")
                return 1
        done += 1
        versions, launches = versions + outcome.versions, launches + outcome.launches
        if options.verbose:
            print(plan, "->", outcome.wrong or "right", outcome.launches, "starts", outcome.calls)
            print(*outcome.said, outcome.output, sep="\n")
        if outcome.wrong:
            found.append(plan.seed)
            print(f"WRONG: {outcome.wrong}\n  {plan}")
            if options.plant:
                break
            if not options.go_on:
                small = shrunk(plan, references)
                outcome = happen(small, references)
                print(f"shrunk: {small}\n  {outcome.wrong}")
                print(*outcome.said[-80:], sep="\n")
                break
    seconds = time.perf_counter() - begin
    print(
        f"{done} histories in {seconds:.1f} s ({60 * done / seconds:.0f} a minute), {versions} "
        f"versions, {launches} starts; wrong: {len(found)} {found[:20]}"
    )
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
