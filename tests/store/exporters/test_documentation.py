"""The page about exporters: its table of metrics, and its code."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.support.prometheus_here import program
from tests.support.warm_python.servers import PYTHON
from tierckpt.exporters import METRICS, PHASES, REASONS, SEVERITIES
from tierckpt.testing import free_ports

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "exporters.md"
HEAD = "| metric | kind | labels | meaning |\n|---|---|---|---|\n"


def table() -> str:
    """The table as the code has it; `python -m tests.store.exporters.test_documentation` writes
    it."""
    rows = []
    for metric in METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        rows.append(f"| `{metric.full_name}` | {metric.kind} | {labels} | {metric.help} |\n")
    return HEAD + "".join(rows)


def test_the_table_has_all_metrics() -> None:
    assert table() in PAGE.read_text()


@pytest.mark.parametrize("values", [REASONS, PHASES, SEVERITIES])
def test_the_values_of_labels_are_listed(values: tuple[str, ...]) -> None:
    (line,) = re.findall(r"^`level` is .*$", PAGE.read_text(), re.MULTILINE)
    assert set(values) <= set(re.findall(r"`(\w+)`", line))


BEFORE = """
import torch
from tierckpt import Checkpointer
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
"""
AFTER = """
ckpt.restore()
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    ckpt.step()
ckpt.close()
"""
PACKAGES = {
    "PrometheusPort": "prometheus_client",
    "TensorBoard": "tensorboard",
    "WandB": "wandb",
    "MLflow": "mlflow",
}
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.parametrize(
    "block", BLOCKS, ids=lambda block: re.findall(r"import (\w+)\n\n", block)[0]
)
def test_the_code_runs(block: str, warm_python: None, tmp_path: Path, shm_dir: Path) -> None:
    for name in re.findall(r"exporters import (\w+)", block):
        if name in PACKAGES:
            pytest.importorskip(PACKAGES[name])
    environment = {
        **os.environ,
        **{"TIERCKPT_SHM_DIR": str(shm_dir), "TIERCKPT_AGENT": "inline"},
        **{"HOME": str(tmp_path), "MLFLOW_TRACKING_URI": "sqlite:///mlflow.db"},
    }
    done = subprocess.run(
        [PYTHON, "-c", BEFORE + block.replace("9400", str(free_ports(1)[0])) + AFTER],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "does not" not in done.stderr
    assert "nothing was logged" not in done.stderr


def test_promtool_accepts_the_configurations(tmp_path: Path) -> None:
    promtool = program("promtool")
    scrape, rules = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    for text, check in ((scrape, "config"), (rules, "rules")):
        (tmp_path / check).write_text(text)
        done = subprocess.run(
            [promtool, "check", check, str(tmp_path / check)], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    before, rest = PAGE.read_text().split(HEAD)
    PAGE.write_text(before + table() + re.sub(r"^(\|.*\n)*", "", rest))
