"""Folders of other nodes beside this node's.

`{node}` in `path` stands for the node's name, and a restarted pod may have another name. Its folder
is then another one too, and a restart does not find the versions in the old one. This module finds
them, so that a notice can name them.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tierckpt.format.ids import VersionId
from tierckpt.format.manifest import Manifest
from tierckpt.storage.files import answers
from tierckpt.storage.files.mounts import mounts_in

from .claim_file import is_claimed
from .store import LocalStore

NODE = "{node}"
MOST_FOLDERS = 256
"""Limit of folders that are looked into; each takes one listing."""


@dataclass(frozen=True)
class Sibling:
    """A folder of another node with a version that this run does not have."""

    node: str
    directory: Path
    newest: VersionId


def parent_of(template: str) -> Path:
    """The directory that has a name for each node in it."""
    return Path(os.path.split(template.partition(NODE)[0])[0])


def named(template: str, names: Iterable[str]) -> Iterator[tuple[str, Path]]:
    """The node and its directory, for each of these names in `parent_of`. The node's name is read
    from the folder's name; it is the same wherever the path has `{node}`. Pure."""
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
    """Folders of other nodes, not in `but`, that have versions of `job` and no running job, newest
    first; those that can be read, of at most `most` folders."""
    if NODE not in template:
        return []
    names: list[str] = []
    with contextlib.suppress(OSError):
        parent = parent_of(template)
        hang = {
            os.path.basename(p) for p in answers.silent(mounts_in(parent), answers.PATIENCE_SECONDS)
        }
        names = sorted({*os.listdir(parent)} - hang)
    others = [(node, path) for node, path in named(template, names) if node not in but]
    found = []
    for node, directory in others[:most]:
        with contextlib.suppress(Exception):  # errors are reported where the folder is used
            store = LocalStore(directory)
            newest = max(store.keys(), key=lambda key: key.id)
            owner = Manifest.decode(store.read_manifest(newest)).facts.job
            if owner == job and not is_claimed(directory):
                found.append(Sibling(node, directory, newest.id))
    return sorted(found, key=lambda each: (each.newest, each.node), reverse=True)


def words_for(newer: Sequence[Sibling], here: str, found: VersionId | None) -> str:
    """Text of the notice that this run, which continues from `found` or starts from the beginning,
    leaves these versions unused, with advice. Pure. `here` is the value of `{node}`."""
    first, more = newer[0], len(newer) - 1
    others = f" ({more} more folders there have newer versions than this run)" if more else ""
    goes_on = f"continues from {found}" if found else "starts from the beginning"
    return (
        f"{first.directory} has {first.newest} of this job{others}, and no node of this run is "
        f"called {first.node!r}: here {NODE} in path stands for {here!r}, and this run {goes_on}. "
        f"To continue from {first.newest}: end this job and restart it with node={first.node!r} "
        "(TIERCKPT_NODE), or give nodes permanent names. With peer_redundancy a node with a new "
        "name can rebuild the shards of a lost node"
    )


__all__ = ["NODE", "Sibling", "named", "parent_of", "siblings_of", "words_for"]
