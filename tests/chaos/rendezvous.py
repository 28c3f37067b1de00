"""Rendezvous of Horovod's ranks, as by `horovodrun --gloo`, for ranks that the test starts."""

from __future__ import annotations

from collections.abc import Mapping


class Rendezvous:
    """Horovod's own server, a new one for every run."""

    def __init__(self) -> None:
        self._server: object | None = None

    def renew(self, ranks: int) -> list[Mapping[str, str]]:
        """Serve another job of `ranks` ranks; returns their environments, by rank."""
        from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
        from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
        from horovod.runner.http.http_server import RendezvousServer

        self.close()
        places = get_host_assignments(parse_hosts(f"localhost:{ranks}"), ranks)
        self._server = server = RendezvousServer()
        shared = create_run_env_vars("127.0.0.1", ["lo"], str(server.start()))
        server.init(places)
        # Fusion of gradients depends on time, and sums over many ranks depend on the fusion.
        shared["HOROVOD_FUSION_THRESHOLD"] = "0"
        return [{**shared, **create_slot_env_vars(place)} for place in places]

    def close(self) -> None:
        """End the server."""
        if self._server is not None:
            self._server.stop()
            self._server._httpd.server_close()
            self._server = None
