"""How much does a checkpoint slow a data-parallel training? Tierckpt and its alternatives.

    python benchmarks/stall.py --toy
    python benchmarks/stall.py --json stall.json --plot stall.png
    python benchmarks/stall.py --json stall.json --plot stall.png --resume stall.json
    python benchmarks/stall.py --model resnet18 --every 1
    python benchmarks/stall.py --launcher horovod
    python benchmarks/stall.py --device cuda --model gpt2

benchmarks/README.md explains the columns and how they are measured.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from lib import machine, report, targets
from lib.files import SHARED_MEMORY, clean_up_when_terminated, temporary
from lib.limits import Limits
from lib.stall import record
from lib.stall.options import arguments, settings
from lib.stall.run import Bench
from lib.terminal import say


def measure(bench: Bench, about: dict[str, Any]) -> targets.Run:
    """Run the missing rounds. No process survives, however it ends."""
    options = bench.options
    try:
        bench.start()
        if not bench.teams:
            sys.exit("no method could be run: see the reasons above")
        limits = Limits(bench.state_bytes, bench.directory, options.device, options.world)
        while bench.rounds < options.rounds:
            bench.round(limits)
            if options.json:
                record.write(options.json, about, bench.result(), bench.partial())
        return bench.result()
    except (KeyboardInterrupt, SystemExit):
        if options.json and bench.rounds:
            say(f"{bench.rounds} rounds are in {options.json}; go on with --resume {options.json}")
        raise
    finally:
        bench.close()


def publish(options: argparse.Namespace, about: dict[str, Any], run: targets.Run) -> None:
    """Print tables and targets, write the requested files."""
    rows = list(run.rows.values())
    steps = ", ".join(f"{1e3 * row.step.median:.0f}" for row in rows if row.step)
    print(
        f"\n{options.model}: {run.state_bytes / 1e6:.1f} MB of state, {run.world} ranks, "
        f"{options.launcher}, {options.backend}, "
        f"a checkpoint every {run.every} steps, {options.rounds} rounds\n"
        f"{about['cpu']}, {about['cores']} cores, {about['filesystem']}, torch {about['torch']}\n"
        f"plain step, by method: {steps} ms\n"
    )
    print(report.table(rows))
    print(report.warning(rows) or "", "\n")
    print(report.limits_table(run), "\n")
    print(report.targets_text(targets.judge(run)))
    if options.json:
        record.write(options.json, about, run)
    if options.plot:
        say(report.plot(options.plot, run) or f"picture: {options.plot}")


def main() -> None:
    options = arguments(sys.argv[1:], str(__doc__).splitlines()[0])
    clean_up_when_terminated()
    parent = options.dir or machine.scratch_parent()
    # A killed method cannot clean up its shared memory, so that is a temporary folder as well.
    with temporary(parent) as directory, temporary(SHARED_MEMORY) as memory:
        about = {**machine.description(directory), "settings": settings(options)}
        bench = Bench(options, directory, memory)
        if options.resume:
            try:
                about, partial = record.take_up(options.resume, about)
            except record.CannotResumeError as error:
                sys.exit(str(error))
            bench.take_up(partial)
        publish(options, about, measure(bench, about))


if __name__ == "__main__":
    main()
