"""Makes the tables of the papers that Tierckpt answers to again, with ours beside theirs.

    python benchmarks/papers.py --toy                        # all, in half a minute
    python benchmarks/papers.py lightcheck --models resnet18,vgg16
    python benchmarks/papers.py --write                      # docs/papers.md from the results

Results go to benchmarks/results/papers-NAME.json: each run replaces the rows that it measured, so
that a table can be measured in pieces. A toy's results go nowhere unless --json names a file.

lib/published.toml has the published values with their sources. The image models need torchvision,
the language models transformers. A missing package is an error at the start; --toy without
a NAME says which papers it leaves out for that. Inputs are random, and nothing is downloaded.
Every verdict is by one rule (lib/papers/rule.py), and needs three visits to a quiet machine.

lightcheck  the shortest interval that costs at most 5 %, tried from every step on, computed above 6
            steps (in parentheses). CheckFreq (lib/methods/checkfreq.py) is written from its paper
candle      Horovod's timeline and Tierckpt's on one axis, and stall.py with a checkpoint a step
dpu         nodes and overlap of levels.py, by size
scr-exa     a checkpoint an epoch of four steps (`--epochs`). Root checkpointing lasts as long as
            its bytes take at a simulated shared file system's bandwidth; others get a broadcast.
            `--parts epochs` (ten epochs a visit), `restarts` (all ranks kill themselves in every
            tenth epoch; without the memory level agent and shared memory go, too), `spares` (eight
            nodes, four spares, a node is lost in every tenth epoch; network namespaces, as root),
            `scale` (simulated to 1,024 ranks from the rows of `epochs` in the results file).
            Losses are compared with those of an undisturbed job, bit for bit
mlperf      MLPerf Storage's checkpoint workload for Llama 3 8B, widths divided by 16 (439 MB), run
            by DLIO under mpirun with the mechanisms of lib/dlio: ten checkpoints with fsync, read
            back with cold caches. DLIO's writer does not read its entry `checkpoint.fsync`, so its
            mechanism here sets the one that it reads. Release 2.0.0 reads no checkpoints, so use
            commit e1919d7:

    git clone https://github.com/argonne-lcf/dlio_benchmark
    git -C dlio_benchmark checkout e1919d7 && pip install --no-deps ./dlio_benchmark
    pip install hydra-core omegaconf pandas h5py psutil pillow mpi4py "pydftracer>=2.0.2"
"""

from __future__ import annotations

import argparse
import os
import sys

from lib import machine
from lib.files import clean_up_when_terminated
from lib.papers import page, results
from lib.papers.page import PAPERS
from lib.papers.rule import MIN_VISITS
from lib.report import table
from lib.terminal import parser_of, say
from tierckpt.testing import NoNetworkError

ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
"""Ranks compute on one thread each, and some are forked from here."""
NUMBERS = ("worlds", "sizes", "samples", "epochs")
"""Options of any numbers."""


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of(
        __doc__,
        toy="a small size, for a check of the code",
        place="where checkpoints go; default: a disk",
        results="the results file, instead of the usual one",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(PAPERS)}")
    parser.add_argument("--write", action="store_true", help="write docs/papers.md from results")
    parser.add_argument("--models", help="some of the models, separated by commas")
    parser.add_argument("--methods", help="some of the methods, separated by commas")
    parser.add_argument("--launchers", help="torchrun, horovod, or both, separated by a comma")
    parser.add_argument("--worlds", help="numbers of ranks, separated by commas")
    parser.add_argument("--sizes", help="MiB of a node's shard, separated by commas")
    parser.add_argument("--samples", help="samples a rank and step (candle's timelines)")
    parser.add_argument("--epochs", help="steps of an epoch (scr-exa)")
    parser.add_argument("--parts", help="some of the parts of a table, separated by commas")
    parser.add_argument("--rounds", type=int, help="visits to each method; default 3, toy 1")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one command")
    options = parser.parse_args()
    if not (options.names or options.write or options.toy):
        parser.error(f"name a paper ({', '.join(PAPERS)}), or give --write")
    for name in options.names:
        if name not in PAPERS:
            parser.error(f"there is no paper {name}: choose from {', '.join(PAPERS)}")
    if options.json and len(options.names) != 1:
        parser.error("--json is the file of one paper: name that one")
    options.rounds = options.rounds or (1 if options.toy else MIN_VISITS)
    options.dir = options.dir or machine.scratch_parent()
    options.chosen = _chosen(options, parser)
    return options


def _chosen(
    options: argparse.Namespace, parser: argparse.ArgumentParser
) -> dict[str, argparse.Namespace]:
    """The parts of each paper. What this machine lacks is an error now, not an empty table later;
    a toy without names says what it leaves out."""
    found = {}
    named = options.names or (PAPERS if options.toy else ())
    for name in named:
        paper = PAPERS[name]
        chosen = argparse.Namespace(**vars(options))
        for key, known in paper.CHOICES.items():
            given = getattr(options, key) if len(named) == 1 else None
            usual = paper.TOY.get(key, known) if options.toy else known
            setattr(chosen, key, given.split(",") if given else list(usual))
            unknown = set(getattr(chosen, key)) - {*known, *paper.TOY.get(key, ())}
            if unknown and key not in NUMBERS:
                parser.error(f"--{key} {','.join(sorted(unknown))}: choose from {','.join(known)}")
        if reasons := page.missing(paper, chosen):
            if options.names:
                parser.error(f"{name} cannot be measured here: {'; '.join(reasons)}")
            say(f"{name} is left out: {'; '.join(reasons)}")
            continue
        found[name] = chosen
    return found


def make(name: str, options: argparse.Namespace) -> bool:
    """Measure one paper's tables; every finished row is in the file at once. Returns whether all
    rows were measured."""
    paper = PAPERS[name]
    about = machine.description(options.dir)
    path = options.json or (None if options.toy else results.path_of(name))
    measured = []
    for key in paper.keys(options):
        say(f"{name}: {', '.join(map(str, key.values()))}")
        row = {**key, "simulated": key.get("part") == "scale", "status": "ok"}
        try:
            row |= paper.measure(options, key)
        except (RuntimeError, NoNetworkError) as error:
            row["status"] = f"failed: {error}"
            say(row["status"])
        measured.append(row)
        if path and (row["status"] == "ok" or options.json):  # a failure replaces no figure
            results.merge(path, about, [row], paper.KEY)
    print(f"\n{name}\n{table(measured)}\n")
    return all(row["status"] == "ok" for row in measured)


def main() -> None:
    if any(os.environ.get(name) != "1" for name in ONE_THREAD):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ONE_THREAD})
    options = arguments()
    clean_up_when_terminated()
    done = [make(name, chosen) for name, chosen in options.chosen.items()]
    if options.write:
        page.write()
    sys.exit(0 if all(done) else 1)


if __name__ == "__main__":
    main()
