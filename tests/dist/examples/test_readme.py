"""The scripts and lines that a user copies from README.md and docs/, run as they stand."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.support import exact
from tests.support.rank_pool import HOROVODRUN
from tests.support.training import horovod, working_in
from tests.support.warm_python.servers import PYTHON, THROUGHOUT
from tierckpt.offline import compare, open_version

ROOT = Path(__file__).resolve().parents[3]
README = ROOT / "README.md"
# Around the lines for Horovod.
BEFORE = """\
import torch, horovod.torch as hvd, horovod_ckpt
hvd.init()
net = torch.nn.Linear(4, 4)
optimizer = torch.optim.Adam(net.parameters())
steps = 3
"""
STEP = "optimizer.zero_grad(); net(torch.ones(2, 4)).sum().backward(); optimizer.step()"
AFTER = "print('versions', ckpt.version)"


def block_with(text: str, page: Path) -> str:
    """The one that holds `text`."""
    (found,) = (
        b for b in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL) if text in b
    )
    return str(found)


def trained(folder: Path, shm_dir: Path, *options: str, **environment: str) -> str:
    """What the script of README.md prints, started as there."""
    folder.mkdir()
    (folder / "train.py").write_text(block_with("no_sync", README))
    env = {**os.environ, **THROUGHOUT, "OMP_NUM_THREADS": "1", "TIERCKPT_SHM_DIR": str(shm_dir)}
    env |= {"XDG_CACHE_HOME": str(folder), "TIERCKPT_AGENT_LINGER_SECONDS": "0", **environment}
    done = subprocess.run(
        ["torchrun", "--standalone", "--nproc-per-node", "2", *options, "train.py"],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def alone(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the code as a job of one rank."""
    return subprocess.run([PYTHON, "-c", code], cwd=folder, capture_output=True, text=True)


def test_the_script_is_killed_and_ends_as_without_that(tmp_path: Path, shm_dir: Path) -> None:
    """Also what README.md shows of it."""
    (shown,) = re.findall(r"```\n\$ torchrun .*?\n(.*?)```", README.read_text(), re.DOTALL)
    calm, killed = tmp_path / "calm", tmp_path / "killed"
    undisturbed = trained(calm, shm_dir)
    (mark := tmp_path / "marks").mkdir()
    faults = {"TIERCKPT_FAULTS": "kill@barrier:version=130", "TIERCKPT_FAULTS_DIR": str(mark)}
    printed = trained(killed, shm_dir, "-m", "tierckpt.run", **faults)
    assert len([*mark.iterdir()]) == 1
    epochs = [line for line in undisturbed.splitlines() if line.startswith("epoch")]
    assert len(epochs) == 4, undisturbed
    assert [line for line in printed.splitlines() if line.startswith("epoch")] == epochs
    before, ending, after = around_the_kill(printed, killed)
    expected = around_the_kill(shown, Path("/home/you"))
    assert [before, after] == [expected[0], expected[2]]
    assert expected[1] <= ending
    with contextlib.ExitStack() as stack:
        both = (open_version(str(each / "ckpts"), None, lambda n: None) for each in (calm, killed))
        first, second = (stack.enter_context(contextlib.closing(each)) for each in both)
        differences = {each.name for each in compare(first, second).differences}
    assert differences <= {"rng/numpy", "rng/python"}, "streams that the script does not seed"


def around_the_kill(text: str, folder: Path) -> tuple[list[str], set[str], list[str]]:
    """The lines before a kill, those until the restart, and those from there on, without what
    differs between runs or machines: folder, rank, figures, whether the version in progress could
    be completed, and a warning of the tests' torchrun. The rank that was not killed may complain,
    or is ended before it notices."""
    text = re.sub(r"rank \d was", "rank N was", text.replace(str(folder), "FOLDER"))
    text = re.sub(r"\d+\.\d+|(?<=[v ])(129|130)\b", "N", text)
    lines = [line for line in text.splitlines() if "runpy" not in line]
    (last,) = (i for i, line in enumerate(lines) if line.startswith("epoch 1"))
    (first,) = (i for i, line in enumerate(lines) if " restored v" in line)
    return lines[: last + 1], {*lines[last + 1 : first]}, lines[first:]


def test_the_lines_for_horovod_train_and_save(
    tmp_path: Path, launchable: Callable[[str], None]
) -> None:
    launchable(HOROVODRUN)
    block = block_with("horovod_ckpt", README).replace("...", STEP)
    for life in (1, 2):
        done = alone(f"{BEFORE}{block}{AFTER}", tmp_path)
        assert done.returncode == 0, done.stderr
        # The second run starts at the end, and makes no step.
        assert done.stdout == "versions 3\n", life
    assert list((tmp_path / "ckpts").rglob("*manifest*"))


LOOP = """\
import os, signal, sys, tierckpt, torch, ddp_ckpt
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.Adam(model.parameters())
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
loader = torch.utils.data.DataLoader(torch.ones(6, 4), batch_size=2)
steps, made = 9, []
def train(step):
    made.append(step)
    if made == [0, 1, 2]:
        os.kill(os.getpid(), signal.SIGTERM)
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""


def test_a_loop_asked_to_end_is_started_again_by_its_status(tmp_path: Path) -> None:
    """The loop of docs/ending.md, which gets a signal."""
    block = block_with("should_exit", ROOT / "docs" / "ending.md")
    code = f"{LOOP}{block}".replace("sys.exit(", "print(*made); sys.exit(")
    first, second = (alone(code, tmp_path) for _ in range(2))
    assert (first.returncode, second.returncode) == (75, 0), first.stderr + second.stderr
    assert [*first.stdout.split(), *second.stdout.split()] == list("012345678")


def test_the_import_in_place_of_horovods_starts_at_the_next_epoch(
    tmp_path: Path, launchable: Callable[[str], None]
) -> None:
    """The lines of docs/horovod.md: a first job of one epoch, and one of two."""
    launchable(HOROVODRUN)
    block = block_with("in place of horovod.torch", ROOT / "docs" / "horovod.md")
    body = "[train(epoch) for batch in loader]; schedule.step()"
    code = block.replace("...  # the loop as it was", body)
    for epoch in (1, 2):
        done = alone(f"{LOOP}epochs = {epoch}\n{code}print(*made)", tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == [str(epoch)] * 3


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


ACCUMULATION = """\
import contextlib, torch, ddp_ckpt, tierckpt
net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
model = torch.nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
samples = torch.randn(24, 3, generator=torch.Generator().manual_seed(torch.distributed.get_rank()))
loader = torch.utils.data.DataLoader(samples, batch_size=2, shuffle=True)

def loss_of(model, batch):
    seen.append(batch.tolist())
    if len(seen) == fails_at:
        raise KeyboardInterrupt
    return model(batch).square().mean()
"""


def accumulated(block: str, folder: str, fails_at: int | None) -> tuple[int, list[Any], str]:
    """The loop of docs/loops.md: steps at its start, its batches, and its final state."""
    seen: list[Any] = []
    names: dict[str, Any] = {"passes": 3, "epochs": 2, "fails_at": fails_at, "seen": seen}
    torch.manual_seed(0)
    with working_in(Path(folder)):
        exec(ACCUMULATION, names)
        with contextlib.suppress(KeyboardInterrupt):
            exec(block, names)
    state = [exact.replicated(names["net"], names["optimizer"]), exact.streams()]
    return int(names["ckpt"].restored), seen, exact.digest(state)


def test_a_loop_that_accumulates_repeats_the_interrupted_step(ranks: Any, tmp_path: Path) -> None:
    """It fails in the second of three passes of step 6, in the second epoch."""
    pool, block = ranks(2), block_with("no_sync", ROOT / "docs" / "loops.md")
    plain = pool.run(accumulated, block, str(tmp_path / "plain"), None)
    failed = pool.run(accumulated, block, str(tmp_path / "failed"), 17)
    again = pool.run(accumulated, block, str(tmp_path / "failed"), None)
    for (_, batches, state), (_, first, _), (start, rest, end) in zip(
        plain, failed, again, strict=True
    ):
        assert start in (4, 5), "a version is complete in the iteration after it"
        assert [*first[: 3 * start], *rest] == batches
        assert end == state


def test_two_models_that_take_turns_resume_from_the_same_point(ranks: Any, tmp_path: Path) -> None:
    """After a failure between the steps of one iteration, bit for bit."""
    pool, block = ranks(2, HOROVODRUN), block_with("train_g", ROOT / "docs" / "loops.md")
    plain = pool.run(two_models, block, str(tmp_path / "plain"), None)
    pool.run(two_models, block, str(tmp_path / "failed"), 4)
    again = pool.run(two_models, block, str(tmp_path / "failed"), None)
    assert [start for start, _ in plain] == [0, 0]
    assert [start for start, _ in again] == [4, 4]
    assert [state for _, state in again] == [state for _, state in plain]
