"""Errors of the package can be passed to other processes, and to code that continues."""

from __future__ import annotations

import pickle

import pytest

from tierckpt import errors
from tierckpt.errors import (
    LeaseHeldError,
    NodeHealthError,
    PersistentError,
    RestoreError,
    StateMismatchError,
)

PLAIN = [
    each
    for each in vars(errors).values()
    if isinstance(each, type)
    and issubclass(each, errors.TierckptError)
    and each not in (LeaseHeldError, NodeHealthError, PersistentError, StateMismatchError)
]


@pytest.mark.parametrize(
    "error",
    [
        *(each("what is wrong") for each in PLAIN),
        RestoreError("v3 is gone", "Start afresh"),
        LeaseHeldError("s3://bucket/job", "job a on node1", 1e9, 30.0),
        PersistentError("s3://bucket/job cannot be written", "s3://bucket/job", transient=True),
        NodeHealthError({"node1": ["no space", "no memory"]}),
        StateMismatchError("Version v3", ["a is missing", "b is new"]),
    ],
    ids=lambda error: type(error).__name__,
)
def test_another_process_gets_the_same(error: errors.TierckptError) -> None:
    other = pickle.loads(pickle.dumps(error))
    assert type(other) is type(error)
    assert str(other) == str(error)
    assert vars(other) == vars(error)


def test_the_reason_is_shown_without_the_remedy() -> None:
    for error in (
        RestoreError("v3 is gone", "Start afresh"),
        StateMismatchError("Version v3", ["a is missing"]),
    ):
        assert str(error).startswith(error.reason)
        assert len(str(error)) > len(error.reason)
    assert "strict" not in StateMismatchError("Version v3", ["a is missing"]).reason
    assert str(RestoreError("v3 is gone", "Start afresh")) == "v3 is gone. Start afresh"
