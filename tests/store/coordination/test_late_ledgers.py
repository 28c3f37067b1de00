"""Ledgers of ranks, one of which has read one vote less than another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tierckpt.config import load_config
from tierckpt.coordination import Agreement, GroupBallots
from tierckpt.core import DONE, LOCAL, MEMORY, VOTE_WIDTH
from tierckpt.format import VersionId
from tierckpt.group import SingleGroup


class Two(SingleGroup):
    """One of two ranks, and the other's answer in the only gather."""

    size = 2

    def __init__(self) -> None:
        self.mine: Any = None
        self.theirs: Any = None

    def all_gather_object(self, value: Any) -> list[Any]:
        self.mine = value
        return [value, self.theirs or value]


def books(path: Path) -> tuple[Agreement, Two]:
    group = Two()
    config = load_config({"path": str(path)}, {})
    made = Agreement(group, GroupBallots(group, VOTE_WIDTH), config, lambda *_: None, lambda: None)
    for version in (4, 5):
        made.open(VersionId(1, version), (MEMORY, LOCAL))
        for level in (MEMORY, LOCAL):
            made.tell(level, VersionId(1, version), DONE)
    return made, group


def test_a_version_that_one_rank_knows_to_be_safe_is_safe_for_one_that_has_not_read_it(
    path: Path,
) -> None:
    """When they settle open versions: otherwise each rank would keep another version, and none
    could be restored."""
    (ahead, first), (behind, second) = books(path), books(path)
    for ledger in (ahead.memory, ahead.local):
        version = ahead.versions.find(VersionId(1, 4))
        assert version is not None
        ledger.resolve(DONE, version)
    ahead.settle()
    second.theirs = first.mine
    behind.settle()
    for level in (MEMORY, LOCAL):
        ledgers = ahead.ledgers[level], behind.ledgers[level]
        assert [(one.safe, one.open, one.broken) for one in ledgers] == [
            (VersionId(1, 5), [], [])
        ] * 2
