"""The states of a trainer's connection to its node's agent: all decisions, and no I/O.

`next_state` takes a `Standing`, an event and the time, and returns the next `Standing` and the
actions to carry out, in this order. `AgentConnection` carries them out, and reports the results as
further events. A node has a few numbered places for agents: an agent may hang, or have another
job's environment, and is then passed over for the next place.

    SEARCHING  -- Connected -->  GREETING  -- Welcomed -->  CONNECTED
    SEARCHING  -- NobodyListens, ProcessStarted -->  STARTING  -- Connected -->  GREETING
    GREETING   -- Unwelcomed, NotUnderstood, or no answer in time -->  SEARCHING at the next place;
                  WAITING where that was the last one, and all are asked again
    GREETING   -- PredecessorEnds -->  WAITING, and from there SEARCHING at the same place
    GREETING, CONNECTED  -- Ended, HangUp -->  SEARCHING, or STARTING while a new agent's process
                  is followed
    any        -- DeclaredOutdated -->  OUTDATED, for ever
"""

from __future__ import annotations

import enum
import logging
import math

from msgspec import Struct, field
from msgspec.structs import replace

from .address import TAKEN

ANSWER_SECONDS = 5.0
"""An agent that does not say welcome within this time is passed over for another."""
START_SECONDS = 60.0
"""A new agent that cannot be reached within this time is given up; the next commit tries again."""
JOIN_SECONDS = 2.0
"""Time that the other ranks of a node leave to the first one to start the agent."""
AGAIN_SECONDS = 0.5
"""Time before the next start, after a new agent found another one in its place."""
GONE_SECONDS = 0.2
"""Interval of checks whether an agent that shuts down has ended."""
MAX_AGENTS = 4
"""Number of places. When all were passed over, the first is tried again after ANSWER_SECONDS."""
OUTDATED = (
    "this node's agent serves a later start of this job, with other keys, credentials or codecs; "
    "parts of one job that share a machine need the same ones, or different values of `node`"
)


class State(enum.Enum):
    """State of a connection."""

    SEARCHING = enum.auto()
    """No agent is connected, and none that was started here is on its way."""
    STARTING = enum.auto()
    """A process that was started here has not been reached yet."""
    GREETING = enum.auto()
    """An agent is connected and has not answered the greeting yet."""
    CONNECTED = enum.auto()
    """An agent is connected and said welcome."""
    WAITING = enum.auto()
    """Nothing is tried until `ask_after`: a predecessor is ending, or all places were passed
    over."""
    OUTDATED = enum.auto()
    """A later run has an agent here: there is none for this trainer any more."""


LINKED = (State.GREETING, State.CONNECTED)
"""States with an open connection; the others have none."""


class Standing(Struct, frozen=True):
    """A connection's state, and the facts that determine the next one. Times are monotonic."""

    state: State = State.SEARCHING
    index: int = 0
    """The number of the agent's place."""
    may_start: bool = True
    """An agent that this process starts has the environment of the node's first rank."""
    inline: bool = False
    """The agent is a thread of this process: no process is started."""
    first: bool = True
    """This is the node's first rank."""
    needed: bool = False
    """An agent must be started if there is none."""
    pid: int | None = None
    """The process id of the agent that said welcome."""
    greeted: int | None = None
    """The process id of the last agent that said welcome."""
    follows: bool = False
    """A process that was started here has not ended yet, and its place was not passed over."""
    unproved: bool = False
    """The agent that was started last never said welcome."""
    exit_status: int = 0
    """The exit status of the process that was followed last."""
    since: float = 0.0
    """When the connection or the process started, or the last connection ended."""
    start_after: float = 0.0
    ask_after: float = -math.inf
    leaving: tuple[int, float] | None = None
    """Process id of the agent that shuts down for a successor, and the time of its first notice."""
    inherits: bool = False
    """An agent that shut down left data that only an agent can keep for later runs."""
    passed: frozenset[int] = field(default_factory=frozenset)
    """Places of agents that hang, or do not serve this trainer."""
    refused: bool = False
    """All places were passed over and this was reported; no agent has said welcome since."""

    @property
    def places(self) -> tuple[int, ...]:
        """Places that were not passed over."""
        return tuple(number for number in range(MAX_AGENTS) if number not in self.passed)

    @property
    def numbers(self) -> tuple[int, ...]:
        """Places to look at. Other ranks or an earlier run may have passed over one with an agent
        that has ended since. While a process is followed, only its own place."""
        return (self.index,) if self.follows else self.places

    @property
    def starting(self) -> bool:
        """A process that was started here is on its way."""
        return self.state not in LINKED and self.follows

    def settled(self, now: float) -> bool:
        """True if no agent is needed, or it is connected."""
        waits = self.state is State.WAITING and now < self.ask_after
        coming = self.state is State.GREETING or waits
        return self.state is State.CONNECTED or not (self.needed or coming)


# --- events --------------------------------------------------------------------------------------


class Needed(Struct, frozen=True):
    """A message is to be sent. `again`: a run starts, and the first rank starts the agent."""

    again: bool = False


class Tick(Struct, frozen=True):
    """Time has passed: take the steps towards a connection that need no wait."""


class Connected(Struct, frozen=True):
    """An agent listens at the place `index` and was greeted."""

    index: int


class NoListener(Struct, frozen=True):
    """No agent listens at any of the places of a `Connect`."""


class ProcessStarted(Struct, frozen=True):
    """A `StartProcess` was carried out."""


class ProcessEnded(Struct, frozen=True):
    """The followed process has ended."""

    status: int


class Ended(Struct, frozen=True):
    """The agent closed its end of the connection, or does not take the greeting."""


class HangUp(Struct, frozen=True):
    """The owner does not use the connection any more."""


class Welcomed(Struct, frozen=True):
    """The agent said `Welcome`."""

    pid: int


class PredecessorEnds(Struct, frozen=True):
    """The agent said `ShuttingDown`. `inherits`: it left data for its successor."""

    pid: int
    inherits: bool


class DeclaredOutdated(Struct, frozen=True):
    """The agent said `Outdated`."""


class Unwelcomed(Struct, frozen=True):
    """The agent said `Unwelcome`."""

    why: str


class NotUnderstood(Struct, frozen=True):
    """The agent sent an invalid message."""

    why: str


Event = (
    Needed
    | Tick
    | Connected
    | NoListener
    | ProcessStarted
    | ProcessEnded
    | Ended
    | HangUp
    | Welcomed
    | PredecessorEnds
    | DeclaredOutdated
    | Unwelcomed
    | NotUnderstood
)

# --- actions -------------------------------------------------------------------------------------


class Connect(Struct, frozen=True):
    """Connect to the first agent that listens at one of these places, and greet it. Leads to
    `Connected` or `NoListener`."""

    numbers: tuple[int, ...]


class StartProcess(Struct, frozen=True):
    """Start an agent at the present place. Leads to `ProcessStarted`."""


class Close(Struct, frozen=True):
    """Close the connection."""


class Fail(Struct, frozen=True):
    """No agent is available now: raise this error."""

    error: OSError


class Report(Struct, frozen=True):
    """Report a problem."""

    text: str
    severity: int


class ReportLost(Struct, frozen=True):
    """Report that the agent that had said welcome has ended. The owner answers with `HangUp`."""

    reason: str


class GiveUp(Struct, frozen=True):
    """Report that no agent is available until one is needed again."""

    reason: str


class AcceptWelcome(Struct, frozen=True):
    """Send the queued messages. `introduce`: the agent is new, and must get the introduction of
    other nodes' agents first."""

    introduce: bool


class ReportShutdown(Struct, frozen=True):
    """Report that a predecessor shuts down, and the data that it left."""


Action = (
    Connect
    | StartProcess
    | Close
    | Fail
    | Report
    | ReportLost
    | GiveUp
    | AcceptWelcome
    | ReportShutdown
)
Next = tuple[Standing, list[Action]]

# --- transitions ---------------------------------------------------------------------------------


def next_state(at: Standing, event: Event, now: float) -> Next:
    """The standing after an event, and the actions to carry out. Pure."""
    match event:
        case Needed(again=again):
            return _needed(at, now, again), []
        case ProcessStarted():
            starting = replace(at, since=now, start_after=now + AGAIN_SECONDS)
            return _unlinked(replace(starting, follows=True, unproved=True, exit_status=0)), []
        case ProcessEnded(status=status):
            return _unlinked(replace(at, follows=False, exit_status=status)), []
    if at.state is State.OUTDATED:
        refused = ConnectionRefusedError(OUTDATED)
        return at, [Fail(refused)] if isinstance(event, Tick) else []
    match event:
        case Tick():
            return _tick(at, now)
        case Connected(index=index):
            return replace(at, state=State.GREETING, index=index, since=now), []
        case NoListener():
            return _no_listener(at, now)
    if at.state not in LINKED:
        return at, []
    match event:
        case Ended() if at.state is State.CONNECTED:
            return at, [ReportLost("the agent ended unexpectedly")]
        case NotUnderstood(why=why) if at.state is State.CONNECTED:
            return at, [ReportLost(f"the agent {why}")]
        case Ended() | HangUp():  # before a welcome: the agent was ending, or had no thread for us
            return _closed(at, now), [Close()]
        case NotUnderstood(why=why):
            return _pass_over(at, now, why, logging.ERROR)
        case Unwelcomed(why=why):
            return _pass_over(at, now, why, logging.INFO)
        case Welcomed(pid=pid):
            proved = replace(at, unproved=False, refused=False, inherits=False)
            reached = replace(proved, state=State.CONNECTED, pid=pid, greeted=pid)
            return reached, [AcceptWelcome(introduce=pid != at.greeted)]
        case PredecessorEnds():
            return _predecessor_ends(at, event, now)
        case DeclaredOutdated():
            over = replace(_closed(at, now), state=State.OUTDATED, inherits=False)
            return over, [Close(), Report(OUTDATED, logging.ERROR), GiveUp(OUTDATED)]


def _needed(at: Standing, now: float, again: bool) -> Standing:
    if at.needed and not again:
        return at
    return _leave_start(replace(at, needed=True), now)


def _leave_start(at: Standing, now: float) -> Standing:
    """Leave the start to the node's first rank for a while, or for START_SECONDS if an agent
    started here would have the wrong environment. Commits wait until then."""
    seconds = 0.0 if at.first else JOIN_SECONDS
    return replace(at, start_after=now + (seconds if at.may_start else START_SECONDS))


def _unlinked(at: Standing) -> Standing:
    """Set SEARCHING or STARTING according to whether a process is followed."""
    if at.state in (State.SEARCHING, State.STARTING):
        return replace(at, state=State.STARTING if at.follows else State.SEARCHING)
    return at


def _closed(at: Standing, now: float) -> Standing:
    # The agent's process may still run for a moment: START_SECONDS count from now.
    after = _unlinked(replace(at, state=State.SEARCHING, pid=None, since=now))
    return after if at.may_start else _leave_start(after, now)


def _tick(at: Standing, now: float) -> Next:
    actions: list[Action] = []
    if at.state is State.CONNECTED:
        return at, []
    if at.state is State.GREETING:
        if now - at.since < ANSWER_SECONDS:
            return at, []
        at, actions = _pass_over(at, now, "does not answer", logging.ERROR)
    if at.state is State.WAITING:
        if now < at.ask_after:
            return at, actions
        at = _unlinked(replace(at, state=State.SEARCHING))
    return at, [*actions, Connect(at.numbers)]


def _no_listener(at: Standing, now: float) -> Next:
    """Start an agent, if one is needed and none is on its way."""
    error: OSError | None = None
    if not at.needed or at.inline:
        return at, []
    if at.follows:
        if now - at.since <= START_SECONDS:
            return at, []
        at = _unlinked(replace(at, follows=False))
        error = TimeoutError(f"a new agent could not be reached within {START_SECONDS:.0f} s")
    elif not at.may_start and now >= at.start_after:
        error = TimeoutError(
            f"the node's first rank has not started it within {START_SECONDS:.0f} s"
        )
    elif at.unproved and at.exit_status not in (0, TAKEN):
        error = ChildProcessError(f"a new agent ended with exit status {at.exit_status}")
        at = replace(at, exit_status=0)
    if error is not None:
        return at, [Fail(error)]
    return at, [] if now < at.start_after else [StartProcess()]


def _pass_over(at: Standing, now: float, why: str, severity: int) -> Next:
    """Leave a place: its agent hangs, or does not serve this trainer. It was sent nothing yet."""
    actions: list[Action] = [Close()]
    number, was_refused = at.index, at.refused
    after = replace(_closed(at, now), passed=at.passed | {number}, follows=False, exit_status=0)
    full = not after.places
    if full:
        waiting = replace(after, state=State.WAITING, ask_after=now + ANSWER_SECONDS)
        after = replace(waiting, passed=frozenset(), refused=True)
    else:
        after = _unlinked(after)
    after = _leave_start(replace(after, index=after.places[0]), now)
    if not was_refused:
        then = "and no other place is free" if full else "another one takes its place"
        text = f"agent {number} of this node {why}; {then}"
        actions.append(Report(text, logging.ERROR if full else severity))
    if full:
        actions.append(
            GiveUp(
                f"none of this node's {MAX_AGENTS} agents answers and serves this run; they are "
                "asked again"
            )
        )
    return after, actions


def _predecessor_ends(at: Standing, event: PredecessorEnds, now: float) -> Next:
    """Wait for the agent to end: then its place is free for ours."""
    actions: list[Action] = []
    if at.leaving is None or at.leaving[0] != event.pid:
        at = replace(at, leaving=(event.pid, now))
        actions.append(ReportShutdown())
        if event.inherits:  # it closes the port at which other nodes, and we, find that data
            at = _needed(replace(at, inherits=True), now, again=False)
    assert at.leaving is not None
    if now - at.leaving[1] > ANSWER_SECONDS:
        at, more = _pass_over(at, now, "does not end", logging.ERROR)
        return at, [*actions, *more]
    waiting = replace(_closed(at, now), state=State.WAITING, ask_after=now + GONE_SECONDS)
    return _leave_start(waiting, now), [Close(), *actions]
