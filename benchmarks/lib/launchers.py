"""Commands and environment of jobs under real launchers, for benchmarks of restarts."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

RESTARTS = ("--max-restarts", "1000")
SHIM = ("-m", "tierckpt.run", *RESTARTS)
ON_THIS_MACHINE = ("--standalone",)


def torchrun(
    world: int, shim: Sequence[str] = (), nodes: Sequence[str] = ON_THIS_MACHINE
) -> list[str]:
    """torchrun for `world` ranks a node, which looks for failures often; the script follows."""
    command = [sys.executable, "-m", "torch.distributed.run", *nodes, "--monitor-interval", "0.1"]
    return [*command, "--nproc-per-node", str(world), *RESTARTS, *shim]


def horovodrun(world: int, discovery: Path) -> list[str]:
    """Elastic horovodrun with Gloo on this machine; the command of a rank follows. `discovery` is
    a script that prints the hosts."""
    command = [
        sys.executable,
        "-m",
        "horovod.runner.launch",
        "--gloo",
        "--network-interfaces",
        "lo",
    ]
    sizes = [word for name in ("-np", "--min-np", "--max-np") for word in (name, str(world))]
    return [*command, *sizes, "--host-discovery-script", str(discovery)]


def write_discovery(path: Path, hosts: Sequence[str]) -> Path:
    """Write the script that prints the hosts, with one slot each."""
    path.write_text("#!/bin/sh\n" + "".join(f"echo {host}:1\n" for host in hosts))
    path.chmod(0o755)
    return path


LOOPBACKS = tuple(f"127.0.0.{'1':0>{zeros}}" for zeros in range(1, 50))
"""Names of this machine. Horovod excludes a host after the death of a rank there, so each death
needs another name."""


def environment(folder: Path) -> dict[str, str]:
    """The environment of a launcher with its job's own `folder`; agents end with the job."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "TIERCKPT_AGENT_LINGER_SECONDS": "0",
        "XDG_CACHE_HOME": str(folder / "cache"),
    }


__all__ = [
    "LOOPBACKS",
    "SHIM",
    "environment",
    "horovodrun",
    "torchrun",
    "write_discovery",
]
