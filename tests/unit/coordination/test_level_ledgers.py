"""One rank's votes, ledgers and reports, level by level."""

from __future__ import annotations

import logging
import re
import time
from typing import Any

import pytest

from tierckpt.agent import CommitFailed, Committed, Flushed, FlushFailed, Problem, ProtectFailed
from tierckpt.callbacks import CallbackList
from tierckpt.config import load_config
from tierckpt.coordination import Agreement, GroupBallots, Reports
from tierckpt.core import (
    BROKEN,
    DONE,
    INTERVALS,
    LEDGERS,
    LOCAL,
    MEMORY,
    PEER,
    PERSISTENT,
    VOTE_WIDTH,
    Version,
)
from tierckpt.events import JobEnd
from tierckpt.format import VersionId
from tierckpt.group import SingleGroup

CONFIG = load_config({"path": "/disk", "persistent_path": "/far", "local_every_seconds": 60}, {})


class Log:
    rank = 0

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def emit(self, name: str, **values: Any) -> None:
        self.events.append({"name": name, **values})


def v(version: int) -> VersionId:
    return VersionId(1, version)


@pytest.fixture
def agreement() -> Agreement:
    group = SingleGroup()
    ballots = GroupBallots(group, VOTE_WIDTH)
    return Agreement(group, ballots, CONFIG, lambda *_: None, lambda: None)


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def reports(log: Any, agreement: Agreement) -> Reports:
    return Reports(CONFIG, log, CallbackList(()), agreement, lambda: 0)


def test_a_level_unfinished_at_the_end_is_broken_where_somebody_waits(agreement: Agreement) -> None:
    agreement.open(v(1), INTERVALS)
    agreement.versions.open(v(1), (PEER, PERSISTENT))
    agreement.settle()
    found = {level: (ledger.open, ledger.broken) for level, ledger in agreement.ledgers.items()}
    assert found == {
        MEMORY: ([], [v(1)]),
        LOCAL: ([], [v(1)]),
        PEER: ([v(1)], []),
        PERSISTENT: ([v(1)], []),
    }
    for level in LEDGERS:
        agreement.tell(level, v(1), DONE)
    agreement.settle()
    assert agreement.ledgers[PEER].safe == agreement.ledgers[PERSISTENT].safe == v(1)


@pytest.mark.parametrize(("state", "free"), [(None, 0), (DONE, 0), (BROKEN, 1)])
def test_local_takes_one_version_at_a_time(
    state: int | None, free: int, agreement: Agreement
) -> None:
    """Except for a version that this rank does not write."""
    agreement.open(v(1), (LOCAL,))
    if state is not None:
        agreement.tell(LOCAL, v(1), state)
    agreement.launch(v(1))
    agreed, _ = agreement.read()
    assert (agreed.levels[MEMORY].free, agreed.levels[LOCAL].free) == (1, free)
    agreement.launch(v(2), busy={MEMORY: True, LOCAL: False})
    agreed, _ = agreement.read()
    assert agreed.levels[MEMORY].free == 0


def test_the_time_of_each_level_passes_by_itself(
    monkeypatch: pytest.MonkeyPatch, agreement: Agreement
) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    agreement.restart({}, (), {LOCAL: 50.0})

    def over(after_seconds: float) -> list[str]:
        now[0] += after_seconds
        agreement.launch(v(9))
        agreed, _ = agreement.read()
        return [level for level, vote in agreed.levels.items() if vote.time_left == 0]

    assert over(9) == []
    assert over(1) == [LOCAL]
    agreement.open(v(8), (MEMORY, LOCAL))
    assert over(0) == []
    assert over(600) == [LOCAL, PERSISTENT]


def test_a_flush_that_failed_is_over_and_a_commit_that_failed_broke_the_version(
    log: Log, reports: Reports, agreement: Agreement
) -> None:
    told: set[str] = set()
    for message in (
        Committed(v(1), 8, 0.1, 0.2, False),
        Flushed(v(1), 8, 0.5, True),
        CommitFailed(v(2), "full"),
        ProtectFailed(v(2), "newer", superseded=True),
        FlushFailed(v(2), "gone"),
    ):
        agreement.versions.open(v(2), {LOCAL, PEER, PERSISTENT} - told)
        reports.on_agent_message(message)
        told |= {message.level} if message.id == v(2) else set()
    agreement.launch(v(3))
    agreed, _ = agreement.read()
    states = {level: agreed.levels[level].state for level in (LOCAL, PEER, PERSISTENT)}
    assert states == {LOCAL: BROKEN, PEER: BROKEN, PERSISTENT: DONE}
    told = [(e["name"], e["level"], e["version"], e["severity"]) for e in log.events]
    assert told == [
        ("committed", "local", 1, logging.INFO),
        ("committed", "persistent", 1, logging.INFO),
        ("failed", "local", 2, logging.ERROR),
        ("skipped", "peer", 2, logging.INFO),
        ("failed", "persistent", 2, logging.ERROR),
    ]
    assert log.events[0]["seconds"] == {"write": 0.1, "commit": 0.2}
    assert log.events[2]["message"] == "full; training continues, without this version in /disk"
    assert log.events[4]["message"] == "gone; training continues, without this version in /far"
    assert log.events[4]["behind_since"] == 1


def test_failures_of_one_cause_are_shown_at_a_decreasing_rate(
    log: Log, reports: Reports, agreement: Agreement
) -> None:
    """A disk full for a night, on 64 ranks. The end of it is shown, too."""
    for version in range(1, 101):
        agreement.versions.open(v(version), [LOCAL])
        reports.on_agent_message(CommitFailed(v(version), f"full: .v{version}.tmp"))
    shown = [each for each in log.events if each["severity"] == logging.ERROR]
    assert [each["version"] for each in shown] == [1, 2, 3, 10, 100]
    assert "only the 10th, the 100th, ... are shown" in shown[2]["message"]
    assert "(failure 100 of this kind;" in shown[4]["message"]
    for version in range(101, 201):
        reports.on_agent_message(Committed(v(version), 8, 0.1, 0.2, False))
    (text,) = [each["message"] for each in log.events if each["name"] == "notice"]
    assert text == "local level: it has versions again, after 100 failures"
    reports.on_agent_message(CommitFailed(v(201), "full: .v201.tmp"))
    assert log.events[-1]["severity"] == logging.ERROR, "another night"


def test_a_warning_at_every_version_is_shown_at_a_decreasing_rate(
    log: Log, reports: Reports
) -> None:
    """A disk that has turned read-only: no version can be retired, and none is lost by that."""
    for version in range(1, 101):
        reports.on_agent_message(Problem(f"cannot retire v{version} (0 of 2): read-only"))
        reports.notice("once", logging.INFO)
    shown = [each["message"] for each in log.events if each["severity"] > logging.INFO]
    assert [re.findall(r"v(\d+)", each) for each in shown] == [["1"], ["2"], ["3"], ["10"], ["100"]]
    assert "(warning 100 of this kind;" in shown[4]
    assert len([each for each in log.events if each["severity"] == logging.INFO]) == 100


def test_a_loss_at_every_step_is_shown_at_a_decreasing_rate_too(log: Log, reports: Reports) -> None:
    """Forward passes that change weights: this rank fails, and then the vote says so once more."""
    for version in range(1, 10):
        lost = Version(v(version))
        reports.lose(lost, "weight: changed")
        reports.lose(lost, "void on all")
        reports.emit(
            "sealed", level=MEMORY
        )  # another rank's failure does not end this one's sealing
    failed = [each for each in log.events if each["name"] == "failed"]
    assert len(failed) == 18, "receivers of events get all"
    told = [(e["version"], e["message"]) for e in failed if e["severity"] == logging.ERROR]
    assert [version for version, _ in told] == [1, 2, 3]
    assert all("weight" in text for _, text in told)


@pytest.mark.parametrize(
    ("memory", "text"), [(25, "It is stored in memory: keep"), (9, "nowhere"), (None, "nowhere")]
)
def test_the_last_word_names_the_places_that_have_the_version(
    memory: int | None, text: str, log: Log, reports: Reports
) -> None:
    reports.ended(JobEnd(25, {"memory": memory, "local": None}, ("local",)), halted=False)
    assert "v25 is missing: /disk has no version. It is stored" in log.events[0]["message"]
    assert text in log.events[0]["message"]
