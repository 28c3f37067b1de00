"""The command line, `tierckpt` or `python -m tierckpt`.

A command is a function that adds its parser to the given subparsers and sets `run`. `run` gets the
parsed arguments and a console, and may return an exit status (default 0). `error_status`, if set,
is the exit status after an error (default 1). A command is listed in `GROUPS`. Commands import
their modules when they run, so that `tierckpt --help` is quick.
"""

from __future__ import annotations

import argparse
import io
import itertools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tierckpt._version import __version__
from tierckpt.errors import ConfigError, NodeHealthError, TierckptError
from tierckpt.run import options as run_options

from .arguments import nbytes, number, place
from .goodput import goodput
from .halt import halt
from .interval import interval

if TYPE_CHECKING:
    from rich.console import Console

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def trace(commands: Subparsers) -> None:
    """`tierckpt trace merge|summary|plot`."""
    parser = commands.add_parser(
        "trace",
        help="draw checkpoints and allreduces on one time axis",
        description="Reads the traces that ranks wrote to trace_dir, and Horovod's timeline if "
        "there is one.",
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True)

    merge = actions.add_parser("merge", help="write one file for Perfetto or about:tracing")
    merge.add_argument("out", type=Path, metavar="OUT.json")
    _add_inputs(merge, "merge")

    summary = actions.add_parser(
        "summary", help="print latencies, gaps, and how much of the copying was hidden"
    )
    text = "leave out all steps before version V, e.g. the first, slow ones"
    summary.add_argument("--from-version", type=int, metavar="V", help=text)
    _add_inputs(summary, "summary")

    plot = actions.add_parser("plot", help="draw one step")
    plot.add_argument("out", type=Path, metavar="OUT.png")
    plot.add_argument(
        "--version", type=int, metavar="V", help="the step to draw; default: one of median duration"
    )
    text = "ranks to draw; default: the first four"
    plot.add_argument("--ranks", type=int, nargs="+", default=(), metavar="R", help=text)
    _add_inputs(plot, "plot")


def _add_inputs(parser: argparse.ArgumentParser, action: str) -> None:
    text = "trace-r*.json of all ranks, from the folder in trace_dir"
    parser.add_argument("--ours", type=Path, nargs="+", required=True, metavar="FILE", help=text)
    text = "the file in HOROVOD_TIMELINE, of the same run"
    parser.add_argument("--horovod", type=Path, metavar="FILE", help=text)

    def run(args: argparse.Namespace, console: Console) -> None:
        from . import trace as command

        getattr(command, action)(args, console)

    parser.set_defaults(run=run)


def health(commands: Subparsers) -> None:
    """`tierckpt health PATH...`."""
    parser = commands.add_parser(
        "health",
        help="check whether this node can take checkpoints",
        description="Writes, flushes, reads back and compares a file in each directory. Meant for "
        "scripts that run before a job: the exit status is 0 if the node is well, else 1.",
    )
    text = "directories for checkpoints: the job's path, its persistent_path, /dev/shm"
    parser.add_argument("path", type=place, nargs="+", metavar="PATH", help=text)
    text = "free space that each directory must have, e.g. 20G"
    parser.add_argument("--free", default="0", metavar="SIZE", help=text)
    text = "memory that must be available, e.g. 64G"
    parser.add_argument("--memory", default="0", metavar="SIZE", help=text)
    text = "how long to wait for a directory to answer (default: 20)"
    parser.add_argument("--seconds", type=float, default=20.0, metavar="S", help=text)
    parser.set_defaults(run=_health)


def _health(args: argparse.Namespace, console: Console) -> None:
    import socket

    from tierckpt.config import DAY_SECONDS
    from tierckpt.storage.health import Need, examine, parse_size

    if not 0.1 <= args.seconds <= DAY_SECONDS:  # as health_seconds; NaN is not
        raise ConfigError(
            f"--seconds is {args.seconds:g}; it must be from 0.1 to {DAY_SECONDS} (a day)"
        )
    free, node = parse_size(args.free), os.environ.get("TIERCKPT_NODE") or socket.gethostname()
    needs = [Need(os.path.abspath(path), free) for path in args.path]
    problems = examine(needs, parse_size(args.memory), args.seconds)
    if problems:
        raise NodeHealthError({node: problems})
    console.print(f"node {node} is well: {', '.join(n.path for n in needs)}", soft_wrap=True)


def doctor(commands: Subparsers) -> None:
    """`tierckpt doctor`."""
    parser = commands.add_parser(
        "doctor",
        help="show what this machine offers, with a cure for all that is missing",
        description="Looks at the software, the machine, the places for checkpoints, the network "
        "and the settings, and prints a cure beside each cross. Under torchrun or mpirun it also "
        "compares all nodes: torchrun --nproc-per-node 1 ... -m tierckpt doctor. The exit status "
        "is 1 if there is a cross; warnings do not count.",
    )
    text = "the job's path (default: as the settings say)"
    parser.add_argument("--path", type=place, metavar="P", help=text)
    text = "the job's persistent_path: a directory or URL"
    parser.add_argument("--persistent-path", type=place, metavar="Q", help=text)
    parser.add_argument("--shm-dir", type=place, metavar="D", help="the place for shared memory")
    text = "size of parameters and optimizer state together, e.g. 12G: is there room for it?"
    parser.add_argument("--state-bytes", default="0", metavar="SIZE", help=text)
    parser.add_argument("--json", action="store_true", help="print JSON, for other programs")
    parser.set_defaults(run=_doctor)


def _doctor(args: argparse.Namespace, console: Console) -> int:
    from . import doctor as command

    return command.doctor(args, console)


PLACES = (
    "PATH is a job's path or its persistent_path. For several nodes give all paths, or the folder "
    "above them; {node} in a path stands for any name. A persistent_path may be a URL: its client "
    "gets the options in TIERCKPT_PERSISTENT_STORAGE_OPTIONS. Checkpoints of the job in this "
    "machine's memory are found by its path. Nothing is changed."
)


def list_(commands: Subparsers) -> None:
    """`tierckpt list PATH...`."""
    parser = commands.add_parser(
        "list",
        help="list the checkpoints, and the one that a restart takes",
        description="Lists the checkpoints, and marks the one that a restart takes. Their data is "
        f"not read; `tierckpt verify` reads it. {PLACES}",
    )
    _add_places(parser, "list_versions")
    parser.add_argument("--json", action="store_true", help="print JSON, for other programs")


def watch(commands: Subparsers) -> None:
    """`tierckpt watch PATH...`."""
    parser = commands.add_parser(
        "watch",
        help="show a job's checkpoints and agents while it runs",
        description="Shows the levels, the newest version on each, the agents, flushes under way, "
        f"and slow ranks, until Ctrl-C. No trainer is asked. {PLACES}",
    )
    parser.add_argument("path", type=place, nargs="+", metavar="PATH")
    text = "folder of the job's events, if the job's path does not lead to it (see events_dir)"
    parser.add_argument("--events", type=place, metavar="DIR", help=text)
    text = "look once, print, and end; the default without a terminal"
    parser.add_argument("--once", action="store_true", help=text)
    text = "print JSON, for other programs; without --once a line for each look"
    parser.add_argument("--json", action="store_true", help=text)
    text = "time between two looks (default: 2; longer where a look takes long)"
    parser.add_argument("--interval-seconds", type=float, metavar="S", help=text)
    parser.set_defaults(run=_watch)


def _watch(args: argparse.Namespace, console: Console) -> None:
    from . import watch as command

    command.watch(args, console)


def verify(commands: Subparsers) -> None:
    """`tierckpt verify PATH...`."""
    parser = commands.add_parser(
        "verify",
        help="compare every byte of checkpoints with its checksum",
        description="Reads every copy of every shard, and all parity. The exit status is 0 if all "
        "of it is sound, else 1. A shard that cannot be decoded here (no key, or a missing "
        f"package) is checked in its stored form, which shows all damage. {PLACES}",
    )
    _add_places(parser, "verify_versions")
    parser.add_argument(
        "--version", type=int, metavar="V", help="verify only version V; default: all versions"
    )


def import_(commands: Subparsers) -> None:
    """`tierckpt import SOURCE PATH`."""
    parser = commands.add_parser(
        "import",
        help="make a version from another tool's checkpoint, for a job to start from",
        description="SOURCE is a file of torch.save (also of Horovod's examples), a folder of "
        "torch.distributed.checkpoint, safetensors (a file, or a folder with an index), a .ckpt "
        "of Lightning, or a folder checkpoint-N of Hugging Face's Trainer. No code in it runs. "
        "PATH is a job's path, or its persistent_path; restore() of the job, on any number of "
        "ranks, takes the version. It is written as a whole, verified, and reported.",
    )
    parser.add_argument("source", type=Path, metavar="SOURCE")
    parser.add_argument("path", type=place, metavar="PATH")
    text = "format of SOURCE; default: as recognized"
    parser.add_argument("--format", choices=FORMATS, help=text)
    text = "name of the model in the file of a script; default: the usual names"
    parser.add_argument("--model", metavar="KEY", help=text)
    text = "drop this beginning of names in the model ('net.'), and tensors without it"
    parser.add_argument("--prefix", metavar="TEXT", help=text)
    text = "the iteration to resume from; default: as in SOURCE, or the number of optimizer steps"
    parser.add_argument("--iteration", type=number, metavar="N", help=text)
    text = "PATH is a directory that is a persistent_path (a URL always is)"
    parser.add_argument("--persistent", action="store_true", help=text)
    text = "also if there are checkpoints: a restart takes the new one then"
    parser.add_argument("--force", action="store_true", help=text)
    parser.set_defaults(run=_interchange, action="import_checkpoint")


def export(commands: Subparsers) -> None:
    """`tierckpt export PATH... TARGET`."""
    parser = commands.add_parser(
        "export",
        help="write a checkpoint for another tool, or for torch.load",
        description="TARGET's name chooses the format: .safetensors for the model alone, .pt or "
        ".pth for everything as torch.save writes it (model, optimizer, or optimizers by name, "
        "extra, version, iteration, metric), .ckpt for Lightning, .pth.tar as in Horovod's "
        "examples. --format chooses dcp (a folder), transformers (a folder checkpoint-N), or "
        "safetensors in a folder. The default is the version that a restart takes. It is verified. "
        f"In Python: tierckpt.load(PATH). {PLACES}",
    )
    _add_places(parser, "export_version")
    parser.add_argument("out", type=Path, metavar="TARGET")
    text = (
        "format of TARGET; default: by its name. files: a folder with the routed files of all ranks"
    )
    parser.add_argument("--format", choices=(*FORMATS, "files"), help=text)
    parser.add_argument(
        "--version",
        type=int,
        metavar="V",
        help="export version V; default: the one that a restart takes",
    )
    text = "limit of one file of weights, e.g. 5G, in a folder of safetensors (default: 5 GB)"
    parser.add_argument("--max-shard-bytes", type=nbytes, metavar="SIZE", help=text)
    text = "put this before names in the model, e.g. 'net.', the attribute of a LightningModule"
    parser.add_argument("--prefix", metavar="TEXT", help=text)
    parser.add_argument("--force", action="store_true", help="replace TARGET if it exists")
    text = (
        "a module with classes of stored values (torchao's 8-bit state, an Enum); may be repeated"
    )
    parser.add_argument(
        "--import", dest="modules", action="append", default=[], metavar="MODULE", help=text
    )
    parser.set_defaults(run=_interchange)


FORMATS = ("safetensors", "transformers", "dcp", "lightning", "torch", "horovod")
"""As in `interchange.formats`, which imports torch."""


def _interchange(args: argparse.Namespace, console: Console) -> None:
    from . import interchange as command

    getattr(command, args.action)(args, console)


def simulate(commands: Subparsers) -> None:
    """`tierckpt simulate SCENARIO`."""
    parser = commands.add_parser(
        "simulate",
        help="simulate a job under failures: goodput, lost work, traffic, best intervals",
        description="Simulates a job that fails and restarts, from a scenario in a TOML file "
        "(`tierckpt simulate --example > job.toml` writes one to start from). Options replace "
        "values of the file, and these replace values measured from events. Needs the extra "
        "[simulate].",
    )
    parser.add_argument("scenario", type=Path, nargs="?", metavar="SCENARIO", help="a TOML file")
    text = "print an example, and end: %(choices)s (default: %(const)s)"
    names = ("cluster", "llama3", "torch-save", "spot", "constant")
    parser.add_argument("--example", nargs="?", const=names[0], choices=names, help=text)
    text = "measure costs, restarts and the failure rate from a job's events_dir; may be repeated"
    parser.add_argument(
        "--events", type=Path, action="append", default=[], metavar="EVENTS", help=text
    )
    text = "set a value of the scenario, such as job.ranks=1024; may be repeated"
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help=text)
    text = "simulate each value, and print a line for each: job.ranks=64,1024,16384"
    parser.add_argument("--vary", metavar="NAME=VALUES", help=text)
    text = "simulate also with the best interval of each level, by the formula"
    parser.add_argument("--best", action="store_true", help=text)
    parser.add_argument("--replicas", type=int, metavar="N", help="number of repetitions")
    parser.add_argument("--seed", type=int, metavar="N", help="seed of all random numbers")
    parser.add_argument("--json", action="store_true", help="print JSON, for other programs")
    text = "write a picture: a bar of time for each simulated job (needs matplotlib)"
    parser.add_argument("--plot", type=Path, metavar="FILE", help=text)
    parser.set_defaults(run=_simulate)


def _simulate(args: argparse.Namespace, console: Console) -> None:
    from . import simulate as command

    command.simulate(args, console)


def _add_places(parser: argparse.ArgumentParser, action: str) -> None:
    parser.add_argument("path", type=place, nargs="+", metavar="PATH")
    parser.set_defaults(run=_offline, action=action)


def _offline(args: argparse.Namespace, console: Console) -> None:
    from . import checkpoints as command

    getattr(command, args.action)(args, console)


def log(commands: Subparsers) -> None:
    """`tierckpt log PATH`."""
    parser = commands.add_parser(
        "log",
        help="show the history of a job as a tree: runs, what each restored, forks",
        description="Shows every run of the job: the version that it restored, who started it, "
        "where and when, the launcher, the git commit, the software, and the versions that are "
        "left, with pins, the best, suspects and holds; and the forks that began from its "
        "versions, with their own histories as far as their paths lead to them from here. "
        "Nothing is changed.",
    )
    text = "a job's path, or its persistent_path"
    parser.add_argument("path", type=place, metavar="PATH", help=text)
    text = "show every version, not only those with something to say"
    parser.add_argument("--all", action="store_true", help=text)
    parser.add_argument("--json", action="store_true", help="print JSON, for other programs")
    text = "write a picture: a line for each run, from the version that it began with"
    parser.add_argument("--plot", type=Path, metavar="FILE", help=text)
    parser.set_defaults(run=_log)


def _log(args: argparse.Namespace, console: Console) -> None:
    from . import log as command

    command.log(args, console)


def diff(commands: Subparsers) -> None:
    """`tierckpt diff A B`."""
    parser = commands.add_parser(
        "diff",
        help="compare two versions, tensor by tensor",
        description="Compares two versions of one job (`tierckpt diff PATH 100 200`) or of two "
        "jobs (`tierckpt diff A@100 B@100`; without a number, the version that a restart takes): "
        "every tensor and every other value. Tensors with equal checksums are not read. The exit "
        "status is 0 if the versions are equal bit for bit, 1 if they differ, 2 after an error. "
        "--plot draws how far each layer moves from version to version, and the norms of its "
        "weights: `tierckpt diff PATH --plot FILE` for all versions, `PATH 100..200` for a range, "
        f"--every and --names for a choice. {PLACES}",
    )
    parser.add_argument("targets", nargs="+", metavar="PATH[@VERSION]|VERSION")
    parser.add_argument("--json", action="store_true", help="print JSON, for other programs")
    parser.add_argument("--all", action="store_true", help="show all lines, not just the first 20")
    text = "write a picture that shows how far each layer moves from version to version"
    parser.add_argument("--plot", type=Path, metavar="FILE", help=text)
    text = "draw only tensors with such names, as in a shell: 'layer4.*' for weights and buffers, "
    text += (
        "'optimizer/layer4.*/exp_avg' for the optimizer's; may be repeated (default: all weights)"
    )
    parser.add_argument("--names", action="append", metavar="PATTERN", help=text)
    text = "draw only versions that are multiples of this"
    parser.add_argument("--every", type=number, metavar="N", help=text)
    parser.set_defaults(run=_diff, error_status=2)


def _diff(args: argparse.Namespace, console: Console) -> int:
    from . import diff as diffcommand

    return diffcommand.diff(args, console)


def prove(commands: Subparsers) -> None:
    """`tierckpt prove -- COMMAND`."""
    parser = commands.add_parser(
        "prove",
        usage="tierckpt prove [options] -- COMMAND...",
        help="test whether a killed and restarted script continues exactly",
        description="Runs the command twice for some steps, without changing it: once undisturbed, "
        "and once killed with SIGKILL on the way and restarted. Compares every bit of every step: "
        "weights, optimizers, random streams, objects. Prints that the runs are equal, or the "
        "first difference and its usual cause. Checkpoints go to a scratch folder; those of the "
        "job itself are not touched. Other files that the script writes are written again by each "
        "run. The exit status is 0 for exact, 1 for not exact, 2 if the test gave no result.",
    )
    text = "number of steps to compare after the kill (default: 10)"
    parser.add_argument("--steps", type=int, default=10, metavar="N", help=text)
    text = "kill after K steps (default: 5)"
    parser.add_argument("--kill-after", type=int, default=5, metavar="K", help=text)
    text = "raise both as needed, so that an epoch ends before the kill and another one after it"
    parser.add_argument("--epochs", action="store_true", help=text)
    text = "start from a copy of this version, not from scratch; PATH defaults to the settings'"
    parser.add_argument("--from", dest="begin", metavar="[PATH@]VERSION", help=text)
    text = "keep logs and records in this folder; on several nodes, a folder that all of them see"
    parser.add_argument("--dir", type=Path, metavar="FOLDER", help=text)
    text = "give up a run that makes no step for this time (default: 900)"
    parser.add_argument("--patience", type=float, default=900.0, metavar="SECONDS", help=text)
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(run=_prove, error_status=2)


def _prove(args: argparse.Namespace, console: Console) -> int:
    from . import prove as command

    return command.prove(args, console)


def pin(commands: Subparsers) -> None:
    """`tierckpt pin PATH VERSION`."""
    _add_pin(commands, "pin", "keep a version: retention does not delete it")


def unpin(commands: Subparsers) -> None:
    """`tierckpt unpin PATH VERSION`."""
    parser = _add_pin(commands, "unpin", "end a pin: retention may delete the version again")
    text = "end the holds of forks that have no version of their own yet, instead of the pin"
    parser.add_argument("--forks", action="store_true", help=text)


def _add_pin(commands: Subparsers, action: str, text: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        action,
        help=text,
        description="PATH is a job's path on this node, or its persistent_path. A persistent_path "
        "may be a URL: its client gets the options in TIERCKPT_PERSISTENT_STORAGE_OPTIONS. If "
        f"every node has a path of its own, run the command on all of them, or call {action}() in "
        "the job.",
    )
    parser.add_argument("path", type=place, metavar="PATH")
    parser.add_argument("version", type=int, metavar="VERSION")
    parser.set_defaults(run=_run_pin, action=action, forks=False)
    return parser


def _run_pin(args: argparse.Namespace, console: Console) -> None:
    if args.forks:
        from . import fork as command

        command.end_holds(args, console)
        return
    from tierckpt.config import load_config
    from tierckpt.coordination.pinning import mark_at

    try:
        marked = mark_at(args.action, args.version, args.path, load_config().persistent)
    except OSError as error:
        raise ConfigError(f"{args.path} cannot be used: {error}") from error
    console.print(f"{args.path}: {args.action}ned {', '.join(marked)}", soft_wrap=True)


def rollback(commands: Subparsers) -> None:
    """`tierckpt rollback PATH VERSION`."""
    parser = commands.add_parser(
        "rollback",
        help="go back to an older version at the next start",
        description="The next start of the job takes VERSION, and trains on from there. Restarts "
        "after that take the newest version since then, never one that was given up. Nothing is "
        "deleted: later versions can be read until retention removes them, when newer versions "
        "of the next run are complete. PATH is a job's path on one of its nodes, or its "
        "persistent_path (its client gets the options in TIERCKPT_PERSISTENT_STORAGE_OPTIONS). A "
        "running job goes on until it ends.",
    )
    parser.add_argument("path", type=place, metavar="PATH")
    parser.add_argument("version", type=number, nargs="?", metavar="VERSION")
    text = "take back a request that no start has carried out"
    parser.add_argument("--cancel", action="store_true", help=text)
    parser.set_defaults(run=_rollback)


def _rollback(args: argparse.Namespace, console: Console) -> None:
    from . import rollback as command

    command.rollback(args, console)


def fork(commands: Subparsers) -> None:
    """`tierckpt fork SOURCE[@VERSION] PATH`."""
    parser = commands.add_parser(
        "fork",
        help="let a new job begin from a version of another one",
        description="The next start of the job with this PATH begins from the version, bit for "
        "bit, on any number of ranks, and goes on with versions of its own. Nothing is copied: "
        "the version is held at its source until the new job has one on disk. SOURCE and PATH are "
        "jobs' paths, or persistent_paths. TIERCKPT_FORK_FROM=SOURCE@VERSION, where the job is "
        "started, is the same without this command.",
    )
    text = "the other job, with @v4000 or @4000 for a version; default: its newest complete one"
    parser.add_argument("source", nargs="?", metavar="SOURCE[@VERSION]", help=text)
    text = "the new job; it must have no version yet"
    parser.add_argument("path", type=place, metavar="PATH", help=text)
    text = "take the order back, if no start has carried it out: tierckpt fork --cancel PATH"
    parser.add_argument("--cancel", action="store_true", help=text)
    parser.set_defaults(run=_fork)


def _fork(args: argparse.Namespace, console: Console) -> None:
    from . import fork as command

    command.fork(args, console)


def takeover(commands: Subparsers) -> None:
    """`tierckpt takeover PATH`."""
    parser = commands.add_parser(
        "takeover",
        help="take a persistent_path away from a job that hangs",
        description="Takes the lease of a persistent_path away from the job that holds it. The "
        "next job that asks for the lease gets it. Use this for a job that hangs and still renews "
        "its lease, if you cannot end it; the lease of a dead job expires by itself. PATH is a "
        "directory or a URL; the client of a URL gets the options in "
        "TIERCKPT_PERSISTENT_STORAGE_OPTIONS.",
    )
    parser.add_argument("path", type=place, metavar="PATH")
    parser.set_defaults(run=_takeover)


def _takeover(args: argparse.Namespace, console: Console) -> None:
    from contextlib import closing

    from tierckpt._text import is_url
    from tierckpt.config import load_config
    from tierckpt.storage.persistent import PersistentStore

    there = load_config().persistent.at(args.path)
    try:
        if not is_url(args.path) and not Path(args.path).is_dir():
            raise ConfigError(f"{args.path} is not a directory; give a job's persistent_path")
        with closing(PersistentStore(there.path, **there.options())) as store:
            owner = store.take_over()
    except OSError as error:
        raise ConfigError(f"{args.path} cannot be used: {error}") from error
    result = f"taken from {owner}; the next job that asks gets it" if owner else "no job holds it"
    console.print(f"{args.path}: {result}", soft_wrap=True)


def run(commands: Subparsers) -> None:
    """`tierckpt run SCRIPT`. `main` gives it the arguments before they are parsed here, as those
    after the script are the script's."""
    parser = commands.add_parser(
        RUN,
        usage=run_options.USAGE,
        help="run a training script under a launcher, and restart it within a second",
        description=run_options.DESCRIPTION,
    )
    run_options.add(parser)


RUN = "run"
GROUPS: dict[str, tuple[Callable[[Any], None], ...]] = {
    "run a script": (run, prove),
    "look at a job": (watch, list_, log, verify, diff, goodput, trace),
    "control a job": (halt, rollback, fork, pin, unpin, takeover),
    "plan a job": (interval, simulate),
    "exchange checkpoints with other tools": (import_, export),
    "examine a machine": (doctor, health),
}
"""Commands by purpose, in the order of `tierckpt --help`."""
COMMANDS = tuple(itertools.chain.from_iterable(GROUPS.values()))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status. Tierckpt's errors and the system's are printed on
    stderr, as one sentence. Ctrl-C gives 130, as in shells. `run` ends this process, or returns at
    the end of the script, whose exceptions it raises."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == [RUN] and not {"-h", "--help"} & set(arguments[1:2]):
        from tierckpt.run.__main__ import main as run_script

        run_script(arguments[1:])
        return 0
    args = argparse.Namespace()
    try:
        _accept_any_file_name()
        args = _parser().parse_args(arguments)
        from rich.console import Console

        status = args.run(args, Console(highlight=False, markup=False))
        print(end="", flush=True)
    except BrokenPipeError:  # `| head`
        _discard_output()
        return 1
    except (TierckptError, OSError) as error:
        _discard_output()
        print(f"tierckpt: {error}", file=sys.stderr)
        return getattr(args, "error_status", 1)
    except KeyboardInterrupt:
        return 130
    return status or 0


def _accept_any_file_name() -> None:
    """Escape characters on stdout that its encoding lacks: file names may contain any."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _discard_output() -> None:
    """Send output to /dev/null if it cannot be written (reader gone, disk full). Otherwise Python
    would try again at exit, and print an error."""
    try:
        print(end="", flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "tierckpt",
        usage="tierckpt [-h] [--version] COMMAND ...",
        description="Runs training scripts, and looks at the checkpoints of a job, while it runs "
        "and afterwards.",
        epilog="`tierckpt COMMAND --help` describes a command.",
    )
    parser.add_argument("--version", action="version", version=f"tierckpt {__version__}")
    commands = parser.add_subparsers(
        prog="tierckpt", metavar="COMMAND", required=True, help=argparse.SUPPRESS
    )
    for title, group in GROUPS.items():
        for add in group:
            add(commands)
        # argparse has one list for all subcommands: their lines go into groups of their own.
        lines = commands._choices_actions[-len(group) :]
        parser.add_argument_group(title)._group_actions.extend(lines)
    return parser
