"""Three nodes flush a version to an S3 server over networks of their own; one network is faulty.

Real network namespaces (root) and a real server (`make s3-for-tests`); otherwise skipped by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.flush_processes import name_of
from tests.support.net_nodes import NodeProcess, network_or_skip
from tests.support.s3_server import KEY, SECRET, rclone, serving
from tierckpt.format import ShardKey
from tierckpt.storage.persistent import PersistentStore
from tierckpt.testing import HUB_ADDRESS, Network, content_of

NODES, VICTIM = 3, 1
PAGES = 5120
"""20 MiB: two parts."""
IN_MID_UPLOAD = "stop@file:op=put,hit=2"
PART, WHOLE = {"committed": False, "reused_bytes": 0}, {"committed": True, "reused_bytes": 0}


@dataclass
class Site:
    """Nodes, their network, and the server at its hub."""

    network: Network
    served: Path
    endpoint: str
    nodes: list[NodeProcess] = field(default_factory=list)

    def start(self, number: int, rule: str = "") -> NodeProcess:
        options = {
            "access_key_id": KEY,
            "secret_access_key": SECRET,
            "endpoint": self.endpoint,
            "region": "us-east-1",
            "client_options": {"connect_timeout": "3s", "timeout": "8s"},
            "retry_config": {"max_retries": 0},
        }
        plan: dict[str, Any] = {"url": "s3://bucket/job", "shard": number, "shards": NODES}
        plan |= {"pages": PAGES, "tries": 2, "options": options}
        return NodeProcess(
            self.network,
            number,
            ["tests.support.flush_processes", json.dumps(plan)],
            rule,
            self.served,
        )

    def start_and_stop(self) -> None:
        """All flush v1; the victim stops in the middle of its upload."""
        self.nodes += [self.start(n, IN_MID_UPLOAD if n == VICTIM else "") for n in range(NODES)]
        assert [node.heard() for node in self.nodes] == ["ready"] * NODES
        for node in self.nodes:
            node.tell(1)
        self.nodes[VICTIM].wait_stopped()

    def store(self) -> PersistentStore:
        """Objects are files on the server's side."""
        return PersistentStore(str(self.served / "bucket" / "job"), shared_writes=False)

    def versions(self) -> list[int]:
        return [name.id.version for name in self.store().versions()]

    def check(self, version: int) -> None:
        """The version exists, to the byte."""
        name, store = name_of(version, NODES), self.store()
        assert name in store.versions()
        for shard in range(NODES):
            expected = content_of(ShardKey(name.id, shard, NODES), PAGES)
            assert store.open_shard(name, shard).read() == expected


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    rclone()  # skips
    served = tmp_path / "served"
    (served / "bucket").mkdir(parents=True)
    with (
        network_or_skip(NODES) as network,
        serving(served, HUB_ADDRESS, network.inside(None)) as endpoint,
    ):
        made = Site(network, served, endpoint)
        yield made
        for node in made.nodes:
            node.kill()


def test_a_node_cut_off_lags_and_completes_the_version_later(site: Site) -> None:
    site.start_and_stop()
    site.network.cut(VICTIM)
    site.nodes[VICTIM].resume()
    said = [node.heard() for node in site.nodes]
    assert (said[0], said[2]) == (PART, PART), "the others are through, and wait for nobody"
    assert "s3://bucket/job" in said[VICTIM]["error"]
    assert "given up after 2 tries" in said[VICTIM]["error"]
    assert site.versions() == []
    site.network.mend(VICTIM)
    site.nodes[VICTIM].tell(1)
    assert site.nodes[VICTIM].heard() == WHOLE
    site.check(1)


def test_a_node_that_loses_power_leaves_no_version_and_its_successor_completes_it(
    site: Site,
) -> None:
    site.start_and_stop()
    site.network.cut(VICTIM)
    site.nodes[VICTIM].kill()
    assert [site.nodes[number].heard() for number in (0, 2)] == [PART, PART]
    assert site.versions() == []
    site.network.mend(VICTIM)
    site.nodes[VICTIM] = site.start(VICTIM)
    assert site.nodes[VICTIM].heard() == "ready"
    site.nodes[VICTIM].tell(1)
    assert site.nodes[VICTIM].heard() == WHOLE
    site.check(1)
    site.nodes[0].tell(1)
    assert site.nodes[0].heard()["reused_bytes"] == 4096 * PAGES, "what is there is not sent again"
