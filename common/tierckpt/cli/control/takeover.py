"""`tierckpt takeover`: take a persistent_path away from a job that hangs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from tierckpt.errors import ConfigError

from ..arguments import place

if TYPE_CHECKING:
    from rich.console import Console


def add_takeover(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tierckpt takeover PATH`."""
    parser.description = (
        "Takes the lease of a persistent_path away from the job that holds it. The "
        "next job that asks for the lease gets it. Use this for a job that hangs and still renews "
        "its lease, if you cannot end it; the lease of a dead job expires by itself. PATH is a "
        "directory or a URL; the client of a URL gets the options in "
        "TIERCKPT_PERSISTENT_STORAGE_OPTIONS."
    )
    parser.add_argument("path", type=place, metavar="PATH")
    parser.set_defaults(run=takeover)


def takeover(args: argparse.Namespace, console: Console) -> None:
    """Take the lease. Raises ConfigError."""
    from contextlib import closing

    from tierckpt._text import is_url
    from tierckpt.config import load_config
    from tierckpt.offline.jobs import where_jobs_are
    from tierckpt.storage.persistent import PersistentStore

    there = load_config().persistent.at(args.path)
    try:
        if not is_url(args.path) and not Path(args.path).is_dir():
            raise ConfigError(f"{args.path} is not a directory; give a job's persistent_path")
        with closing(PersistentStore(there.path, **there.options())) as store:
            owner = store.take_over()
            if owner is None and not store.is_used():
                raise ConfigError(
                    f"{args.path}: no job has used this as its persistent_path: "
                    f"{where_jobs_are(args.path)}"
                )
    except OSError as error:
        raise ConfigError(f"{args.path} cannot be used: {error}") from error
    result = f"taken from {owner}; the next job that asks gets it" if owner else "no job holds it"
    console.print(f"{args.path}: {result}", soft_wrap=True)
