"""A real Horovod job's own timeline and Tierckpt's traces of it, on one time axis."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.dist.tracing.test_trace import PARAMETERS, STEPS, check_order
from tests.support.horovod_here import horovod_missing
from tests.support.training import Net
from tests.support.warm_python.servers import PYTHON
from tierckpt.tracing import TREE_ROW, agreement, load_traces, rows_of_step, step_of, summarize

pytestmark = pytest.mark.skipif(bool(horovod_missing()), reason=horovod_missing())

WAYS = ["default", "groups", "lists of groups", "no names", "other names", "sparse and dense"]
"""Ways in which a job can have Horovod name its tensors."""

HOROVOD_JOB = """
import sys
import horovod.torch as hvd, torch
import horovod_ckpt
from tests.support.training import Net, Sentences, WIDTH
from tierckpt import snapshot
from tierckpt.tracing import recorder

recorder.STEPS = 6
snapshot.QUIET_SECONDS = 1e6  # however slow the machine is, reductions release

def train(way, path, folder):
    torch.manual_seed(1)
    net = Sentences() if way == "sparse and dense" else Net()
    named = list(net.named_parameters())
    params = [p for _, p in named]
    options = {
        "groups": {"named_parameters": named, "num_groups": 3},
        "lists of groups": {"named_parameters": named, "groups": [params[5:7], [params[2]]]},
        "no names": {},
        "other names": {"named_parameters": [("replica." + n, p) for n, p in named]},
    }
    optimizer = horovod_ckpt.DistributedOptimizer(
        torch.optim.Adagrad(params), **options.get(way, {"named_parameters": named}), model=net,
        path=path, trace_dir=folder, release="backward", local_every_steps=0,
        local_every_seconds=0,
    )
    for _ in range(8):
        optimizer.zero_grad()
        net(torch.randn(6, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.checkpointer.step()
    optimizer.checkpointer.close()

hvd.init()
for way in sys.argv[2:]:
    train(way, f"{sys.argv[1]}/ckpts/{way}", f"{sys.argv[1]}/traces/{way}")
    hvd.barrier()
hvd.shutdown()
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One job that trains in all ways, one after the other: a timeline, and traces of each."""
    folder = tmp_path_factory.mktemp("recorded")
    program, memory = folder / "job.py", folder / "memory"
    program.write_text(HOROVOD_JOB)
    memory.mkdir()
    launcher = Path(sys.executable).with_name("horovodrun")
    command = [launcher, "--gloo", "--disable-cache", "-np", "2", PYTHON, program, folder, *WAYS]
    env = {
        **os.environ,
        "HOROVOD_TIMELINE": str(folder / "horovod.json"),
        "TIERCKPT_SHM_DIR": str(memory),
        "OMP_NUM_THREADS": "1",
        "HOROVOD_CYCLE_TIME": "1",  # its default: what is compared here are milliseconds
    }
    done = subprocess.run(
        list(map(str, command)), env=env, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_horovods_timeline_and_ours_are_on_one_axis(recorded: Path) -> None:
    traces = sorted((recorded / "traces" / "default").glob("trace-r*.json"))
    timeline = load_traces(traces, recorded / "horovod.json")
    check_order(timeline, ranks=2, steps=STEPS)
    assert agreement(timeline).expected == PARAMETERS * (STEPS - 1)
    assert summarize(timeline).hidden.backward_us > 0


@pytest.mark.parametrize("way", WAYS)
def test_allreduces_are_found_by_whatever_names_horovod_gives(way: str, recorded: Path) -> None:
    """All of them, between their updates, and under the names of the parameters."""
    traces = sorted((recorded / "traces" / way).glob("trace-r*.json"))
    timeline = load_traces(traces, recorded / "horovod.json")
    layers = {name for name, _ in Net().named_parameters()}
    layers |= {"table.weight"} if way == "sparse and dense" else set()
    fit = agreement(timeline)
    assert fit.expected == len(layers) * (STEPS - 1)
    assert fit.missing == 0, fit.text()
    assert not [note for note in timeline.notes if "Warning" in note]
    assert {layer for s in timeline.of("allreduce") for layer in s.layers} == layers
    step = step_of(timeline, 1, 3)
    reduced = [layer for s in step if s.kind == "allreduce" for layer in s.layers]
    assert set(reduced) == layers
    assert set(rows_of_step(step).values()) - {TREE_ROW} == {
        name.rpartition(".")[0] for name in layers
    }
    if way == "sparse and dense":  # its indices and its values
        sparse = [s for s in step if s.kind == "allreduce" and s.layers == ("table.weight",)]
        assert len(sparse) == 2
        assert all(s.nbytes > 0 for s in sparse)
