"""A real Horovod job's own timeline and our traces of it, on one time axis."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.dist.test_trace import PARAMETERS, STEPS, check_order
from tests.horovod_here import horovod_missing
from tierckpt.timeline.command import load
from tierckpt.timeline.horovod import agreement
from tierckpt.timeline.summary import summarize

HOROVOD_JOB = """
import sys
import horovod.torch as hvd, torch
import horovod_ckpt
from tests.dist.training import Net, WIDTH

hvd.init()
torch.manual_seed(1)
net = Net()
optimizer = torch.optim.Adam(net.parameters())
optimizer = horovod_ckpt.DistributedOptimizer(
    optimizer, named_parameters=net.named_parameters(), model=net, path=sys.argv[1],
    trace_dir=sys.argv[2], trace_steps=6, release="backward", local_every_steps=0,
    local_every_seconds=0,
)
for _ in range(8):
    optimizer.zero_grad()
    net(torch.randn(6, WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.checkpointer.step()
optimizer.checkpointer.close()
hvd.barrier()
hvd.shutdown()
"""


@pytest.mark.skipif(bool(horovod_missing()), reason=horovod_missing())
def test_horovods_timeline_and_ours_are_on_one_axis(tmp_path: Path, shm_dir: Path) -> None:
    program, timeline_file = tmp_path / "job.py", tmp_path / "horovod.json"
    program.write_text(HOROVOD_JOB)
    folder = tmp_path / "traces"
    launcher = Path(sys.executable).with_name("horovodrun")
    command = [launcher, "--gloo", "-np", "2", sys.executable, program, tmp_path / "ckpts", folder]
    env = {
        **os.environ,
        "HOROVOD_TIMELINE": str(timeline_file),
        "TIERCKPT_SHM_DIR": str(shm_dir),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        list(map(str, command)), env=env, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    timeline = load(sorted(folder.glob("trace-r*.json")), timeline_file)
    check_order(timeline, ranks=2, steps=STEPS)
    fit = agreement(timeline)
    assert fit.expected == PARAMETERS * (STEPS - 1)
    assert fit.missing == 0, fit.text()
    names = {s.name for s in timeline.of("allreduce")}
    assert names == {s.name for s in timeline.of("release")}
    assert summarize(timeline).hidden.backward_us > 0
