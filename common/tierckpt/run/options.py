"""The command line of `tierckpt run`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

MAX_RESTARTS = 3
USAGE = "tierckpt run [options] (SCRIPT | -m MODULE) [ARGUMENTS...]"
DESCRIPTION = (
    "Runs a training script under a launcher, and restarts it within a second after a failure: "
    "torchrun ... -m tierckpt.run train.py, or mpirun ... tierckpt run train.py. Each rank's "
    "process keeps torch imported, and forks the script. If one rank's script is killed or fails, "
    "the scripts of all ranks are ended, and the next attempt starts. After --max-restarts the "
    "launcher handles the failure as usual."
)


@dataclass(frozen=True)
class Options:
    """The options, and the program to run."""

    program: str
    """A script's path, or a module's name."""
    is_module: bool
    arguments: tuple[str, ...]
    max_restarts: int = MAX_RESTARTS
    preload: tuple[str, ...] = ()
    rendezvous: str = ""
    standby: bool = False
    """This process is a spare: it waits for the rank of a lost node."""
    times: str = ""
    verbose: bool = False


def parse(arguments: Sequence[str]) -> Options:
    """Parse the command line; ends the process with status 2 and a message if it is wrong."""
    parser = argparse.ArgumentParser("tierckpt run", usage=USAGE, description=DESCRIPTION)
    add(parser)
    found = parser.parse_args(arguments)
    words = found.command[1:] if found.command[:1] == ["--"] else found.command
    if not words:
        parser.error("a script, or -m and a module, is missing")
    if found.max_restarts < 0:
        parser.error("--max-restarts must be 0 or more")
    if found.rendezvous and not found.rendezvous.rpartition(":")[2].isdigit():
        parser.error("--rendezvous must be HOST:PORT")
    if found.standby and not found.rendezvous:
        parser.error("--standby needs --rendezvous HOST:PORT, as given to the job's own ranks")
    if not found.is_module and _is_interpreter(words[0]):
        parser.error(f"leave out {words[0]}: tierckpt run is given the script itself")
    return Options(
        words[0],
        found.is_module,
        tuple(words[1:]),
        found.max_restarts,
        tuple(filter(None, found.preload.split(","))),
        found.rendezvous,
        found.standby,
        found.times,
        found.verbose,
    )


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options to a parser."""
    text = f"restarts before the launcher takes over (default: {MAX_RESTARTS})"
    parser.add_argument("--max-restarts", type=int, default=MAX_RESTARTS, metavar="N", help=text)
    text = "modules to import before the script starts, besides torch and those of its last run"
    parser.add_argument("--preload", default="", metavar="A,B", help=text)
    text = (
        "where rank 0 listens for the other ranks and for spares, in place of the launcher's store"
    )
    parser.add_argument("--rendezvous", default="", metavar="HOST:PORT", help=text)
    text = "be a spare: import, wait at --rendezvous, and take the rank of a node that is lost"
    parser.add_argument("--standby", action="store_true", help=text)
    text = "print the parts of each restart's time, too"
    parser.add_argument("-v", "--verbose", action="store_true", help=text)
    text = "append the times of each restart to this file, as JSON lines"
    parser.add_argument("--times", default="", metavar="FILE", help=text)
    text = "run a module, named in place of the script, as python -m does"
    parser.add_argument("-m", dest="is_module", action="store_true", help=text)
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def _is_interpreter(word: str) -> bool:
    name = word.rpartition("/")[2]
    return name.startswith("python") and not name.removeprefix("python").strip("0123456789.")


__all__ = ["DESCRIPTION", "USAGE", "Options", "add", "parse"]
