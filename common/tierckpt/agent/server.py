"""The agent: one process a node that owns everything after a slot is sealed.

It takes sealed slots through the levels behind memory (today: `local`), so that the trainers'
Python is never disturbed, and goes on when a trainer is killed: it finishes what was handed to it.
A restarted trainer finds it where it was; it ends when all its trainers have said goodbye, or when
those that were killed did not come back for `linger_seconds`. A flush under way is finished first,
unless its store hangs, or a trainer of another environment comes, for whose agent this one shuts
down. It runs in a session of its own (launchers kill their workers' process groups) at low CPU and
I/O priority, and imports neither torch nor numpy.

Trainers reach it over a Unix socket in the job's private folder; `protocol` has the messages.
A trainer that was killed is waited for, and one that abandoned its job likewise, where agents of
other nodes may ask this one.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from . import protocol
from .address import _peer_uid
from .flusher import Flusher
from .protocol import (
    PROTOCOL,
    Finished,
    Hello,
    KnownNodes,
    Outdated,
    PersistentSettings,
    SessionSettings,
    ShuttingDown,
    Welcome,
)
from .session import TrainerSession
from .shard_guard import ShardGuard

if TYPE_CHECKING:
    from .protector import Protector

ACCEPT_AGAIN_SECONDS = 0.1
FIRST_CLIENT_SECONDS = 30.0
"""An agent that nobody speaks to ends after this; where its starter died before it could speak,
after the time to linger if that is less."""
STUCK_SECONDS = 1800.0
"""A flush that does not get on for so long is given up when no trainer is left: its store hangs.
Not less, as a large file's fsync may take its time."""
LOOK_AGAIN_SECONDS = 5.0
MOST_SECONDS = 3600.0
"""At a time; the kernel counts milliseconds, and only 25 days of them."""
FIRST_SECONDS = 2.0
"""An agent that shuts down waits so long for the node's first rank, which is to know the nodes that
the agent knows."""


Run = tuple[tuple[int | None, str], float]
"""A start of the job on this node: protocol and environment of its trainers, and when one of them
began (monotonic)."""


class Agent:
    """Serves every trainer that comes, each in a session and a thread of its own."""

    def __init__(self, linger_seconds: float, environment: str = "") -> None:
        """`environment`: a fingerprint; only trainers of the same are served. Empty: all are."""
        self.linger_seconds = linger_seconds
        self._environment = environment
        self.shutting_down = False
        """A run of another environment has begun: no more orders are taken, and this ends."""
        self._leave_at = 0.0
        """Until then the first rank of that run is waited for (monotonic)."""
        self._given_up: list[int] = []
        """Versions whose flush was given up for it."""
        self._run: Run = ((PROTOCOL, environment), -math.inf)
        """The newest that came."""
        self._lock = threading.Lock()
        self._threads: dict[tuple[str, int], threading.Thread] = {}
        """The thread that serves a shard's last trainer. One trainer of a shard at a time: a
        killed one's work is finished before its successor's begins."""
        self._seated: set[TrainerSession] = set()
        """Where trainers are served."""
        self._newest: dict[tuple[str, int], TrainerSession] = {}
        """Of the last trainer that came for a shard."""
        self._serving = 0
        self._missed: dict[tuple[str, int], float] = {}
        """Shards whose trainer was killed, and until when to wait for its successor."""
        self._here: dict[str, tuple[int, ...]] = {}
        """By directory: the node's ranks in the newest run that came."""
        self.held = ShardGuard()
        self._flushers: dict[PersistentSettings, Flusher] = {}
        self._protector: Protector | None = None
        self._woken, self._wake = socket.socketpair()

    def serve(
        self,
        listener: socket.socket,
        let_go: Callable[[], None] = lambda: None,
        starter: int | None = None,
    ) -> None:
        """Accept trainers until there is nobody to serve, or to wait for, any more.

        `starter` is a descriptor of the process that started this one; None: it is gone already.
        `let_go` is called, perhaps several times, once that has ended or all trainers have gone,
        whatever is still under way: who waits for their output is not to wait for this process.
        """
        nobody_before, looked_again = time.monotonic() + FIRST_CLIENT_SECONDS, False
        with selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            if starter is not None:
                selector.register(starter, selectors.EVENT_READ)
            else:
                nobody_before = self._orphaned(nobody_before)
                let_go()
            while True:
                left = self._patience(nobody_before)
                with self._lock:
                    flushing, alone = bool(self._flushing()), not self._serving
                    idle = list(self._flushers.values()) if alone else []
                for flusher in idle:
                    flusher.rest()
                over = left is not None and left <= 0
                if over and (looked_again or not flushing):
                    return
                if over:  # all of us may have been stopped, and the flusher goes on in a moment
                    left = LOOK_AGAIN_SECONDS
                looked_again = over
                if alone and not nobody_before:
                    let_go()
                for key, _ in selector.select(None if left is None else min(left, MOST_SECONDS)):
                    if key.fileobj is listener:
                        if self._accept(listener):
                            nobody_before = 0
                    elif key.fileobj == starter:
                        selector.unregister(key.fileobj)
                        nobody_before = self._orphaned(nobody_before)
                        let_go()
                    else:
                        self._woken.recv(1)

    def _orphaned(self, nobody_before: float) -> float:
        return min(nobody_before, time.monotonic() + self.linger_seconds)

    def _patience(self, nobody_before: float) -> float | None:
        """How long to wait for a trainer; None: until those that are here have gone."""
        with self._lock:
            if self.shutting_down:
                return None if self._serving else self._leave_at - time.monotonic()
            if self._serving or self._protecting():
                return None
            stuck = [at + max(STUCK_SECONDS, self.linger_seconds) for at in self._flushing()]
            return max([nobody_before, *self._awaited(), *stuck]) - time.monotonic()

    def _awaited(self) -> list[float]:
        """With the lock held: until when to wait for each trainer that may come back; as long from
        when another node last read what it left."""
        read = self._protector.asked_at() + self.linger_seconds if self._protector else 0.0
        ends = [
            max(end, read)
            for (directory, shard), end in self._missed.items()
            if shard in self._here.get(directory, (shard,))
        ]
        now = time.monotonic()
        return [end for end in ends if end > now]  # the others come back no more

    def _at_work(self) -> bool:
        """With the lock held: something goes on that no trainer waits for."""
        return self._protecting() or bool(self._flushing())

    def _protecting(self) -> bool:
        return self._protector is not None and self._protector.busy()

    def _flushing(self) -> list[float]:
        """When each flush that is under way last got on (monotonic)."""
        return [f.went_on_at for f in self._flushers.values() if f.busy()]

    def close(self) -> None:
        """Give up what the agent itself holds."""
        if self._protector is not None:
            self._protector.close()
        for flusher in self._flushers.values():
            flusher.close()
        self._woken.close()
        self._wake.close()

    def _accept(self, listener: socket.socket) -> bool:
        """True when there is somebody to serve."""
        try:
            channel, _ = listener.accept()
        except OSError:  # no descriptor is left, or they hung up
            time.sleep(ACCEPT_AGAIN_SECONDS)
            return False
        if _peer_uid(channel) != os.getuid():
            channel.close()
            return False
        try:
            self.attend(channel)
        except OSError:  # it finds itself hung up on, and tries again
            return False
        return True

    def attend(self, channel: socket.socket) -> threading.Thread:
        """Serve the trainer at the other end of `channel`, in a new thread; returns that.

        Raises OSError when there may be no more threads; `channel` is closed then.
        """
        thread = threading.Thread(
            target=self._attend, args=(channel,), name="tierckpt-session", daemon=True
        )
        with self._lock:
            self._serving += 1
        try:
            thread.start()
        except RuntimeError as error:
            with self._lock:
                self._serving -= 1
            channel.close()
            raise OSError(str(error)) from error
        return thread

    def _attend(self, channel: socket.socket) -> None:
        made, said_goodbye = None, True
        try:
            with channel:
                hello = _greeting(channel)
                if hello is None:
                    return
                settings = hello.session
                if settings is None or not self._serves(hello):
                    self._turn_away(hello, channel)
                    return
                made = TrainerSession(settings, channel, self)
                before = self._sit_down(made)
                said_goodbye = False  # until it does: it is waited for also if the session breaks
                made.say(Welcome(os.getpid(), self._known_nodes(settings)))
                made.await_turn(before)
                goodbye = made.serve()
                if self.shutting_down:
                    made.say(Outdated())
                if goodbye is not None:
                    said_goodbye = not (goodbye.abandoned and self._may_be_asked())
                    with self._lock:
                        others = self._serving > 1 or self._awaited() or self._at_work()
                        last = said_goodbye and not others
                    made.say(Finished(last))
        except ConnectionError:
            pass
        finally:
            with self._lock:
                self._serving -= 1
                if made is not None:
                    self._seated.discard(made)
                    # Its successor may have come before its end was noticed.
                    if not said_goodbye and self._newest[made.at] is made:
                        self._missed[made.at] = time.monotonic() + self.linger_seconds
            with contextlib.suppress(OSError):
                self._wake.send(b"\0")

    def _may_be_asked(self) -> bool:
        """Whether to linger is of use: the agents of several nodes have met, and a run without
        this node would ask. On the node itself slots and files are found without an agent."""
        met = self._protector is not None and bool(self._protector.known_nodes())
        return met and self.linger_seconds > 0

    def _serves(self, hello: Hello) -> bool:
        """Whether such a trainer is served here."""
        run_id = _run_of(hello)
        (number, theirs), _ = run_id
        same = theirs == self._environment or not (theirs and self._environment)
        with self._lock:
            if self.shutting_down or number != PROTOCOL or not same:
                return False
            self._run = max(self._run, run_id, key=_began)
            return True

    def _sit_down(self, session: TrainerSession) -> threading.Thread | None:
        """Be the newest that serves its shard, in this thread; returns who did before."""
        with self._lock:
            self._seated.add(session)
            if self.shutting_down:  # since that was looked at
                self._given_up += session.leave()
            self._missed.pop(session.at, None)
            self._newest[session.at] = session
            if session.settings.ranks:
                self._here[session.settings.directory] = session.settings.ranks
            before = self._threads.get(session.at)
            self._threads[session.at] = threading.current_thread()
            return before

    def _known_nodes(self, session: SessionSettings) -> KnownNodes | None:
        """Other nodes' agents, as far as known; for the node's first trainer."""
        if session.first and self._protector is not None:
            return self._protector.known_nodes()
        return None

    # --- for trainers of other environments ----------------------------------------------------

    def _turn_away(self, hello: Hello, channel: socket.socket) -> None:
        """Shut down for a later run; a trainer of an earlier one is told that it is over."""
        run_id, session = _run_of(hello), hello.session
        with self._lock:
            outdated = run_id[0] != self._run[0] and _began(run_id) < _began(self._run)
            if not outdated:
                self._run = max(self._run, run_id, key=_began)
                self._begin_shutdown()
        if outdated:
            protocol.send(channel, Outdated())
            return
        known_nodes = None if session is None else self._known_nodes(session)
        where = self._protector.met_at() if known_nodes and self._protector is not None else None
        given_up = tuple(sorted({*self._given_up}))
        protocol.send(channel, ShuttingDown(os.getpid(), known_nodes, where, given_up))
        if session is None or session.speaks:
            with self._lock:
                self._leave_at = 0.0
        if self._protector is not None:
            self._protector.close()  # the port is the successor's

    def _begin_shutdown(self) -> None:
        """With the lock held: finish the commits under way, and give up all else. Of that nothing
        is removed: it is left as if this process were killed. Who has not said yet who it is stays
        connected, as it may be the one to be told."""
        if self.shutting_down:
            return
        self.shutting_down = True
        self._leave_at = time.monotonic() + FIRST_SECONDS
        for flusher in self._flushers.values():
            self._given_up += flusher.cancel()
        for session in self._seated:
            self._given_up += session.leave()

    # --- what all sessions share ---------------------------------------------------------------

    def flusher(self, session: SessionSettings) -> Flusher | None:
        """One for all sessions that flush to the same place."""
        if session.persistent is None:
            return None
        settings = session.persistent
        with self._lock:
            self._check_stays()
            return self._flushers.setdefault(settings, Flusher(settings, self.held, self._wake_up))

    def protector(self) -> Protector:
        """One for the node."""
        from .protector import Protector  # and with it numpy

        with self._lock:
            self._check_stays()
            if self._protector is None:
                self._protector = Protector(self.held, self._wake_up)
            return self._protector

    def _check_stays(self) -> None:
        """With the lock held: an order that a trainer gave just before is not begun any more."""
        if self.shutting_down:
            raise RuntimeError("the agent shuts down for a later start's")

    def _wake_up(self) -> None:
        with contextlib.suppress(OSError):
            self._wake.send(b"\0")


def _greeting(channel: socket.socket) -> Hello | None:
    """The trainer's first message; None for anything else."""
    with contextlib.suppress(ValueError):
        hello, _ = protocol.receive(channel)
        return hello if isinstance(hello, Hello) else None
    return None


def _run_of(hello: Hello) -> Run:
    """The trainer's run. A trainer of another protocol that does not say when it began has just."""
    began = hello.began_seconds
    return (hello.protocol, hello.environment), time.monotonic() if began is None else began


def _began(run_id: Run) -> float:
    return run_id[1]
