"""Folders of other nodes beside this one's: `{node}` in `path` stands for a name, and a pod that is
started again may have another one. Then its folder is another, too, and what the old one has is not
found by a restart. Here it is seen, so that it can be said."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tierckpt.format.ids import VersionId
from tierckpt.format.manifest import Manifest

from .claim_file import is_claimed
from .store import LocalStore

NODE = "{node}"
MOST_FOLDERS = 256
"""Are looked into: one listing each."""


@dataclass(frozen=True)
class Sibling:
    """What a folder of a node has that this run does not have."""

    node: str
    directory: Path
    newest: VersionId


def parent_of(template: str) -> Path:
    """The directory that has a name for each node in it."""
    return Path(os.path.split(template.partition(NODE)[0])[0])


def named(template: str, names: Iterable[str]) -> Iterator[tuple[str, Path]]:
    """Which node each of these names in `parent_of` is of, and that node's directory. What `{node}`
    can stand for is told by names: it is the same wherever the path has it. Pure."""
    before, _, after = template.partition(NODE)
    parent, prefix = os.path.split(before)
    suffix, slash, rest = after.partition("/")
    again = "(?P=node)".join(map(re.escape, suffix.split(NODE)))
    shape = re.compile(f"{re.escape(prefix)}(?P<node>.+){again}", re.DOTALL)
    for match in filter(None, map(shape.fullmatch, names)):
        node = match["node"]
        yield node, Path(parent, match[0] + slash + rest.replace(NODE, node))


def siblings_of(
    template: str, job: str, but: Collection[str], most: int = MOST_FOLDERS
) -> list[Sibling]:
    """What nodes `but` these have of `job`, the newest first, where no job runs; as far as can be
    seen, in `most` folders."""
    if NODE not in template:
        return []
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = sorted(os.listdir(parent_of(template)))
    others = [(node, path) for node, path in named(template, names) if node not in but]
    found = []
    for node, directory in others[:most]:
        with contextlib.suppress(Exception):  # what cannot be read is said where it is wanted
            store = LocalStore(directory)
            newest = max(store.keys(), key=lambda key: key.id)
            theirs = Manifest.decode(store.read_manifest(newest)).facts.job
            if theirs == job and not is_claimed(directory):
                found.append(Sibling(node, directory, newest.id))
    return sorted(found, key=lambda each: (each.newest, each.node), reverse=True)


def words_for(newer: Sequence[Sibling], here: str, found: VersionId | None) -> str:
    """That a run which goes on from `found`, or begins, leaves these behind, and what to do. Pure.
    `here`: what `{node}` stands for."""
    first, more = newer[0], len(newer) - 1
    others = f" ({more} more folders there have newer ones than this run)" if more else ""
    goes_on = f"goes on from {found}" if found else "begins afresh"
    return (
        f"{first.directory} has {first.newest} of this job{others}, and no node of this run is "
        f"called {first.node!r}: here {NODE} in path stands for {here!r}, and this run {goes_on}. "
        f"To go on from {first.newest}: end this job, and start it again with node={first.node!r} "
        "(TIERCKPT_NODE), or under names that stay. With peer_redundancy a node of a new name has "
        "what a lost one had"
    )


__all__ = ["NODE", "Sibling", "named", "parent_of", "siblings_of", "words_for"]
