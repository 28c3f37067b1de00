"""Each fault point of the package is in the list of a sweep that kills or fails something there."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

import tierckpt
from tests.crash.agent.test_agents import BEFORE_EXCHANGE, IN_MID_EXCHANGE, IN_MID_FLUSH
from tests.crash.checkpointer.test_sweep import AGENT_POINTS, TRAINER_POINTS
from tests.crash.files.test_killed import FILES_KILLS
from tests.crash.journal.test_journal_kills import JOURNAL_KILLS
from tests.dist.interchange.test_interrupted import EXPORT_KILLS
from tests.store.lineage.test_fork_kills import FORK_KILLS
from tests.store.storage.test_persistent_fsspec import FSSPEC_KILLS
from tests.store.storage.test_persistent_killed import FLUSH_KILLS, REMOVAL_KILLS
from tests.store.storage.test_persistent_s3 import UPLOAD_KILLS
from tests.unit.storage.test_health import POINTS as HEALTH_POINTS
from tierckpt import _faults

Point = tuple[str, str]
"""Its name, and its `op` if it has one."""

PACKAGE = Path(tierckpt.__file__).parent


def of_files(conditions: Iterable[str]) -> list[str]:
    return [f"kill@file:{text}" for text in conditions]


CHECKPOINT = [*TRAINER_POINTS.values(), *AGENT_POINTS.values()]
SWEEPS = {
    "storage/health.py": [f"eio@health:op={op}" for op in HEALTH_POINTS],
    "peer/exchange.py": [f"kill@peer:op={op}" for op in IN_MID_EXCHANGE],
    "storage/persistent/object_stores.py": of_files([*UPLOAD_KILLS, *FSSPEC_KILLS]),
    "storage/persistent/backends.py": of_files(
        [*IN_MID_FLUSH.values(), *FLUSH_KILLS, *REMOVAL_KILLS]
    ),
    "cli/exchange.py": EXPORT_KILLS,
    "files/versions.py": FILES_KILLS,
    "journal/writer.py": JOURNAL_KILLS,
    "lineage/fork.py": FORK_KILLS[1:3],
    "lineage/source.py": [FORK_KILLS[0], *FORK_KILLS[3:]],
    "agent/protector.py": [f"kill@peer:op={BEFORE_EXCHANGE}"],
}
"""Swept points by file. Points of other files are a part of CHECKPOINT's sweep."""


def points_in(path: Path) -> set[Point]:
    """Names in the file's calls of `faults.point`. If `op` is an argument of the function around
    the call, the names are those that the function's callers in the file pass."""
    found = set()
    tree = ast.parse(path.read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for function in functions:
        for call in calls_of("point", function):
            op = next((key.value for key in call.keywords if key.arg == "op"), None)
            passed: list[ast.expr | None] = [op]
            if isinstance(op, ast.Name):
                passed = [caller.args[0] for caller in calls_of(function.name, tree)]
            found |= {(text_of(call.args[0]), text_of(given)) for given in passed}
    return found


def calls_of(name: str, tree: ast.AST) -> list[ast.Call]:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [c for c in calls if isinstance(c.func, ast.Attribute) and c.func.attr == name]


def text_of(node: ast.expr | None) -> str:
    if node is None:
        return ""
    assert isinstance(node, ast.Constant), f"no literal in line {node.lineno}"
    return str(node.value)


def swept_by(rules: Iterable[str]) -> set[Point]:
    parsed = [rule for text in rules for rule in _faults.parse(text)]
    return {(rule.point, rule.conditions.get("op", "")) for rule in parsed}


def test_no_point_of_the_package_is_left_out() -> None:
    points = {str(p.relative_to(PACKAGE)): points_in(p) for p in PACKAGE.rglob("*.py")}
    for name, rules in SWEEPS.items():
        assert points.pop(name) == swept_by(rules), name
    assert set().union(*points.values()) == swept_by(CHECKPOINT)
