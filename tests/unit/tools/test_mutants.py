"""Mutants of small sources, and the record of those of the product."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mutation
import pytest

SOURCE = '''"""A module."""

from __future__ import annotations

LIMIT: int = 3


def under(number: int, limit: int = LIMIT) -> bool:
    """A docstring."""
    assert limit > 0, "not mutated"
    return number < limit


def first(values: list[int]) -> int:
    try:
        return values[0]
    except IndexError:
        raise ValueError(f"none of {len(values)}") from None


class Box:
    size = 1

    def put(self, value: int) -> None:
        self.value = value
'''


def mutants_of(source: str) -> list[mutation.Change]:
    return mutation.changes("module.py", source, ast.parse(source))


@pytest.fixture
def mutated(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], dict[str, Any]]:
    """`mutated(number)`: names of the module with all its mutants, of which one is turned on."""

    def load(number: int) -> dict[str, Any]:
        tree = ast.parse(SOURCE)
        chosen = dict(enumerate(mutation.changes("module.py", SOURCE, tree)))
        text = mutation.with_mutants(tree, chosen, "switch")
        assert f"from switch import {mutation.SWITCH}\n" in text
        names: dict[str, Any] = {mutation.SWITCH: lambda other: other == number}
        exec(text.replace(f"from switch import {mutation.SWITCH}\n", ""), names)
        return names

    return load


def test_bodies_of_functions_are_mutated_and_no_messages_or_annotations() -> None:
    found = {(c.mutant.function, c.mutant.operator, c.mutant.becomes) for c in mutants_of(SOURCE)}
    assert found == {
        ("under", "comparison", "number <= limit"),
        ("under", "comparison", "number >= limit"),
        ("under", "return", "True"),
        ("under", "return", "False"),
        ("first", "return", "None"),
        ("first", "constant", "1"),
        ("first", "exception not caught", "()"),
        ("first", "statement dropped", ""),
        ("Box.put", "statement dropped", ""),
    }


def test_without_a_mutant_the_module_is_as_it_was(mutated: Callable[[int], Any]) -> None:
    names = mutated(-1)
    assert names["under"](2)
    assert not names["under"](3)
    with pytest.raises(ValueError, match="none of 0"):
        names["first"]([])


def test_one_mutant_at_a_time_is_on(mutated: Callable[[int], Any]) -> None:
    at = {change.mutant.becomes: i for i, change in enumerate(mutants_of(SOURCE))}
    assert mutated(at["number <= limit"])["under"](3)
    assert not mutated(at["False"])["under"](2)
    assert mutated(at["1"])["first"]([7, 8]) == 8
    with pytest.raises(IndexError):
        mutated(at["()"])["first"]([])


def test_a_mutant_is_the_same_after_its_function_has_moved() -> None:
    moved = SOURCE.replace("LIMIT: int = 3", "LIMIT: int = 3\n\n\ndef new() -> None: ...")
    assert [change.mutant for change in mutants_of(moved)] == [
        change.mutant for change in mutants_of(SOURCE)
    ]


def test_a_mutant_is_found_in_the_module_to_which_its_function_went(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "new.py").write_text(SOURCE)
    monkeypatch.setattr(mutation, "ROOT", tmp_path)
    monkeypatch.setattr(mutation, "mutated_files", lambda: [Path("new.py")])
    mutants = [change.mutant for change in mutants_of(SOURCE)]
    lost = mutation.Mutant("module.py", "under", "return number == limit", "return", "True")
    ((module, (_, chosen)),) = mutation.located([lost, *mutants]).items()
    assert module == "new.py"
    assert set(chosen) == set(range(1, len(mutants) + 1))


def test_equal_lines_of_a_function_are_told_apart() -> None:
    twice = "def f(a):\n    a.go()\n    a.go()\n"
    assert [change.mutant.nth for change in mutants_of(twice)] == [0, 1]


def test_the_same_seed_draws_the_same_mutants(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path("common/tierckpt/core/decisions.py")
    monkeypatch.setattr(mutation, "mutated_files", lambda: [path])
    assert mutation.choose(20, seed=1) == mutation.choose(20, seed=1)
    assert mutation.choose(20, seed=1) != mutation.choose(20, seed=2)


def test_the_record_has_the_set_and_each_kill_names_its_test() -> None:
    mutants = mutation.read_record()
    assert len({mutant.place for mutant in mutants}) == mutation.COUNT
    assert all(bool(m.by) == (m.status in ("killed", "timeout")) for m in mutants)
