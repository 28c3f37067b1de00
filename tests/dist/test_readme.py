"""The first lines that a user copies from README.md, run as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.dist.rankpool import HOROVODRUN
from tests.slurmcluster import free_ports

README = Path(__file__).resolve().parents[2] / "README.md"
# What the two blocks take for granted.
BEFORE = """\
import torch
net = torch.nn.Linear(4, 4)
opt = torch.optim.Adam(net.parameters())
steps = 3
def loss_of(net, step):
    return net(torch.ones(2, 4)).sum() + step
"""
AFTER = "print('versions', ckpt.version)"


def blocks() -> dict[str, str]:
    """The two adapters, by the titles over the columns."""
    table = README.read_text().split("<table>")[1].split("</table>")[0]
    code = re.findall(r"```python\n(.*?)```", table, re.DOTALL)
    return dict(zip(re.findall(r"<th>(.*?)</th>", table), code, strict=True))


@pytest.mark.parametrize("title", ["DistributedDataParallel", "Horovod"])
def test_ten_lines_train_and_save(
    title: str, tmp_path: Path, launchable: Callable[[str], None]
) -> None:
    if title == "Horovod":
        launchable(HOROVODRUN)
    block = blocks()[title]
    assert len([line for line in block.splitlines() if line.strip()]) <= 10
    alone = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}
    alone |= {"RANK": "0", "WORLD_SIZE": "1"}
    for life in (1, 2):
        done = subprocess.run(
            [sys.executable, "-c", f"{BEFORE}{block}{AFTER}"],
            cwd=tmp_path,
            env={**os.environ, **alone},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        # The second life begins at the end, and makes no step.
        assert done.stdout == "versions 3\n", life
    assert list((tmp_path / "ckpts").rglob("*manifest*"))
