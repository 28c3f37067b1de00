"""An object store of a world: names and bytes, each put whole or not there, and a server that is
slow, refuses, or is gone for a while."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .world import World

SCHEME = "bucket"
LATENCY_SECONDS = 0.002


class Server:
    """What all nodes reach."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.objects: dict[str, bytes] = {}
        self.gone_until = 0.0

    def meet(self, name: str) -> None:
        """A request takes its time, or fails."""
        self.world.enter("store", (name,))
        self.world.scheduler.park(LATENCY_SECONDS * (1 + self.world.random.random()))
        if self.gone_until > self.world.scheduler.now:
            raise ConnectionResetError(errno.ECONNRESET, f"{name}: the server is gone")


class Bucket:
    """As of `storage.persistent.backend.Backend`, with exclusive puts."""

    shared_writes, in_parts = False, True

    def __init__(self, server: Server, url: str) -> None:
        self._server, self.url = server, url.rstrip("/")
        self._root = self.url.partition("://")[2]

    def _key(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _found(self, name: str) -> bytes:
        self._server.meet(name)
        try:
            return self._server.objects[self._key(name)]
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, f"{self.url}/{name} is missing") from None

    def create(self) -> None:
        """As of `Backend`."""

    def close(self) -> None:
        """As of `Backend`."""

    def put(
        self,
        name: str,
        content: Callable[[], Iterator[memoryview]],
        nbytes: int,
        exclusive: bool = False,
    ) -> None:
        """As of `Backend`. A writer that dies before or after that leaves nothing, or all."""
        data = b"".join(content())
        self._server.meet(name)
        if exclusive and self._key(name) in self._server.objects:
            raise FileExistsError(errno.EEXIST, f"{self.url}/{name} exists")
        self._server.objects[self._key(name)] = data
        self._server.meet(name)

    def write_at(self, name: str, offset: int, content: Any) -> None:
        """Objects are written whole."""
        raise NotImplementedError

    def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """As of `Backend`."""
        data = self._found(name)
        return data[offset:] if nbytes is None else data[offset : offset + nbytes]

    def read_into(self, name: str, offset: int, into: memoryview) -> int:
        """As of `Backend`."""
        data = self.read(name, offset, len(into))
        into[: len(data)] = data
        return len(data)

    def size(self, name: str) -> int:
        """As of `Backend`."""
        return len(self._found(name))

    def sizes(self, folder: str = "") -> dict[str, int]:
        """As of `Backend`."""
        self._server.meet(folder)
        start = self._key(f"{folder}/" if folder else "")
        found: dict[str, int] = {}
        for key, data in self._server.objects.items():
            if key.startswith(start):
                name, slash, _ = key[len(start) :].partition("/")
                if not name.startswith("."):
                    found[name + slash] = 0 if slash else len(data)
        return found

    def delete(self, *names: str) -> None:
        """As of `Backend`."""
        for name in names:
            self._server.meet(name)
            self._server.objects.pop(self._key(name), None)

    def delete_folder(self, folder: str) -> None:
        """As of `Backend`: an object after the other."""
        start = self._key(f"{folder}/")
        for key in [key for key in self._server.objects if key.startswith(start)]:
            self._server.meet(key)
            self._server.objects.pop(key, None)

    def discard(self, name: str) -> None:
        """As of `Backend`: nothing is ever half-written."""


def entry_points(server: Callable[[], Server]) -> Callable[..., list[Any]]:
    """`importlib.metadata.entry_points` of a machine on which this store is installed."""

    def found(*, group: str, name: str = "") -> list[Any]:
        if (group, name) != ("tierckpt.backends", SCHEME):
            return []
        load = lambda: lambda url, **_: Bucket(server(), url)  # noqa: E731
        return [SimpleNamespace(name=name, value="tests.simulator.store:Bucket", load=load)]

    return found


__all__ = ["SCHEME", "Server", "entry_points"]
