"""As many real ranks and agents as the machine holds: every level, the loss of a node, a restart.

`MANY_RANKS=128 pytest tests/dist/peer/test_many_ranks.py` sets the number of ranks, and
`MANY_NODE_RANKS=1` makes each of them a node with an agent of its own. As root every node has a
network namespace, and agents and leaders reach each other over a bridge; otherwise over loopback.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.support.star_group import StarGroup, run_star
from tests.support.thorough import on_demand
from tierckpt.storage.persistent import PersistentStore
from tierckpt.testing import NoNetworkError, TinyJob, temporary_network

VARIABLE = "MANY_RANKS"
RANKS = int(os.environ.get(VARIABLE, "24"))
NODE_RANKS = int(os.environ.get("MANY_NODE_RANKS", "8" if RANKS >= 64 else "4"))
NODES = -(-RANKS // NODE_RANKS)
CLONE_NEWNET = 0x40000000
STEPS, MORE = 6, 3
PATIENCE_SECONDS = 400.0


@pytest.fixture
def spaces() -> Iterator[list[str]]:
    """Names of the nodes' network namespaces; empty if they cannot be made."""
    with contextlib.ExitStack() as stack:
        try:
            found = stack.enter_context(temporary_network(NODES)).nodes
        except NoNetworkError:
            found = []
        yield found


def enter(space: str) -> None:
    """Move this process, and the agent that it will start, to a network namespace."""
    with open(f"/var/run/netns/{space}") as there:
        assert ctypes.CDLL(None, use_errno=True).setns(there.fileno(), CLONE_NEWNET) == 0


def job_of(group: StarGroup, folder: str, shm_dir: str, spaces: Sequence[str]) -> TinyJob:
    """Attach a rank to the job, on the node of its number."""
    if spaces:
        enter(spaces[group.rank // NODE_RANKS])
    return TinyJob(
        f"{folder}/{{node}}/ckpts",
        group=group,
        node=f"node{group.rank // NODE_RANKS}",
        shm_dir=shm_dir,
        slots=3,
        local_every_steps=2,
        peer_redundancy="rs 2+1",
        peer_interface="net0" if spaces else "lo",
        persistent_path=f"{folder}/shared",
        persistent_every_steps=2,
        persistent_every_seconds=0.0,
    )


def first_run(group: StarGroup, folder: str, shm_dir: str, spaces: Sequence[str]) -> dict[str, Any]:
    """Train until the last version is protected and on the persistent level; then stay."""
    times = [time.perf_counter()]
    job = job_of(group, folder, shm_dir, spaces)
    times.append(time.perf_counter())
    job.run(STEPS)
    times.append(time.perf_counter())
    ckpt = job.checkpointer
    ckpt.save(now=True)
    # The last version would be flushed at the next boundary; the one before it is on its way.
    # The first rank of a node has the results.
    while group.rank % NODE_RANKS == 0 and not (
        _has(job, "peer", STEPS) and _has(job, "persistent", STEPS - 2)
    ):
        assert time.perf_counter() - times[0] < PATIENCE_SECONDS, _complaints(job)
        time.sleep(0.05)
        ckpt._levels.collect()
    group.barrier()
    times.append(time.perf_counter())
    return {
        "fingerprint": job.fingerprint(),
        "complaints": _complaints(job),
        "by_tree": ckpt._agreement._ballots.tree is not None,  # type: ignore[attr-defined]
        "seconds": [after - before for before, after in pairwise(times)],
        "descriptors": len(os.listdir("/proc/self/fd")),
        "memory_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


def _has(job: TinyJob, level: str, version: int) -> bool:
    return any(e.version == version for e in job.heard("committed", level))


def _complaints(job: TinyJob) -> list[str]:
    """Return the errors. With many ranks a core, an agent may get no processor for seconds, and
    another one takes its place: no error here."""
    errors = [e.text() for e in job.events if e.severity > 30]
    return [text for text in errors if "does not answer; another one" not in text]


def second_run(
    group: StarGroup, folder: str, shm_dir: str, spaces: Sequence[str]
) -> dict[str, Any]:
    """Restore, train on, and close."""
    start = time.perf_counter()
    job = job_of(group, folder, shm_dir, spaces)
    attached = time.perf_counter()
    restored = job.restore()
    found = job.fingerprint()
    seconds = [attached - start, time.perf_counter() - attached]
    job.run(STEPS + MORE)
    last = job.fingerprint()
    job.checkpointer.close()
    return {
        "version": restored.version,
        "levels": restored.levels,
        "fingerprint": found,
        "last": last,
        "seconds": seconds,
        "complaints": _complaints(job),
    }


def kill_agents(shm_dir: Path, node: str = "") -> None:
    """Kill the agents of that node, or of all."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if any(str(shm_dir) in word for word in words) and (not node or f"@{node}" in str(words)):
            os.kill(int(folder.name), signal.SIGKILL)


def check_flush(shared: Path) -> None:
    """Check that a version of all ranks is on the persistent level, every byte of it, written by
    every node."""
    with contextlib.closing(PersistentStore(str(shared))) as store:
        names = store.versions()
        assert [name.id.version for name in names][-1] >= STEPS - 2
        for shard in range(RANKS):
            store.open_shard(names[-1], shard).verify()


@on_demand("hundreds of processes")
def test_many_ranks_lose_a_node_and_continue(
    tmp_path: Path, shm_dir: Path, spaces: list[str]
) -> None:
    how = str(tmp_path), str(shm_dir), spaces
    before = run_star(RANKS, first_run, *how, is_ring=True, patience_seconds=600)
    first = [each.value for each in before]
    assert [each["complaints"] for each in first] == [[]] * RANKS
    assert all(each["by_tree"] for each in first)
    kill_agents(shm_dir)
    check_flush(tmp_path / "shared")
    shutil.rmtree(tmp_path / "node1")
    for left in shm_dir.glob("*/*@node1"):
        shutil.rmtree(left)
    after = run_star(RANKS, second_run, *how, is_ring=True, patience_seconds=600)
    second = [each.value for each in after]
    assert "peer" in second[0]["levels"], "the shards of the lost node were rebuilt"
    for one, other in zip(first, second, strict=True):
        assert other["fingerprint"] == one["fingerprint"]
        assert other["version"] == STEPS
        assert other["complaints"] == []
    for title, rows in (("first run", first), ("second run", second)):
        slowest = [max(column) for column in zip(*(r["seconds"] for r in rows), strict=True)]
        print(f"{RANKS} ranks, {title}: {[f'{s:.1f} s' for s in slowest]}")
    print(max(r["descriptors"] for r in first), "descriptors a rank at most")
    print(max(r["memory_bytes"] for r in first) // 1_000_000, "MB a rank at most")
    print(second[0]["levels"], f"{NODES} agents,", "namespaces" if spaces else "loopback")
