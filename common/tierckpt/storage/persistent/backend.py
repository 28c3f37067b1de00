"""The seam to storage: named bytes in folders, nothing of checkpoints.

Names are paths with slashes, relative to the place. What holds of every backend:

- `put` is atomic: readers see the old content or the whole new one, also when the writer dies;
- when `put` or `write_at` returns, the bytes are durable;
- names that begin with a dot are work in progress and are never listed.

`testing.BackendConformance` checks it. Before each operation that changes something,
`faults.point("file", op=...)` is called, so that tests can fail or kill there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

Content = Callable[[], Iterator[memoryview]]
"""Makes the windows of what is to be written, in order; called anew for every try. A window is
valid until the next one is asked for, and is at most WINDOW_BYTES long."""

WINDOW_BYTES = 8 << 20


class Backend(Protocol):
    """See the module's text. Methods raise OSError, and FileNotFoundError for what is missing."""

    url: str
    """For messages; carries no credentials."""
    shared_writes: bool
    """Several writers may write disjoint ranges of one file (`write_at`)."""

    def create(self) -> None:
        """Make the place if it can be made."""
        ...

    def put(self, name: str, content: Content, nbytes: int, exclusive: bool = False) -> None:
        """Make `content`, about `nbytes` long, the file's. `exclusive`: FileExistsError if it is
        there, and of several at once exactly one succeeds, where the store can do that."""
        ...

    def write_at(self, name: str, offset: int, content: Content) -> None:
        """Overwrite a range of a file that others may be writing elsewhere; makes the file."""
        ...

    def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """A range; shorter where the file ends. Threads may read at once."""
        ...

    def read_into(self, name: str, offset: int, into: memoryview) -> int:
        """The range that fills `into`, put there; how many bytes of it there were. Threads may read
        at once."""
        ...

    def size(self, name: str) -> int:
        """Length of a file."""
        ...

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Length of every file directly in `folder`; folders are called `name/` and have 0.
        Empty for a folder that is not there."""
        ...

    def delete(self, *names: str) -> None:
        """Remove files; those that are not there are passed over."""
        ...

    def delete_folder(self, folder: str) -> None:
        """Remove a folder, all that is in it, and all unfinished writes to it."""
        ...

    def discard(self, name: str) -> None:
        """Remove what dead writers of `name` left unfinished, never what a living one has.

        `folder/`, or nothing for the root: of any file in it, as far as that can be told."""
        ...

    def close(self) -> None:
        """Let connections go."""
        ...
