"""Requests to go back, and the records of runs that did."""

from __future__ import annotations

import pytest

from tierckpt.core import (
    MAX_HONOURED,
    Rollback,
    RollbackRequest,
    check_alike,
    merged_rollbacks,
    nearest_version,
    pending_request,
    rollback_of_setting,
)
from tierckpt.errors import RestoreError
from tierckpt.format import VersionId, newest_first


def test_the_newest_record_counts_with_the_requests_of_all() -> None:
    records = [Rollback(5, 30, ("b",)), Rollback(2, 80, ("a", "rollback_to 80"))]
    assert merged_rollbacks(records) == Rollback(5, 30, ("a", "rollback_to 80", "b"))
    assert merged_rollbacks([]) is None
    many = Rollback(1, 1, tuple(map(str, range(100))))
    assert merged_rollbacks([many]) == Rollback(1, 1, many.honoured[-MAX_HONOURED:])


def test_a_request_is_pending_until_a_record_names_it() -> None:
    setting = rollback_of_setting(4)
    assert setting is not None
    command = RollbackRequest(6, "a", "/ckpts")
    assert rollback_of_setting(0) is None
    assert pending_request([setting, command], None) == (command, setting), (
        "the command comes first"
    )
    assert pending_request([setting, command], Rollback(2, 6, ("a",))) == (setting,)
    assert pending_request([setting, command], Rollback(2, 6, ("a", setting.name))) == ()


def test_two_commands_that_contradict_each_other_are_refused() -> None:
    one, same = RollbackRequest(6, "a", "/n0"), RollbackRequest(6, "b", "/n1")
    check_alike([one, same, *filter(None, [rollback_of_setting(5)])])
    with pytest.raises(RestoreError, match=r"different versions: v6 in /n0.*v7 in /n2"):
        check_alike([one, RollbackRequest(7, "c", "/n2")])


def test_an_entry_hides_later_versions_until_its_run_has_one() -> None:
    old = {VersionId(1, v): ((1, 0),) for v in (4, 8, 12)}
    started = (2, 8)
    assert newest_first(old.items(), started) == [VersionId(1, 8), VersionId(1, 4)]
    new = {**old, VersionId(3, 9): ((1, 0), (3, 8))}
    line = [VersionId(3, 9), VersionId(1, 8), VersionId(1, 4)]
    assert newest_first(new.items(), started) == line
    assert newest_first(new.items()) == line
    assert newest_first([], started) == []


def test_nearest_versions() -> None:
    assert nearest_version(10, [1, 9, 12, 30, 11, 5, 9]) == [5, 9, 11, 12]
