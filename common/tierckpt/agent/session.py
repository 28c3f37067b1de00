"""The agent's side of one trainer: its commits, and retention of its shards. One thread."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tierckpt import _faults
from tierckpt.codecs.delta import Chain
from tierckpt.codecs.pipeline import Pipeline
from tierckpt.core.retention import retired
from tierckpt.errors import ConfigError, CorruptShardError
from tierckpt.format.ids import Lineage, ParityKey, ShardKey, VersionId
from tierckpt.storage.local.encoded_files import References, commit_encoded
from tierckpt.storage.local.pins import LocalPins
from tierckpt.storage.local.store import CommitTimes, LocalStore
from tierckpt.storage.memory.slots import Slot, pin, unpin
from tierckpt.storage.suspects import SuspectMarks

from . import protocol
from .flusher import Flusher, FlushOrder
from .shard_guard import ShardGuard

if TYPE_CHECKING:
    from .protector import Protector

UNDONE = {
    "commit": "failed",
    "flush": "flush_failed",
    "meet": "listening",
    "protect": "protect_failed",
}
"""What a trainer hears, with an error, where what it asked for could not even be begun; otherwise
it is a problem."""
OUT_OF_TURN = frozenset(("flush", "meet", "know", "succeed", "protect"))
"""What others on the node do, and no desk is needed for."""
LOOK_SECONDS = 0.1
"""How often a trainer is heard that waits for its turn."""


@dataclass(frozen=True)
class SessionSettings:
    """What a trainer says of itself."""

    directory: str
    """Of the local level."""
    shard: int
    shards: int
    keep_last: int
    keep_every: int
    persistent: dict[str, Any] | None = field(default=None, repr=False)
    """PersistentSettings, which may hold secrets, if there is such a level."""
    codecs: str = ""
    """What is done to shards on their way to the local level; see `codecs.pipeline`."""
    ranks: tuple[int, ...] = ()
    """Of the job, that run on this node; the first one's desk sees to what has no other."""

    @property
    def first(self) -> bool:
        """Whether it is the node's first rank."""
        return self.ranks[:1] == (self.shard,)

    @property
    def speaks(self) -> bool:
        """Whether it speaks for the node: as `first`, or its ranks are not known."""
        return self.first or not self.ranks


class NodeServices(Protocol):
    """What all desks of an agent share. Any thread."""

    held: ShardGuard
    makes_way: bool
    """No more orders are taken."""

    def flusher(self, session: SessionSettings) -> Flusher | None:
        """The persistent level's, if the desk has one."""
        ...

    def protector(self) -> Protector:
        """The peer level's."""
        ...


class TrainerSession:
    """Messages wait in the socket while a slot is written."""

    def __init__(
        self, settings: SessionSettings, channel: socket.socket, services: NodeServices
    ) -> None:
        self.settings = settings
        self.services = services
        self.channel = channel
        self.store = LocalStore(settings.directory)
        self._chain = Chain()
        self._bases = References(self.store)
        self._speaking = threading.Lock()
        self._hearing = threading.Lock()
        self._cleaned_strays = False
        self._waiting: deque[tuple[dict[str, Any] | None, list[int]]] = deque()
        """Messages, and their descriptors, that came before its turn; None: the trainer is gone."""
        self._slots: dict[tuple[int, int], Slot] = {}
        """Mapped slots by device and inode: mapping a large segment anew for every commit costs."""

    @property
    def at(self) -> tuple[str, int]:
        """Whose desk it is."""
        return self.settings.directory, self.settings.shard

    def await_turn(self, before: threading.Thread | None) -> None:
        """Until the trainer before has been served at this desk: what it handed over may take long
        to write. What needs no desk is heeded meanwhile, as other nodes' agents wait for it."""
        try:
            while before is not None and before.is_alive():
                self._hear_early()
                before.join(LOOK_SECONDS)
        finally:
            if before is not None:  # who comes next waits for us alone
                before.join()

    def _hear_early(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self.channel, selectors.EVENT_READ)
            while not self._is_over() and selector.select(0):
                message, fds = self._receive()
                if message is not None and message["op"] in OUT_OF_TURN:
                    self._heed(message, fds)
                else:
                    self._waiting.append((message, fds))

    def _is_over(self) -> bool:
        """Whether the last message has come that the trainer says."""
        last = self._waiting[-1][0] if self._waiting else {"op": ""}
        return last is None or last["op"] == "bye"

    def _receive(self) -> tuple[dict[str, Any] | None, list[int]]:
        """The next message; None when the trainer is gone."""
        with self._hearing:
            return protocol.receive(self.channel)

    def leave(self) -> list[int]:
        """Hear no more, as the agent makes way. Returns the versions whose flush was ordered and
        not heard of yet, as a commit was under way, say. Any thread; waits for nothing."""
        unheard: list[int] = []
        with contextlib.suppress(OSError, ValueError, KeyError):
            self.channel.shutdown(socket.SHUT_RD)
            message, fds = self._receive()
            while message is not None:
                if message["op"] == "flush":
                    unheard.append(_version_in(message)["version"])
                for fd in fds:
                    os.close(fd)
                message, fds = self._receive()
        return unheard

    def serve(self) -> dict[str, Any] | None:
        """Serve until the trainer is gone and its work is done, or the agent makes way; returns
        the trainer's goodbye, None when it said none."""
        self._prepare()
        try:
            while True:
                message, fds = self._waiting.popleft() if self._waiting else self._receive()
                if message is None or self.services.makes_way:
                    return None
                if message["op"] == "bye":
                    return message
                self._heed(message, fds)
        finally:
            with contextlib.suppress(OSError):
                self.store.drop_spare(self.settings.shard)
            for slot in self._slots.values():
                slot.close()

    def _heed(self, message: dict[str, Any], fds: list[int]) -> None:
        """Do as the trainer says. Whatever fails costs what was asked for, and never the desk: its
        trainer would take that for the agent's death, and everything that is under way for lost."""
        op = message["op"]
        try:
            if op == "commit":
                self._commit(message, fds)
            elif op == "retire":
                self._retire(message)
            elif op == "flush":
                self._flush(message)
            elif op == "ask":
                self._tell_quiet()
            elif op in ("meet", "know", "succeed", "protect"):
                self._protect(message)
        except Exception as error:
            what = UNDONE.get(op, "problem")
            self.say(op=what, error=_text(error), **_version_in(message))

    def _prepare(self) -> None:
        try:
            self.store.create()
            removed = self.store.clean(self.settings.shard)
        except OSError as error:
            self.say(op="problem", error=_text(error))
        else:
            if removed:
                self.say(op="cleaned", names=removed)

    def _commit(self, message: dict[str, Any], fds: list[int]) -> None:
        key = ShardKey.parse(message["stem"])
        assert key is not None
        slot = None
        try:
            _faults.point("agent", version=key.id.version, shard=key.shard)
            slot = self._slot(message["segment"], fds)
            manifest, nbytes = self._sealed(slot, key)
            self.store.create()
            times, nbytes = self._commit_slot(key, slot, nbytes, manifest)
        finally:
            if slot is not None:
                unpin(slot.fd)
                if slot.path is None:  # passed with the message, and will be again
                    self._slots.pop(_file_of(slot.fd)).close()
        self.say(op="committed", nbytes=nbytes, **asdict(times), **_version_in(message))

    def _commit_slot(
        self, key: ShardKey, slot: Slot, nbytes: int, manifest: bytes
    ) -> tuple[CommitTimes, int]:
        """Commit the shard as the file that the slot is already, or by writing it; also returns how
        long its file is."""

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
        """Write and commit the shard, through the codecs if there are any; also returns bytes
        written."""
        # Made anew for each: a key in a file may be another one by now.
        pipeline = Pipeline.of_setting(self.settings.codecs, "local_codecs")
        if not pipeline:
            return self.store.commit(key, image, manifest, still), len(image)
        return commit_encoded(self.store, key, image, manifest, pipeline, self._chain, still)

    def _slot(self, segment: str | None, fds: list[int]) -> Slot:
        """Map the slot, or find it mapped; pinned, so that a restarted trainer lets it be."""
        for file, slot in list(self._slots.items()):
            if slot.path is not None and os.fstat(slot.fd).st_nlink == 0:
                self._slots.pop(file).close()  # the trainer made a new one: give the memory back
        if segment is None:
            found: Slot | None = Slot(fds[0], "passed", None)
        else:
            found = self._slots.get(_file_of(segment)) or Slot.open(Path(segment))
        if found is None:
            raise FileNotFoundError(f"slot {segment} is gone")
        slot = self._slots.setdefault(_file_of(found.fd), found)
        if slot is not found:
            found.close()
        pin(slot.fd)
        return slot

    def _sealed(self, slot: Slot, key: ShardKey) -> tuple[bytes, int]:
        """The manifest's bytes, and the length of the shard that it is about."""
        encoded, manifest = slot.manifest_bytes(), slot.manifest()
        if encoded is None or manifest is None or manifest.key != key:
            raise FileNotFoundError(f"{key} is no longer in slot {slot.name}")
        if slot.image_bytes < manifest.image_bytes:
            raise CorruptShardError(f"the image of {key} in slot {slot.name} is cut short")
        return encoded, manifest.image_bytes

    def _retire(self, message: dict[str, Any]) -> None:
        """Apply retention to this rank's shards, and to those of ranks that are no more."""
        safe = VersionId(*message["safe"]) if message["safe"] else None
        void = {VersionId(*each) for each in message["void"]}
        lineage = tuple((g, v) for g, v in message["lineage"])
        held = [*self.store.keys(), *self.store.parities()]
        mine = [k for k in held if self._is_mine(k)]
        strays = self._strays(held, safe, lineage)

        def gone(keys: list[ShardKey]) -> set[VersionId]:
            policy = (self.settings.keep_last, self.settings.keep_every)
            return set(retired({k.id for k in keys}, safe, lineage, *policy, void))

        # Strays go by what the whole node has: alone, the last of them would be kept for ever.
        mine_gone, strays_gone = gone(mine), gone(held) if strays else set[VersionId]()
        going = [k for k in mine if k.id in mine_gone] + [k for k in strays if k.id in strays_gone]
        keep = {VersionId(*each) for each in message["keep"]}
        there = {key for key in (*mine, *strays) if not isinstance(key, ParityKey)}
        went = set[VersionId]()
        # The newest first: what another refers to goes after that one, never before it.
        for key in sorted(going, key=lambda key: key.id, reverse=True):
            if key.id not in keep and key not in self._bases.of(there):
                try:
                    if self._retire_one(key):
                        there.discard(key)
                        went.add(key.id)
                except OSError as error:
                    self.say(op="problem", error=f"cannot retire {key}: {_text(error)}")

        self._drop_marks(went)

    def _drop_marks(self, went: set[VersionId]) -> None:
        """Of suspects of which nothing is left on this node."""
        with contextlib.suppress(OSError):
            if went:
                left = {key.id for key in (*self.store.keys(), *self.store.parities())}
                SuspectMarks(self.store.directory).remove(went - left)

    def _retire_one(self, key: ShardKey) -> bool:
        """False when it is pinned, or something still reads it: it goes with a later one then."""
        pins = LocalPins(self.store.directory)
        with self.services.held.lock, pins.spared(key.id) as pinned:
            if pinned or key in self.services.held:
                return False
            self.store.retire(key, reuse=key.shard == self.settings.shard)
            return True

    def _is_mine(self, key: ShardKey) -> bool:
        return self._rank_of(key) == self.settings.shard

    def _rank_of(self, key: ShardKey) -> int:
        """Whose it is now."""
        return key.shard % self.settings.shards

    def _strays(
        self, held: list[ShardKey], safe: VersionId | None, lineage: Lineage
    ) -> list[ShardKey]:
        """What lies here of ranks that are on other nodes in this run, for the node's first desk.

        Where nodes share the directory nothing is stray. A version of this run that is complete
        on all local levels tells: then shards of it are here that ranks of this node did not write.
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
        """Once, remove what earlier runs of other shards left half-done, or for reuse."""
        if not self._cleaned_strays:
            self._cleaned_strays = True
            for shard in self.store.shards_named() - set(self.settings.ranks):
                self.store.drop_spare(shard)
                if removed := self.store.clean(shard):
                    self.say(op="cleaned", names=removed)

    def _flush(self, message: dict[str, Any]) -> None:
        flusher = self.services.flusher(self.settings)
        if flusher is not None:
            flusher.order(FlushOrder.of_message(message["order"]), self._answer)

    def _tell_quiet(self) -> None:
        flusher = self.services.flusher(self.settings)
        self.say(op="quiet", seconds=flusher.quiet_seconds() if flusher is not None else 0.0)

    def _protect(self, message: dict[str, Any]) -> None:
        from .protector import PartySettings

        protector = self.services.protector()
        if message["op"] == "meet":
            try:
                address = protector.open(**message["where"])
            except ConfigError as error:
                self.say(op="listening", error=str(error))
            else:
                self.say(op="listening", error="", host=address.host, port=address.port)
        elif message["op"] == "know":
            parties = [PartySettings.of_message(party) for party in message["parties"]]
            protector.know(parties, message["roster"])
        elif message["op"] == "succeed":
            protector.succeed(message["where"], message["roster"])
        else:
            version = VersionId(message["generation"], message["version"])
            what = (version, self.settings.shards, message["lost"])
            protector.order(self.settings.directory, *what, self._answer)

    def _answer(self, said: dict[str, Any]) -> None:
        self.say(**said)

    def say(self, **message: Any) -> None:
        """Tell the trainer. Any thread."""
        with self._speaking, contextlib.suppress(OSError):  # it is gone: nobody to tell
            protocol.send(self.channel, message)


def _file_of(path: str | int) -> tuple[int, int]:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return (-1, -1)
    return (found.st_dev, found.st_ino)


def _version_in(message: dict[str, Any]) -> dict[str, int]:
    """Which version a trainer's message is about, for the answer; empty where it is about none."""
    if message["op"] == "commit":
        key = ShardKey.parse(message["stem"])
        assert key is not None
        return {"version": key.id.version, "generation": key.id.generation}
    about = message.get("order", message)
    return {name: about[name] for name in ("version", "generation") if name in about}


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
