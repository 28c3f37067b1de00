"""Processes that stand for nodes, each in a network namespace, controlled by lines of JSON."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.peer_shards import wait_until
from tierckpt.testing import Network, NoNetworkError, burst_bytes
from tierckpt.testing import temporary_network as network


@contextlib.contextmanager
def network_or_skip(count: int) -> Iterator[Network]:
    """A network inside `with`. Skips the test if network namespaces are not available."""
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(network(count))
        except NoNetworkError as error:
            pytest.skip(str(error))
        yield made


def network_fixture(count: int) -> Any:
    """A fixture for the module that assigns it: a network of so many nodes for each test."""

    @pytest.fixture
    def made() -> Iterator[Network]:
        with network_or_skip(count) as nodes:
            yield nodes

    return made


@contextlib.contextmanager
def narrowed(network: Network, number: int, bytes_per_second: float) -> Iterator[None]:
    """Limit a node's bandwidth, and check at the end of the block that more than a second's
    traffic passed in some direction, and no more than the limit. On a busy machine it is less."""
    network.narrow(number, bytes_per_second)
    began_seconds, before = time.monotonic(), network.carried_bytes(number)
    yield
    after, seconds = network.carried_bytes(number), time.monotonic() - began_seconds
    passed_bytes = [late - early for late, early in zip(after, before, strict=True)]
    fits_bytes = burst_bytes(bytes_per_second) + bytes_per_second * seconds
    assert bytes_per_second < max(passed_bytes) <= 1.05 * fits_bytes, "the cable was not narrow"


class NodeProcess:
    """A process `python -m <program>` on node `number`; `rule` is a fault (see `tierckpt._faults`).

    A fault leaves its mark in `marks`, so nodes that are to be hit by the same rule share that.
    """

    def __init__(
        self,
        network: Network,
        number: int,
        program: list[str],
        rule: str = "",
        marks: Path | None = None,
        **environment: str,
    ) -> None:
        faults = {"TIERCKPT_FAULTS": rule}
        if marks is not None:
            faults["TIERCKPT_FAULTS_DIR"] = str(marks)
        self.process = subprocess.Popen(
            [*network.inside(number), sys.executable, "-m", *program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **faults, **environment},
        )

    def heard(self) -> Any:
        """The next line; "killed" when the process ended without one."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else "killed"

    def tell(self, order: Any) -> None:
        assert self.process.stdin is not None
        print(json.dumps(order), file=self.process.stdin, flush=True)

    def wait_stopped(self) -> None:
        """Wait until its fault has stopped it."""
        wait_until(self._stopped)

    def _stopped(self) -> bool:
        status = Path(f"/proc/{self.process.pid}/stat").read_text()
        return status.rpartition(")")[2].split()[0] == "T"

    def resume(self) -> None:
        """Continue it, after `wait_stopped`."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill it, also when it is stopped."""
        self.process.kill()
        self.process.communicate()
