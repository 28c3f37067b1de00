"""horovodrun, with a fix for an error in its rendezvous.

Each rank reports the end of each scope (global, local, cross). When all ranks have reported one
scope, Horovod 0.28 drops the reports of the other scopes, too. If ranks are not in step there, the
addresses of such a scope stay, and after `hvd.shutdown()` the next `hvd.init()` finds them and
aborts: "Connection refused".
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from horovod.runner.http.http_server import RendezvousHTTPServer
from horovod.runner.launch import run_commandline


class Finished(defaultdict[str, list[str]]):
    """The ranks that reported an end, by scope."""

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__(list)
        self._sizes = sizes

    def clear(self) -> None:
        """Forget the scopes that all ranks have ended."""
        for scope in [name for name, ranks in self.items() if len(ranks) == self._sizes.get(name)]:
            del self[scope]


def mend() -> None:
    make = RendezvousHTTPServer.__init__

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self.finished_list = Finished(self.scope_size)

    RendezvousHTTPServer.__init__ = made


if __name__ == "__main__":
    mend()
    run_commandline()
