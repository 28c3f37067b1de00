"""Progress of a wait for the agent: a bar on a terminal, events elsewhere."""

from __future__ import annotations

import io
import logging
import sys
import time
from contextlib import redirect_stderr
from typing import Any

import pytest

from tests.support.progress import Terminal, at_once
from tierckpt import events
from tierckpt.agent import Problem, TaskStatus
from tierckpt.checkpointer import WaitProgress
from tierckpt.config import load_config
from tierckpt.core import PEER, PERSISTENT, Level
from tierckpt.format import VersionId
from tierckpt.restore import Progress

STORE = "/shared/ckpts"


class Agent:
    """Work that the test sets."""

    def __init__(self) -> None:
        self.commits: list[VersionId] = []
        self.levels: list[Level] = []
        self.flush_under_way: TaskStatus | None = None
        self.asked = 0

    def committing(self) -> list[VersionId]:
        return self.commits

    def behind(self) -> list[Level]:
        return self.levels

    def problems(self) -> list[Problem]:
        return []

    def ask_progress(self) -> None:
        self.asked += 1

    def flushes(self, done: int) -> None:
        self.levels = [PERSISTENT]
        self.flush_under_way = TaskStatus(
            "persistent", VersionId(1, 40), 0.0, None, done, 2_000_000
        )


class Reports:
    def __init__(self) -> None:
        self.said: list[tuple[str, int]] = []

    def waiting(self, text: str, severity: int) -> None:
        self.said.append((text, severity))


def made(rank: int = 0, speaks: bool = True) -> tuple[Any, Agent, Reports]:
    config = load_config({"path": "/scratch/ckpts", "persistent_path": STORE})
    agent, reports = Agent(), Reports()
    return WaitProgress(config, agent, reports, rank, speaks), agent, reports  # type: ignore[arg-type]


def in_terminal(monkeypatch: pytest.MonkeyPatch, rank: int = 0) -> tuple[str, Reports]:
    """The output of a commit, a flush, and a wait for other ranks."""
    monkeypatch.setenv("TERM", "xterm")
    at_once(monkeypatch)
    terminal = Terminal()
    with redirect_stderr(terminal):
        progress, agent, reports = made(rank)
        agent.commits = [VersionId(1, 40)]
        progress.look()
        agent.commits = []
        for done in (0, 500_000, 2_000_000):
            agent.flushes(done)
            progress.look()
        progress.say("it takes long")
        agent.levels = []
        progress.look()
        progress.close()
    return terminal.getvalue(), reports


def test_on_a_terminal_a_bar_follows_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events.logger, "hasHandlers", lambda: False)
    text, reports = in_terminal(monkeypatch)
    assert "writing v40 to /scratch/ckpts" in text
    assert f"storing v40 on {STORE}" in text
    assert "/2.0 MB" in text
    assert "waiting for other ranks" in text
    assert reports.said == [("it takes long", logging.DEBUG)], "the bar has the line"


def test_other_ranks_show_nothing_on_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert in_terminal(monkeypatch, rank=1)[0] == ""


def test_with_logging_set_up_the_log_has_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events.logger, "hasHandlers", lambda: True)
    assert in_terminal(monkeypatch)[1].said == [("it takes long", logging.INFO)]


@pytest.mark.parametrize(("speaks", "severity"), [(True, logging.INFO), (False, logging.DEBUG)])
def test_in_logs_lines_come_at_growing_intervals(
    speaks: bool, severity: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    progress, agent, reports = made(speaks=speaks)
    agent.flushes(500_000)
    for _ in range(130):
        now[0] += 1.0
        progress.look()
    progress.close()
    text = f"still storing v40 on {STORE}: 500 kB of 2 MB, for {{}} s now"
    assert reports.said == [(text.format(seconds), severity) for seconds in (30, 60, 120)]
    assert agent.asked == 130


def test_a_retry_starts_the_bar_again(monkeypatch: pytest.MonkeyPatch) -> None:
    started = list[tuple[str, int]]()
    monkeypatch.setattr(Progress, "start_phase", lambda self, *given: started.append(given))
    progress, agent, _ = made()
    for done in (500_000, 1_000_000, 200_000):
        agent.flushes(done)
        progress.look()
    assert started == [(f"storing v40 on {STORE}", 2_000_000)] * 2


def test_exchanges_with_other_nodes_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    started = list[tuple[str, int]]()
    monkeypatch.setattr(Progress, "start_phase", lambda self, *given: started.append(given))
    progress, agent, _ = made()
    agent.levels = [PEER]
    progress.look()
    assert started == [("waiting for other nodes", 0)]
    assert agent.asked == 0, "a question would start an agent where there is none"
