"""Interfaces of a network namespace with two of them; speeds come from a made-up /sys."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

LOOK = """
import json, sys
from msgspec.structs import asdict
from pathlib import Path
from tierckpt.config import load_config
from tierckpt.doctor import machine
from tierckpt.doctor.software import Subject
towards = sys.argv[2]
subject = Subject(load_config(), towards=towards, root=Path(sys.argv[1]))
found = [*machine.interface(subject), *machine.infiniband(subject)]
print(json.dumps([asdict(each) for each in found]))
"""
LINKS = """
set -e
ip link set lo up
ip link add eth9 type veth peer name far9
ip link add ib9 type veth peer name farib9
ip address add 10.77.1.1/24 dev eth9
ip address add 10.77.2.1/24 dev ib9
ip link set eth9 up; ip link set far9 up; ip link set ib9 up; ip link set farib9 up
ip route add default via 10.77.1.254
exec "$@"
"""


@pytest.fixture(scope="module")
def can_make_networks() -> None:
    done = subprocess.run(["unshare", "-n", "ip", "link", "add", "x", "type", "veth"])
    if done.returncode:
        pytest.skip("making network namespaces takes root, unshare and ip")


def made_sys(root: Path, **speeds: str) -> Path:
    """/sys/class/net with these speeds; `ib9` is Infiniband's."""
    for name, speed in speeds.items():
        folder = root / "sys/class/net" / name
        folder.mkdir(parents=True)
        (folder / "speed").write_text(f"{speed}\n")
        (folder / "operstate").write_text("up\n")
        (folder / "type").write_text("32\n" if name == "ib9" else "1\n")
    return root


def seen(root: Path, towards: str = "", **environment: str) -> list[dict[str, Any]]:
    """Findings in a namespace with eth9, on the default route, and ib9."""
    look = [sys.executable, "-c", LOOK, str(root), towards]
    prefix = [f"{name}={value}" for name, value in environment.items()]
    done = subprocess.run(
        ["unshare", "-n", "sh", "-c", LINKS, "sh", "env", *prefix, *look],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


@pytest.mark.usefixtures("can_make_networks")
def test_a_faster_interface_is_named_with_the_setting_that_chooses_it(tmp_path: Path) -> None:
    root = made_sys(tmp_path, eth9="10000", ib9="200000")
    (found,) = seen(root)
    assert found["mark"] == "warning"
    assert found["text"] == (
        "peers use 10.77.1.1 on eth9, 10 Gbit/s; ib9 is up, Infiniband of 200 Gbit/s"
    )
    setting = found["cure"].rpartition(": ")[2]
    assert setting == "TIERCKPT_PEER_INTERFACE=ib9"
    name, _, value = setting.partition("=")
    (cured,) = seen(root, **{name: value})
    assert cured["mark"] == "good"
    assert cured["text"] == "peers use 10.77.2.1 on ib9, 200 Gbit/s (peer_interface)"


@pytest.mark.usefixtures("can_make_networks")
@pytest.mark.parametrize("speeds", [("-1", "10000"), ("10000", "10000")])
def test_a_slower_interface_is_not_named(speeds: tuple[str, str], tmp_path: Path) -> None:
    (found,) = seen(made_sys(tmp_path, eth9=speeds[0], ib9=speeds[1]))
    assert found["mark"] == "good"


@pytest.mark.usefixtures("can_make_networks")
def test_veth_pairs_of_containers_are_not_recommended() -> None:
    """In the real /sys they have 10 Gbit/s, and an interface of a virtual machine none."""
    (found,) = seen(Path("/"))
    assert found["mark"] == "good"


@pytest.mark.usefixtures("can_make_networks")
def test_a_name_of_another_node_that_leads_to_loopback_is_a_cross(tmp_path: Path) -> None:
    """/etc/hosts of Debian gives a machine's own name 127.0.1.1; copied files do it for others."""
    root = made_sys(tmp_path, eth9="10000", ib9="200000")
    (found,) = seen(root, towards="127.0.1.1")
    assert found["mark"] == "cross"
    assert found["text"].startswith("other nodes cannot reach 127.0.")
    assert found["cure"] == "set TIERCKPT_PEER_INTERFACE=ib9"
