"""Memory use: as many slots as are asked for, and no copy of the state; and no second copy during a
restart."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tierckpt import Checkpointer
from tierckpt.restore import rebuild, shards
from tierckpt.testing import TinyJob, run_in_child

WIDTH, LAYERS = 512, 20
STATE_BYTES = 3 * 4 * (LAYERS * WIDTH * (WIDTH + 1) + WIDTH * (12 + 1) + 4 * (WIDTH + 1))
"""63 MB: parameters and Adam's two moments."""
ALLOWANCE_BYTES = 40_000_000
"""Code touched for the first time, threads' stacks, seal areas, Python's objects: 8 to 11
MB were measured, 28 once on a busy machine; a slot more, or a copy, would be 63."""
RESTART_BYTES = 30_000_000
"""Besides the fetched shards: windows and code. Memory for all optimizer state would be 42 MB
more."""
AGENT_BYTES = 40_000_000
"""The agent's Python without torch: 23 MB. It has mapped the slots, too: the same memory."""


def deep_model() -> torch.nn.Module:
    """Many layers: the optimizer needs little memory for each of them at a time."""
    inner = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    return torch.nn.Sequential(torch.nn.Linear(12, WIDTH), *inner, torch.nn.Linear(WIDTH, 4))


VOLATILE_BYTES = 2 * 40_000_000
"""Each of the two longer than malloc would keep for later."""


class Averaged(torch.nn.Module):
    """Has state as large as a model's besides parameters and buffers, as an `extra` object may."""

    def __init__(self) -> None:
        super().__init__()
        self.averages = {name: torch.ones(VOLATILE_BYTES // 8) for name in ("one", "other")}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def get_extra_state(self) -> dict[str, torch.Tensor]:
        return self.averages

    def set_extra_state(self, state: dict[str, torch.Tensor]) -> None:
        self.averages = state


def averaged_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(12, 4), Averaged())


def measure(
    report: Path, path: Path, settings: dict[str, Any], make: Callable[[], torch.nn.Module]
) -> None:
    """In a process of its own: peak resident memory with checkpoints at every step, here beyond the
    training's, and in the agent."""
    job = TinyJob(None, model=make()).run(2)
    forget_peak()
    job.run(5)
    alone_bytes = peak_bytes()
    with TinyJob(path, model=job.model, **settings) as job:
        job.run(2)
        job.settle()
        forget_peak()
        job.run(8)
        job.settle()
        agent = job.checkpointer._agent._connection._process
        assert agent is not None
        told = {
            "extra": peak_bytes() - alone_bytes,
            "agent": peak_bytes(agent.pid),
            "shard": max(event.nbytes for event in job.heard("sealed")),
            "committed": len(job.heard("committed")),
        }
        forget_peak()
        told["rest"] = peak_bytes() - alone_bytes
    report.write_text(json.dumps(told))


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes(pid: int | str = "self") -> int:
    """Peak resident memory: mapped slots, and everything else."""
    found = re.search(r"^VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.M)
    assert found
    return int(found[1]) * 1024


def test_checkpoints_take_their_slots_and_no_more(tmp_path: Path, shm_dir: Path) -> None:
    slots, report = 3, tmp_path / "report"
    settings = {"shm_dir": str(shm_dir), "slots": slots}
    assert run_in_child(measure, report, tmp_path / "ckpts", settings, deep_model) == 0
    told = json.loads(report.read_text())
    assert told["committed"] >= 8, "it was measured while versions were taken to both levels"
    shard_bytes = told["shard"]
    assert shard_bytes == pytest.approx(STATE_BYTES, rel=0.01)
    assert slots * shard_bytes <= told["extra"] <= slots * shard_bytes + ALLOWANCE_BYTES
    assert told["agent"] <= slots * shard_bytes + AGENT_BYTES


def test_a_copy_made_at_the_boundary_exists_once_and_not_for_long(
    tmp_path: Path, shm_dir: Path
) -> None:
    report = tmp_path / "report"
    settings = {"shm_dir": str(shm_dir), "slots": 2}
    assert run_in_child(measure, report, tmp_path / "ckpts", settings, averaged_model) == 0
    told = json.loads(report.read_text())
    assert told["committed"] >= 8
    slots_bytes = 2 * told["shard"]
    assert VOLATILE_BYTES <= told["shard"] <= 1.02 * VOLATILE_BYTES, "hardly any room to grow"
    most_bytes = slots_bytes + VOLATILE_BYTES
    assert most_bytes <= told["extra"] <= most_bytes + ALLOWANCE_BYTES
    assert told["rest"] <= slots_bytes + ALLOWANCE_BYTES


# --- restarts ------------------------------------------------------------------------------------

WINDOW_BYTES = 2**20
"""Window sizes for broadcasts and for each reader thread: smaller here, as the state is."""


def far_away(tmp_path: Path, shm_dir: Path) -> tuple[Path, Path, dict[str, Any]]:
    """Paths for a report and for checkpoints, and settings with a persistent level."""
    settings = {
        "shm_dir": str(shm_dir),
        "persistent_path": str(tmp_path / "shared"),
        "persistent_every_steps": 2,
        "persistent_every_seconds": 0.0,
    }
    return tmp_path / "report", tmp_path / "ckpts", settings


def leave_far_away(path: Path, settings: dict[str, Any]) -> None:
    with TinyJob(path, model=deep_model(), **settings) as job:
        job.run(2)


def come_back(report: Path, path: Path, settings: dict[str, Any]) -> None:
    """In a process of its own: peak resident memory while a version is fetched and loaded, beyond
    the new model."""
    rebuild.BROADCAST_BYTES = shards.RUN_BYTES = WINDOW_BYTES
    with TinyJob(path, model=deep_model(), **settings) as job:
        forget_peak()
        before_bytes = peak_bytes()
        restored = job.restore()
        told = {
            "extra": peak_bytes() - before_bytes,
            "levels": restored.levels,
            "state": restored.nbytes,
        }
    report.write_text(json.dumps(told))


PLAIN_LAYERS = 4 * LAYERS
PLAIN_BYTES = 4 * PLAIN_LAYERS * WIDTH * (WIDTH + 1)
"""84 MB, and no optimizer state: the live state is as large as the fetched shards."""


def plain_model() -> torch.nn.Module:
    return torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(PLAIN_LAYERS)])


def with_plain_sgd(path: Path, settings: dict[str, Any]) -> Checkpointer:
    model = plain_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Checkpointer(model, optimizer, path=path, boundary="explicit", **settings)


def leave_plain_far_away(path: Path, settings: dict[str, Any]) -> None:
    with with_plain_sgd(path, settings) as ckpt:
        for _ in range(2):
            ckpt._state.model(torch.ones(1, WIDTH)).sum().backward()
            next(iter(ckpt._state.optimizers.values())).step()
            ckpt.step()


def come_back_plain(report: Path, path: Path, settings: dict[str, Any], full: bool) -> None:
    """As `come_back`; the local disk may be full."""
    if full:
        os.posix_fallocate = no_room
    rebuild.BROADCAST_BYTES = shards.RUN_BYTES = WINDOW_BYTES
    with with_plain_sgd(path, settings) as ckpt:
        forget_peak()
        before_bytes = peak_bytes()
        restored = ckpt.restore()
        told = {
            "extra": peak_bytes() - before_bytes,
            "levels": restored.levels,
            "state": restored.nbytes,
            "read": restored.read_bytes,
        }
    report.write_text(json.dumps(told))


def no_room(*args: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("full", [False, True])
def test_plain_sgd_is_never_in_memory_twice(full: bool, tmp_path: Path, shm_dir: Path) -> None:
    """The live state stays until all fetched shards are sound, and nothing is fetched twice. So
    they are spilled to the local disk, or kept in memory if the disk is full."""
    report, path, settings = far_away(tmp_path, shm_dir)
    assert run_in_child(leave_plain_far_away, path, settings) == 0
    shutil.rmtree(path)
    assert run_in_child(come_back_plain, report, path, settings, full) == 0
    told = json.loads(report.read_text())
    assert told["levels"] == {"persistent": 1}
    assert told["state"] == told["read"] == pytest.approx(PLAIN_BYTES, rel=0.01)
    held_bytes = PLAIN_BYTES if full else 0
    assert held_bytes <= told["extra"] <= held_bytes + PLAIN_BYTES // 2


def test_one_rank_that_fetches_all_never_has_it_twice(tmp_path: Path, shm_dir: Path) -> None:
    """Optimizer state, two thirds of it, takes memory as the fetched shards free theirs."""
    report, path, settings = far_away(tmp_path, shm_dir)
    assert run_in_child(leave_far_away, path, settings) == 0
    shutil.rmtree(path)
    assert run_in_child(come_back, report, path, settings) == 0
    told = json.loads(report.read_text())
    assert told["levels"] == {"persistent": 1}
    assert told["state"] == pytest.approx(STATE_BYTES, rel=0.01)
    assert told["state"] <= told["extra"] <= told["state"] + RESTART_BYTES
