"""An undisturbed job of one process, and the files that it leaves."""

from __future__ import annotations

from pathlib import Path

from tierckpt.format import ShardKey
from tierckpt.testing import TinyJob

STEPS = 8


def fingerprints() -> dict[int, str]:
    """State after every step of a job without a Checkpointer."""
    job = TinyJob(None)
    found: dict[int, str] = {}
    for iteration in range(1, 2 * STEPS + 1):
        job.run(iteration)
        found[iteration] = job.fingerprint()
    return found


def versions_on_disk(path: Path) -> list[int]:
    keys = (ShardKey.parse(p.name.removesuffix(".manifest")) for p in path.glob("*.manifest"))
    return sorted(key.id.version for key in keys if key)


def in_shm(shm_dir: Path) -> list[str]:
    return [p.name for p in shm_dir.rglob("*")]
