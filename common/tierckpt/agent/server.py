"""The agent: one process per node that owns every shard after its slot is sealed.

It takes sealed slots through the levels below memory, so the Python of the trainers is never
disturbed. When a trainer is killed, it finishes the work that was handed over, and a restarted
trainer finds it in the same place. It ends when all trainers have said goodbye, or when killed
ones have not come back within `linger_seconds`. It finishes flushes in progress first, unless
their store hangs, or a trainer of another environment comes: then it shuts down for that trainer's
agent. It runs in its own session (launchers kill their workers' process groups) at low CPU and I/O
priority, and imports neither torch nor numpy.

Trainers connect over a Unix socket in the job's private folder; `protocol` has the messages. The
agent waits for a trainer that was killed. It also waits for one that abandoned its job, if agents
of other nodes may read from this one.

A `TrainerSession` is the agent's side of one trainer: commits, and retention of the rank's shards.
Each has one thread.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import selectors
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tierckpt import _faults
from tierckpt._text import error_text
from tierckpt.codecs.codec import Pipeline
from tierckpt.codecs.shard_coding import Chain
from tierckpt.config import RetentionPolicy
from tierckpt.core.levels import PEER
from tierckpt.core.retention import retirable
from tierckpt.errors import ConfigError, CorruptShardError
from tierckpt.format.ids import Lineage, ParityKey, ShardKey, VersionId
from tierckpt.storage import file_lock
from tierckpt.storage.local import CommitTimes, LocalStore, References, commit_encoded
from tierckpt.storage.marks import LocalPins, local_suspects
from tierckpt.storage.slots import Slot

from . import protocol
from .address import _peer, _peer_uid
from .flusher import Flusher
from .pipeline import Hosted, HostedOrder, ShardGuard, Stage
from .processor import UsageSampler, shorten_slices
from .protocol import (
    PROTOCOL,
    AgentMessage,
    AgentStatus,
    AskProgress,
    Bye,
    Cleaned,
    Commit,
    Committed,
    Finished,
    Flush,
    Forward,
    Hello,
    Inherit,
    Introduce,
    KnownNodes,
    Listen,
    ListenFailed,
    Listening,
    Message,
    Outdated,
    PersistentSettings,
    Problem,
    Progress,
    Protect,
    Retire,
    SessionSettings,
    ShuttingDown,
    Welcome,
)
from .status import Activity

if TYPE_CHECKING:
    from .protector import Protector


REMOVED = (
    "{version} was removed by another program, and older versions perhaps, too. Files are "
    "written again from the next version on; `tierckpt list` shows what is left"
)
LOOK_SECONDS = 0.1
"""Interval between two reads of messages from a trainer that waits for its turn."""
Received = tuple[Message | None, list[int]]
"""A message and its descriptors; None: the trainer has closed the connection."""


class NodeServices(Protocol):
    """Services that all sessions of an agent share. Any thread."""

    held: ShardGuard
    activity: Activity
    shutting_down: bool
    """True when the agent takes no more orders."""

    def flusher(self, session: SessionSettings) -> Flusher | None:
        """The flusher of the persistent level, if the session has one."""
        ...

    def protector(self) -> Protector:
        """The node's protector."""
        ...

    def hosted(self, text: str) -> Hosted:
        """The stage of the setting with this text."""
        ...


class TrainerSession:
    """Serves one trainer. Its messages wait in the socket while a slot is written."""

    def __init__(
        self, settings: SessionSettings, channel: socket.socket, services: NodeServices
    ) -> None:
        self.settings = settings
        self.services = services
        self.channel = channel
        self.store = LocalStore(settings.directory)
        self._chain = Chain()
        self._bases = References(self.store)
        self._sending = threading.Lock()
        self._receiving = threading.Lock()
        self._cleaned_strays = False
        self._waiting: deque[Received] = deque()
        """Messages that arrived before the trainer's turn."""
        self._slots: dict[tuple[int, int], Slot] = {}
        """Mapped slots by device and inode; mapping a large segment for every commit is slow."""
        self._newest: ShardKey | None = None
        """The shard of the last commit, unless it was retired."""

    @property
    def at(self) -> tuple[str, int]:
        """Directory and shard that the session is for."""
        return self.settings.directory, self.settings.shard

    def await_turn(self, before: threading.Thread | None) -> None:
        """Wait until the shard's previous trainer has been served: its last commits may take long.
        Orders that do not concern the shard are done at once: other nodes' agents wait for them."""
        try:
            while before is not None and before.is_alive():
                self._process_early()
                before.join(LOOK_SECONDS)
        finally:
            if before is not None:  # the next session waits only for this thread
                before.join()

    def _process_early(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self.channel, selectors.EVENT_READ)
            while not self._is_over() and selector.select(0):
                message, fds = self._receive()
                match message:
                    case Flush() | Listen() | Introduce() | Inherit() | Protect() | Forward():
                        self._carry_out(message, fds)  # does not concern the shard
                    case _:
                        self._waiting.append((message, fds))

    def _is_over(self) -> bool:
        """True if the trainer's last message has arrived."""
        return bool(self._waiting) and isinstance(self._waiting[-1][0], Bye | None)

    def _receive(self) -> Received:
        """The next message; for invalid bytes, the `Problem` to answer with."""
        try:
            with self._receiving:
                return protocol.receive(self.channel)
        except ValueError as error:
            return Problem(f"the agent received an invalid message of its trainer: {error}"), []

    def leave(self) -> list[int]:
        """Stop reading, because the agent shuts down. Returns the versions of flush orders that
        were still unread, for example during a commit. Any thread; does not wait."""
        unread: list[int] = []
        with contextlib.suppress(OSError):
            self.channel.shutdown(socket.SHUT_RD)
            message, fds = self._receive()
            while message is not None:
                if isinstance(message, Flush):
                    unread.append(message.order.id.version)
                for fd in fds:
                    os.close(fd)
                message, fds = self._receive()
        return unread

    def serve(self) -> Bye | None:
        """Serve until the trainer has left and its work is done, or the agent shuts down. Returns
        the trainer's goodbye; None when it said none."""
        self._prepare()
        try:
            while True:
                message, fds = self._waiting.popleft() if self._waiting else self._receive()
                if message is None or self.services.shutting_down:
                    return None
                if isinstance(message, Bye):
                    return message
                self._carry_out(message, fds)
        finally:
            with contextlib.suppress(OSError):
                self.store.drop_spare(self.settings.shard)
            for slot in self._slots.values():
                slot.close()

    def _carry_out(self, message: Message, fds: list[int]) -> None:
        """Carry out an order. A failure costs this order only, never the session: the trainer would
        take that for the agent's death, and all work in progress for lost."""
        try:
            match message:
                case Commit():
                    with self.services.activity.order():
                        self._commit(message, fds)
                case Retire():
                    with self.services.activity.order():
                        self._retire(message)
                case Flush(order=order):
                    if (flusher := self.services.flusher(self.settings)) is not None:
                        flusher.accept(order, self.say)
                case AskProgress():
                    self._report_progress()
                case Listen():
                    self._listen(message)
                case Introduce(parties=parties, known_nodes=known_nodes):
                    self.services.protector().introduce(parties, known_nodes)
                case Inherit(where=where, known_nodes=known_nodes):
                    self.services.protector().inherit(where, known_nodes)
                case Protect(id=id_, lost=lost):
                    wanted = (self.settings.directory, id_, self.settings.shards, lost)
                    self.services.protector().protect(*wanted, self.say)
                case Forward(id=id_, stage=text):
                    self.services.hosted(text).accept(self._here(id_), self.say)
                case Problem():
                    self.say(message)
                case _:
                    raise ValueError(f"{type(message).__name__} is no order for an agent")
        except Exception as error:
            self.say(protocol.failed(message, error_text(error)))

    def _here(self, id_: VersionId) -> HostedOrder:
        settings = self.settings
        ranks = settings.ranks or (settings.shard,)
        return HostedOrder(settings.directory, id_, settings.shards, ranks)

    def _prepare(self) -> None:
        try:
            with self.services.activity.order():
                self.store.create()
                removed = self.store.clean(self.settings.shard)
        except OSError as error:
            what = f"{self.settings.directory} cannot be used ({error_text(error)})"
            self.say(Problem(f"{what}: versions stay in memory alone, until it can"))
        else:
            if removed:
                self.say(Cleaned(tuple(removed)))

    def _commit(self, message: Commit, fds: list[int]) -> None:
        key, slot = message.key, None
        try:
            _faults.point("agent", version=key.id.version, shard=key.shard)
            slot = self._slot(message.segment, fds)
            manifest, nbytes = self._sealed(slot, key)
            self._report_removed()
            self.store.create()
            with self.services.activity.commit(key.id, key.shard, nbytes):
                times, nbytes = self._commit_slot(key, slot, nbytes, manifest)
        finally:
            if slot is not None:
                file_lock.unlock(slot.fd)
                if slot.path is None:  # its descriptor came with the message, and will come again
                    self._slots.pop(_file_of(slot.fd)).close()
        self._newest = key
        seconds = (times.write_seconds, times.commit_seconds)
        self.say(Committed(key.id, nbytes, *seconds, times.direct))

    def _report_removed(self) -> None:
        """Say that this rank's newest shard is not there any more, and was not retired."""
        key, self._newest = self._newest, None
        if key is not None and not self.store.has(key):
            text = f"{self.store.directory}: {REMOVED.format(version=key.id)}"
            self.say(Problem(text, severity=logging.WARNING))

    def _commit_slot(
        self, key: ShardKey, slot: Slot, nbytes: int, manifest: bytes
    ) -> tuple[CommitTimes, int]:
        """Commit the shard: link the slot's file if it is one of the store, or write it. Also
        returns the length of the file."""

        def still() -> bool:
            return slot.manifest_bytes() == manifest

        file = slot.file
        if file is not None and not self.settings.codecs and file.can_be(self.store, nbytes):
            return self.store.commit_file(key, file.path, manifest, still), nbytes
        with slot.image() as whole, whole[:nbytes] as image:
            return self._store(key, image, manifest, still)

    def _store(
        self, key: ShardKey, image: memoryview, manifest: bytes, still: Callable[[], bool]
    ) -> tuple[CommitTimes, int]:
        """Write and commit the shard, through the codecs if there are any. Also returns the bytes
        written."""
        # Made for each commit: the key in a file may have changed.
        pipeline = Pipeline.of_setting(self.settings.codecs, "local_codecs")
        if not pipeline:
            return self.store.commit(key, image, manifest, still), len(image)
        return commit_encoded(self.store, key, image, manifest, pipeline, self._chain, still)

    def _slot(self, segment: str | None, fds: list[int]) -> Slot:
        """The slot, mapped and pinned: a restarted trainer does not reuse a pinned slot."""
        for file, slot in list(self._slots.items()):
            if slot.path is not None and os.fstat(slot.fd).st_nlink == 0:
                self._slots.pop(file).close()  # the trainer replaced it: free the memory
        if segment is None:
            found: Slot | None = Slot(fds[0], "passed", None)
        else:
            found = self._slots.get(_file_of(segment)) or Slot.open(Path(segment))
        if found is None:
            raise FileNotFoundError(f"slot {segment} is gone")
        slot = self._slots.setdefault(_file_of(found.fd), found)
        if slot is not found:
            found.close()
        file_lock.lock_shared(slot.fd)
        return slot

    def _sealed(self, slot: Slot, key: ShardKey) -> tuple[bytes, int]:
        """The manifest's bytes, and the length of its shard."""
        encoded, manifest = slot.manifest_bytes(), slot.manifest()
        if encoded is None or manifest is None or manifest.key != key:
            raise FileNotFoundError(f"{key} is no longer in slot {slot.name}")
        if slot.image_bytes < manifest.image_bytes:
            raise CorruptShardError(f"the image of {key} in slot {slot.name} is truncated")
        return encoded, manifest.image_bytes

    def _retire(self, message: Retire) -> None:
        """Apply retention to this rank's shards, and to those of ranks that no longer exist."""
        safe, lineage = message.safe, message.lineage
        policy = RetentionPolicy.of_setting(self.settings.keep, "local_keep")
        keep, void = {*message.keep}, {*message.void}
        held = [*self.store.keys(), *self.store.parities()]
        mine = [k for k in held if self._is_mine(k)]
        strays = self._strays(held, safe, lineage)

        def gone(keys: list[ShardKey]) -> set[VersionId]:
            return {*retirable({k.id for k in keys}, policy, safe, lineage, keep, void)}

        # Strays count with all shards of the node: alone, the last one would be kept for ever.
        mine_gone, strays_gone = gone(mine), gone(held) if strays else set[VersionId]()
        going = [k for k in mine if k.id in mine_gone] + [k for k in strays if k.id in strays_gone]
        there = {key for key in (*mine, *strays) if not isinstance(key, ParityKey)}
        went = set[VersionId]()
        # The newest first: a version goes before its base, never after it.
        for key in sorted(going, key=lambda key: key.id, reverse=True):
            if key not in self._bases.of(there):
                try:
                    if self._retire_one(key):
                        there.discard(key)
                        went.add(key.id)
                except OSError as error:
                    self.say(Problem(f"cannot retire {key}: {error_text(error)}"))

        self._drop_marks(went)

    def _drop_marks(self, went: set[VersionId]) -> None:
        """Remove the marks of suspect versions that left nothing on this node."""
        with contextlib.suppress(OSError):
            if went:
                left = {key.id for key in (*self.store.keys(), *self.store.parities())}
                local_suspects(self.store.directory).unmark(went - left)

    def _retire_one(self, key: ShardKey) -> bool:
        """Retire a shard. False when it is pinned or still being read: a later call retires it."""
        pins = LocalPins(self.store.directory)
        with self.services.held.lock, pins.spared(key.id) as pinned:
            if pinned or key in self.services.held:
                return False
            self.store.retire(key, reuse=key.shard == self.settings.shard)
            self._newest = None if key == self._newest else self._newest
            return True

    def _is_mine(self, key: ShardKey) -> bool:
        return self._rank_of(key) == self.settings.shard

    def _rank_of(self, key: ShardKey) -> int:
        """The rank that owns the shard in this run."""
        return key.shard % self.settings.shards

    def _strays(
        self, held: list[ShardKey], safe: VersionId | None, lineage: Lineage
    ) -> list[ShardKey]:
        """Shards of ranks that are on other nodes in this run; for the node's first session.

        There are none where nodes share the directory. A version of this run complete on all local
        levels shows whether they do: if so, the directory has shards of it that no rank of this
        node wrote.
        """
        if not self.settings.first or safe is None:
            return []
        generation = lineage[-1][0]
        strays = [k for k in held if self._rank_of(k) not in self.settings.ranks]
        if safe.generation < generation or any(k.id.generation == generation for k in strays):
            return []
        self._clean_strays()
        return strays

    def _clean_strays(self) -> None:
        """Remove, once, unfinished and spare files of earlier runs' shards."""
        if not self._cleaned_strays:
            self._cleaned_strays = True
            for shard in self.store.shards_named() - set(self.settings.ranks):
                self.store.drop_spare(shard)
                if removed := self.store.clean(shard):
                    self.say(Cleaned(tuple(removed)))

    def _report_progress(self) -> None:
        flusher = self.services.flusher(self.settings)
        hosted = [self.services.hosted(text) for text in self.settings.stages]
        at_work: list[Stage[Any]] = [*hosted, *([flusher] if flusher else [])]
        quiet = max((stage.quiet_seconds() for stage in at_work), default=0.0)
        self.say(Progress(quiet, flusher.status()[0] if flusher else None))

    def _listen(self, message: Listen) -> None:
        try:
            address = self.services.protector().open(message.where)
        except ConfigError as error:
            self.say(ListenFailed(str(error)))
        else:
            self.say(Listening(address.host, address.port))

    def say(self, message: AgentMessage) -> None:
        """Count a result, and send a message to the trainer. Any thread."""
        self.services.activity.record(message)
        with self._sending, contextlib.suppress(OSError):  # the trainer has left
            protocol.send(self.channel, message)


def _file_of(path: str | int) -> tuple[int, int]:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return (-1, -1)
    return (found.st_dev, found.st_ino)


ACCEPT_AGAIN_SECONDS = 0.1
FIRST_CLIENT_SECONDS = 30.0
"""An agent without any trainer ends after this time; if its starter has died before it connected,
after the linger time if it is shorter."""
STUCK_SECONDS = 1800.0
"""Without trainers, a flush without progress for this long is given up: its store hangs. Not less,
because the fsync of a large file may take long."""
LOOK_AGAIN_SECONDS = 5.0
MAX_SECONDS = 3600.0
"""Limit of one wait: the kernel counts milliseconds, and at most 25 days of them."""
FIRST_SECONDS = 2.0
"""Time that an agent waits, before it shuts down, for the node's first rank, which needs the list
of nodes that the agent knows."""


Run = tuple[tuple[int | None, str], float]
"""A start of the job on this node: protocol and environment of its trainers, and the start of one
of them (monotonic)."""


class Agent:
    """Serves every trainer that connects, each in its own session and thread."""

    def __init__(self, linger_seconds: float, environment: str = "") -> None:
        """`environment`: a fingerprint; only trainers with the same one are served. Empty: all."""
        self.linger_seconds = linger_seconds
        self._environment = environment
        self.shutting_down = False
        """A run of another environment has started: this agent takes no more orders, and ends."""
        self._leave_at = 0.0
        """Wait for the first rank of that run until this time (monotonic)."""
        self._given_up: list[int] = []
        """Versions with a flush that was given up because of that run."""
        self._run: Run = ((PROTOCOL, environment), -math.inf)
        """The newest run that has connected."""
        self._lock = threading.Lock()
        self._threads: dict[tuple[str, int], threading.Thread] = {}
        """The thread that serves a shard's last trainer. One trainer of a shard at a time: the work
        of a killed one is finished before its successor's starts."""
        self._sessions: dict[TrainerSession, None] = {}
        """Sessions in progress, in the order in which they began."""
        self._newest: dict[tuple[str, int], TrainerSession] = {}
        """The session of the last trainer that connected for each shard."""
        self._serving = 0
        self._missed: dict[tuple[str, int], float] = {}
        """Shards with a killed trainer, and the time until which to wait for its successor."""
        self._ranks_here: dict[str, tuple[int, ...]] = {}
        """Ranks on this node in the newest run, by directory."""
        self.held = ShardGuard()
        self.activity = Activity()
        self._usage = UsageSampler()
        self._began_seconds = time.time()
        self._flushers: dict[PersistentSettings, Flusher] = {}
        self._hosted: dict[str, Hosted] = {}
        self._protector: Protector | None = None
        self._woken, self._wake = socket.socketpair()

    def serve(
        self,
        listener: socket.socket,
        when_unneeded: Callable[[], None] = lambda: None,
        starter: int | None = None,
    ) -> None:
        """Accept trainers until there is none to serve or to wait for any more.

        `starter` is a descriptor of the process that started this one; None: it has ended already.
        `when_unneeded` is called, possibly several times, once that process has ended or all
        trainers have left, even with work in progress: readers of their output must not wait for
        this process.
        """
        nobody_before, looked_again = time.monotonic() + FIRST_CLIENT_SECONDS, False
        with selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            if starter is not None:
                selector.register(starter, selectors.EVENT_READ)
            else:
                nobody_before = self._orphaned(nobody_before)
                when_unneeded()
            while True:
                left = self._patience(nobody_before)
                with self._lock:
                    flushing, alone = bool(self._flushing()), not self._serving
                    idle = self._stages() if alone else []
                for stage in idle:
                    stage.rest()
                over = left is not None and left <= 0
                if over and (looked_again or not flushing):
                    return
                if over:  # the whole node may have been stopped, and the flush resumes in a moment
                    left = LOOK_AGAIN_SECONDS
                looked_again = over
                if alone and not nobody_before:
                    when_unneeded()
                for key, _ in selector.select(None if left is None else min(left, MAX_SECONDS)):
                    if key.fileobj is listener:
                        if self._accept(listener):
                            nobody_before = 0
                    elif key.fileobj == starter:
                        selector.unregister(key.fileobj)
                        nobody_before = self._orphaned(nobody_before)
                        when_unneeded()
                    else:
                        self._woken.recv(1)

    def _orphaned(self, nobody_before: float) -> float:
        return min(nobody_before, time.monotonic() + self.linger_seconds)

    def _patience(self, nobody_before: float) -> float | None:
        """Seconds to wait for a trainer; None: until the present ones have left."""
        with self._lock:
            if self.shutting_down:
                return None if self._serving else self._leave_at - time.monotonic()
            if self._serving or self._protecting():
                return None
            stuck = [at + max(STUCK_SECONDS, self.linger_seconds) for at in self._flushing()]
            return max([nobody_before, *self._awaited(), *stuck]) - time.monotonic()

    def _awaited(self) -> list[float]:
        """With the lock held: the times until which to wait for trainers that may come back. Reads
        by other nodes extend them by the linger time."""
        read = self._protector.asked_at() + self.linger_seconds if self._protector else 0.0
        ends = [
            max(end, read)
            for (directory, shard), end in self._missed.items()
            if shard in self._ranks_here.get(directory, (shard,))
        ]
        now = time.monotonic()
        return [end for end in ends if end > now]  # the others are not expected any more

    def _at_work(self) -> bool:
        """With the lock held: True if there is work that no trainer waits for."""
        return self._protecting() or bool(self._flushing())

    def _protecting(self) -> bool:
        return self._protector is not None and self._protector.busy()

    def _flushing(self) -> list[float]:
        """Time of the last progress of each flush and each stage of the setting (monotonic)."""
        stages: list[Stage[Any]] = [*self._flushers.values(), *self._hosted.values()]
        return [stage.progress_at for stage in stages if stage.busy()]

    def _stages(self) -> list[Stage[Any]]:
        """All stages below the local level."""
        protector = [self._protector] if self._protector is not None else []
        return [*protector, *self._flushers.values(), *self._hosted.values()]

    def close(self) -> None:
        """Release the resources that the agent itself holds."""
        for stage in self._stages():
            stage.close()
        self._woken.close()
        self._wake.close()

    def _accept(self, listener: socket.socket) -> bool:
        """Accept one connection; True if it is served."""
        try:
            channel, _ = listener.accept()
        except OSError:  # out of descriptors, or the trainer hung up
            time.sleep(ACCEPT_AGAIN_SECONDS)
            return False
        if _peer_uid(channel) != os.getuid():
            channel.close()
            return False
        try:
            self.attend(channel)
        except OSError:  # the trainer sees a closed connection, and tries again
            return False
        return True

    def attend(self, channel: socket.socket) -> threading.Thread:
        """Serve the trainer at the other end of `channel`, in a new thread; returns the thread.

        Raises OSError when no thread can be started; `channel` is closed then.
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
                shorten_slices()  # commits wait for the disk most of the time
                hello = _greeting(channel)
                if hello is None:
                    return
                settings = hello.session
                if settings is None or not self._serves(hello):
                    self._refuse(hello, channel)
                    return
                made = TrainerSession(settings, channel, self)
                before = self._register(made)
                said_goodbye = False  # until it does, wait for it, also if the session breaks
                made.say(Welcome(os.getpid(), self._known_nodes(settings)))
                pid, _ = _peer(channel)
                with self._usage.sampling(settings.trace_dir, settings.ranks, settings.shard, pid):
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
                    self._sessions.pop(made, None)
                    # The successor may have connected before this end was noticed.
                    if not said_goodbye and self._newest[made.at] is made:
                        self._missed[made.at] = time.monotonic() + self.linger_seconds
            with contextlib.suppress(OSError):
                self._wake.send(b"\0")

    def _may_be_asked(self) -> bool:
        """True if lingering is useful: the agents of several nodes have met, so a run without this
        node would read from it. On the node itself, slots and files are found without an agent."""
        met = self._protector is not None and bool(self._protector.known_nodes())
        return met and self.linger_seconds > 0

    def _serves(self, hello: Hello) -> bool:
        """True if this agent serves the trainer."""
        run_id = _run_of(hello)
        (number, theirs), _ = run_id
        same = theirs == self._environment or not (theirs and self._environment)
        with self._lock:
            if self.shutting_down or number != PROTOCOL or not same:
                return False
            self._run = max(self._run, run_id, key=_start_of)
            return True

    def _register(self, session: TrainerSession) -> threading.Thread | None:
        """Make `session` the one that serves its shard, in this thread; returns the previous
        thread."""
        with self._lock:
            self._sessions[session] = None
            if self.shutting_down:  # started after `_serves`
                self._given_up += session.leave()
            self._missed.pop(session.at, None)
            self._newest[session.at] = session
            if session.settings.ranks:
                self._ranks_here[session.settings.directory] = session.settings.ranks
            before = self._threads.get(session.at)
            self._threads[session.at] = threading.current_thread()
            return before

    def _known_nodes(self, session: SessionSettings) -> KnownNodes | None:
        """Other nodes' agents, as far as known; for the node's first trainer."""
        if session.first and self._protector is not None:
            return self._protector.known_nodes()
        return None

    # --- for trainers of other environments ----------------------------------------------------

    def _refuse(self, hello: Hello, channel: socket.socket) -> None:
        """Shut down for a later run; answer a trainer of an earlier run that it is outdated."""
        run_id, session = _run_of(hello), hello.session
        with self._lock:
            outdated = run_id[0] != self._run[0] and _start_of(run_id) < _start_of(self._run)
            if not outdated:
                self._run = max(self._run, run_id, key=_start_of)
                self._start_shutdown()
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
            self._protector.close()  # the successor needs the port

    def _start_shutdown(self) -> None:
        """With the lock held: finish the commits in progress, and give up all other work, without
        removing anything, as if this process were killed. Trainers that have not sent their
        greeting stay connected: one may be the trainer to inform."""
        if self.shutting_down:
            return
        self.shutting_down = True
        self._leave_at = time.monotonic() + FIRST_SECONDS
        for flusher in self._flushers.values():
            self._given_up += flusher.cancel()
        for hosted in self._hosted.values():
            hosted.cancel()
        for session in self._sessions:
            self._given_up += session.leave()

    # --- for watchers --------------------------------------------------------------------------

    def status(self) -> AgentStatus:
        """What the agent does, and has done. Any thread; waits for no work."""
        with self._lock:
            stages = self._stages()
            now = time.monotonic()
            trainers = {session.settings.shard for session in self._sessions}
            awaited = {shard for (_, shard), end in self._missed.items() if end > now}
        found = [(stage, *stage.status()) for stage in stages]
        waiting = Counter[str]()
        for stage, _, count in found:
            waiting[stage.level] += count
        flushes = [stage for stage in stages if stage.level != PEER]
        return AgentStatus(
            os.getpid(),
            socket.gethostname(),
            self._began_seconds,
            tuple(sorted(trainers)),
            tuple(sorted(awaited)),
            self.shutting_down,
            max([stage.quiet_seconds() for stage in flushes], default=0.0),
            (*self.activity.commits(), *(task for _, task, _ in found if task)),
            tuple(self.activity.levels({level: n for level, n in waiting.items() if n})),
            self.activity.local_quiet_seconds(),
        )

    # --- services for all sessions -------------------------------------------------------------

    def flusher(self, session: SessionSettings) -> Flusher | None:
        """The flusher for all sessions with the same persistent level."""
        if session.persistent is None:
            return None
        settings = session.persistent
        with self._lock:
            self._check_stays()
            return self._flushers.setdefault(settings, Flusher(settings, self.held, self._wake_up))

    def protector(self) -> Protector:
        """The node's protector."""
        from .protector import Protector  # imports numpy

        with self._lock:
            self._check_stays()
            if self._protector is None:
                self._protector = Protector(self.held, self._wake_up)
            return self._protector

    def hosted(self, text: str) -> Hosted:
        """The stage of the setting with this text."""
        with self._lock:
            self._check_stays()
            return self._hosted.setdefault(text, Hosted(text, self.held, self._wake_up))

    def _check_stays(self) -> None:
        """With the lock held: raise RuntimeError for an order that came just before the
        shutdown."""
        if self.shutting_down:
            raise RuntimeError("the agent is shutting down for a later start of the job")

    def _wake_up(self) -> None:
        with contextlib.suppress(OSError):
            self._wake.send(b"\0")


def _greeting(channel: socket.socket) -> Hello | None:
    """The trainer's first message; None if it is not a `Hello`."""
    with contextlib.suppress(ValueError):
        hello, _ = protocol.receive(channel)
        return hello if isinstance(hello, Hello) else None
    return None


def _run_of(hello: Hello) -> Run:
    """The trainer's run. One of another protocol, without a start time, counts as new."""
    began = hello.began_seconds
    return (hello.protocol, hello.environment), time.monotonic() if began is None else began


def _start_of(run_id: Run) -> float:
    return run_id[1]
