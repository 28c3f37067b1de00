"""A binding to the copy engine, a small C library that copies and hashes without the interpreter.

The library is `copy_engine.c`, built at installation where there is a C compiler; it has no Python
in it, so one file serves all versions of Python. It calls the xxh3_64 of the xxhash package, by its
address. `find` returns None where either is missing; then `snapshot` copies with torch, block by
block.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from tierckpt.format.manifest import DIGEST_BYTES

if TYPE_CHECKING:
    from .tensor_memory import TensorRecords

VARIABLE = "TIERCKPT_COPY_ENGINE"
"""`torch` in this environment variable forbids the library."""

INTERFACE = 6
"""Number in the C file; a library with another one is not used."""

HELP_BYTES = 256 * 1024 * 1024
"""Limit of one call of the library's `help`: Python handles a signal only after it."""
HELP_NANOSECONDS = 100_000_000
"""Limit of its wait for another thread."""

_RESULTS = struct.Struct("=QQQ")
"""Head of a job's results: whether the counters are unchanged, and nanoseconds of copying and of
hashing."""
_NUMBER_BYTES = 4
"""Size of a block's number in a job's queue, which is between digests and states."""
_HASHES = ("XXH3_64bits_dispatch", "XXH3_64bits")
_NAME = "_copy_engine*.so"


class Progress(IntEnum):
    """State of a job when a call returns."""

    COMPLETE = 0
    ABORTED = 1
    IDLE = 2
    """Blocks are held, and no released one is left."""
    UNFINISHED = 3
    """Call again: see `HELP_BYTES`, `Desk`."""
    ORDERED = 4
    """A device copies the rest before it changes a source: see `cuda`. Not of the library."""


_PROGRESS: list[Progress] = [*Progress]


class Counters:
    """The version counters of some tensors, as the library reads them."""

    def __init__(self, records: TensorRecords) -> None:
        self.records = records
        """Has the memory, and keeps it."""
        offsets, rows, count = records.addresses()
        self.nbytes = 4 * count
        self._room = ctypes.create_string_buffer(self.nbytes + 1)
        self._memory = (ctypes.c_uint64 * 4)(offsets, rows, count, ctypes.addressof(self._room))
        self.address = ctypes.addressof(self._memory)


class Table:
    """Segments and blocks of a plan, as the library reads them. Does not keep the memory alive."""

    def __init__(self, segments: np.ndarray, blocks: np.ndarray) -> None:
        """`segments`: (address, bytes) a row; `blocks`: (first segment, segments, offset, bytes).
        Both uint64 and contiguous."""
        self._segments, self._blocks = segments, blocks
        self.segments, self.blocks = segments.ctypes.data, blocks.ctypes.data
        self.count = len(blocks)
        self.nbytes = int(blocks[:, 3].sum())
        self._counters: Counters | None = None
        self._hash_address: int | None = None
        self._blank = b""
        self._memory: Any = None

    def counters_of(self, records: TensorRecords | None) -> Counters | None:
        """The counters of the plan's tensors; the same object for the same records."""
        if records is None:
            return None
        if self._counters is None or self._counters.records is not records:
            self._counters = Counters(records)
        return self._counters

    def memory_of_job(self, library: Library) -> Any:
        """The memory of a new job, an array of characters. It is a copy of a prepared one: a copy
        of a free lock is a free lock."""
        if self._hash_address != library.hash_address:
            self._memory = ctypes.c_char * library.job_bytes(self.count)
            first = self._memory()
            at = ctypes.addressof(first)
            library.init(at, library.hash_address, self.segments, self.blocks, self.count)
            self._blank, self._hash_address = first.raw, library.hash_address
        return self._memory.from_buffer_copy(self._blank)


class Library:
    """The loaded library. Threads may share it: it keeps no state.

    Raises OSError if a library cannot be loaded, AttributeError if it lacks a function, ValueError
    if it has another interface or hashes to other values than `format.manifest.digest`.
    """

    def __init__(self, path: str, hashes: str) -> None:
        self.path = path
        library = ctypes.CDLL(path)
        number, pointer, small = ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint32
        if library.tierckpt_interface() != INTERFACE:
            raise ValueError(f"{path} is of another version of Tierckpt; install it again")
        self._hashes = ctypes.CDLL(hashes)
        name = next((n for n in _HASHES if hasattr(self._hashes, n)), _HASHES[-1])
        self.hash_address = ctypes.cast(getattr(self._hashes, name), ctypes.c_void_p).value
        self.run = _function(library, "run", [pointer, number], ctypes.c_int)
        self.wait = _function(library, "wait", [pointer, number], ctypes.c_int)
        self.help = _function(library, "help", [pointer, number, number, pointer], ctypes.c_int)
        self.copy_one = _function(library, "copy_one", [pointer, small], number)
        self.serve = _function(library, "serve", [pointer, number, number], ctypes.c_int)
        arrays = [pointer, pointer, pointer, small, pointer]
        self.enqueue = _function(
            library, "enqueue", [pointer, pointer, pointer, *arrays, number], ctypes.c_int
        )
        self.hash_blocks = _function(library, "hash_blocks", [*arrays, pointer])
        # These take a microsecond: too short to give the interpreter to another thread.
        held = ctypes.PyDLL(path)
        self.init = _function(held, "init", [pointer, pointer, pointer, pointer, small])
        self.bind = _function(held, "bind", [pointer, pointer])
        self.release = _function(held, "release", [pointer, pointer, small])
        self.take = _function(held, "take", [pointer], ctypes.c_int64)
        self.abort = _function(held, "abort", [pointer])
        self.copying = _function(held, "copying", [pointer], small)
        self.desk_bytes = _function(held, "desk_bytes", [], number)
        self.desk_init = _function(held, "desk_init", [pointer])
        image = [number, ctypes.c_char_p, number, number, ctypes.c_char_p, number, number]
        watched = [pointer, ctypes.c_char_p]
        self.post = _function(held, "post", [pointer, pointer, *image, *watched], small)
        self.fill = _function(held, "fill", [pointer, *image])
        self.settle = _function(held, "settle", [pointer, pointer])
        self.ring = _function(held, "ring", [pointer])
        self.job_bytes = _function(held, "job_bytes", [small], number)
        self.results_offset = int(library.tierckpt_results_offset())
        self._check(_function(held, "hash", [pointer, ctypes.c_char_p, number], number))

    def _check(self, hashed: Callable[..., int]) -> None:
        data = bytes(i * 7 & 0xFF for i in range(4096))
        for length in (0, 1, 9, 100, 200, 1000, 4096):
            ours = hashed(self.hash_address, data, length)
            if ours != xxhash.xxh3_64_intdigest(data[:length]):
                raise ValueError(f"the library of xxhash hashes {length} bytes to another value")


def _function(
    library: ctypes.CDLL, name: str, takes: list[Any], gives: Any = None
) -> Callable[..., Any]:
    found = getattr(library, f"tierckpt_{name}")
    found.argtypes, found.restype = takes, gives
    return found  # type: ignore[no-any-return]


class Job:
    """One copy of a table into one target. Any thread may call any method.

    The caller keeps the memory of segments and target for as long as a thread is in `run`, `help`
    or `copy_one`, whether or not the job was aborted.
    """

    def __init__(self, library: Library, table: Table) -> None:
        self._library, self._table = library, table
        self.posted = False
        """True once it was left for the copier."""
        self.unchanged = False
        """With the results: True if a barrier found the counters of its post unchanged."""
        self._memory = table.memory_of_job(library)
        self._at = ctypes.addressof(self._memory)

    def bind(self, target: int) -> None:
        """Set the target, the address of offset 0; nothing is copied before."""
        self._library.bind(self._at, target)

    def release(self, blocks: Iterable[int] | None) -> None:
        """Allow the copy of these blocks, of all with None."""
        if blocks is None:
            self._library.release(self._at, None, 0)
            return
        numbers = [*blocks]
        self._library.release(self._at, (ctypes.c_uint32 * len(numbers))(*numbers), len(numbers))

    def held(self) -> set[int]:
        """The blocks that are not released."""
        count, start = self._table.count, self._library.results_offset + _RESULTS.size
        low = start + (count + 2) * DIGEST_BYTES + count * _NUMBER_BYTES
        states = self._memory[low : low + count]
        return {block for block, state in enumerate(states) if not state}

    def run(self, wait_seconds: float) -> Progress:
        """Copy released blocks, until none was released for `wait_seconds`."""
        return _PROGRESS[int(self._library.run(self._at, int(1e9 * wait_seconds)))]

    def wait(self, wait_seconds: float) -> Progress:
        """As `run`, but without copying: UNFINISHED if a block may be taken."""
        return _PROGRESS[int(self._library.wait(self._at, int(1e9 * wait_seconds)))]

    def help(self, desk: Desk | None = None) -> Progress:
        """Copy the released blocks that are left, and return when no thread copies one. Settle the
        job at the desk, if there is one, and its results say `unchanged`."""
        desk_at = None if desk is None else desk.address
        at = self._at, HELP_BYTES, HELP_NANOSECONDS, desk_at
        while (progress := _PROGRESS[int(self._library.help(*at))]) is Progress.UNFINISHED:
            pass
        return progress

    def take(self) -> int | None:
        """Take one released block, for `copy_one`; None if there is none."""
        number = int(self._library.take(self._at))
        return None if number < 0 else number

    def copy_one(self, block: int) -> float:
        """Copy a block that this thread took; returns when it was copied, in
        `time.perf_counter()` seconds: Linux has one monotonic clock."""
        return float(self._library.copy_one(self._at, block)) / 1e9

    def fill_at_once(self, image: int, parts: tuple[bytes, int, bytes, int]) -> None:
        """Fill an image on this thread, with the interpreter held; arguments as for `Desk.post`.
        For a job that no other thread knows; it may be filled again and again."""
        head, nbytes, tail, room = parts
        self.posted = True
        self._library.fill(self._at, image, head, len(head), nbytes, tail, len(tail), room)

    def abort(self) -> None:
        """Start no further block; all calls return after the block that they copy."""
        self._library.abort(self._at)

    def results(self) -> tuple[float, float, bytes]:
        """Seconds of copying and of hashing, summed over all threads, and the digests of all
        blocks; if the job was posted, those of head and tail around them. Valid after COMPLETE."""
        low = self._library.results_offset
        unchanged, copy, hashing = _RESULTS.unpack_from(self._memory, low)
        self.unchanged = unchanged == 1
        low += _RESULTS.size
        high = low + (self._table.count + 2) * DIGEST_BYTES
        if not self.posted:
            low, high = low + DIGEST_BYTES, high - DIGEST_BYTES
        return copy / 1e9, hashing / 1e9, self._memory[low:high]

    @property
    def copying(self) -> bool:
        """True while a thread writes to the target."""
        return bool(self._library.copying(self._at))


class Desk:
    """A place where the copier thread waits for one job at a time, without the interpreter."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._memory = (ctypes.c_uint64 * (library.desk_bytes() // 8 + 1))()
        self.address = ctypes.addressof(self._memory)
        library.desk_init(self.address)
        self._kept: list[tuple[Job, object]] = []
        """The jobs that the copier may use, and the owners of their memory."""

    def post(
        self,
        job: Job,
        owner: object,
        image: int,
        parts: tuple[bytes, int, bytes, int],
        counted: tuple[Counters | None, bytes | None] = (None, None),
    ) -> bool:
        """Fill an image, with the help of the copier; training thread.

        Args:
            job: not bound, with its blocks held.
            owner: keeps its segments and the image in memory, for as long as is needed.
            image: the address.
            parts: the head of the image, the length of the job's target after it, the tail, and the
                length of the tail with zeros after it.
            counted: what `Job.unchanged` is about, and the values at the boundary.

        Returns False, and does nothing, if the copier still uses another job.
        """
        head, nbytes, tail, room = parts
        counters, before = counted
        watched = None
        if counters is not None and before is not None and len(before) == counters.nbytes:
            watched = counters.address
        job.posted = True  # before: an interrupt may come after the call
        self._kept.append((job, (owner, counted)))
        at, sizes = (self.address, job._at, image), (len(head), nbytes, tail, len(tail), room)
        if not self._library.post(*at, head, *sizes, watched, before):
            job.posted = False
            self._kept.pop()
            return False
        del self._kept[:-1]
        return True

    def settle(self, job: Job) -> None:
        """This job is over: `serve` need not return for it. Any thread."""
        self._library.settle(self.address, job._at)

    def clear(self) -> None:
        """Drop the jobs and the owners of their memory, once no thread serves any more."""
        self._kept.clear()

    def ring(self) -> None:
        """Have `serve` return UNFINISHED, after the job that it is with."""
        self._library.ring(self.address)

    def serve(self, wait_seconds: float, linger_seconds: float) -> Progress:
        """Copier thread: copy posted jobs. Returns COMPLETE if no thread has settled a job
        `linger_seconds` after its last block was taken, ABORTED if it was aborted, IDLE if there
        was no job, or no release of its blocks, for `wait_seconds`."""
        state = self._library.serve(
            self.address, int(1e9 * wait_seconds), int(1e9 * linger_seconds)
        )
        return _PROGRESS[int(state)]


def find() -> Library | None:
    """The library, if it is there and may be used. Looks once per process."""
    return _found()[0]


def describe() -> str:
    """A sentence for the log: what copies, and why."""
    library, reasons = _found()
    if library is not None:
        return f"versions are copied by the copy engine, {library.path}"
    return f"versions are copied by torch, with more time of the CPU: {reasons}"


@cache
def _found() -> tuple[Library | None, str]:
    if os.environ.get(VARIABLE) == "torch":
        return None, f"{VARIABLE} asks for it"
    reasons = []
    for path in sorted(Path(__file__).parent.glob(_NAME)):
        for hashes in _hash_libraries():
            try:
                return Library(str(path), hashes), ""
            except (OSError, AttributeError, ValueError) as error:
                reasons.append(str(error))
    none = "the copy engine is not built; install Tierckpt again, with a C compiler"
    return None, "; ".join(reasons) or none


def _hash_libraries() -> Iterator[str]:
    """The extension module of the xxhash package, then the system's library."""
    yield from (str(p) for p in sorted(Path(xxhash.__file__).parent.glob("_xxhash*.so")))
    yield "libxxhash.so.0"


__all__ = ["Desk", "Job", "Library", "Progress", "Table", "describe", "find"]
