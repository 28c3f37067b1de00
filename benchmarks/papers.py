"""Makes the tables of the papers that Tierckpt answers to again, with ours beside theirs.

    python benchmarks/papers.py --list
    python benchmarks/papers.py --toy                        # all, in half a minute
    python benchmarks/papers.py lightcheck --models resnet18,vgg16
    python benchmarks/papers.py --write                      # docs/papers.md from the results

Results go to benchmarks/results/papers-NAME.json: each run replaces the rows that it measured, so
that a table can be measured in pieces. A toy's results go nowhere unless --json names a file.
"""

from __future__ import annotations

import argparse
import os
import sys

from lib import machine
from lib.files import clean_up_when_terminated
from lib.papers import page, results
from lib.papers.registry import PAPERS
from lib.terminal import parser_of

ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
"""Ranks compute on one thread each, and some are forked from here."""


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of(
        __doc__,
        toy="a small size, for a check of the code",
        place="where checkpoints go; default: a disk",
        results="the results file, instead of the usual one",
    )
    parser.add_argument("name", nargs="?", choices=(*PAPERS, "all"), metavar="NAME")
    parser.add_argument("--list", action="store_true", help="say what each NAME makes, and end")
    parser.add_argument("--write", action="store_true", help="write docs/papers.md from results")
    parser.add_argument("--models", help="some of the models, separated by commas")
    parser.add_argument("--methods", help="some of the methods, separated by commas")
    parser.add_argument("--launchers", help="torchrun, horovod, or both, separated by a comma")
    parser.add_argument("--worlds", help="numbers of ranks, separated by commas")
    parser.add_argument("--sizes", help="MiB of a node's shard, separated by commas")
    parser.add_argument("--epoch", type=int, default=4, help="steps of an epoch (scr-exa)")
    parser.add_argument("--parts", help="some of the parts of a table, separated by commas")
    parser.add_argument("--rounds", type=int, help="visits to each method; default 2, toy 1")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one command")
    options = parser.parse_args()
    if options.toy and not options.name:
        options.name = "all"
    if not (options.name or options.list or options.write):
        parser.error(f"name a paper ({', '.join(PAPERS)} or all), or give --list or --write")
    if options.name == "all" and options.json:
        parser.error("--json is the file of one paper: name that instead of all")
    options.rounds = options.rounds or (1 if options.toy else 2)
    options.dir = options.dir or machine.scratch_parent()
    for name in [options.name] if options.name in PAPERS else []:
        paper = PAPERS[name]
        for key, known in paper.choices.items():
            chosen = getattr(options, key)
            unknown = set(chosen.split(",")) - set(known) if chosen else set()
            if unknown:
                parser.error(f"--{key} {','.join(sorted(unknown))}: choose from {','.join(known)}")
    return options


def make(name: str, options: argparse.Namespace) -> None:
    """Measure one paper's tables; every finished row is in the file at once."""
    paper = PAPERS[name]
    chosen = argparse.Namespace(**vars(options))
    for key, known in paper.choices.items():
        given = getattr(options, key) if options.name == name else None
        usual = paper.toy.get(key, known) if options.toy else known
        setattr(chosen, key, given.split(",") if given else list(usual))
    about = machine.description(options.dir)
    path = options.json or (None if options.toy else results.path_of(name))
    measured = []
    for rows in paper.measure()(chosen):
        measured += rows
        if path:
            results.merge(path, about, rows, paper.key)
    print(f"\n{name}\n\n{page.terminal(name, measured)}\n")


def main() -> None:
    options = arguments()
    if options.list:
        print(page.listing())
        return
    if any(os.environ.get(name) != "1" for name in ONE_THREAD):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ONE_THREAD})
    clean_up_when_terminated()
    if options.name:
        for name in PAPERS if options.name == "all" else [options.name]:
            make(name, options)
    if options.write:
        page.write()


if __name__ == "__main__":
    main()
