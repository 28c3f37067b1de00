"""`tierckpt pin` and `unpin`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from tierckpt._text import is_url
from tierckpt.errors import ConfigError, PinError

from ..arguments import place, version_number

if TYPE_CHECKING:
    from rich.console import Console


def add_pin(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tierckpt pin PATH VERSION`."""
    _add(parser, "pin")


def add_unpin(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tierckpt unpin PATH VERSION`."""
    _add(parser, "unpin")
    text = "end the holds that forks have on the version, instead of the pin"
    parser.add_argument("--forks", action="store_true", help=text)


def _add(parser: argparse.ArgumentParser, action: str) -> None:
    parser.description = (
        "PATH is a job's path on this node, its persistent_path, or the folder above the paths of "
        "its nodes, if these are visible here. A persistent_path may be a URL: its client gets the "
        "options in TIERCKPT_PERSISTENT_STORAGE_OPTIONS. If every node has a disk of its own, run "
        f"the command on all of them, or call {action}() in the job."
    )
    parser.add_argument("path", type=place, metavar="PATH")
    parser.add_argument("version", type=version_number, metavar="VERSION")
    parser.set_defaults(run=mark, action=action, forks=False)


def mark(args: argparse.Namespace, console: Console) -> None:
    """Pin or unpin the version, or end the holds of its forks. Raises ConfigError, PinError."""
    if args.forks:
        from .fork import end_holds

        end_holds(args, console)
        return
    from tierckpt.config import load_config
    from tierckpt.coordination.pinning import mark_at

    try:
        places = _places_of_job(args.path)
        marked = mark_at(args.action, args.version, places, load_config().persistent)
    except PinError as error:
        raise PinError(f"{args.path}: {error}{_elsewhere(args.path)}") from error
    except OSError as error:
        raise ConfigError(f"{args.path} cannot be used: {error}") from error
    console.print(f"{args.path}: {args.action}ned {', '.join(marked)}", soft_wrap=True)


def _places_of_job(path: str) -> list[str]:
    """The directories of the job on this machine, or its URL. Raises MissingPathError, ConfigError
    for several jobs, PinError if its versions are in memory alone."""
    from tierckpt.offline.jobs import survey_of_job

    if is_url(path):
        return [path]
    there = survey_of_job(path)
    if not there.directories:
        raise PinError(
            "the versions of this job are in memory alone, where nothing keeps them. Have the job "
            "write one: save(now=True), local_every_steps"
        )
    return [str(each) for each in there.directories]


def _elsewhere(path: str) -> str:
    """Where the versions may be, if there are none at the path."""
    from tierckpt.offline.jobs import hints_of
    from tierckpt.offline.survey import survey

    hint = hints_of(path, survey(path))
    return f"; {hint}" if hint else ""
