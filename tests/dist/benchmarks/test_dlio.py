"""The mechanisms for DLIO under real mpirun: what another job restores is what was written."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = """
import sys, torch
from dlio_benchmark.main import main
from lib.dlio.mechanisms import Tierckpt

def bytes_of(mechanism):
    tensors = mechanism._model.values()
    return [t.detach().view(torch.uint8).numpy().tobytes().hex() for t in tensors][1:]

def keep(mechanism, epoch, step):
    save(mechanism, epoch, step)
    if step == 1:  # the tensors that this version has
        torch.save(bytes_of(mechanism), f"{sys.argv[0]}.{mechanism.args.my_rank}")
    for tensor in mechanism._model.values():
        tensor.detach().zero_()

def compare(mechanism, epoch, step):
    load(mechanism, epoch, step)
    kept = torch.load(f"{sys.argv[0]}.{mechanism.args.my_rank}")
    equal = [a == b for a, b in zip(bytes_of(mechanism), kept, strict=True)]
    print(f"rank {mechanism.args.my_rank} step {step} equal {all(equal)} of {len(equal)}")

save, Tierckpt.save_checkpoint = Tierckpt.save_checkpoint, keep
load, Tierckpt.load_checkpoint = Tierckpt.load_checkpoint, compare
main()
"""


@pytest.mark.skipif(
    importlib.util.find_spec("dlio_benchmark") is None or not os.environ.get("EVERY_POINT"),
    reason="needs dlio_benchmark and some 30 s: EVERY_POINT=1",
)
def test_another_job_restores_the_tensors_of_each_rank(tmp_path: Path) -> None:
    """Two ranks, with tensors of their own as under ZeRO-3: each restore replaces random ones."""
    script = tmp_path / "rank.py"
    script.write_text(SCRIPT)
    assert "equal" not in _dlio(tmp_path, script, write=2, read=0)
    text = _dlio(tmp_path, script, write=0, read=2)
    for rank in range(2):
        assert f"rank {rank} step 1 equal True of " in text
        assert f"rank {rank} step 2 equal False of " in text, "it was zeroed before"
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["metric"]["load_checkpoint_duration_mean_seconds"] > 0


def _dlio(folder: Path, script: Path, write: int, read: int) -> str:
    checkpoint = {
        "checkpoint_folder": folder / "checkpoints",
        "checkpoint_mechanism_classname": "lib.dlio.mechanisms.Tierckpt",
        "time_between_checkpoints": 0,
        "num_checkpoints_write": write,
        "num_checkpoints_read": read,
    }
    widths = {"hidden_size": 64, "ffn_hidden_size": 224, "vocab_size": 2004}
    path = os.pathsep.join([str(ROOT / "benchmarks"), str(ROOT / "common"), str(ROOT)])
    done = subprocess.run(
        [
            *("mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2"),
            *(sys.executable, str(script), "workload=llama_8b_zero3"),
            "++workload.model.num_layers=2",
            *(f"++workload.model.transformer.{key}={value}" for key, value in widths.items()),
            *(f"++workload.checkpoint.{key}={value}" for key, value in checkpoint.items()),
            f"++workload.output.folder={folder / 'out'}",
            f"hydra.run.dir={folder / 'out'}",
            "hydra.output_subdir=null",
        ],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
