"""Shards in parts: one shard as many objects of an object store, which are sent at the same time.

A multipart upload would make one object of them. But a writer that is killed leaves an upload that
no listing of objects shows, and that is billed until somebody finds it. Parts that are objects lie
in the version's folder and go with it, each is repeated alone after an error, and every store has
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from tierckpt.format.version_names import PART_BYTES, PARTS, part_name

from .backend import Backend

PARTS_AT_ONCE = 8
"""Parts that are under way at once, over a connection each. More than these and the next one are
never in memory."""


def write_parts(backend: Backend, path: str, windows: Iterator[memoryview]) -> None:
    """Make the bytes of `windows` durable as parts of `path`. Raises the first error of a part, or
    of `windows`; no part is under way then any more."""
    with ThreadPoolExecutor(PARTS_AT_ONCE, "tierckpt-parts") as pool:
        under_way: set[Future[None]] = set()
        try:
            for number, part in enumerate(_cut(windows)):
                if len(under_way) == PARTS_AT_ONCE:
                    under_way = _after_one(under_way)
                name = f"{path}/{part_name(number)}"
                under_way.add(pool.submit(_put, backend, name, part))
            while under_way:
                under_way = _after_one(under_way)
        except BaseException:
            for future in under_way:
                future.cancel()
            raise


def _put(backend: Backend, name: str, part: list[memoryview]) -> None:
    backend.put(name, lambda: map(memoryview, part), sum(map(len, part)))


def _after_one(under_way: set[Future[None]]) -> set[Future[None]]:
    """Wait until a part is durable; returns the others. Raises its error."""
    done, left = wait(under_way, return_when=FIRST_COMPLETED)
    for future in done:
        future.result()
    return left


def _cut(windows: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """Gather windows to parts, each of PART_BYTES, except the last."""
    part: list[memoryview] = []
    room = PART_BYTES
    for window in windows:
        while len(window) >= room:
            yield [*part, window[:room]]
            window, part, room = window[room:], [], PART_BYTES
        if len(window):
            part.append(window)
            room -= len(window)
    if part:
        yield part


def is_in_parts(path: str) -> bool:
    """True for the path of a shard in parts."""
    return path.endswith(PARTS)


def stored_bytes(backend: Backend, path: str) -> int:
    """Length of the file, or of the parts that exist without a gap. FileNotFoundError without the
    file; zero without parts."""
    if not is_in_parts(path):
        return backend.size(path)
    found, number, nbytes = backend.sizes(path), 0, 0
    while (length := found.get(part_name(number))) is not None:
        number, nbytes = number + 1, nbytes + length
        if length != PART_BYTES:
            break
    return nbytes


def read(backend: Backend, path: str, offset: int, nbytes: int) -> bytes:
    """A range of a file or of a shard in parts; shorter where that ends."""
    if not is_in_parts(path):
        return backend.read(path, offset, nbytes)
    into = bytearray(nbytes)
    with memoryview(into) as view:
        done = read_into(backend, path, offset, view)
    return bytes(into[:done])


def read_into(backend: Backend, path: str, offset: int, into: memoryview) -> int:
    """Read a range into `into`; returns the number of bytes read."""
    if not is_in_parts(path):
        return backend.read_into(path, offset, into)
    done = 0
    while done < len(into):
        number, begin = divmod(offset + done, PART_BYTES)
        end = min(len(into), done + PART_BYTES - begin)
        got = backend.read_into(f"{path}/{part_name(number)}", begin, into[done:end])
        done += got
        if done < end:
            break
    return done


__all__ = ["is_in_parts", "read", "read_into", "stored_bytes", "write_parts"]
