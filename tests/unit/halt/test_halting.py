"""Ending early: the conditions, the request file, signals, and their consequences."""

from __future__ import annotations

import faulthandler
import logging
import math
import os
import re
import shlex
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.waiting import until
from tierckpt.cli import run_command
from tierckpt.config import load_config, parse_signals
from tierckpt.core import NO_HALT, HaltRequest, HaltVote, Reason
from tierckpt.errors import ConfigError, FormatError
from tierckpt.group import Node
from tierckpt.halt import (
    FILE_NAME,
    Signals,
    clear_request,
    parse_time,
    read_request,
    write_request,
)
from tierckpt.halt import controller as halting
from tierckpt.halt.controller import RequestWatcher
from tierckpt.storage import watched_directories

NOON = 1_800_000_000.0
"""Unix seconds."""

# --- conditions ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "version", "seconds", "end", "expected"),
    [
        (HaltRequest(), 10**9, NOON, NOON - 1, Reason.NONE),
        (HaltRequest(now=True), 0, NOON, None, Reason.NOW),
        (HaltRequest(after_version=10), 8, NOON, None, Reason.NONE),
        (HaltRequest(after_version=10), 9, NOON, None, Reason.VERSION),
        (HaltRequest(after_version=10), 99, NOON, None, Reason.VERSION),
        (HaltRequest(before_seconds=NOON), 0, NOON - 0.1, None, Reason.NONE),
        (HaltRequest(before_seconds=NOON), 0, NOON, None, Reason.TIME),
        (HaltRequest(before_seconds=NOON, seconds_left=60), 0, NOON - 61, None, Reason.NONE),
        (HaltRequest(before_seconds=NOON, seconds_left=60), 0, NOON - 60, None, Reason.TIME),
        (HaltRequest(seconds_left=60), 0, NOON, None, Reason.NONE),
        (HaltRequest(seconds_left=60), 0, NOON, NOON + 61, Reason.NONE),
        (HaltRequest(seconds_left=60), 0, NOON, NOON + 60, Reason.ALLOCATION),
        # The end of the allocation was not requested; it may have been extended.
        (HaltRequest(before_seconds=NOON + 9), 0, NOON, NOON - 9, Reason.NONE),
        (HaltRequest(now=True, after_version=1), 5, NOON, None, Reason.NOW),
    ],
)
def test_a_condition_holds_when_it_should(
    request_: HaltRequest, version: int, seconds: float, end: float | None, expected: Reason
) -> None:
    assert request_.reason(version, seconds, end) is expected


times = st.none() | st.floats(0, 2e9)
requests = st.builds(
    HaltRequest,
    now=st.booleans(),
    after_version=st.none() | st.integers(0, 2**40),
    before_seconds=times,
    seconds_left=times,
)


@given(requests)
def test_a_request_survives_the_file(request_: HaltRequest) -> None:
    assert HaltRequest.decode(request_.encode()) == request_


@given(requests, requests)
def test_a_later_request_is_added(first: HaltRequest, second: HaltRequest) -> None:
    both = first.merged(second)
    assert both.now == (first.now or second.now)
    for name in ("after_version", "before_seconds", "seconds_left"):
        later, earlier = getattr(second, name), getattr(first, name)
        assert getattr(both, name) == (earlier if later is None else later)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"kind": "another", "version": 1}',
        HaltRequest().encode().replace('"version": 1', '"version": 2'),
        HaltRequest(after_version=3).encode().replace("3", '"x"'),
        HaltRequest(after_version=-3).encode(),
        HaltRequest(seconds_left=float("nan")).encode(),
        HaltRequest(before_seconds=float("inf")).encode(),
        HaltRequest(before_seconds=1e300).encode(),
    ],
)
def test_an_invalid_request_is_refused(text: str) -> None:
    with pytest.raises(FormatError, match="halt request"):
        HaltRequest.decode(text)


def test_times_as_people_write_them() -> None:
    now = datetime(2026, 12, 24, 18, 30)
    at = {
        "18:31": datetime(2026, 12, 24, 18, 31),
        "18:30": datetime(2026, 12, 25, 18, 30),
        "6:00": datetime(2026, 12, 25, 6, 0),
        "2026-12-24T06:00": datetime(2026, 12, 24, 6, 0),
        "2026-12-24 06:00:30": datetime(2026, 12, 24, 6, 0, 30),
        "2026-12-24T06:00+00:00": datetime(2026, 12, 24, 6, 0, tzinfo=UTC),
    }
    for text, expected in at.items():
        assert parse_time(text, now) == expected.timestamp(), text
    with pytest.raises(ConfigError, match="'tomorrow' is not a time; give HH:MM"):
        parse_time("tomorrow", now)


def test_only_processes_and_allocations_that_end_are_interruptions() -> None:
    """The other reasons are requests by a user: such a job must not be restarted."""
    found = [reason for reason in Reason if reason.is_interruption]
    assert found == [Reason.SIGNAL, Reason.PREEMPTION, Reason.ALLOCATION]


# --- the command ---------------------------------------------------------------------------------


def test_the_command_asks_adds_shows_and_clears(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place, claim = str(tmp_path), tmp_path / ".claim.9f8e7d6c.0"
    claim.touch()
    assert run_command(["halt", place, "--after-version", "100"]) == 0
    assert read_request(tmp_path) == HaltRequest(after_version=100)
    assert (
        run_command(["halt", place, "--before", "2027-01-15T08:00+00:00", "--seconds-left", "90"])
        == 0
    )
    assert read_request(tmp_path) == HaltRequest(False, 100, NOON, 90.0)
    capsys.readouterr()
    assert run_command(["halt", place, "--show"]) == 0
    assert "to stop: after version 100, or 90 seconds before 2027-01-15" in capsys.readouterr().out
    assert run_command(["halt", place, "--now", "--clear"]) == 0
    assert read_request(tmp_path) == HaltRequest(now=True)
    assert run_command(["halt", place, "--clear"]) == 0
    assert read_request(tmp_path) is None
    assert "may continue" in capsys.readouterr().out
    assert run_command(["halt", place, "--clear"]) == 0
    assert list(tmp_path.iterdir()) == [claim]


@pytest.mark.parametrize(
    ("left", "seen"),
    [
        (".claim.9f8e7d6c.0", True),
        ("v0000000012.g000001.s00000of00002.manifest", True),
        (".v0000000012.g000001.s00000of00002.tmp", True),
        ("v0000000012.g000001.of00002.9f8e7d6c/", True),
        ("v0000000012.g000001.of00002.9f8e7d6c.manifest", True),
        ("v0000000012.g000001.of00002.9f8e7d6c.retired", True),
        (".spare.s00000of", True),
        ("lease.000003", True),
        ("node17/", False),
        ("train.py", False),
        ("", False),
    ],
)
def test_the_command_refuses_a_directory_where_no_job_would_look(
    left: str, seen: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise the user believes that the job will end, but it continues. For a job that starts
    later, --force writes the request."""
    if left:
        (tmp_path / left).mkdir() if left.endswith("/") else (tmp_path / left).touch()
    asked = run_command(["halt", str(tmp_path), "--now"]) == 0
    assert asked == seen == (read_request(tmp_path) is not None)
    assert ("no job has written to" in capsys.readouterr().err) != seen
    assert run_command(["halt", str(tmp_path), "--now", "--force"]) == 0
    assert read_request(tmp_path) == HaltRequest(now=True)


@pytest.mark.parametrize("asked", [["--show"], ["--clear"]])
def test_where_no_job_ever_ran_none_is_reported_as_running(
    asked: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a mistyped path the user would believe that the request was withdrawn."""
    for path in (tmp_path, tmp_path / "nowhere"):
        assert run_command(["halt", str(path), *asked]) == 1
        out, told = capsys.readouterr()
        assert (out, str(path) in told) == ("", True)
        assert "no job has written to" in told or "cannot be used" in told
    assert run_command(["halt", str(tmp_path), *asked, "--force"]) == 0
    assert "may continue" in capsys.readouterr().out


def test_the_command_names_the_job_that_will_read_the_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / ".claim.9f8e7d6c.0").touch()
    assert run_command(["halt", str(tmp_path), "--now"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"{tmp_path}: the job is asked to stop: now"
    assert second.startswith(f"{tmp_path}: no job on this machine watches it now; ")


def test_a_place_is_made_for_a_request_if_it_is_only_the_last_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A missing folder above it may be an unmounted file system."""
    assert run_command(["halt", str(tmp_path / "ckpts"), "--now", "--force"]) == 0
    assert read_request(tmp_path / "ckpts") == HaltRequest(now=True)
    assert run_command(["halt", str(tmp_path / "mount" / "ckpts"), "--now", "--force"]) == 1
    told = capsys.readouterr().err
    assert f"{tmp_path}/mount does not exist; mount it, or make it" in told
    assert not (tmp_path / "mount").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "no condition is given"),
        (["--before", "noon"], "'noon' is not a time"),
        (["--before", "0001-01-01"], "'0001-01-01' is not a time|before_seconds is -"),
        (["--before", "9999-12-31T23:59"], "the year 9999, or later"),
        (["--now"], "cannot be used: .*No such file.*give the job's checkpoint directory"),
    ],
)
def test_the_command_names_the_mistake(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["halt", str(tmp_path / "nowhere"), *arguments]) == 1
    told = capsys.readouterr().err
    assert told.startswith("tierckpt: ")
    assert re.search(said, told), told


@pytest.mark.parametrize(
    "arguments",
    [
        ["--seconds-left=nan"],
        ["--seconds-left=inf"],
        ["--seconds-left=-1"],
        ["--before=2027-01-15T08:00", "--seconds-left=nan"],
        ["--clear", "--seconds-left=-3"],
    ],
)
def test_the_command_refuses_conditions_that_never_or_always_hold(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The current request stays unchanged."""
    standing = HaltRequest(after_version=7)
    write_request(tmp_path, standing)
    assert run_command(["halt", str(tmp_path), *arguments]) == 1
    assert re.search("numbers from 0 on|a finite number of seconds, 0 or", capsys.readouterr().err)
    assert read_request(tmp_path) == standing


@pytest.mark.parametrize("arguments", [["--after-version=-1"], ["--clear", "--after-version=x"]])
def test_the_command_refuses_what_is_no_version(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    standing = HaltRequest(after_version=7)
    write_request(tmp_path, standing)
    with pytest.raises(SystemExit, match="2"):
        run_command(["halt", str(tmp_path), *arguments])
    assert "is no version; give a number, like 4000 or v4000" in capsys.readouterr().err
    assert read_request(tmp_path) == standing


@pytest.mark.parametrize("arguments", [["--now"], ["--show"], ["--clear"]])
def test_the_command_refuses_a_url(
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The URL would be treated as the name of a directory that no job watches."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s3:" / "bucket").mkdir(parents=True)
    assert run_command(["halt", "s3://bucket", *arguments]) == 1
    assert "s3://bucket is a URL, and jobs do not watch URLs" in capsys.readouterr().err
    assert list((tmp_path / "s3:" / "bucket").iterdir()) == []


@pytest.mark.parametrize("content", ['{"kind": "tierckpt-halt", "ver', "what?"])
def test_a_request_that_cannot_be_read_is_named_with_the_way_out(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / FILE_NAME).write_text(content)
    for asked in ("--show", "--now"):
        assert run_command(["halt", str(tmp_path), asked]) == 1
        told = capsys.readouterr().err
        assert told.startswith(f"tierckpt: {tmp_path}: ")
        assert told.endswith("; --clear removes it\n")
    assert run_command(["halt", str(tmp_path), "--clear", "--now"]) == 0
    assert read_request(tmp_path) == HaltRequest(now=True)


def test_the_command_names_the_job_with_the_margin_that_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        run_command(["halt", str(tmp_path), "--before", "2027-01-15T08:00+00:00", "--force"]) == 0
    )
    assert "to stop: the job's halt_seconds_left before 2027-01-15" in capsys.readouterr().out


# --- looking for requests ------------------------------------------------------------------------


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(halting, "LOOK_SECONDS", 0.001)


@pytest.fixture
def watch(often: None) -> Iterator[Callable[..., RequestWatcher]]:
    made = []

    def start(*directories: Path) -> RequestWatcher:
        made.append(RequestWatcher([*map(str, directories)]))
        return made[-1]

    yield start
    for each in made:
        each.close()


def test_a_request_is_found_replaced_and_forgotten(watch: Any, tmp_path: Path) -> None:
    elsewhere = tmp_path / "not there yet"
    watcher = watch(tmp_path, elsewhere)
    write_request(tmp_path, HaltRequest(after_version=5))
    until(lambda: watcher.requests == (HaltRequest(after_version=5),))
    elsewhere.mkdir()
    write_request(elsewhere, HaltRequest(now=True))
    until(lambda: len(watcher.requests) == 2)
    assert f"tierckpt halt {tmp_path} --clear, " in watcher.advice()
    clear_request(elsewhere)
    (tmp_path / FILE_NAME).write_text("what?")
    until(lambda: watcher.problems)
    assert watcher.requests == ()
    assert f"a halt request in {tmp_path} is ignored" in watcher.problems[0]


def test_a_place_that_cannot_be_read_is_no_request(watch: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    watcher = watch(tmp_path / "file")
    until(lambda: watcher.problems)
    (problem,) = watcher.problems
    assert problem.startswith(f"{tmp_path}/file cannot be read: ")
    assert "ignored" not in problem


@pytest.mark.parametrize(
    "content",
    [
        b"\xff\xfe\x00 no text in any encoding of ours",
        b"[" * 100_000,
        HaltRequest().encode().replace('"after_version": null', '"after_version": 1e999').encode(),
    ],
    ids=["no text", "too deep", "too large"],
)
def test_an_invalid_request_is_skipped_and_the_next_one_found(
    content: bytes, watch: Any, tmp_path: Path
) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    watcher = watch(tmp_path)
    until(lambda: watcher.problems)
    assert f"a halt request in {tmp_path} is ignored" in watcher.problems[0]
    write_request(tmp_path, HaltRequest(now=True))
    until(lambda: watcher.requests == (HaltRequest(now=True),))
    assert watcher.problems == ()


def test_a_fifo_is_no_request(watch: Any, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / FILE_NAME)
    watcher = watch(tmp_path)
    until(lambda: watcher.problems)
    assert "no regular file instead of a file" in watcher.problems[0]


def test_first_ranks_of_nodes_watch_local_directories_and_rank_0_the_shared_one() -> None:
    first, second = Node(1, 2, (4, 5)), Node(0, 2, (0, 1))
    own = load_config({"path": "/local/ckpts"}, {})
    both = load_config({"path": "/local/ckpts", "persistent_path": "/shared"}, {})
    bucket = load_config({"path": "/local/ckpts", "persistent_path": "s3://bucket/x"}, {})
    assert watched_directories(own, 4, first) == ["/local/ckpts"]
    assert watched_directories(both, 4, first) == ["/local/ckpts"]
    assert watched_directories(both, 5, first) == []
    assert watched_directories(both, 0, second) == ["/local/ckpts", "/shared"]
    assert watched_directories(bucket, 0, second) == ["/local/ckpts"]


def test_the_advice_can_be_pasted_into_a_shell(watch: Any, tmp_path: Path) -> None:
    place = tmp_path / "my run; rm"
    place.mkdir()
    write_request(place, HaltRequest(now=True))
    watcher = watch(place)
    until(watcher.advice)
    command = watcher.advice().partition(": ")[2]
    assert shlex.split(command) == ["tierckpt", "halt", str(place), "--clear"]


def test_a_rank_that_does_not_look_has_no_thread(watch: Any) -> None:
    before = threading.active_count()
    watch()
    assert threading.active_count() == before


# --- signals -------------------------------------------------------------------------------------


@pytest.fixture
def listen() -> Iterator[Callable[..., Signals]]:
    """`listen("SIGUSR1")`: as in a job that has passed a boundary; all handlers are restored
    afterwards."""
    ours = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)
    before = {s: signal.getsignal(s) for s in ours}
    made = []

    def start(names: str, **more: float) -> Signals:
        made.append(Signals(parse_signals(names), **more))
        made[-1].passed_boundary()
        return made[-1]

    yield start
    for signals in made:
        signals.close()
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_signal_is_remembered_and_ends_nothing(listen: Any) -> None:
    signals = listen("SIGUSR1, sigterm")
    assert signals.received is None
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert signals.received is signal.SIGTERM


@pytest.mark.parametrize("grace_seconds", [1e-9, 1e9])
def test_a_signal_that_leaves_no_time_for_two_iterations_says_so(
    grace_seconds: float, listen: Any, caplog: pytest.LogCaptureFixture
) -> None:
    signals = listen("SIGUSR1", grace_seconds=grace_seconds)
    signals.passed_boundary()
    os.kill(os.getpid(), signal.SIGUSR1)
    if grace_seconds < 1:
        until(lambda: "set halt_grace_seconds and the sender's own limit to more" in caplog.text)
    signals.close()
    assert ("a last checkpoint comes up to two iterations" in caplog.text) == (grace_seconds < 1)


def test_an_earlier_signal_handler_is_called_too(listen: Any) -> None:
    told = []
    signal.signal(signal.SIGUSR1, lambda number, _: told.append(number))
    signals = listen("SIGUSR1")
    inner = listen("SIGUSR1")
    os.kill(os.getpid(), signal.SIGUSR1)
    assert told == [signal.SIGUSR1]
    assert signals.received is inner.received is signal.SIGUSR1


def test_where_ranks_cannot_agree_a_signal_keeps_its_default_effect(listen: Any) -> None:
    seen: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: seen.append(number))
    signals = listen("SIGUSR1")
    signals.redeliver()
    signal.raise_signal(signal.SIGUSR1)
    signals.redeliver()
    assert seen == [signal.SIGUSR1], "the script's handler was called when it came"
    interrupted = listen("SIGINT")
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        interrupted.redeliver()


def test_without_a_signal_all_is_as_before(listen: Any) -> None:
    theirs = signal.getsignal(signal.SIGUSR1)
    read, write = os.pipe()
    os.set_blocking(write, False)
    wakeup = signal.set_wakeup_fd(write)
    try:
        listen("SIGUSR1").close()
        assert signal.getsignal(signal.SIGUSR1) is theirs
        assert signal.set_wakeup_fd(wakeup) == write
    finally:
        signal.set_wakeup_fd(wakeup)
        os.close(read)
        os.close(write)


def test_an_ignored_signal_or_one_with_another_handler_is_left_alone(listen: Any) -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signals = listen("SIGUSR1")
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    assert "this process ignores it" in signals.unhandled[signal.SIGUSR1]
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    with (Path(os.devnull)).open("w") as nowhere:
        faulthandler.register(signal.SIGUSR2, file=nowhere)
        try:
            signals = listen("SIGUSR2")
            assert "a handler outside Python" in signals.unhandled[signal.SIGUSR2]
            os.kill(os.getpid(), signal.SIGUSR2)
            assert signals.received is None
        finally:
            faulthandler.unregister(signal.SIGUSR2)


def test_on_another_thread_no_signal_is_received_and_nothing_breaks() -> None:
    made: list[Signals] = []
    thread = threading.Thread(target=lambda: made.append(Signals(parse_signals("SIGUSR1"))))
    thread.start()
    thread.join()
    made[0].passed_boundary()
    made[0].close()
    assert "main thread" in made[0].unhandled[signal.SIGUSR1]
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


@pytest.mark.parametrize("text", ["SIGKILL", "SIGTERM,SIGSTOP", "TERM", "15", "SIGTERM SIGUSR1"])
def test_signals_that_cannot_be(text: str) -> None:
    with pytest.raises(ConfigError, match=r"halt_signals: .* not a signal that can be handled"):
        load_config({"halt_signals": text}, {})


# --- one rank's part -----------------------------------------------------------------------------


def boundary(ranks: list[Any], version: int, agreed: HaltVote) -> tuple[list[bool], HaltVote]:
    """One boundary of all ranks, in the checkpointer's order; and their agreement."""
    ends = [rank.halting.receive(agreed) for rank in ranks]
    cast = [rank.halting.wish(version) for rank in ranks]
    return ends, HaltVote(*map(min, zip(*cast, strict=True)))


def test_all_ranks_learn_of_it_one_boundary_later(make_rank: Any, tmp_path: Path) -> None:
    places = [tmp_path / "a", tmp_path / "b"]
    for place in places:
        place.mkdir()
    write_request(places[1], HaltRequest(after_version=4))
    ranks = [make_rank(place) for place in places]
    until(lambda: ranks[1].halting._watcher.requests)
    agreed, answers = NO_HALT, []
    for version in range(1, 6):
        ends, agreed = boundary(ranks, version, agreed)
        assert ends == [False, False]
        answers.append([rank.halting.should_exit() for rank in ranks])
    assert answers == [[False] * 2] * 3 + [[True] * 2] * 2
    assert ranks[0].halting.reason is Reason.VERSION
    assert agreed.reason == Reason.NONE, "said once"
    assert f"tierckpt halt {places[1]} --clear" in ranks[1].texts()


@pytest.mark.parametrize("asks", [[], [1]])
def test_a_script_that_never_asks_is_ended_and_one_rank_that_asks_is_enough(
    asks: list[int], make_rank: Any
) -> None:
    """The first boundary is too early: a loop calls should_exit() after it."""
    soon = {"SLURM_JOB_END_TIME": str(time.time() + 3600)}
    ranks = [make_rank(halt_seconds_left=7200, environment=soon), make_rank()]
    agreed, ended = NO_HALT, []
    for version in range(1, 5):
        ends, agreed = boundary(ranks, version, agreed)
        assert len(set(ends)) == 1
        ended.append(ends[0])
        for rank in asks:
            ranks[rank].halting.should_exit()
    assert ended == ([False] * 4 if asks else [False, False, True, True])
    assert ranks[0].halting.reason is Reason.ALLOCATION


@pytest.mark.parametrize(
    ("seconds_left", "configured", "margin"),
    [(None, 120, 120), (None, 0, 0), (60, 120, 60), (0, 120, 0)],
)
def test_how_long_before_a_time_a_job_ends(
    seconds_left: float | None,
    configured: float,
    margin: float,
    make_rank: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The request's own margin, or the configured one; without either, after that time."""
    write_request(tmp_path, HaltRequest(before_seconds=NOON, seconds_left=seconds_left))
    rank = make_rank(halt_seconds_left=configured)
    until(lambda: rank.halting._watcher.requests)
    found = []
    for seconds in (NOON - margin - 1, NOON - margin):
        monkeypatch.setattr(time, "time", lambda at=seconds: at)
        found.append(rank.halting.wish(1)[0])
    assert found == [Reason.NONE, Reason.TIME]


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (None, "SLURM_JOB_END_TIME is not set"),
        ("1", "SLURM_JOB_END_TIME is '1', which is in the past"),  # the old one, if it was extended
        ("tomorrow", "SLURM_JOB_END_TIME is 'tomorrow', which is not a Unix time in seconds"),
        ("inf", "SLURM_JOB_END_TIME is 'inf', which is not a Unix time in seconds"),
    ],
)
def test_an_end_of_the_allocation_that_cannot_be_is_reported_once(
    end: str | None, said: str, make_rank: Any
) -> None:
    rank = make_rank(halt_seconds_left=10, environment=end and {"SLURM_JOB_END_TIME": end})
    for version in range(1, 4):
        assert rank.halting.wish(version)[0] is Reason.NONE
    assert len(rank.said) == 1
    assert said in rank.texts()


NEVER = math.inf


@pytest.mark.parametrize(
    ("agreed", "end_in", "disk", "others"),
    [
        (Reason.NONE, 120, NEVER, NEVER),
        (Reason.VERSION, 120, NEVER, NEVER),
        (Reason.SIGNAL, None, NEVER, 20),  # 30 s, less 10
        (Reason.SIGNAL, 120, 105, 105),  # it announces the end
        (Reason.SIGNAL, 7200, NEVER, 20),  # it does not
        (Reason.SIGNAL, 6, 20, 20),
        (Reason.ALLOCATION, 7200, 7185, 7185),
        (Reason.ALLOCATION, None, NEVER, 20),
    ],
)
def test_how_long_an_end_may_take(
    agreed: Reason,
    end_in: float | None,
    disk: float,
    others: float,
    make_rank: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The job stays on the disk with the last checkpoint until a signal's grace is over."""
    monkeypatch.setattr(time, "time", lambda: NOON)
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
    named = {} if end_in is None else {"SLURM_JOB_END_TIME": str(NOON + end_in)}
    halting = make_rank(environment=named).halting
    halting.receive(HaltVote(agreed))
    granted = halting.seconds_to_wait()
    assert (NEVER if granted is None else granted) == disk
    assert halting.seconds_for_others() == others


def test_the_time_that_a_signal_grants_counts_from_its_arrival(
    make_rank: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The boundary at which all ranks agree may come an evaluation later."""
    halting = make_rank(halt_signals="").halting
    monkeypatch.setattr(Signals, "received_seconds", 1000.0)
    monkeypatch.setattr(time, "monotonic", lambda: 1012.0)
    halting.receive(HaltVote(Reason.SIGNAL))
    assert halting.seconds_for_others() == pytest.approx(20 - 12, abs=1)


@pytest.mark.parametrize("agreed", [False, True])
def test_a_rank_that_left_is_ended_by_a_signal_unless_the_end_was_agreed_on(
    agreed: bool, make_rank: Any, listen: Any
) -> None:
    halting = make_rank(halt_signals="SIGINT").halting
    halting.wish(1)
    signal.raise_signal(signal.SIGINT)
    if agreed:
        halting.receive(HaltVote(Reason.SIGNAL))
        halting.apart()
    else:
        with pytest.raises(KeyboardInterrupt):
            halting.apart()


def test_a_signal_is_the_most_urgent_reason(make_rank: Any, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    write_request(tmp_path, HaltRequest(now=True))
    rank = make_rank(halt_signals="SIGUSR1")
    try:
        until(lambda: rank.halting._watcher.requests)
        assert rank.halting.wish(1)[0] is Reason.NOW
        os.kill(os.getpid(), signal.SIGUSR1)
        assert rank.halting.wish(2)[0] is Reason.SIGNAL
        assert ("this rank received SIGUSR1", logging.WARNING) in rank.said
        rank.halting.receive(HaltVote(Reason.SIGNAL))
        assert "a rank received a signal to stop" in rank.texts()
    finally:
        rank.halting.close()
        signal.signal(signal.SIGUSR1, before)
