"""`tierckpt watch`: a job's checkpoints and agents while it runs. It changes nothing."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from tierckpt.errors import ConfigError
from tierckpt.offline.survey import MissingPathError
from tierckpt.watch.drawing import drawn
from tierckpt.watch.observer import Observer
from tierckpt.watch.view import View

from .arguments import PLACES, place

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

__all__ = ["watch"]


DEFAULT_SECONDS = 2.0
SHARE = 0.2
"""Largest share of the time spent on looking: a look at many files is repeated less often.
"""


def add_watch(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tierckpt watch PATH...`."""
    parser.description = (
        "Shows the levels, the newest version on each, the agents, flushes under way, "
        f"and slow ranks, until Ctrl-C. No trainer is asked. {PLACES}"
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
    parser.set_defaults(run=watch)


def watch(args: argparse.Namespace, console: Console) -> None:
    """Show the job until Ctrl-C, or once. Raises ConfigError."""
    given = args.interval_seconds
    if given is not None and not 0.1 <= given <= 86400:  # NaN is not
        raise ConfigError(f"--interval-seconds is {given:g}; it must be from 0.1 to 86400 (a day)")
    if args.events and not Path(args.events).is_dir():
        raise ConfigError(f"--events {args.events} is not a directory; give a job's events_dir")
    observer = Observer(args.path, args.events or "")
    if args.once or (given is None and not (args.json or console.is_terminal)):
        _print(observer.look(), args.json, console, indent=1)
    elif args.json or not console.is_terminal:
        reported = ""
        for view in _views(observer, given or DEFAULT_SECONDS):
            if isinstance(view, View):
                reported = ""
                _print(view, args.json, console)
            elif view != reported:
                reported = view
                print(f"tierckpt: {view}", file=sys.stderr, flush=True)
    else:
        _show(observer, given or DEFAULT_SECONDS, console)


def _views(observer: Observer, interval_seconds: float) -> Iterator[View | str]:
    """Look again and again; text in place of a view while there is nothing to look at yet."""
    while True:
        start = time.monotonic()
        try:
            yield observer.look()
        except MissingPathError as error:
            yield f"{error}: waiting for the job"
        except OSError as error:  # a file system away for a moment
            yield str(error)
        spent = time.monotonic() - start
        time.sleep(max(interval_seconds - spent, spent * (1 / SHARE - 1), 0.0))


def _print(view: View, as_json: bool, console: Console, indent: int | None = None) -> None:
    if as_json:
        print(json.dumps(view.as_json(), indent=indent), flush=True)
        return
    from rich.text import Text

    for part in drawn(view, console.width, bars=console.is_terminal):
        console.print(part, soft_wrap=isinstance(part, str | Text))
    sys.stdout.flush()


def _show(observer: Observer, interval_seconds: float, console: Console) -> None:
    """Show a live picture on a screen of its own, which the terminal drops at the end."""
    from rich.console import Group
    from rich.live import Live

    with _terminable(), Live(console=console, screen=True, auto_refresh=False) as live:
        for view in _views(observer, interval_seconds):
            parts: list[RenderableType] = (
                [view] if isinstance(view, str) else drawn(view, console.width)
            )
            live.update(Group(*parts), refresh=True)


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the process in order, so that the terminal is restored."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
