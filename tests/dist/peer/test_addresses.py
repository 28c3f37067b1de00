"""Addresses of agents on nodes with their own networks: a bad one is reported at once.

Real network namespaces on a bridge. Making them takes root; without it, the tests are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support.net_nodes import network_fixture
from tests.support.warm_python.servers import PYTHON
from tierckpt.testing import Network

NODES = 2
PATIENCE_SECONDS = 120.0


network = network_fixture(NODES)


JOB = """
import json, os, socket, sys
import torch, torch.distributed as dist
import ddp_ckpt
folder, shm, rank = sys.argv[1], sys.argv[2], os.environ["RANK"]
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
errors = []
ckpt = ddp_ckpt.Checkpointer(
    model,
    torch.optim.SGD(model.parameters(), lr=0.1),
    path=f"{folder}/node{rank}",
    shm_dir=shm,
    node=f"node{rank}",
    peer_redundancy="partner",
    local_journal_steps=10,
    on_event=lambda event: errors.append(event.message) if event.severity > 30 else None,
)
ckpt.restore()
listening = []
for line in open("/proc/net/tcp").readlines()[1:]:
    host, port = line.split()[1].split(":")
    if line.split()[3] == "0A":
        listening.append((socket.inet_ntoa(bytes.fromhex(host)[::-1]), int(port, 16)))
if copies := ckpt._levels.peers.own_address:
    assert (copies.host, copies.port) in listening
    listening.append((copies.host, 0))  # where the rank waits for copies of a journal
print(json.dumps([ckpt._levels.peers.ready, errors, listening]), flush=True)
ckpt.abandon()
os._exit(0)
"""


def attached(
    network: Network, folder: Path, shm_dir: Path, interfaces: list[str], port: int = 0
) -> list[tuple[bool, str, list[tuple[str, int]]]]:
    """For every rank, one per node: whether the peer level is on, its errors, and all addresses of
    listeners on that node."""
    processes = []
    for rank, interface in enumerate(interfaces):
        environment = {
            "RANK": str(rank),
            "WORLD_SIZE": str(NODES),
            "MASTER_ADDR": network.address(0),
            "MASTER_PORT": "29500",
            "GLOO_SOCKET_IFNAME": "net0",
            "TIERCKPT_PEER_INTERFACE": f"{interface}:{port}" if port else interface,
            "TIERCKPT_AGENT_LINGER_SECONDS": "0",
        }
        processes.append(
            subprocess.Popen(
                [*network.inside(rank), PYTHON, "-c", JOB, str(folder), str(shm_dir)],
                stdout=subprocess.PIPE,
                env={**os.environ, **environment},
            )
        )
    try:
        heard = [process.communicate(timeout=PATIENCE_SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    answers = [json.loads(text) for text in heard]
    return [
        (ready, "\n".join(errors), [(host, port) for host, port in listening])
        for ready, errors, listening in answers
    ]


def test_agents_listen_at_the_interface_and_the_port_that_are_set(
    network: Network, tmp_path: Path, shm_dir: Path
) -> None:
    port = 17171
    told = attached(network, tmp_path, shm_dir, ["net0", network.address(1)], port)
    for node, (ready, errors, listening) in enumerate(told):
        assert (ready, errors) == (True, "")
        found = [host for host, p in listening if p in (port, 0)]
        assert found == [network.address(node)] * 2, "the agent, and the rank's copy of a journal"


def test_an_address_that_cannot_work_is_named_on_all_ranks(
    network: Network, tmp_path: Path, shm_dir: Path
) -> None:
    """The nodes share a machine, so its boot and its name, but not their loopbacks."""
    for ready, errors, _ in attached(network, tmp_path, shm_dir, ["net0", "lo"]):
        assert not ready
        assert "rank 1's agent would listen on 127.0.0.1, where other machines" in errors
        assert "set peer_interface" in errors


def test_an_interface_with_ipv6_alone_has_an_address(network: Network) -> None:
    """The global address is taken: a link-local one is useless to other nodes."""
    space = network.nodes[0]
    for change in (["del", f"{network.address(0)}/24"], ["add", "fd00::7/64", "nodad"]):
        subprocess.run(
            ["ip", "-n", space, "address", *change[:2], "dev", "net0", *change[2:]], check=True
        )
    program = "from tierckpt.net import own_host; print(own_host('net0'))"
    found = subprocess.run(
        [*network.inside(0), sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert found.stdout == "fd00::7\n"
