"""The simulated object store keeps what every backend promises."""

from __future__ import annotations

from typing import cast

import pytest

from tests.simulator.store import SCHEME, Bucket, Server
from tests.simulator.world import World
from tierckpt.testing import BackendConformance


class QuietServer(Server):
    """One without a world around it."""

    def __init__(self) -> None:
        super().__init__(cast(World, None))

    def meet(self, name: str) -> None:
        """A request takes no time."""


class TestBucket(BackendConformance):
    @pytest.fixture
    def backend(self) -> Bucket:
        return Bucket(QuietServer(), f"{SCHEME}://place")
