"""The agent's side of one trainer: its commits, and retention of its shards. One thread."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from . import faults
from .errors import ConfigError, CorruptShardError, TierckptError
from .flusher import Flusher, FlushOrder
from .held import Held
from .localstore import CommitTimes, LocalStore
from .modules.incremental import Chain
from .modules.localfiles import References, commit_encoded
from .modules.pipeline import Pipeline
from .naming import ParityKey, ShardKey, VersionId, retired
from .pins import LocalPins
from .slots import Slot, pin, unpin

if TYPE_CHECKING:
    from .protector import Protector

MESSAGE_BYTES = 1 << 16


@dataclass(frozen=True)
class DeskSettings:
    """What a trainer says of itself."""

    directory: str
    """Of the local level."""
    shard: int
    shards: int
    keep_last: int
    keep_every: int
    persistent: dict[str, Any] | None = field(default=None, repr=False)
    """PersistentSettings, which may hold secrets, if there is such a level."""
    modules: str = ""
    """What is done to shards on their way to the local level; see `modules.pipeline`."""


class NodeServices(Protocol):
    """What all desks of an agent share. Any thread."""

    held: Held

    def flusher(self, desk: DeskSettings) -> Flusher | None:
        """The persistent level's, if the desk has one."""
        ...

    def protector(self) -> Protector:
        """The peer level's."""
        ...


class Desk:
    """Messages wait in the socket while a slot is written."""

    def __init__(
        self, settings: DeskSettings, channel: socket.socket, services: NodeServices
    ) -> None:
        self.settings = settings
        self.services = services
        self.channel = channel
        self.store = LocalStore(settings.directory)
        self._chain = Chain()
        self._bases = References(self.store)
        self._slots: dict[tuple[int, int], Slot] = {}
        """Mapped slots by device and inode: mapping a large segment anew for every commit costs."""

    def serve(self) -> bool:
        """Serve until the trainer is gone and its work is done; False when it said no goodbye."""
        self._prepare()
        try:
            while True:
                try:
                    data, fds, _, _ = socket.recv_fds(self.channel, MESSAGE_BYTES, 1)
                except ConnectionResetError:
                    data, fds = b"", []
                if not data:
                    return False
                message = json.loads(data)
                if message["op"] == "commit":
                    self._commit(message, fds)
                elif message["op"] == "retire":
                    self._retire(message)
                elif message["op"] == "flush":
                    self._flush(message)
                elif message["op"] in ("meet", "know", "protect"):
                    self._protect(message)
                elif message["op"] == "bye":
                    return True
        finally:
            with contextlib.suppress(OSError):
                self.store.drop_spare(self.settings.shard)
            for slot in self._slots.values():
                slot.close()

    def _prepare(self) -> None:
        try:
            self.store.create()
            removed = self.store.clean(self.settings.shard)
        except OSError as error:
            self._say(op="problem", error=_text(error))
        else:
            if removed:
                self._say(op="cleaned", names=removed)

    def _commit(self, message: dict[str, Any], fds: list[int]) -> None:
        key = ShardKey.parse(message["stem"])
        assert key is not None
        where = {"version": key.id.version, "generation": key.id.generation}
        slot = None
        try:
            faults.point("agent", version=key.id.version, shard=key.shard)
            slot = self._slot(message["segment"], fds)
            manifest, nbytes = self._sealed(slot, key)
            self.store.create()
            times, nbytes = self._commit_slot(key, slot, nbytes, manifest)
        except (OSError, TierckptError) as error:
            self._say(op="failed", error=_text(error), **where)
            return
        finally:
            if slot is not None:
                unpin(slot.fd)
                if slot.path is None:  # passed with the message, and will be again
                    self._slots.pop(_file_of(slot.fd)).close()
        self._say(op="committed", nbytes=nbytes, **asdict(times), **where)

    def _commit_slot(
        self, key: ShardKey, slot: Slot, nbytes: int, manifest: bytes
    ) -> tuple[CommitTimes, int]:
        """Commit the shard as the file that the slot is already, or by writing it; also returns how
        long its file is."""

        def still() -> bool:
            return slot.manifest_bytes() == manifest

        file = slot.file
        if file is not None and not self.settings.modules and file.can_be(self.store, nbytes):
            return self.store.commit_file(key, file.path, manifest, still), nbytes
        with slot.image() as whole, whole[:nbytes] as image:
            return self._store(key, image, manifest, still)

    def _store(
        self, key: ShardKey, image: memoryview, manifest: bytes, still: Callable[[], bool]
    ) -> tuple[CommitTimes, int]:
        """Write and commit the shard, through the modules if there are any; also returns bytes
        written."""
        # Made anew for each: a key in a file may be another one by now.
        pipeline = Pipeline.of_setting(self.settings.modules, "local_modules")
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
        policy = (self.settings.keep_last, self.settings.keep_every)
        gone = retired({k.id for k in mine}, safe, lineage, *policy, void)
        keep = {VersionId(*each) for each in message["keep"]}
        going = [key for key in mine if key.id in gone and key.id not in keep]
        there = {key for key in mine if not isinstance(key, ParityKey)}
        # The newest first: what another refers to goes after that one, never before it.
        for key in sorted(going, key=lambda key: key.id, reverse=True):
            if key not in self._bases.of(there):
                try:
                    if self._retire_one(key):
                        there.discard(key)
                except OSError as error:
                    self._say(op="problem", error=f"cannot retire {key}: {_text(error)}")

    def _retire_one(self, key: ShardKey) -> bool:
        """False when it is pinned, or something still reads it: it goes with a later one then."""
        pins = LocalPins(self.store.directory)
        with self.services.held.lock, pins.spared(key.id) as pinned:
            if pinned or key in self.services.held:
                return False
            self.store.retire(key)
            return True

    def _flush(self, message: dict[str, Any]) -> None:
        flusher = self.services.flusher(self.settings)
        if flusher is not None:
            flusher.order(FlushOrder.of_message(message["order"]), self._answer)

    def _protect(self, message: dict[str, Any]) -> None:
        from .protector import PartySettings

        protector = self.services.protector()
        if message["op"] == "meet":
            try:
                address = protector.open(**message["where"])
            except ConfigError as error:
                self._say(op="listening", error=str(error))
            else:
                self._say(op="listening", error="", host=address.host, port=address.port)
        elif message["op"] == "know":
            protector.know([PartySettings.of_message(party) for party in message["parties"]])
        else:
            version = VersionId(message["generation"], message["version"])
            what = (version, self.settings.shards, message["lost"])
            protector.order(self.settings.directory, *what, self._answer)

    def _answer(self, said: dict[str, Any]) -> None:
        self._say(**said)

    def _is_mine(self, key: ShardKey) -> bool:
        if key.shards == self.settings.shards:
            return key.shard == self.settings.shard
        return key.shard % self.settings.shards == self.settings.shard

    def _say(self, **message: Any) -> None:
        with contextlib.suppress(OSError):  # the trainer is gone: nobody to tell
            self.channel.send(json.dumps(message).encode())


def _file_of(path: str | int) -> tuple[int, int]:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return (-1, -1)
    return (found.st_dev, found.st_ino)


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
