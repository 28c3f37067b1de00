"""Storage backends: named bytes in folders; backends know nothing about checkpoints.

Names are paths with slashes, relative to the backend's root. Every backend guarantees:

- `put` is atomic: readers see the old content or the whole new one, also if the writer dies;
- when `put` or `write_at` returns, the bytes are durable;
- names that begin with a dot are work in progress and are never listed.

`testing.BackendConformance` checks this. Before each operation that changes something,
`faults.point("file", op=...)` is called, so that tests can fail or kill there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

Content = Callable[[], Iterator[memoryview]]
"""Yields the windows to write, in order; called again for every attempt. A window is at most
WINDOW_BYTES long, belongs to the caller, and its bytes do not change."""

WINDOW_BYTES = 8 << 20


class Backend(Protocol):
    """Interface of a backend; the module's docstring has its guarantees. Methods raise OSError, and
    FileNotFoundError for missing names."""

    url: str
    """Address for messages; contains no credentials."""
    shared_writes: bool
    """Several writers may write disjoint ranges of one file (`write_at`)."""
    in_parts: bool
    """Many files do no harm, and are written faster than one; `put` is called by several threads
    then. False if each `put` may be long."""

    def create(self) -> None:
        """Create the root if it can be created."""
        ...

    def put(self, name: str, content: Content, nbytes: int, exclusive: bool = False) -> None:
        """Write `content`, about `nbytes` long, as the whole file. With `exclusive`, raises
        FileExistsError if the file exists, and of several concurrent calls exactly one succeeds, if
        the store supports that."""
        ...

    def write_at(self, name: str, offset: int, content: Content) -> None:
        """Overwrite a range of a file, creating it if necessary; others may write other ranges."""
        ...

    def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """A range; shorter where the file ends. Threads may read at once."""
        ...

    def read_into(self, name: str, offset: int, into: memoryview) -> int:
        """Read a range into `into`; returns the number of bytes read. Threads may read at once."""
        ...

    def size(self, name: str) -> int:
        """Length of a file."""
        ...

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Length of every file directly in `folder`; folders are named `name/` and have length 0.
        Empty for a missing folder."""
        ...

    def delete(self, *names: str) -> None:
        """Remove files; missing ones are ignored."""
        ...

    def delete_folder(self, folder: str) -> None:
        """Remove a folder, its contents, and all unfinished writes to it."""
        ...

    def discard(self, name: str) -> None:
        """Remove unfinished writes of `name` by dead writers, never those of living ones.

        `folder/`, or an empty name for the root, stands for all files in it, as far as their
        writers are known to be dead.
        """
        ...

    def close(self) -> None:
        """Close connections."""
        ...
