"""How much does a checkpoint slow a data-parallel training? Tierckpt and its alternatives.

    python benchmarks/stall.py --toy
    python benchmarks/stall.py --json stall.json --plot stall.png
    python benchmarks/stall.py --json stall.json --plot stall.png --resume stall.json
    python benchmarks/stall.py --model resnet18 --every 1
    python benchmarks/stall.py --launcher horovod
    python benchmarks/stall.py --device cuda --model gpt2

Needs the package and torch; torchsnapshot, matplotlib (`--plot`) and xxhash are used if there.
Each rank computes on one thread. `--json` is rewritten after each round and has raw timings
(`partial`) until all are done; `--resume` continues such a file, and refuses another commit,
machine, software or options. On a GPU, where some methods need seconds a step: `--rounds 2
--steps 6`.

nothing        training alone, measured as if it took checkpoints: the noise
torch-save     rank 0 writes with fsync, all ranks wait; with Horovod at their next allreduce
dcp-thread     DCP's `async_save` as in its tutorial, fsync
dcp-process    the same with `AsyncCheckpointerType.PROCESS`
dcp-tuned      a daemon process, a staging thread with reused shared memory, cached plans, plain
               state dicts, a wait before the optimizer's step
torchsnapshot  `Snapshot.async_take`, all replicated, each rank writes a part, no fsync
ours-off       Tierckpt attached with every level off, compared with `nothing`
ours-memory    Tierckpt's memory level; not on disk
ours-local     its local level: committed, file and folder fsync'ed
hvd-commit     Horovod: `hvd.elastic.TorchState.commit`, a deep copy in each process
ours-commit    Horovod: Tierckpt's elastic commit to memory
By name only: ours-levels, ours-auto.

call ms       inside the method at the boundary, slowest rank, median of the checkpoints
wait ms       the optimizer's step waited for a copy, slowest rank, median
CPU-s         CPU-seconds a checkpoint beyond plain steps, of all processes and their children
direct        the same without the trainers' main threads, except inside the method: less noise
durable ms    from the first rank's call until the last rank's data is finished (fsync'ed if it is)
slowdown ms   wall time that a finished checkpoint adds: a block with checkpoints, less as many
              plain steps; median and range over visits. %step: of a plain step
by cycle      a cycle with a checkpoint less the visit's median plain cycle; median
PSS, RSS MB   peak memory of all processes above training alone; PSS divides shared pages, RSS
              counts them once a process. CUDA's pinned memory may be missing in both
taken         finished checkpoints, of the requested ones
CPU x, slow x direct CPU-seconds and slowdown relative to the best alternative
others        cores that other processes used
quiet         visits that count, of all: with other load of at most 0.15 cores, if there are three;
              0: too few were quiet, so all count

Each method has rank processes of its own for the whole run; while one trains, the others block in
a read (Horovod's are stopped, as they poll). Methods take turns: a visit is half a block of plain
steps, a block with checkpoints, half a block of plain steps, so drift of the machine cancels. A
block is a warm-up step, timed steps, a step to settle, and a wait until all is durable.
Boundaries are called in blocks with checkpoints alone. No method starts a checkpoint while its
previous one is under way: it waits, as call time. DCP and torchsnapshot use a gloo group of their
own. Memory is sampled every 20 ms in blocks without timing, with `mallopt` so that freed memory
leaves at once. The ranks of `nothing` train the plain blocks of `ours-off`. On a GPU a block ends
when its stream is done, so trust slowdown, not by cycle.

Bare limits, on one thread over the whole state: a copy between shared mappings, xxh3, an O_DIRECT
write and fsync of a new file, of an old one (`recycled`), and of an old one beside a training
(`loaded`); on a GPU a copy to page-locked memory (`copy_pinned`).

Targets, judged at the end (met, MISSED, not measured): 0.10 CPU-seconds a durable 192 MB
checkpoint on 2 cores; call and wait under 1 ms; a tenth of dcp-tuned's slowdown; memory of slots
x state / ranks; ResNet-18 with a checkpoint a step at most 5 % slower, none skipped; no
significant slowdown with levels off; 0.9 of a bare write over a recycled file; on a GPU 0.9 of a
bare copy, and under 1 % slower a step if the copies fit a step, else by the excess. The toy
judges call and wait alone.
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
    options = arguments(sys.argv[1:], str(__doc__))
    clean_up_when_terminated()
    parent = options.dir or machine.scratch_parent()
    # A killed method cannot clean up its shared memory, so it is a temporary folder as well.
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
