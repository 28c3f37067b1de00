"""Jobs that use Accelerate under real launchers: torchrun, `accelerate launch`, `tierckpt run`."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.support.frameworks.fixtures import MakeJob, Undisturbed
from tests.support.frameworks.killed_job import resumes_under_a_launcher
from tests.support.warm_python.servers import PYTHON
from tierckpt.testing import free_ports

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "tests" / "support" / "accelerate" / "job.py"
RESTARTS = ["--max_restarts", "1", "--monitor_interval", "0.1"]
TORCHRUN = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
LAUNCH = [PYTHON, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
LAUNCH += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
COMMANDS = {
    "torchrun": [*TORCHRUN, *RESTARTS],
    "accelerate launch": [*LAUNCH, *RESTARTS, "--rdzv_backend", "c10d"],
    "accelerate launch, tierckpt run": [*LAUNCH, "--module", "tierckpt.run"],
    "tierckpt run": [*TORCHRUN, "-m", "tierckpt.run"],
}


@pytest.fixture(scope="module", autouse=True)
def _warm(warm_python: None) -> None:
    """Started before the first test, as it starts processes that last."""


@pytest.mark.parametrize("launcher", COMMANDS)
def test_ranks_restarted_by_the_launcher_resume_exactly(
    launcher: str, make_job: MakeJob, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    command = [*COMMANDS[launcher], str(SCRIPT)]
    if launcher.startswith("accelerate launch"):
        command[3:3] = ["--main_process_ip", "127.0.0.1"]
        command[3:3] = ["--main_process_port", str(free_ports(1)[0])]
    home = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    resumes_under_a_launcher(command, make_job(), "backward:1:10", undisturbed(), home)


def test_the_code_of_the_documentation_trains_and_resumes(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", exc_type=ImportError)
    page = (ROOT / "docs" / "accelerate.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    before = """
import torch
data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randint(3, (64,)))
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
model = torch.nn.Linear(8, 3)
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
"""
    after = "\nprint('steps', int(ckpt.restored), ckpt.iteration)"
    for start in (0, 12):
        done = subprocess.run(
            [PYTHON, "-c", before + block + after], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert f"steps {start} 12" in done.stdout
