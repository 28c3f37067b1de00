"""A member's process is killed, or stops, in every phase of an exchange between real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.peer_shards import Members
from tests.support.thorough import points
from tierckpt.erasure import Code

CODE = Code(4, 2, 1)
LENGTHS = [(5 << 20) - 4096 * i for i in range(4)]
VICTIM, RANK = 1, 3

KILLS = [
    "meet:hit=1",
    "send:hit=1",
    "send:hit=4",
    "write:hit=1",
    "write:hit=3",
    "end:hit=1",
    "commit:hit=1",
]
# The file operations of the commit, in order.
COMMITS = ["fsync", "rename", "fsync_directory", "write_manifest", "fsync_manifest"]


def run(folder: Path, rules: list[str], stall_seconds: float) -> list[dict[str, Any]]:
    plan = {
        "lengths": LENGTHS,
        "k": CODE.k,
        "m": CODE.m,
        "rules": rules,
        "join_seconds": 10.0,  # longer than a busy machine takes to fork
        "stall_seconds": stall_seconds,
    }
    command = [sys.executable, "-m", "tests.support.peer_processes", str(folder), json.dumps(plan)]
    subprocess.run(command, check=True, timeout=280)
    return [json.loads((folder / f"{i}.json").read_text()) for i in range(len(rules))]


def check_after(folder: Path, rule: str, fared: dict[str, Any], complete: bool) -> None:
    """v1 is sound wherever it exists, and v2 everywhere."""
    members = Members(folder, CODE, LENGTHS)
    marks = [p for p in folder.iterdir() if p.is_file()]
    assert len(marks) == 1, f"{rule} never fired"
    left = members.parities(1)
    assert set(left) <= {0, 2, 3} if complete else not left
    for survivor in left:
        assert members.store(survivor).parities(), rule
    assert fared["v2"] == [None] * 4, f"the next version after {rule}"
    assert len(members.parities(2)) == 4
    for lost in range(4):
        assert members.rebuilt({lost}, 2) == {lost: members.image(lost, 2)}


def test_a_kill_in_every_phase(tmp_path: Path) -> None:
    rules = [f"kill@peer:op={at.replace(':', ',')},version=1" for at in KILLS]
    rules += [f"kill@file:op={operation}" for operation in COMMITS]
    for number, fared in enumerate(run(tmp_path, rules, stall_seconds=60.0)):
        rule = rules[number]
        assert fared["v1"][VICTIM] == "killed", rule
        late = "commit" in rule or "@file" in rule  # all had received the end: they commit, or not
        for survivor in (0, 2, 3):
            error = fared["v1"][survivor]
            if late:
                assert error is None, rule
            else:
                where = f"rank {RANK} (127.0.0.1:{fared['ports'][VICTIM]})"
                assert where in error, f"{rule}: {error}"
        check_after(tmp_path / str(number), rule, fared, complete=late)


@pytest.mark.parametrize("at", points(["send:hit=3", "end:hit=1"], "send:hit=3"))
def test_a_member_that_stops_is_named_after_the_limit(at: str, tmp_path: Path) -> None:
    """SIGSTOP: the kernel still takes connections and bytes for it, but no process reads them."""
    rule = f"stop@peer:op={at.replace(':', ',')},version=1"
    (fared,) = run(tmp_path, [rule], stall_seconds=1.0)
    where = f"rank {RANK} (127.0.0.1:{fared['ports'][VICTIM]})"
    for survivor in (0, 2, 3):
        assert where in fared["v1"][survivor], fared["v1"]
    check_after(tmp_path / "0", rule, fared, complete=False)
