"""A connection's decisions, without an agent, a process or a socket."""

from __future__ import annotations

import logging

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from tierckpt.agent.address import TAKEN
from tierckpt.agent.connection_states import (
    ANSWER_SECONDS,
    GONE_SECONDS,
    JOIN_SECONDS,
    LINKED,
    MAX_AGENTS,
    START_SECONDS,
    AcceptWelcome,
    Action,
    Close,
    Connect,
    Connected,
    DeclaredOutdated,
    Ended,
    Event,
    Fail,
    GiveUp,
    HangUp,
    Needed,
    NoListener,
    NotUnderstood,
    PredecessorEnds,
    ProcessEnded,
    ProcessStarted,
    Report,
    ReportLost,
    ReportShutdown,
    Standing,
    StartProcess,
    State,
    Tick,
    Unwelcomed,
    Welcomed,
    next_state,
)

NOW = 1000.0
ALL = tuple(range(MAX_AGENTS))
NEEDED = Standing(needed=True)
STARTING = Standing(State.STARTING, needed=True, follows=True, unproved=True, since=NOW)
GREETING = Standing(State.GREETING, needed=True, since=NOW)
CONNECTED = Standing(State.CONNECTED, needed=True, pid=7, greeted=7, since=NOW)
WAITING = Standing(State.WAITING, needed=True, ask_after=NOW + 1.0)
EVENTS: list[Event] = [
    Needed(),
    Tick(),
    NoListener(),
    Ended(),
    HangUp(),
    Welcomed(7),
    PredecessorEnds(7, inherits=True),
    DeclaredOutdated(),
    Unwelcomed("has others"),
    NotUnderstood("is not understood"),
]


def after(at: Standing, *events: Event, seconds: float = 0.0) -> tuple[Standing, list[Action]]:
    """The standing after all events, and the actions of the last one."""
    actions: list[Action] = []
    for event in events:
        at, actions = next_state(at, event, NOW + seconds)
    return at, actions


def failure(actions: list[Action]) -> OSError:
    (action,) = actions
    assert isinstance(action, Fail)
    return action.error


# --- finding one, or starting it -----------------------------------------------------------------


def test_one_is_started_only_where_it_is_needed_and_by_whom_it_should_be() -> None:
    assert after(Standing(), NoListener())[1] == []
    assert after(Standing(), Needed(), NoListener())[1] == [StartProcess()]
    assert after(Standing(inline=True), Needed(), NoListener())[1] == []
    later, actions = after(Standing(first=False), Needed(), NoListener())
    assert actions == [], "left to the first rank"
    assert after(later, NoListener(), seconds=JOIN_SECONDS)[1] == [StartProcess()]


def test_a_new_run_leaves_the_start_to_the_first_rank_again() -> None:
    at = replace(NEEDED, first=False, start_after=0.0)
    assert after(at, Needed())[0] == at
    assert after(at, Needed(again=True))[0].start_after == NOW + JOIN_SECONDS


def test_a_started_process_is_followed_at_its_place_alone() -> None:
    at, _ = after(replace(NEEDED, index=2), ProcessStarted())
    assert (at.state, at.starting, at.unproved) == (State.STARTING, True, True)
    assert after(at, Tick())[1] == [Connect((2,))]
    assert after(at, NoListener(), seconds=START_SECONDS)[1] == []
    at, actions = after(at, NoListener(), seconds=START_SECONDS + 1)
    assert (at.state, at.follows) == (State.SEARCHING, False)
    assert "a new agent could not be reached within 60 s" in str(failure(actions))


@pytest.mark.parametrize(("status", "fails"), [(0, False), (TAKEN, False), (1, True), (-9, True)])
def test_a_process_that_ended_before_it_was_reached(status: int, fails: bool) -> None:
    """An agent that found another one in its place, or no job, is no failure."""
    at, _ = after(STARTING, ProcessEnded(status))
    assert at.state is State.SEARCHING
    at, actions = after(at, NoListener())
    if fails:
        assert f"a new agent ended with exit status {status}" in str(failure(actions))
        at, actions = after(at, NoListener())
    assert actions == [StartProcess()]


def test_an_agent_that_served_and_ended_is_no_failed_start() -> None:
    at, _ = after(STARTING, Connected(0), Welcomed(7), Ended(), HangUp(), ProcessEnded(-9))
    assert (at.state, at.unproved) == (State.SEARCHING, False)
    assert after(at, NoListener())[1] == [StartProcess()]


def test_the_process_of_a_lost_agent_may_be_seen_to_live_for_a_moment() -> None:
    """Its old start time does not make it a new agent that fails to come."""
    at = replace(CONNECTED, follows=True, since=NOW - 10 * START_SECONDS)
    at, actions = after(at, HangUp(), NoListener())
    assert (at.state, at.since, actions) == (State.STARTING, NOW, [])


# --- the greeting --------------------------------------------------------------------------------


def test_a_welcome_introduces_a_new_agent_and_no_other() -> None:
    before = replace(GREETING, refused=True, inherits=True, unproved=True)
    at, actions = after(before, Welcomed(7))
    assert (at.state, at.pid, actions) == (State.CONNECTED, 7, [AcceptWelcome(introduce=True)])
    assert not (at.refused)
    assert not (at.inherits)
    assert not (at.unproved)
    at, actions = after(at, HangUp(), Connected(0), Welcomed(7))
    assert actions == [AcceptWelcome(introduce=False)]
    at, actions = after(at, HangUp(), Connected(0), Welcomed(8))
    assert actions == [AcceptWelcome(introduce=True)]


@pytest.mark.parametrize(
    ("event", "text", "severity"),
    [
        (Unwelcomed("has others"), "has others", logging.INFO),
        (NotUnderstood("is not understood"), "is not understood", logging.ERROR),
    ],
)
def test_an_agent_not_for_us_is_passed_over(event: Event, text: str, severity: int) -> None:
    at, actions = after(replace(GREETING, follows=True, exit_status=1), event)
    assert (at.state, at.index, at.follows, at.exit_status) == (State.SEARCHING, 1, False, 0)
    said = f"agent 0 of this node {text}; another one takes its place"
    assert actions == [Close(), Report(said, severity)]


def test_where_all_addresses_are_skipped_it_is_reported_once_and_tried_again() -> None:
    at, reports = NEEDED, list[Action]()
    for number in (*ALL, *ALL):
        at, _ = next_state(at, Connected(number), NOW)
        at, actions = next_state(at, Unwelcomed("has others"), NOW)
        reports += [action for action in actions if isinstance(action, Report)]
        assert any(isinstance(a, GiveUp) for a in actions) == (number == ALL[-1])
    assert [report.severity for report in reports] == [logging.INFO] * 3 + [logging.ERROR]  # type: ignore[union-attr]
    assert (at.state, at.passed, at.refused) == (State.WAITING, frozenset(), True)
    assert after(at, Tick(), seconds=ANSWER_SECONDS - 0.1)[1] == []
    assert after(at, Tick(), seconds=ANSWER_SECONDS)[1] == [Connect(ALL)]


# --- predecessors and successors -----------------------------------------------------------------


def test_a_predecessors_end_is_awaited_at_its_place() -> None:
    at, actions = after(replace(GREETING, needed=False), PredecessorEnds(9, inherits=False))
    assert (at.state, at.index, at.needed) == (State.WAITING, 0, False)
    assert actions == [Close(), ReportShutdown()]
    assert not at.settled(NOW), "it is looked for once more"
    assert after(at, Tick(), seconds=GONE_SECONDS / 2)[1] == []
    at, actions = after(at, Tick(), seconds=GONE_SECONDS)
    assert (at.state, actions) == (State.SEARCHING, [Connect(ALL)])
    assert at.settled(NOW + GONE_SECONDS)
    at, actions = after(at, Connected(0), PredecessorEnds(9, inherits=False), seconds=1.0)
    assert actions == [Close()], "which is reported once"
    at, actions = after(at, Tick(), Connected(0), seconds=ANSWER_SECONDS)
    at, actions = after(at, PredecessorEnds(9, inherits=False), seconds=ANSWER_SECONDS + 1)
    text = "agent 0 of this node does not end; another one takes its place"
    assert (at.index, actions) == (1, [Close(), Report(text, logging.ERROR)])


# --- a connection --------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [NEEDED, STARTING, WAITING])
def test_without_a_connection_nothing_can_come_over_it(at: Standing) -> None:
    for event in EVENTS[3:]:
        assert after(at, event) == (at, [])


@pytest.mark.parametrize(
    ("at", "settled"),
    [
        (Standing(), True),
        (NEEDED, False),
        (STARTING, False),
        (GREETING, False),
        (replace(GREETING, needed=False), False),
        (CONNECTED, True),
        (WAITING, False),
        (replace(WAITING, needed=False), False),
        (replace(WAITING, needed=False, ask_after=NOW), True),
    ],
)
def test_whether_somebody_is_still_to_be_reached(at: Standing, settled: bool) -> None:
    assert at.settled(NOW) == settled


# --- any order of events -------------------------------------------------------------------------


class Course(RuleBasedStateMachine):
    """A connection with its actions carried out in a world where anything may happen."""

    def __init__(self) -> None:
        super().__init__()
        self.at = Standing()
        self.now = NOW
        self.linked = False
        self.running = False
        """A process that was started here, and was neither passed over nor given up."""
        self.listening: frozenset[int] = frozenset()
        self.given_up = 0

    @initialize(first=st.booleans(), may_start=st.booleans(), inline=st.booleans())
    def begin(self, first: bool, may_start: bool, inline: bool) -> None:
        self.at = Standing(first=first, may_start=may_start or first, inline=inline)

    def on(self, event: Event) -> None:
        before = self.at
        self.at, actions = next_state(self.at, event, self.now)
        if before.follows and not self.at.follows:
            passed = self.at.index != before.index or any(isinstance(a, GiveUp) for a in actions)
            late = any(isinstance(a, Fail) for a in actions)
            assert passed or late or isinstance(event, ProcessEnded), "else it is followed"
            self.running = False
        for action in actions:
            self.do(action)

    def do(self, action: Action) -> None:
        match action:
            case Connect(numbers=numbers):
                assert not self.linked, "there are never two connections"
                there = [n for n in numbers if n in self.listening]
                if there or self.at.inline:
                    self.linked = True
                    self.on(Connected(there[0] if there else self.at.index))
                else:
                    self.on(NoListener())
            case StartProcess():
                assert not self.running, "nor two processes on their way"
                assert not self.linked
                assert self.at.needed
                assert self.at.may_start
                assert not self.at.inline
                self.running = True
                self.on(ProcessStarted())
            case Close():
                assert self.linked
                self.linked = False
            case ReportLost() | GiveUp():
                self.given_up += 1
                self.on(HangUp())
            case AcceptWelcome():
                assert self.linked

    @rule(seconds=st.sampled_from([0.01, 0.3, 1.0, 6.0, 61.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.on(Tick())

    @rule(again=st.booleans())
    def something_is_sent(self, again: bool) -> None:
        self.on(Needed(again))

    @rule(numbers=st.frozensets(st.sampled_from(ALL)))
    def agents_come_and_go(self, numbers: frozenset[int]) -> None:
        self.listening = numbers

    @rule(pid=st.sampled_from([7, 8]))
    def welcome(self, pid: int) -> None:
        self.on(Welcomed(pid))

    @rule(pid=st.sampled_from([9, 10]), inherits=st.booleans())
    def predecessor(self, pid: int, inherits: bool) -> None:
        self.on(PredecessorEnds(pid, inherits))

    @rule(event=st.sampled_from([Ended(), Unwelcomed("x"), NotUnderstood("x"), HangUp()]))
    def another_answer(self, event: Event) -> None:
        self.on(event)

    @precondition(lambda self: self.running)
    @rule(status=st.sampled_from([0, 1, TAKEN]))
    def process_ends(self, status: int) -> None:
        self.on(ProcessEnded(status))

    @rule(rarely=st.integers(0, 9))
    def outdated(self, rarely: int) -> None:
        if not rarely:
            self.on(DeclaredOutdated())

    @invariant()
    def state_and_world_agree(self) -> None:
        assert self.linked == (self.at.state in LINKED)
        assert self.running == self.at.follows
        assert (self.at.pid is not None) == (self.at.state is State.CONNECTED)
        assert self.at.places, "there is always a place to look at"
        assert self.at.state is not State.STARTING or self.at.follows
        assert self.at.state is not State.SEARCHING or not self.at.follows


Course.TestCase.settings = hypothesis_settings(max_examples=50, stateful_step_count=40)
TestAnyOrderOfEvents = Course.TestCase
