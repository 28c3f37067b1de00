"""The table of levels: properties that the code that iterates over it relies on."""

from __future__ import annotations

import json
import pickle

import pytest

from tierckpt.config import AUTOMATIC, TABLES, load_config
from tierckpt.core import (
    AWAITED,
    INTERVALS,
    LEDGERS,
    LOCAL,
    MEMORY,
    PEER,
    PERSISTENT,
    RANK,
    Level,
    place_of,
)


@pytest.mark.parametrize("level", Level)
def test_a_level_is_its_name_everywhere(level: Level) -> None:
    """In events, messages, ranks' manifests and setting names; also in another process."""
    assert (str(level), repr(level), json.dumps(level)) == (level, f"'{level}'", f'"{level}"')
    assert pickle.loads(pickle.dumps(level)) is level
    assert RANK[str(level)] == RANK[level]


def test_the_source_of_a_level_comes_first() -> None:
    """Versions are scheduled, opened and resolved in the order of the table."""
    for level in Level:
        if level.source is not None:
            assert RANK[level.source] < RANK[level]
            assert level.source in AWAITED
    assert MEMORY == next(iter(INTERVALS)) == next(iter(Level))
    assert AWAITED == (MEMORY, LOCAL)


def test_every_scheduled_level_has_a_ledger_and_settings() -> None:
    for level in INTERVALS:
        assert level in LEDGERS
        assert {"every_steps", "every_seconds"} <= vars(TABLES[level]()).keys()
    assert set(AUTOMATIC) == {f"{level}_every_steps" for level in INTERVALS}
    assert list(TABLES) == list(LEDGERS)


def test_where_a_level_is() -> None:
    config = load_config({"path": "/disk/{node}", "node": "n1", "persistent_path": "/far"}, {})
    told = [place_of(level, config) for level in (MEMORY, LOCAL, PEER, PERSISTENT)]
    assert told == ["memory", "/disk/n1", "other nodes", "/far"]
