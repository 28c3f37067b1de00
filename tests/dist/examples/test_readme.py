"""The first lines that a user copies from README.md and docs/, run as they stand."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import exact
from tests.support.rank_pool import HOROVODRUN
from tests.support.training import horovod, working_in
from tests.support.warm_python.servers import PYTHON
from tierckpt.testing.ports import free_ports

ROOT = Path(__file__).resolve().parents[3]
README = ROOT / "README.md"
# Definitions that the two blocks need.
BEFORE = """\
import torch
net = torch.nn.Linear(4, 4)
opt = torch.optim.Adam(net.parameters())
steps = 3
def loss_of(net, step):
    return net(torch.ones(2, 4)).sum() + step
"""
AFTER = "print('versions', ckpt.version)"


def block_with(text: str, page: Path) -> str:
    """The one that holds `text`."""
    (found,) = (
        b for b in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL) if text in b
    )
    return str(found)


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
            [PYTHON, "-c", f"{BEFORE}{block}{AFTER}"],
            cwd=tmp_path,
            env={**os.environ, **alone},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        # The second run starts at the end, and makes no step.
        assert done.stdout == "versions 3\n", life
    assert list((tmp_path / "ckpts").rglob("*manifest*"))


GAN = """\
import torch
g = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 4))
d = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
g_opt = torch.optim.Adam(g.parameters(), lr=0.01)
d_opt = torch.optim.SGD(d.parameters(), lr=0.01, momentum=0.9)
torch.manual_seed(hvd.rank())

def train_d(step):
    d.requires_grad_(True)
    d_opt.zero_grad()
    (d(g(torch.randn(5, 3)).detach()) - d(torch.randn(5, 4))).mean().backward()
    d_opt.step()

def train_g(step):
    if step == fails_at:
        raise KeyboardInterrupt
    d.requires_grad_(False)
    g_opt.zero_grad()
    (-d(g(torch.randn(5, 3)))).mean().backward()
    g_opt.step()
"""


def two_models(block: str, folder: str, fails_at: int | None) -> tuple[int, str]:
    """The loop of docs/loops.md, for six iterations: its first iteration, and its final state."""
    names = {"hvd": horovod(), "horovod_ckpt": importlib.import_module("horovod_ckpt")}
    torch.manual_seed(0)
    with working_in(Path(folder)):
        exec(f"fails_at, steps = {fails_at}, 6\n{GAN}", names)
        with contextlib.suppress(KeyboardInterrupt):
            exec(block, names)
    both = names["both"]
    state = [exact.replicated(both, names["g_opt"], names["d_opt"]), exact.buffers(both)]
    return int(names["ckpt"].restored), exact.digest([*state, exact.streams()])


def test_two_models_that_take_turns_resume_from_the_same_point(ranks: Any, tmp_path: Path) -> None:
    """After a failure between the steps of one iteration, bit for bit."""
    pool, block = ranks(2, HOROVODRUN), block_with("train_g", ROOT / "docs" / "loops.md")
    plain = pool.run(two_models, block, str(tmp_path / "plain"), None)
    pool.run(two_models, block, str(tmp_path / "failed"), 4)
    again = pool.run(two_models, block, str(tmp_path / "failed"), None)
    assert [start for start, _ in plain] == [0, 0]
    assert [start for start, _ in again] == [4, 4]
    assert [state for _, state in again] == [state for _, state in plain]
