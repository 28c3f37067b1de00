"""The pipeline below the local level: stages that bring complete versions further.

Each stage has a queue, and a thread that works it off: `Flusher` for the persistent level,
`Protector` for the peer level, and a `Hosted` one for each stage of the setting `stages`. They read
the node's shards from the files of the local level, which are durable and do not change. No slot
waits for a slow place. `ShardGuard` keeps retention from the shards that are read.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from msgspec import Struct

from tierckpt import stages
from tierckpt._text import error_text
from tierckpt.format.ids import ShardKey, VersionId
from tierckpt.format.manifest import Manifest
from tierckpt.storage.local import LocalStore

from .protocol import AgentMessage, Staged, StageFailed, TaskStatus
from .status import Task

__all__ = ["CANCELLED", "Answer", "Hosted", "HostedOrder", "ShardGuard", "Stage", "open_shard"]

CANCELLED = "the agent shuts down to make room for a later run's agent"
NEWER = "a newer version came"

Answer = Callable[[AgentMessage], None]


class ShardGuard:
    """Set of local shards that must not be retired now. Any thread."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """Hold it from the check to the removal of a shard."""
        self._keys: dict[ShardKey, int] = {}

    def add(self, keys: list[ShardKey]) -> None:
        """Guard the shards; call it once for every use."""
        with self.lock:
            for key in keys:
                self._keys[key] = self._keys.get(key, 0) + 1

    def discard(self, keys: list[ShardKey]) -> None:
        """Undo one `add`."""
        with self.lock:
            for key in keys:
                self._keys[key] -= 1
                if not self._keys[key]:
                    del self._keys[key]

    def __contains__(self, key: ShardKey) -> bool:
        return key in self._keys


@contextlib.contextmanager
def open_shard(local: LocalStore, key: ShardKey) -> Iterator[tuple[memoryview, bytes]]:
    """A guarded shard's image, mapped, and the manifest that it was sealed with.

    The image is checked, because other nodes and the persistent level trust it. An encoded shard is
    decoded first, into a file without a name. Raises OSError, CorruptShardError, and the errors of
    `codecs.shard_coding.Decoder`.
    """
    data = local.read_manifest(key)
    manifest = Manifest.decode(data)
    if manifest.encoding is not None:
        from tierckpt.storage.local import open_encoded, unfolded

        decoder = open_encoded(local, manifest)
        with unfolded(local, decoder) as image:
            yield image, decoder.sealed_bytes
        return
    with sound_image(local, manifest) as image:
        yield image, data


@contextlib.contextmanager
def sound_image(local: LocalStore, manifest: Manifest) -> Iterator[memoryview]:
    """Bytes of a shard stored without codecs, mapped and checked."""
    from tierckpt.format.manifest import verify_shard

    mapped = local.open_image(manifest.key)
    image = memoryview(mapped)
    try:
        verify_shard(manifest, image, f"{manifest.key} in {local.directory}")
        yield image
    finally:
        with contextlib.suppress(BufferError):  # a traceback has a view, and frees it later
            image.release()
            mapped.close()


class Order(Protocol):
    """A version of which this node's shards go through a stage."""

    @property
    def id(self) -> VersionId: ...

    @property
    def keys(self) -> list[ShardKey]: ...


AnyOrder = TypeVar("AnyOrder", bound=Order)


class Stage(Generic[AnyOrder]):
    """One stage of a node. Any thread may call it; its own thread works, version by version."""

    def __init__(self, level: str, held: ShardGuard, on_idle: Callable[[], None]) -> None:
        """`on_idle` is called by the stage's thread whenever no work is left."""
        self.level, self.held = level, held
        self.progress_at = time.monotonic()
        """Time when the work last made progress, or waited as planned, for example for a window."""
        self._on_idle = on_idle
        self._changed = threading.Lock()
        self._orders: deque[tuple[AnyOrder, Answer]] = deque()
        self._now: tuple[AnyOrder, Answer] | None = None
        """The order under way, or the last one."""
        self._task: Task | None = None
        """The same, for those that ask for its progress."""
        self._thread: threading.Thread | None = None
        self._cancelled = False
        """Permanent, see `cancel`."""

    def accept(self, order: AnyOrder, answer: Answer) -> None:
        """Take a version in, after those accepted before; `answer` is called with the result.

        Raises RuntimeError where no thread can be started, and after `cancel`; then nothing is
        accepted.
        """
        with self._changed:
            if self._cancelled:
                raise RuntimeError(CANCELLED)
            if self._thread is None:
                name = f"tierckpt-{self.level}"
                thread = threading.Thread(target=self._run, name=name, daemon=True)
                thread.start()  # RuntimeError: the limit of the system or container on threads
                self._thread = thread  # after the start: one that never ran could not be joined
                self._note_progress()
            self.held.add(order.keys)
            replaced = [each for each in self._orders if self._replaces(order, each[0])]
            for older in replaced:
                self._orders.remove(older)
                self.held.discard(older[0].keys)
            self._orders.append((order, answer))
        for older_order, answer_older in replaced:  # without the lock: a trainer may not read
            answer_older(self._failed(older_order, NEWER, superseded=True))

    def busy(self) -> bool:
        """True while a version is in work or waits."""
        return self._thread is not None and not self._cancelled

    def quiet_seconds(self) -> float:
        """Return the time since the work under way last made progress; 0.0 without. Any thread."""
        return max(time.monotonic() - self.progress_at, 0.0) if self.busy() else 0.0

    def status(self) -> tuple[TaskStatus | None, int]:
        """The work under way, and the number of versions that wait for it. Any thread."""
        with self._changed:
            task = self._task if self.busy() else None
            return task.status() if task else None, len(self._orders)

    def rest(self) -> None:
        """Record that no trainer of this node runs. Until the next order."""

    def cancel(self) -> list[int]:
        """Give up the work under way and all that waits, as if this process were killed. Returns
        the versions given up. Any thread; waits for nothing."""
        with self._changed:
            now = [self._now] if self._now is not None and self.busy() else []
            given_up = [order.id.version for order, _ in (*now, *self._orders)]
            self._cancelled = True
            self._orders.clear()
        return given_up

    def close(self) -> None:
        """Release what the stage holds beside its work."""

    # --- for subclasses ------------------------------------------------------------------------

    def _store(self, order: AnyOrder) -> AgentMessage:
        """Do the work for one version; returns the result, raises nothing."""
        raise NotImplementedError

    def _failed(self, order: AnyOrder, error: str, superseded: bool = False) -> AgentMessage:
        """The result for a version that does not get here."""
        raise NotImplementedError

    def _replaces(self, order: AnyOrder, waiting: AnyOrder) -> bool:
        """Whether a version that waits is given up for a new one."""
        return False

    def _note_progress(self) -> None:
        self.progress_at = time.monotonic()

    # --- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._orders:
                    self._thread = None
                    break
                order, answer = self._now = self._orders.popleft()
                self._task = Task(self.level, order.id)
            try:
                said = self._store(order)
            finally:
                self.held.discard(order.keys)
            answer(said)
        self._on_idle()


class HostedOrder(Struct, frozen=True):
    """A version for a stage of the setting."""

    directory: str
    id: VersionId
    shards: int
    here: tuple[int, ...]

    @property
    def keys(self) -> list[ShardKey]:
        """The node's shards."""
        return [ShardKey(self.id, shard, self.shards) for shard in self.here]


class Hosted(Stage[HostedOrder]):
    """Runs a stage of the setting `stages`, which is made with its first version. Of versions that
    wait, the newest replaces the others."""

    def __init__(self, text: str, held: ShardGuard, on_idle: Callable[[], None]) -> None:
        """`text`: name and argument. Raises ConfigError."""
        (self._named,) = stages.parse(text)
        super().__init__(self._named.name, held, on_idle)
        self._stage: stages.Stage | None = None

    def _store(self, order: HostedOrder) -> AgentMessage:
        start, local = time.perf_counter(), LocalStore(order.directory)
        version = stages.LocalVersion(
            Path(order.directory), tuple(order.keys), partial(open_shard, local), self._advance
        )
        self._note_progress()
        try:
            if self._stage is None:
                self._stage = self._named.make()
            self._stage.accept(version)
        except BaseException as error:  # foreign code: its SystemExit ends no agent
            return self._failed(order, error_text(error), self._cancelled)
        seconds = time.perf_counter() - start
        return Staged(order.id, str(self._named), version.stored_bytes, seconds)

    def _failed(self, order: HostedOrder, error: str, superseded: bool = False) -> AgentMessage:
        return StageFailed(order.id, str(self._named), error, superseded)

    def _replaces(self, order: HostedOrder, waiting: HostedOrder) -> bool:
        return order.directory == waiting.directory

    def _advance(self, nbytes: int) -> None:
        if self._cancelled:
            raise stages.StageCancelledError(CANCELLED)
        self._note_progress()
        if self._task is not None:
            self._task.advance(nbytes)
