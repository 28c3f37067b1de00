"""Prometheus: a port that it scrapes, a text file for node_exporter, or the script's registry."""

from __future__ import annotations

import contextlib
import errno
import os
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tierckpt.callbacks import Job
from tierckpt.errors import ConfigError
from tierckpt.events import Event, logger

from .exporter import Exporter, Ranks, Sample, require

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from .prometheus_collector import Collector


LOOPBACK, ALL = "127.0.0.1", "0.0.0.0"


class PrometheusRegistry(Exporter):
    """Puts the metrics into a registry of prometheus_client, for a script that serves it already.

    Args:
        registry: default: `prometheus_client.REGISTRY`.
        ranks: the ranks that export; by default the first one of each node.
    """

    def __init__(self, registry: CollectorRegistry | None = None, *, ranks: Ranks = "node") -> None:
        super().__init__(ranks)
        require("prometheus_client", "prometheus")
        self._registry = registry
        self._collector: Collector | None = None

    def begin(self, job: Job) -> None:
        """Register the metrics. Those of an earlier job of this process start again."""
        from .prometheus_collector import Collector

        if self._collector is None:
            collector = Collector()
            self._chosen(job).register(collector)
            self._collector = collector
        self._collector.begin(job)

    def _chosen(self, job: Job) -> CollectorRegistry:
        """The registry."""
        from prometheus_client import REGISTRY

        return self._registry or REGISTRY

    def record(self, sample: Sample, event: Event | None) -> None:
        """See `Exporter`."""
        assert self._collector is not None
        self._collector.record(sample)

    def export(self) -> bool:
        """Nothing: the registry is read on request."""
        return False


class _OwnRegistry(PrometheusRegistry):
    """Has a registry of its own."""

    def _chosen(self, job: Job) -> CollectorRegistry:
        from prometheus_client import CollectorRegistry

        self._registry = self._registry or CollectorRegistry()
        return self._registry


class PrometheusPort(_OwnRegistry):
    """Serves the metrics at `http://<node>:<port>/metrics`, for Prometheus to scrape.

    Args:
        port: the port of each node's first rank. With `ranks="all"` the next ones follow.
        address: the node's address to listen on; default: its loopback, which no other machine
            reaches. The port has no password: `0.0.0.0` (all addresses) opens it to everybody.
        ranks: the ranks that export; by default the first one of each node.
    """

    def __init__(self, port: int = 9400, address: str = LOOPBACK, *, ranks: Ranks = "node") -> None:
        super().__init__(ranks=ranks)
        if not 0 <= port <= 65535:
            raise ConfigError(f"the exporter's port is {port}; it must be from 0 to 65535")
        self._first_port, self.address = port, address
        """The address, as given."""
        self.port = port
        """The port, once it is open; with 0 a free one is chosen."""
        self._server: Any = None

    def begin(self, job: Job) -> None:
        """See `Exporter`."""
        super().begin(job)
        self.port = self._first_port + (job.local_rank if self._first_port else 0)

    def export(self) -> bool:
        """Open the port, unless it is open. A killed process's children may hold it for a while."""
        if self._server is not None:
            return False
        from prometheus_client import start_http_server

        assert self._registry is not None
        try:
            server, _ = start_http_server(self.port, self.address, self._registry)
        except OSError as error:
            what = "port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "address"
            text = f"port {self.port} of {self.address}: {error.strerror}; choose another {what}"
            raise OSError(text) from error
        self.port = server.server_port
        self._server = server
        _servers.add(server)
        whom = " (this machine alone)" if self.address == LOOPBACK else ""
        logger.info("%s: metrics are at %s:%d%s", self, self.address, self.port, whom)
        return True

    def end(self) -> None:
        """Close the port."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()

    def __repr__(self) -> str:
        return f"PrometheusPort({self.port})"


_servers: weakref.WeakSet[Any] = weakref.WeakSet()
"""Open servers of this process."""


def _close_in_child() -> None:
    """Close the ports in a forked child: a DataLoader's workers outlive a killed trainer for
    seconds, and would keep its successor from opening them."""
    for server in list(_servers):
        with contextlib.suppress(OSError):
            server.socket.close()


os.register_at_fork(after_in_child=_close_in_child)


class PrometheusFile(_OwnRegistry):
    """Writes the metrics to a text file, for the textfile collector of node_exporter.

    A reader finds a whole file at every moment, also after a SIGKILL.

    Args:
        path: a file `*.prom` in the folder that node_exporter was given, or the folder: the file is
            then named after the job. It needs the name `*{rank}*.prom` if several ranks of a node
            export.
        every_seconds: shortest time between two writes.
        ranks: the ranks that export; by default the first one of each node.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        every_seconds: float = 5.0,
        *,
        ranks: Ranks = "node",
    ) -> None:
        super().__init__(ranks=ranks)
        self._path = Path(path).expanduser().absolute()
        if self._path.is_dir():
            self._path /= "tierckpt-{job_id}-r{rank}.prom" if ranks == "all" else DEFAULT_NAME
        if self._path.suffix != SUFFIX:
            raise ConfigError(
                f"the exporter's file is {str(path)!r}; node_exporter reads only *{SUFFIX} in "
                "its folder: give such a name, or a folder that exists"
            )
        if ranks == "all" and "{rank}" not in self._path.name:
            raise ConfigError(
                f"the exporter's file is {str(path)!r} on all ranks; put {{rank}} into the name"
            )
        self._every_seconds = every_seconds
        self._next_seconds = 0.0
        self.path = self._path
        """The file."""

    def begin(self, job: Job) -> None:
        """Remove what a killed writer left."""
        super().begin(job)
        name = self._path.name.replace("{job_id}", job.job_id).replace("{rank}", str(job.rank))
        self.path = self._path.with_name(name)
        for left in self.path.parent.glob(f"{name}.*{TEMPORARY}"):
            left.unlink(missing_ok=True)

    def export(self) -> bool:
        """Replace the file, if it is time."""
        now = time.monotonic()
        if now < self._next_seconds:
            return False
        self._write()
        self._next_seconds = now + self._every_seconds
        return True

    def end(self) -> None:
        """Write the last values. The file stays, as those of batch jobs do."""
        self._write()

    def _write(self) -> None:
        from prometheus_client import generate_latest

        assert self._registry is not None
        # node_exporter ignores this name.
        temporary = self.path.with_name(f"{self.path.name}.{os.getpid()}{TEMPORARY}")
        try:
            temporary.write_bytes(generate_latest(self._registry))
            temporary.replace(self.path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise

    def __repr__(self) -> str:
        return f"PrometheusFile({str(self.path)!r})"


SUFFIX, TEMPORARY = ".prom", ".tmp"
DEFAULT_NAME = "tierckpt-{job_id}.prom"

__all__ = ["ALL", "LOOPBACK", "PrometheusFile", "PrometheusPort", "PrometheusRegistry"]
