"""The agent's side of one trainer: commits, and retention of the rank's shards. One thread."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from tierckpt import _faults
from tierckpt._text import in_words
from tierckpt.codecs.delta import Chain
from tierckpt.codecs.pipeline import Pipeline
from tierckpt.core.retention import RetentionPolicy, retirable
from tierckpt.errors import ConfigError, CorruptShardError
from tierckpt.format.ids import Lineage, ParityKey, ShardKey, VersionId
from tierckpt.storage.files import file_lock
from tierckpt.storage.local.encoded_files import References, commit_encoded
from tierckpt.storage.local.pins import LocalPins
from tierckpt.storage.local.store import CommitTimes, LocalStore
from tierckpt.storage.memory.slots import Slot
from tierckpt.storage.suspects import SuspectMarks

from . import protocol
from .flusher import Flusher
from .protocol import (
    AgentMessage,
    AskProgress,
    Bye,
    Cleaned,
    Commit,
    CommitFailed,
    Committed,
    Flush,
    FlushFailed,
    Inherit,
    Introduce,
    Listen,
    ListenFailed,
    Listening,
    Message,
    Problem,
    Progress,
    Protect,
    ProtectFailed,
    Retire,
    SessionSettings,
)
from .shard_guard import ShardGuard
from .status.activity import Activity

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
                    case Flush() | Listen() | Introduce() | Inherit() | Protect():
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
                        flusher.order(order, self.say)
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
                    self.services.protector().order(*wanted, self.say)
                case Problem():
                    self.say(message)
                case _:
                    raise ValueError(f"{type(message).__name__} is no order for an agent")
        except Exception as error:
            self.say(_failure(message, in_words(error)))

    def _prepare(self) -> None:
        try:
            with self.services.activity.order():
                self.store.create()
                removed = self.store.clean(self.settings.shard)
        except OSError as error:
            what = f"{self.settings.directory} cannot be used ({in_words(error)})"
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
        policy = RetentionPolicy(self.settings.keep_last, self.settings.keep_every)
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
                    self.say(Problem(f"cannot retire {key}: {in_words(error)}"))

        self._drop_marks(went)

    def _drop_marks(self, went: set[VersionId]) -> None:
        """Remove the marks of suspect versions that left nothing on this node."""
        with contextlib.suppress(OSError):
            if went:
                left = {key.id for key in (*self.store.keys(), *self.store.parities())}
                SuspectMarks(self.store.directory).remove(went - left)

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

        There are none where nodes share the directory. A version of this run that is complete on
        all local levels shows whether they do: if so, the directory has shards of it that no rank
        of this node wrote.
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
        if flusher is None:
            self.say(Progress(0.0))
        else:
            self.say(Progress(flusher.quiet_seconds(), flusher.status()[0]))

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


def _failure(message: Message, error: str) -> AgentMessage:
    """The answer to an order that failed at its start."""
    match message:
        case Commit(key=key):
            return CommitFailed(key.id, error)
        case Flush(order=order):
            return FlushFailed(order.id, error)
        case Protect(id=id_):
            return ProtectFailed(id_, error)
        case Listen():
            return ListenFailed(error)
        case _:
            return Problem(error)
