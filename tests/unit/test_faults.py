"""Fault rules: read as written, or refused by name."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from tierckpt import _faults
from tierckpt.testing import injected


def test_rules_are_read() -> None:
    kill, full = _faults.parse(" kill@seal:version=12,rank=1 ; enospc@write ")
    assert (kill.action, kill.point, kill.conditions) == (
        "kill",
        "seal",
        {"version": "12", "rank": "1"},
    )
    assert (full.action, full.point, full.conditions) == ("enospc", "write", {})


@pytest.mark.parametrize("text", ["", ";", " ; "])
def test_nothing_asks_for_nothing(text: str) -> None:
    assert _faults.parse(text) == []


@pytest.mark.parametrize(
    "text",
    ["kill", "kill@", "@seal", "explode@seal", "enotanerrno@x", "kill@a;bad", "kill@seal:version"],
)
def test_a_rule_that_cannot_be_read_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="TIERCKPT_FAULTS") as caught:
        _faults.parse(text)
    assert repr(text.rpartition(";")[2]) in str(caught.value)


def test_a_point_that_nobody_asked_for_does_nothing() -> None:
    with injected("eio@there"):
        _faults.point("elsewhere", version=1)


def test_conditions_must_all_hold() -> None:
    with injected("eio@write:version=3,rank=1"):
        _faults.point("write", version=3, rank=0)
        _faults.point("write", version=2, rank=1)
        _faults.point("write")
        with pytest.raises(OSError, match="injected by 'eio@write:version=3,rank=1'") as caught:
            _faults.point("write", version=3, rank=1)
        assert caught.value.errno == errno.EIO


def test_the_third_hit_is_the_third_time_the_rest_holds_and_only_that() -> None:
    happened = []
    with injected("enospc@write:version=2,hit=3"):
        for turn in range(6):
            _faults.point("write", version=1)
            try:
                _faults.point("write", version=2)
            except OSError:
                happened.append(turn)
    assert happened == [2]


def test_a_rule_fires_once_per_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_faults.FIRED_VARIABLE, str(tmp_path))
    with injected("eio@write"), pytest.raises(OSError, match="injected"):
        _faults.point("write")
    assert [p.name for p in tmp_path.iterdir()] == ["eio_write"]
    with injected("eio@write"):  # as a restarted process would
        _faults.point("write")


def test_injection_ends_with_its_block() -> None:
    with injected("eio@write"):
        pass
    _faults.point("write")
