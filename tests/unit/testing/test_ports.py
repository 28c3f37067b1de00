"""Ports that no other gets before a server has them."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tierckpt.testing import network


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that names the ports that the kernel gives."""
    path = tmp_path / "range"
    monkeypatch.setattr(network, "PORTS_GIVEN", path)
    return path


def test_they_differ_and_the_kernel_gives_none_of_them(given: Path) -> None:
    given.write_text("12000\t64000\n")
    found = network.free_ports(100)
    assert len(set(found)) == 100
    assert not [port for port in found if 12000 <= port <= 64000]
    for port in found:
        socket.create_server(("127.0.0.1", port)).close()


def test_a_kernel_that_gives_all_leaves_a_choice_too(given: Path) -> None:
    given.write_text("1024\t65535\n")
    assert len(set(network.free_ports(5))) == 5


def test_a_port_in_use_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(network, "_candidates", lambda: [port])
        with pytest.raises(OSError, match=f"0 ports of {port} to {port} are free, not 1"):
            network.free_ports(1)
