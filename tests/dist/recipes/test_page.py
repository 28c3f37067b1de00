"""docs/scripts.md without the scripts: its block of Python, and its diffs."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import ddp_ckpt
import tierckpt
from tests.support import exact
from tests.support.recipes import diffs
from tests.support.recipes.scripts import RECIPES
from tests.support.training import working_in

PAGE = Path(__file__).parents[3] / "docs" / "scripts.md"


class AverageMeter:
    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def update(self, value: float) -> None:
        self.total, self.count = self.total + value, self.count + 1


def run(block: str, folder: Path, fails_at: int | None = None) -> list[Any]:
    """The loop of the page: what it logs for each batch, and its state at the end."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    made: list[AverageMeter] = []
    said: list[Any] = []

    def train(inputs: torch.Tensor, targets: torch.Tensor) -> float:
        if said and (names["epoch"], names["i"]) == (1, fails_at):
            raise KeyboardInterrupt
        optimizer.zero_grad()
        loss = (model(inputs) - targets).square().mean()
        loss.backward()
        optimizer.step()
        meter = made[-1]
        said.append((names["epoch"], names["i"], meter.total, meter.count, loss.item()))
        return loss.item()

    def averaged() -> AverageMeter:
        made.append(AverageMeter())
        return made[-1]

    samples = [(torch.full((2,), 0.1 * n), torch.ones(1)) for n in range(10)]
    names: dict[str, Any] = {
        "tierckpt": tierckpt,
        "ddp_ckpt": ddp_ckpt,
        "data": tierckpt.ResumableLoader(DataLoader(samples, 2, shuffle=True)),  # type: ignore[arg-type]
        "model": model,
        "optimizer": optimizer,
        "epochs": 3,
        "AverageMeter": averaged,
        "train": train,
        "evaluate": lambda: made[-1].total,
    }
    with working_in(folder), contextlib.suppress(KeyboardInterrupt):
        exec(block, names)
        said.append((names["loop"].best, exact.digest(exact.replicated(model, optimizer))))
    if "ckpt" in names:
        names["ckpt"].close()
    return said


def test_the_loop_of_the_page_continues(tmp_path: Path) -> None:
    """Figures and weights, after an error in the middle of an epoch."""
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "plain").mkdir()
    (tmp_path / "ours").mkdir()
    plain = run(block, tmp_path / "plain")
    assert len(plain) == 16
    failed = run(block, tmp_path / "ours", 3)
    assert failed == plain[:8]
    assert run(block, tmp_path / "ours") == plain[8:]


def test_the_page_has_a_diff_for_each_recipe() -> None:
    assert set(diffs.blocks_of(PAGE)) == {recipe.repository for recipe in RECIPES.values()}


def test_diffs_are_applied_in_order(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    path = tmp_path / "a" / "b.py"
    path.write_text("import x\n\nwhile y:\n    go(1)\nwhile y:\n    go(2)  # again\n")
    first = " import x\n+import z\n\n@@\n-    go(1)\n+    go(z)\n"
    second = "@@\n while y:\n+    z\n     go(2) ...\n"
    diffs.apply(f"--- a/b.py\n{first}{second}", tmp_path)
    assert path.read_text() == (
        "import x\nimport z\n\nwhile y:\n    go(z)\nwhile y:\n    z\n    go(2)  # again\n"
    )
    with pytest.raises(diffs.NotFoundError, match=r"a/b.py has no lines, after line 0:\nimport w"):
        diffs.apply("--- a/b.py\n import w\n", tmp_path)
