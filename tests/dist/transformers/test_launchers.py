"""Jobs of Hugging Face's Trainer under real launchers: torchrun, `tierckpt run`."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.support.frameworks.fixtures import MakeJob, Undisturbed
from tests.support.frameworks.killed_job import resumes_under_a_launcher
from tests.support.warm_python.servers import PYTHON, TRANSFORMERS

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "tests" / "support" / "transformers" / "job.py"
TORCHRUN = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.parametrize("shim", [[], ["-m", "tierckpt.run"]], ids=["torchrun", "tierckpt run"])
def test_ranks_restarted_by_the_launcher_resume_exactly(
    shim: list[str], make_job: MakeJob, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    restarts = [] if shim else ["--max-restarts", "1", "--monitor-interval", "0.1"]
    command = [*TORCHRUN, *restarts, *shim, str(SCRIPT)]
    environment = {**TRANSFORMERS, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    resumes_under_a_launcher(command, make_job(), "backward:1:8", undisturbed(), environment)


def test_the_code_of_the_documentation_trains_and_resumes(tmp_path: Path) -> None:
    pytest.importorskip("transformers", exc_type=ImportError)
    page = (ROOT / "docs" / "transformers.md").read_text()
    first, second, of_a_fork = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    compile(of_a_fork, "docs/transformers.md", "exec")
    before = """
import torch, transformers
config = transformers.GPT2Config(vocab_size=9, n_positions=4, n_embd=4, n_layer=1, n_head=1)
model = transformers.GPT2LMHeadModel(config)
dataset = [{"input_ids": torch.tensor([i % 9, 1, 2, 3]), "labels": torch.tensor([1, 2, 3, 4])}
    for i in range(64)]
"""
    after = "\nprint('steps', trainer.state.global_step, int(trainer.checkpointer.restored))"
    for code, start in ((first, 0), (first, 24), (second, 24)):
        done = subprocess.run(
            [PYTHON, "-c", before + code + after],
            cwd=tmp_path,
            env={**os.environ, **TRANSFORMERS},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert f"steps 24 {start}" in done.stdout
