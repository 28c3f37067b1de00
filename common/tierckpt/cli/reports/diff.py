"""`tierckpt diff`: compare two versions, or show how weights change over many."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

from tierckpt._text import some
from tierckpt.errors import ConfigError
from tierckpt.offline.survey import survey
from tierckpt.restore.progress import Progress

from ..arguments import PLACES, add_json, check_places
from ..columns import print_columns
from ..version_targets import Target, targets_of

if TYPE_CHECKING:
    from rich.console import Console

    from tierckpt.offline.difference import Comparison, Difference, Numbers
    from tierckpt.offline.stored_version import StoredVersion

MOST_GAPS = 8
SHOWN = 20
"""Lines shown without `--all`."""
TITLES = ("what differs", "elements", "largest", "relative", "norm", "")
LEFT = ("what differs", "")


def add_diff(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tierckpt diff A B`."""
    parser.description = (
        "Compares two versions of one job (`tierckpt diff PATH 100 200`) or of two "
        "jobs (`tierckpt diff A@100 B@100`; without a number, the version that a restart takes): "
        "every tensor and every other value. Tensors with equal checksums are not read. The exit "
        "status is 0 if the versions are equal bit for bit, 1 if they differ, 2 after an error. "
        f"{PLACES}"
    )
    parser.add_argument("targets", nargs="+", metavar="PATH[@VERSION]|VERSION")
    add_json(parser)
    parser.add_argument("--all", action="store_true", help="show all lines, not just the first 20")
    parser.set_defaults(run=diff, error_status=2)


def diff(args: argparse.Namespace, console: Console) -> int:
    """Run the command; returns 1 if the versions differ, else 0. Raises ConfigError and errors of
    reading."""
    targets = targets_of(args.targets)
    check_places(target.path for target in targets)
    with ExitStack() as stack:
        bar = stack.enter_context(closing(Progress(Progress.wanted(0, None))))
        a, b, found = _compared(targets, bar, stack)
    if args.json:
        print(json.dumps(as_json(found, a, b), indent=1))
    else:
        for line in summary(found, a, b):
            console.print(line, soft_wrap=True)
        print_differences(found.differences, console, None if args.all else SHOWN)
    return 0 if found.equal else 1


def _compared(
    targets: Sequence[Target], bar: Progress, stack: ExitStack
) -> tuple[StoredVersion, StoredVersion, Comparison]:
    """Compare. If one copy proves damaged, compare again with verified copies: another may be
    sound."""
    from tierckpt.offline.difference import compare
    from tierckpt.restore.shard_image import LOST

    for verify in (False, True):
        bar.begin("comparing")
        a, b = (_opened(target, bar.advance, stack, verify) for target in targets)
        try:
            return a, b, compare(a, b)
        except LOST:
            if verify:
                raise
    raise AssertionError


def _opened(
    target: Target, on_read: Callable[[int], None], stack: ExitStack, verify: bool
) -> StoredVersion:
    from tierckpt.offline.stored_version import open_version

    there = survey(target.path)
    if target.version is None and there.unseen:
        raise ConfigError(
            f"{target.path}: not all places could be read, so the newest version is unknown; name "
            f"one: {target.path}@VERSION. {'; '.join(there.troubles[:4])}"
        )
    found = open_version(target.path, target.version, on_read, there, verify)
    stack.callback(found.close)
    return found


# --- output --------------------------------------------------------------------------------------


def summary(found: Comparison, a: StoredVersion, b: StoredVersion) -> Iterator[str]:
    """Yield the lines above the table."""
    yield f"A: {a.text()}"
    yield f"B: {b.text()}"
    if found.equal:
        yield f"equal, bit for bit: {found.tensors} tensors, and all other values"
        return
    names = {each.name for each in found.differences}
    tensors = sum(name in a.names() or name in b.names() for name in names)
    yield f"{tensors} of {found.tensors} tensors differ, and {len(names) - tensors} other values"


def print_differences(
    differences: Sequence[Difference], console: Console, most: int | None = None
) -> None:
    """Print a line for each difference, at most `most` lines, and the number of the rest."""
    if not differences:
        return
    shown = differences[:most]
    print_columns([TITLES, *map(_cells, shown)], LEFT, console)
    if more := len(differences) - len(shown):
        console.print(f"{more} more; --all shows them, --json is for programs", soft_wrap=True)


def _cells(row: Difference) -> tuple[str, ...]:
    of = f" (rank {some(row.ranks, 4)})" if row.ranks else ""
    if row.numbers is None:
        change = f"{row.a} -> {row.b}" if row.a or row.b else "differs"
        text = {"values": change, "shape": f"shape {change}", "dtype": f"dtype {change}"}
        return (row.name + of, "", "", "", "", text.get(row.what) or f"{row.what}: {row.a}")
    found = row.numbers
    return (
        row.name + of,
        f"{found.differing} of {found.elements}",
        *map(_figure, (found.max_absolute, found.max_relative, found.norm)),
        ", ".join(_oddities(found)),
    )


def _oddities(found: Numbers) -> Iterator[str]:
    for name, (before, after) in (("NaN", found.nans), ("Inf", found.infs)):
        if before or after:
            yield f"{name}: {before} -> {after}"


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def as_json(found: Comparison, a: StoredVersion, b: StoredVersion) -> dict[str, Any]:
    """The whole comparison, for other programs."""
    return {
        "equal": found.equal,
        "a": _side(a),
        "b": _side(b),
        "tensors": found.tensors,
        "differences": [each.as_json() for each in found.differences],
    }


def _side(version: StoredVersion) -> dict[str, Any]:
    manifest = version.manifest
    return {
        "path": version.path,
        "version": manifest.id.version,
        "iteration": manifest.facts.iteration,
        "metric": manifest.facts.metric,
        "suspect": version.suspect,
        "ranks": len(version.shards),
        "levels": dict(version.levels),
    }
