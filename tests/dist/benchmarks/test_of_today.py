"""The libraries beside ours in stall.py: each has stored the state of the boundary."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
LOADERS = {
    "torch-checkpointing": """
saved = method.manager.load(str(path), into={"model": None, "optimizer": None})
weight, mean = saved["model"]["weight"], saved["optimizer"]["state"][0]["exp_avg"]
""",
    "dlrover": """
saved = torch.load(f"{path}.pt", weights_only=True)
weight, mean = saved["model"]["weight"], saved["optimizer"]["state"][0]["exp_avg"]
""",
    "orbax": """
import orbax.checkpoint
saved = orbax.checkpoint.StandardCheckpointer().restore(path)
weight, mean = saved["model"]["weight"], saved["optimizer"]["state"]["0"]["exp_avg"]
weight, mean = torch.from_numpy(weight), torch.from_numpy(mean)
""",
}
SCRIPT = """
import sys
from pathlib import Path
import torch
import torch.distributed as dist
from lib.methods.method import Job
from lib.methods.of_today import OF_TODAY

def main(name, folder):
    dist.init_process_group("gloo", init_method=f"file://{{folder}}.store", rank=0, world_size=1)
    method = next(each for each in OF_TODAY if each.name == name)()
    model = torch.nn.Linear(100, 100)
    adam = torch.optim.Adam(model.parameters())
    for _ in range(2):
        model(torch.ones(1, 100)).sum().backward()
        adam.step()
    before = [t.clone() for t in (model.weight.detach(), adam.state[model.weight]["exp_avg"])]
    method.setup(Job(model, model, adam, Path(folder), Path(folder), 0, 1, torch.device("cpu")))
    method.boundary(2, due=True)
    method.before_optimizer_step()
    adam.step()
    method.drain()
    path = method.path(2)
    {loader}
    assert torch.equal(weight, before[0]) and torch.equal(mean, before[1])
    assert not torch.equal(weight, model.weight)
    assert list(method.durable) == [2]
    method.close()

if __name__ == "__main__":
    main(*sys.argv[1:])
"""


@pytest.mark.parametrize("name", LOADERS)
def test_the_state_of_the_boundary_is_stored(tmp_path: Path, name: str) -> None:
    """Although the next step changes the weights before the files are written."""
    if find_spec(name.replace("-", "_")) is None:
        pytest.skip("not installed")
    script, folder = tmp_path / "rank.py", tmp_path / "checkpoints"
    folder.mkdir()
    script.write_text(SCRIPT.format(loader=LOADERS[name].strip().replace("\n", "\n    ")))
    path = os.pathsep.join([str(ROOT / "benchmarks"), str(ROOT / "common"), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "LOCAL_RANK": "0"}
    done = subprocess.run(
        [sys.executable, str(script), name, str(folder)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
