"""Leader tree: a minimum over all ranks, by a page of memory on each node and a tree of nodes.

A ring of N ranks passes 2 (N - 1) messages one after the other. Here the ranks of a node write
their votes to a page that they share (`SharedBallots`); the rank that completes a turn wakes a
thread of the node's first rank, the leader. Leaders form a tree over TCP: each sends the minimum
of its node and of the nodes below it to its parent, the result comes back the same way, and each
leader writes it to its node's page, where the others read it. A turn takes two messages a level of
the tree, and no rank other than a leader has a connection.

The thread sends and receives a few numbers and calls no collective of the group. A rank gone
without a vote breaks the tree: every rank that waits for a result raises RankGoneError, and results
that were complete before stay. So does a connection that ends, and an error in a thread;
`GroupBallots.recover` finds out that no rank is gone, and votes continue by the group's reduction.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import queue
import secrets
import selectors
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from tierckpt._text import error_text
from tierckpt.errors import PeerError, TierckptError
from tierckpt.group import Group, Node, Pending, SingleGroup
from tierckpt.net.addresses import Address, own_host, own_network
from tierckpt.net.handshake import Caller, Listener, greet
from tierckpt.net.limits import LEADERS, tend
from tierckpt.net.link import Link, reach

from .ballots import (
    FIRST_PAUSE_SECONDS,
    LONGEST_PAUSE_SECONDS,
    PATIENCE_SECONDS,
    TOKEN_BYTES,
    TURNS,
    RankGoneError,
    SharedBallots,
    Votes,
    make_page,
    map_page,
    page_bytes,
    read_row,
    row_bytes,
    watch_processes,
    write_row,
)

__all__ = ["LeaderTree", "leader_tree"]


PURPOSE = "leader"
"""Kind of listener that a node's leader is (see `net.handshake`)."""
FAN_OUT = 8
"""Children of a node. More would make a lower tree, and more messages for one thread."""
MEETING_SECONDS = 30.0
"""Longest time to connect to the parent and to accept the children."""
SEND_SECONDS = 30.0
"""Longest time for a message of a few hundred bytes; then the neighbour counts as gone."""
LAST_SECONDS = 1.0
"""Longest time that a leader which closes waits for results of turns that it has voted in."""
LOOK_AGAIN_SECONDS = 1.0
"""Longest time until a leader sees a vote without a wake-up: an interrupt (a signal's
handler that raises) came between the two."""
_RESULT, _BROKEN = 0, 1
_NEVER = 1 << 62


class _NodeRanks(SingleGroup):
    """The numbers of a node's ranks, for their page."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


class LeaderTree:
    """The reduction on one rank. Casts and `close` on the training thread; any thread may wait."""

    def __init__(
        self,
        node: Node,
        rank: int,
        width: int,
        page: mmap.mmap,
        processes: dict[int, int],
        wake_fd: int,
    ) -> None:
        """Own the node's `page`, `processes` (by the place in the node, a pidfd of every other
        rank), and the writing end of the pipe that wakes the leader."""
        ranks = _NodeRanks(node.ranks.index(rank), len(node.ranks))
        self._node, self._ranks = SharedBallots(page, ranks, width, processes), node.ranks
        self.width = width
        self._shape = struct.Struct(f"<q{width}q")
        self._broken = struct.Struct("<qq")
        first = page_bytes(len(node.ranks), width)
        self._results_at = [first + turn * row_bytes(width) for turn in range(TURNS)]
        self._broken_at = first + TURNS * row_bytes(width)
        self._wake_fd = wake_fd
        self.leader: _Leader | None = None

    def all_reduce_min(self, values: list[int]) -> Pending:
        """Launch a minimum as a Group does."""
        self._node.all_reduce_min(values)
        turn = self._node.turn
        if not self.missing_here(turn):
            self.wake()
        return _PendingResult(self, turn)

    @property
    def turn(self) -> int:
        """The turn of this rank's last vote."""
        return self._node.turn

    def why_lost(self) -> str:
        """Return the error of this rank's thread, if it is a leader and its thread failed."""
        return "" if self.leader is None else self.leader.trouble

    def no_votes(self) -> Votes:
        """Return the votes of a turn before any has come."""
        return [None] * len(self._ranks)

    def missing_here(self, turn: int, votes: Votes | None = None) -> list[int]:
        """Return the ranks in the node, by their place in it, without a vote of that turn; add the
        votes that have come to `votes`."""
        return self._node.missing(turn, self.no_votes() if votes is None else votes)

    def wake(self) -> None:
        """Wake the leader's thread, which looks at the page. Any thread."""
        if self._wake_fd >= 0:
            with contextlib.suppress(OSError):  # full: it is awake; broken: the leader is gone
                os.write(self._wake_fd, b"\0")

    def result(self, turn: int) -> list[int] | None:
        """Return that turn's result; None before it is here. Raises RankGoneError if it will not
        come, and RuntimeError when the ballots are closed. Any thread."""
        with self._node.opened() as page:
            at = self._results_at[turn % TURNS]
            broken = read_row(page, self._broken_at, self._broken, 1)
            # In this order: the result may have come just before the tree broke.
            found = read_row(page, at, self._shape, turn)
        if found is not None:
            if found[0] != turn:
                raise RuntimeError(f"the result of turn {turn} was asked for after {found[0]}")
            return [*found[1:]]
        if broken is not None and turn >= broken[0]:
            raise RankGoneError(f"rank {broken[1]} was gone before it reached this boundary")
        return None

    def lost_leader(self) -> bool:
        """True if the process of this node's leader has ended: no result will come. Any thread."""
        return self._node.has_ended(0)

    @property
    def leader_rank(self) -> int:
        """The rank of the node's leader."""
        return self._ranks[0]

    def lost_here(self, turn: int) -> list[int]:
        """Return the job's ranks on this node that have no vote of that turn and are gone."""
        # Twice: a rank may vote and leave in between.
        gone = [place for place in self.missing_here(turn) if self._node.is_gone(place)]
        return [self._ranks[place] for place in self.missing_here(turn) if place in gone]

    def write(self, turn: int, values: Sequence[int]) -> None:
        """Write a turn's result for the ranks of this node. Leader's thread."""
        with self._node.opened() as page:
            write_row(page, self._results_at[turn % TURNS], self._shape.pack(turn, *values))

    def write_broken(self, turn: int, rank: int) -> None:
        """Let the ranks of this node know that `rank` has no vote of that turn and is gone.
        Leader's thread."""
        with self._node.opened() as page:
            write_row(page, self._broken_at, self._broken.pack(turn, rank))

    def process_fds(self) -> list[int]:
        """Descriptors that become readable when a process of the node ends."""
        return self._node.process_fds()

    def close(self) -> None:
        """End on this rank: others that wait for it learn that it is gone. Not collective."""
        self._node.leave()
        self.wake()
        if self.leader is not None:
            self.leader.end()
        self._node.close()
        if self._wake_fd >= 0:
            os.close(self._wake_fd)
            self._wake_fd = -1


class _PendingResult:
    """A minimum under way; any thread may wait, more than once."""

    def __init__(self, tree: LeaderTree, turn: int) -> None:
        self._tree, self._turn = tree, turn
        self._result: list[int] | None = None
        self._woken = False

    def _look(self) -> bool:
        """Return whether the result is here. Raises as `LeaderTree.result`."""
        if self._result is None:
            self._result = self._tree.result(self._turn)
        if self._result is None and not self._woken:
            # The ranks that came last may not have seen each other's votes.
            self._woken = True
            if not self._tree.missing_here(self._turn):
                self._tree.wake()
        return self._result is not None

    def done(self) -> bool:
        """True if `wait` would return or raise at once."""
        try:
            return self._look() or self._tree.lost_leader()
        except RuntimeError:
            return True

    def wait(self) -> list[int]:
        """Return the result. Raises RankGoneError if a rank is gone, TimeoutError after the
        patience of torch's collectives."""
        deadline, pause = time.monotonic() + PATIENCE_SECONDS, FIRST_PAUSE_SECONDS
        while not self._look():
            if self._tree.lost_leader() and not self._look():
                rank = self._tree.leader_rank
                raise RankGoneError(f"rank {rank} was gone before it reached this boundary")
            if time.monotonic() > deadline:
                raise TimeoutError(f"no result of the votes in {PATIENCE_SECONDS:g} s")
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        assert self._result is not None
        return self._result


class _Link:
    """A connection to a neighbour in the tree, which carries frames of one size. A forked child (a
    DataLoader's worker) closes its copy: the connection ends with this process."""

    def __init__(self, end: socket.socket, frame: struct.Struct, rank: int) -> None:
        """Own `end`. `rank`: the neighbour."""
        end.settimeout(SEND_SECONDS)
        tend(end, LEADERS)
        self.end, self.rank = end, rank
        self._frame, self._received = frame, bytearray()
        _links.add(self)

    def send(self, kind: int, turn: int, values: Sequence[int]) -> None:
        """Send a frame. Raises OSError."""
        self.end.sendall(self._frame.pack(kind, turn, *values))

    def no_more(self) -> None:
        """Send nothing more."""
        with contextlib.suppress(OSError):
            self.end.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close, after the neighbour has what was sent: closing with unread bytes would drop it."""
        self.no_more()
        with contextlib.suppress(OSError):
            self.end.settimeout(0.0)
            while self.end.recv(1 << 16):
                pass
        self.end.close()

    def receive(self) -> list[tuple[int, int, list[int]]] | None:
        """Return the frames that have come; None at the end. Called when the socket is
        readable."""
        try:
            data = self.end.recv(1 << 16)
        except OSError:
            return None
        self._received += data
        found, size = [], self._frame.size
        while len(self._received) >= size:
            kind, turn, *values = self._frame.unpack(self._received[:size])
            del self._received[:size]
            found.append((kind, turn, values))
        return found if data or found else None


_links: weakref.WeakSet[_Link] = weakref.WeakSet()


def _close_in_child() -> None:
    for link in [*_links]:
        link.end.close()


os.register_at_fork(after_in_child=_close_in_child)


class _Leader:
    """The thread of a node's first rank: receives, combines, sends, and writes to the page."""

    def __init__(
        self, tree: LeaderTree, wake_fd: int, parent: _Link | None, children: Sequence[_Link]
    ) -> None:
        """Own `wake_fd`, the reading end of the pipe, and the links, also after an error. Raises
        RuntimeError if no thread can be started."""
        self._tree, self._wake_fd = tree, wake_fd
        self._parent, self._children = parent, list(children)
        self.links = [*filter(None, [parent]), *children]
        self._turn = 1
        """The next turn to send up."""
        self._cast: Votes = tree.no_votes()
        """The node's votes of that turn that have come."""
        self._below: dict[_Link, deque[list[int]]] = {child: deque() for child in children}
        """Minima of the children that are not sent up yet, in the order of turns."""
        self._delivered = 0
        """The last turn of which the result came down."""
        self._broken_from = _NEVER
        """The first turn of which no result can come, as a rank is gone."""
        self._over = False
        self.trouble = ""
        """The error that ended the thread, as text."""
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._run, name="tierckpt-votes", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self._release()
            raise

    def end(self) -> None:
        """End the thread and close the links, after the results of turns that all have voted in; at
        the latest after some time."""
        self._thread.join(LAST_SECONDS)
        self._over = True
        self._tree.wake()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._selector.register(self._wake_fd, selectors.EVENT_READ, None)
            for link in self.links:
                self._selector.register(link.end, selectors.EVENT_READ, link)
            for fd in self._tree.process_fds():
                self._selector.register(fd, selectors.EVENT_READ, None)
            while not (self._over or self._delivered + 1 >= self._broken_from):
                for key, _ in self._selector.select(LOOK_AGAIN_SECONDS):
                    self._receive(key)
                self._send_up()
        except Exception as error:  # no result comes from here any more
            rank = self._tree.leader_rank
            self.trouble = f"on rank {rank}: {error_text(error)}"
        finally:
            with contextlib.suppress(Exception):
                self._break(self._delivered + 1, self._tree.leader_rank)
            self._release()

    def _release(self) -> None:
        self._selector.close()
        for link in self.links:
            link.close()
        os.close(self._wake_fd)

    def _receive(self, key: selectors.SelectorKey) -> None:
        link = key.data
        if link is None:
            if key.fd == self._wake_fd:
                os.read(self._wake_fd, 4096)
            else:
                self._selector.unregister(key.fd)  # a process has ended, and is readable for ever
            return
        frames = link.receive()
        if frames is None:
            self._selector.unregister(link.end)
            is_child = link in self._below
            turn = self._turn + len(self._below[link]) if is_child else self._delivered + 1
            self._break(turn, link.rank)
        for kind, turn, values in frames or ():
            if kind == _BROKEN:
                self._break(turn, values[0])
            elif link is self._parent:
                self._send_down(turn, values)
            else:
                self._below[link].append(values)

    def _send_up(self) -> None:
        """Send the minima of all turns that are complete in this part of the tree."""
        while self._turn < self._broken_from:
            if self._tree.missing_here(self._turn, self._cast):
                if lost := self._tree.lost_here(self._turn):
                    self._break(self._turn, lost[0])
                return
            if not all(self._below.values()):
                return
            below = [minima.popleft() for minima in self._below.values()]
            here = [vote[0] for vote in self._cast if vote is not None]
            least = [*map(min, *here, *below)] if len(here) + len(below) > 1 else here[0]
            turn, self._turn, self._cast = self._turn, self._turn + 1, self._tree.no_votes()
            if self._parent is None:
                self._send_down(turn, least)
            else:
                self._send(self._parent, _RESULT, turn, least)

    def _send_down(self, turn: int, values: Sequence[int]) -> None:
        # In this order: a rank of this node that has read the result may die at once, and others
        # below have it all the same.
        for child in self._children:
            self._send(child, _RESULT, turn, values)
        self._tree.write(turn, values)
        self._delivered = turn

    def _break(self, turn: int, rank: int) -> None:
        """Let all ranks know that `rank` is gone, without a vote of that turn. Results of earlier
        turns still come."""
        if turn >= self._broken_from:
            return
        self._broken_from = turn
        self._tree.write_broken(turn, rank)
        for link in self.links:
            self._send(link, _BROKEN, turn, [rank, *[0] * (self._tree.width - 1)])

    def _send(self, link: _Link, kind: int, turn: int, values: Sequence[int]) -> None:
        try:
            link.send(kind, turn, values)
        except OSError:
            link.no_more()  # `receive` sees its end, after the frames that it sent before


class _Meeting(Struct, frozen=True):
    """Values that every rank sends to the others before the tree is made."""

    pid: int
    page: str
    """Path of the node's page while its leader waits; empty from the others."""
    pipe: str
    """Path of the pipe that wakes the leader; empty from the others."""
    token: bytes
    machine: str
    network: str


def leader_tree(group: Group, node: Node, width: int, interface: str = "") -> LeaderTree | None:
    """Return the tree for these ranks; None on all ranks if one of them cannot be in it.
    Collective.

    `interface`: as the setting `peer_interface`.
    """
    is_leader = node.first == group.rank
    with contextlib.ExitStack() as only_now, contextlib.ExitStack() as unless_whole:
        page, pipe, own = _offer(node, width, is_leader, only_now, unless_whole)
        gathered: list[_Meeting] = group.all_gather_object(own)
        secret = gathered[0].token
        listener, where = _listen(gathered, group.rank, interface) if is_leader else (None, None)
        if listener is not None:
            only_now.callback(listener.close)
        leaders: list[Any] = group.all_gather_object((node.index, where, is_leader))
        places = {index: place for index, place, leads in leaders if leads}
        firsts = {index: rank for rank, (index, _, leads) in enumerate(leaders) if leads}
        part, links = None, None
        if all(places.values()):
            part = _join(page, pipe[1], gathered, node, group.rank, width, unless_whole)
            if is_leader and listener is not None:
                frame = struct.Struct(f"<qq{width}q")
                links = _connect(listener, places, firsts, node.index, secret, frame)
                for link in filter(None, [links[0], *links[1]] if links else []):
                    unless_whole.callback(link.end.close)
        tree = None
        if part is not None and (links is not None or not is_leader):
            unless_whole.pop_all()
            tree = _started(LeaderTree(node, group.rank, width, *part), pipe[0], links)
        if not all(group.all_gather_object(tree is not None)):
            if tree is not None:
                tree.close()
            return None
        return tree


def _started(
    tree: LeaderTree, wake_fd: int, links: tuple[_Link | None, list[_Link]] | None
) -> LeaderTree | None:
    """Start the thread of a leader, which has `links`; None, with all closed, if that fails."""
    try:
        if links is not None:
            tree.leader = _Leader(tree, wake_fd, *links)
    except RuntimeError:
        tree.close()
        return None
    return tree


def _offer(
    node: Node,
    width: int,
    is_leader: bool,
    only_now: contextlib.ExitStack,
    unless_whole: contextlib.ExitStack,
) -> tuple[mmap.mmap | None, tuple[int, int], _Meeting]:
    """Return the page and the pipe that the leader makes, and this rank's part of the meeting."""
    page, where, ends, pipe, token = None, "", (-1, -1), "", secrets.token_bytes(TOKEN_BYTES)
    if is_leader:
        nbytes = _page_bytes(node, width)
        with contextlib.suppress(OSError, AttributeError):
            ends = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            unless_whole.callback(os.close, ends[0])
            unless_whole.callback(os.close, ends[1])
            pipe = f"/proc/{os.getpid()}/fd/{ends[1]}"
            page, where = make_page(nbytes, token, only_now)
    meeting = _Meeting(os.getpid(), where, pipe, token, socket.gethostname(), own_network())
    return page, ends, meeting


def _page_bytes(node: Node, width: int) -> int:
    """Return the size of a node's page: the votes, the results, and the row of a broken tree."""
    return page_bytes(len(node.ranks), width) + (TURNS + 1) * row_bytes(width)


def _listen(
    gathered: Sequence[_Meeting], rank: int, interface: str
) -> tuple[_Callers | None, Address | None]:
    """Return a listener that other nodes reach, and its address; None if there is none."""
    own = gathered[rank]
    towards = next((m.machine for m in gathered if m.machine != own.machine), "localhost")
    try:
        where = Address(own_host(interface, towards), 0)
        if where.is_loopback and any(m.network != own.network for m in gathered):
            return None, None
        callers = _Callers(where, gathered[0].token)
    except (OSError, ValueError, RuntimeError, TierckptError):
        return None, None
    return callers, callers.listener.address


def _join(
    page: mmap.mmap | None,
    wake_fd: int,
    gathered: Sequence[_Meeting],
    node: Node,
    rank: int,
    width: int,
    until: contextlib.ExitStack,
) -> tuple[mmap.mmap, dict[int, int], int] | None:
    """Return the node's page, the processes of its ranks, and the end of the pipe that wakes the
    leader; None if this rank cannot open one of them."""
    leader = gathered[node.first]
    nbytes = _page_bytes(node, width)
    page = page or map_page(leader.page, leader.token, nbytes)
    if page is None:
        return None
    until.callback(page.close)
    pids = {at: gathered[r].pid for at, r in enumerate(node.ranks) if r != rank}
    processes = watch_processes(pids, until)
    if processes is None:
        return None
    if wake_fd < 0:
        try:
            wake_fd = os.open(leader.pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return None
        until.callback(os.close, wake_fd)
    return page, processes, wake_fd


class _Callers:
    """A leader's listener, and the callers that know the job's secret."""

    def __init__(self, where: Address, secret: bytes) -> None:
        """Raises OSError, and RuntimeError without a thread."""
        self._met: queue.SimpleQueue[tuple[Link, Any]] = queue.SimpleQueue()
        self.listener = Listener(where, PURPOSE, lambda: [secret], self._meet)

    def _meet(self, link: Link, caller: Caller) -> bool:
        self._met.put((link, caller.hello.get("node")))
        return True

    def next(self, deadline: float) -> tuple[Link, Any]:
        """Return a connection, and the number of its node. Raises PeerError."""
        try:
            return self._met.get(timeout=max(0.01, deadline - time.monotonic()))
        except queue.Empty as error:
            raise PeerError("a node below did not connect in time") from error

    def close(self) -> None:
        """Listen no more, and close the connections not taken."""
        self.listener.close()
        while not self._met.empty():
            self._met.get()[0].close()


def _connect(
    callers: _Callers,
    places: dict[int, Address],
    firsts: dict[int, int],
    index: int,
    secret: bytes,
    frame: struct.Struct,
) -> tuple[_Link | None, list[_Link]] | None:
    """Return the links to the parent and to the children; None if one cannot be made."""
    expected = {c for c in range(FAN_OUT * index + 1, FAN_OUT * (index + 1) + 1) if c in places}
    deadline = time.monotonic() + MEETING_SECONDS
    with contextlib.ExitStack() as on_failure:
        parent, children = None, []
        try:
            if index:
                above = (index - 1) // FAN_OUT
                link = reach(places[above], MEETING_SECONDS)
                on_failure.callback(link.close)
                greet(link, PURPOSE, secret, {"node": index}, MEETING_SECONDS)
                end = link.released()
                on_failure.callback(end.close)
                parent = _Link(end, frame, firsts[above])
            while expected:
                link, child = callers.next(deadline)
                if child not in expected:
                    link.close()
                    continue
                end = link.released()
                on_failure.callback(end.close)
                expected.remove(child)
                children.append(_Link(end, frame, firsts[child]))
        except (OSError, PeerError):
            return None
        on_failure.pop_all()
    return parent, children
