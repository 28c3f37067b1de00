"""As many real ranks and agents as the machine holds: every level, the loss of a node, a restart.

`MANY_RANKS=128 pytest tests/dist/peer/test_many_ranks.py` sets the number of ranks.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.support.star_group import StarGroup, run_star
from tests.support.thorough import on_demand
from tierckpt.testing.tiny_job import TinyJob

VARIABLE = "MANY_RANKS"
RANKS = int(os.environ.get(VARIABLE, "24"))
NODE_RANKS = 8 if RANKS >= 64 else 4
STEPS, MORE = 6, 3
PATIENCE_SECONDS = 400.0


def job_of(group: StarGroup, folder: str, shm_dir: str) -> TinyJob:
    """Attach a rank to the job, on the node of its number."""
    return TinyJob(
        f"{folder}/{{node}}/ckpts",
        group=group,
        node=f"node{group.rank // NODE_RANKS}",
        shm_dir=shm_dir,
        slots=3,
        local_every_steps=2,
        peer_redundancy="rs 2+1",
        peer_interface="lo",
        persistent_path=f"{folder}/shared",
        persistent_every_steps=2,
        persistent_every_seconds=0.0,
    )


def first_run(group: StarGroup, folder: str, shm_dir: str) -> dict[str, Any]:
    """Train until the last version is protected and on the persistent level; then stay."""
    times = [time.perf_counter()]
    job = job_of(group, folder, shm_dir)
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
        ckpt._collect()
    group.barrier()
    times.append(time.perf_counter())
    return {
        "fingerprint": job.fingerprint(),
        "complaints": _complaints(job),
        "seconds": [after - before for before, after in pairwise(times)],
        "descriptors": len(os.listdir("/proc/self/fd")),
        "memory_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


def _has(job: TinyJob, level: str, version: int) -> bool:
    return any(e.version == version for e in job.heard("committed", level))


def _complaints(job: TinyJob) -> list[str]:
    """Return the errors. With many ranks a core, an agent may get no processor for seconds, and
    another one takes its place: that is no error here."""
    errors = [e.text() for e in job.events if e.severity > 30]
    return [text for text in errors if "does not answer; another one" not in text]


def second_run(group: StarGroup, folder: str, shm_dir: str) -> dict[str, Any]:
    """Restore, train on, and close."""
    begin = time.perf_counter()
    job = job_of(group, folder, shm_dir)
    attached = time.perf_counter()
    restored = job.restore()
    found = job.fingerprint()
    seconds = [attached - begin, time.perf_counter() - attached]
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


@on_demand("hundreds of processes")
def test_many_ranks_lose_a_node_and_go_on(tmp_path: Path, shm_dir: Path) -> None:
    folder, memory = str(tmp_path), str(shm_dir)
    before = run_star(RANKS, first_run, folder, memory, is_ring=True, patience_seconds=600)
    first = [each.value for each in before]
    assert [each["complaints"] for each in first] == [[]] * RANKS
    kill_agents(shm_dir)
    shutil.rmtree(tmp_path / "node1")
    for left in shm_dir.glob("*/*@node1"):
        shutil.rmtree(left)
    after = run_star(RANKS, second_run, folder, memory, is_ring=True, patience_seconds=600)
    second = [each.value for each in after]
    for one, other in zip(first, second, strict=True):
        assert other["fingerprint"] == one["fingerprint"]
        assert other["version"] == STEPS
        assert other["complaints"] == []
    for title, rows in (("first run", first), ("second run", second)):
        slowest = [max(column) for column in zip(*(r["seconds"] for r in rows), strict=True)]
        print(f"{RANKS} ranks, {title}: {[f'{s:.1f} s' for s in slowest]}")
    print(max(r["descriptors"] for r in first), "descriptors a rank at most")
    print(max(r["memory_bytes"] for r in first) // 1_000_000, "MB a rank at most")
    print(second[0]["levels"])
