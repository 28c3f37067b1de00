"""A real job of two ranks with exporters: one rank of a node exports, and a SIGKILL is seen."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.support.warm_python.servers import PYTHON, THROUGHOUT
from tierckpt.testing import free_ports

pytest.importorskip("prometheus_client")

SCRIPT = """
import os, shutil, signal, sys, urllib.request
import torch, torch.distributed as dist, ddp_ckpt
from torch.nn.parallel import DistributedDataParallel
from tests.support.exported_job import wait_until

folder, port = sys.argv[1:]
file = f"{folder}/job.prom"
dist.init_process_group("gloo")
torch.manual_seed(0)
net = DistributedDataParallel(torch.nn.Linear(4, 1))
opt = torch.optim.Adam(net.parameters())
with ddp_ckpt.Checkpointer(net, opt, path=f"{folder}/ckpts") as ckpt:
    again = ckpt.restore()
    if again and dist.get_rank() == 0:
        shutil.copy(file, f"{folder}/left.prom")
    for step in range(again, 20):
        opt.zero_grad()
        net(torch.ones(2, 4)).sum().backward()
        opt.step()
        ckpt.step()
        if step == 8 and not again and dist.get_rank() == 0:
            wait_until(lambda: "live_version" in open(file).read(), "nothing is written")
            os.kill(os.getpid(), signal.SIGKILL)
    if dist.get_rank() == 0:
        def served():
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
                    return b"live_version{" in (text := answer.read()) and text
            except OSError:
                return b""
        wait_until(served, "the port is not open again")
        open(f"{folder}/scraped.prom", "wb").write(served())
"""


def value(text: str, name: str, labels: str = "") -> float:
    """The value of the only series of that name."""
    ((_, found),) = re.findall(rf"^{name}(\{{[^}}]*{labels}[^}}]*\}}) (.*)$", text, re.MULTILINE)
    return float(found)


def test_one_rank_exports_and_its_successor_continues(tmp_path: Path, shm_dir: Path) -> None:
    port, script = free_ports(1)[0], tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [
        *(PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("--max-restarts", "1", "-m", "tierckpt.run", str(script), str(tmp_path), str(port)),
    ]
    environment = {
        **os.environ,
        **THROUGHOUT,
        "TIERCKPT_SHM_DIR": str(shm_dir),
        "TIERCKPT_EXPORT": f"prometheus 127.0.0.1:{port}, prometheus {tmp_path}/job.prom",
    }
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    left, scraped, last = (
        (tmp_path / f"{name}.prom").read_text() for name in ("left", "scraped", "job")
    )
    assert left.endswith(" 2.0\n")  # ranks, the last line
    assert value(left, "tierckpt_running") == 1
    for text in (left, scraped, last):
        assert 'rank="0"' in text
        assert 'rank="1"' not in text
    restored = value(scraped, "tierckpt_restored_version")
    assert restored >= 7
    assert value(scraped, "tierckpt_running") == 1
    assert value(last, "tierckpt_running") == 0
    assert value(last, "tierckpt_newest_version", 'level="local"') == 20
    assert value(last, "tierckpt_drifted_total") == 0
    assert "does not" not in done.stderr
    assert not list(tmp_path.glob("*.tmp"))
