"""Agents' addresses and failure domains, set by users: each node has its own environment."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.dist.peer.test_peer_level import protected_at
from tests.support.training import Place, attach, make_job, rank, restored_into, train
from tierckpt.testing import free_ports

STEPS = 3
RACKS = ((0, 1), (2, 3))
"""Racks of nodes; on a ring without racks the first two would keep only each other's parity."""
INTERFACES = ("lo", "127.0.0.1")
"""Interfaces given by name, and by address."""
SCHEME = {"peer_redundancy": "partner", "local_every_steps": 100, "slots": 3, "when_busy": "wait"}


def run_id(place: Place, ports: list[int], restore: bool) -> dict[str, Any]:
    """Train, with the last version protected, and end as in a crash; returns the agent's
    address."""
    number = rank()
    mine = {
        "TIERCKPT_NODE": f"node{number}",
        "TIERCKPT_PEER_PORT": str(ports[number]),
        "TIERCKPT_PEER_INTERFACE": INTERFACES[number % 2],
        "TIERCKPT_PEER_DOMAIN": next(f"rack{rack[0]}" for rack in RACKS if number in rack),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in mine.items():
            patch.setenv(name, value)
        job = make_job(seed=1 + restore)
        attached = attach(job, place, **SCHEME)
    told = restored_into(job, attached) if restore else {}
    course = train(job, attached.ckpt, range(STEPS, 2 * STEPS) if restore else range(STEPS))
    protected_at(2 * STEPS if restore else STEPS, attached)
    agent = attached.ckpt._agent.pid
    assert agent is not None
    told |= {
        "course": course,
        "listens": listening(agent),
        "complaints": [e.text() for e in attached.events if e.severity > 30],
    }
    attached.ckpt.abandon()
    return told


def listening(pid: int) -> set[tuple[str, int]]:
    """Addresses at which a process waits for TCP connections, IPv4."""
    sockets = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            sockets.add(os.readlink(fd))
        except FileNotFoundError:
            continue
    found = set()
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        _, where, _, state, *_, inode = line.split()[:10]
        if state == "0A" and f"socket:[{inode}]" in sockets:
            host, port = where.split(":")
            found.add((socket.inet_ntoa(bytes.fromhex(host)[::-1]), int(port, 16)))
    return found


def test_agents_listen_at_the_given_address_and_a_lost_rack_is_restored(
    ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    nodes = sum(map(len, RACKS))
    place = Place(str(tmp_path / "{node}" / "ckpts"), str(shm_dir))
    ports = free_ports(nodes)
    before = ranks(nodes).run(run_id, place, ports, False)
    assert [told["listens"] for told in before] == [{("127.0.0.1", port)} for port in ports]
    assert [told["complaints"] for told in before] == [[]] * nodes
    for node in RACKS[0]:
        shutil.rmtree(tmp_path / f"node{node}")
    shutil.rmtree(place.shm)  # everything was switched off
    Path(place.shm).mkdir()
    ports = free_ports(nodes)
    after = ranks(nodes).run(run_id, place, ports, True)
    lost = len(RACKS[0])
    assert [told["restored"] for told in after] == [
        (STEPS, {"local": nodes - lost, "peer": lost})
    ] * nodes
    assert [told["digest"] for told in after] == [told["course"][STEPS] for told in before]
    assert [told["listens"] for told in after] == [{("127.0.0.1", port)} for port in ports]
