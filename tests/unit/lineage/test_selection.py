"""Patterns of names, and parts."""

from __future__ import annotations

import pytest

from tierckpt.core import ForkSource, source_of
from tierckpt.errors import ConfigError
from tierckpt.lineage import PARTS, Selection, matched


@pytest.mark.parametrize(
    ("pattern", "name", "text"),
    [
        ("backbone.*", "backbone.0.weight", "0.weight"),
        ("*.weight", "a.b.weight", "a.b"),
        ("a.*.weight", "a.0.1.weight", "0.1"),
        ("a*a", "a", None),
        ("a*a", "aa", ""),
        ("a", "a", ""),
        ("a", "ab", None),
        ("*", "x", "x"),
    ],
)
def test_a_star_stands_for_any_text(pattern: str, name: str, text: str | None) -> None:
    assert matched(pattern, name) == text


def test_the_first_pattern_that_fits_counts_and_other_names_stay() -> None:
    chosen = Selection.of("model", {"a.b.*": "x.*", "a.*": "y.*.z"})
    assert chosen is not None
    assert chosen.parts == ("model",)
    assert [chosen.target(n) for n in ("a.b.c", "a.c", "b")] == ["x.c", "y.c.z", "b"]
    assert chosen.idle(["a.b.c", "b"]) == []
    assert chosen.idle(["b"]) == ["a.b.*", "a.*"]


def test_arguments_that_mean_nothing_are_refused() -> None:
    assert Selection.of(None, None) is None
    assert Selection.of(None, {"a": "b"}) == Selection(PARTS, (("a", "b"),))
    with pytest.raises(ValueError, match="'rng'; the parts are"):
        Selection.of(["model", "rng"], None)
    with pytest.raises(ValueError, match="empty"):
        Selection.of([], None)
    with pytest.raises(ValueError, match="at most one"):
        Selection.of(None, {"a.*.*": "b.*"})
    with pytest.raises(ValueError, match="needs one in the old"):
        Selection.of(None, {"a": "b.*"})
    with pytest.raises(ValueError, match='add "model"'):
        Selection.of("optimizer", {"a": "b"})


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("runs/a", ForkSource("runs/a")),
        ("runs/a@v4000", ForkSource("runs/a", 4000)),
        ("runs/a@7", ForkSource("runs/a", 7)),
        ("runs/a@7/", ForkSource("runs/a@7/")),
        ("s3://key@bucket/run@v12", ForkSource("s3://key@bucket/run", 12)),
        ("runs/me@host", ForkSource("runs/me@host")),
    ],
)
def test_sources_as_people_write_them(text: str, source: ForkSource) -> None:
    assert source_of(text) == source


def test_an_empty_source_is_refused() -> None:
    with pytest.raises(ConfigError, match="fork_from is"):
        source_of(" ")
