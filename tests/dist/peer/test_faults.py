"""Agents of real jobs are killed while versions are protected.

The loss of a node then never costs more than the versions since the last protected one, and events
name these.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.dist.peer.test_peer_level import (
    lose,
    place_of,
    protected_at,
    settings,
)
from tests.support.training import Attached, Place, attach, make_job, rank, restored_into, train
from tierckpt import _faults
from tierckpt.format import ParityKey, VersionId

SCHEME = "partner"
EARLIER, HIT = 2, 4
VICTIM = 1
PARITY = ParityKey(VersionId(1, HIT), VICTIM, 2).stem

BEFORE_THE_END = f"kill@peer:op=end,version={HIT}"
AFTER_IT = f"kill@file:op=rename,target={PARITY}.manifest"
"""test_processes has every phase, without jobs."""


@contextlib.contextmanager
def agent_hit_by(rule: str, marks: str) -> Iterator[None]:
    """Agents that this process starts have the rule; the process itself does not."""
    os.environ[_faults.FAULTS_VARIABLE], os.environ[_faults.FIRED_VARIABLE] = rule, marks
    try:
        yield
    finally:
        del os.environ[_faults.FAULTS_VARIABLE], os.environ[_faults.FIRED_VARIABLE]


def report(attached: Attached, course: dict[int, str]) -> dict[str, Any]:
    failed = [e for e in attached.events if (e.name, e.level) == ("failed", "peer")]
    return {
        "course": course,
        "protected": attached.versions("committed", "peer"),
        "failed": [(e.version, e.message) for e in failed],
        "local": attached.versions("committed", "local"),
    }


def killed_while_protecting(place: Place, rule: str, marks: str) -> dict[str, Any]:
    """One agent is killed at the rule's point; then everything ends, as in a power failure."""
    with agent_hit_by(rule if rank() == VICTIM else "", marks):
        job = make_job()
        attached = attach(job, place, **settings(SCHEME))
        course = train(job, attached.ckpt, range(EARLIER))
        protected_at(EARLIER, attached)
        course |= train(job, attached.ckpt, range(EARLIER, HIT))
        attached.ckpt.save(now=True)
        attached.await_event("peer", HIT, "committed", "failed")
        attached.ckpt.abandon()
    return report(attached, course)


def come_back(place: Place) -> dict[str, Any]:
    job = make_job(seed=2)
    attached = attach(job, place, memory_every_steps=0, **settings(SCHEME))
    told = restored_into(job, attached)
    attached.ckpt.abandon()
    return told


@pytest.mark.parametrize("rule", [BEFORE_THE_END, AFTER_IT])
def test_an_agent_is_killed_and_its_node_is_lost(
    rule: str, ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    place, marks = place_of(tmp_path, shm_dir), tmp_path / "marks"
    marks.mkdir()
    before = ranks(2).run(killed_while_protecting, place, rule, str(marks))
    assert len(list(marks.iterdir())) == 1, "the kill never happened"
    survivor, victim = before
    assert "agent ended unexpectedly" in victim["failed"][0][1]
    late = rule == AFTER_IT
    if late:  # a member with the end of all others commits by itself
        assert survivor["protected"] == [EARLIER, HIT]
    else:
        assert survivor["protected"] == [EARLIER]
        assert f"rank {VICTIM}" in survivor["failed"][0][1]
    lose(place, tmp_path, VICTIM)
    expected = HIT if late else EARLIER
    for number, told in enumerate(ranks(2).run(come_back, place)):
        assert told["restored"] == (expected, {"local": 1, "peer": 1})
        assert told["digest"] == before[number]["course"][expected]
