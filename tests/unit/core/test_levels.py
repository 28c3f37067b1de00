"""The table of levels: properties that the code that iterates over it relies on."""

from __future__ import annotations

import json
import pickle

import pytest

from tierckpt.config import load_config
from tierckpt.core import (
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


def test_where_a_level_is() -> None:
    config = load_config({"path": "/disk/{node}", "node": "n1", "persistent_path": "/far"}, {})
    told = [place_of(level, config) for level in (MEMORY, LOCAL, PEER, PERSISTENT)]
    assert told == ["memory", "/disk/n1", "other nodes", "/far"]
