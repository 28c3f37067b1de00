"""A recipe, and the jobs that it runs: undisturbed, and killed and started again."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.crash.launcher import quiet_environment
from tests.support.recipes import diffs
from tests.support.recipes.rank import VARIABLE

RANK = Path(__file__).with_name("rank.py")
HOROVODRUN = RANK.parents[1] / "horovodrun.py"
PATIENCE_SECONDS = 300.0
CLONES = "TIERCKPT_RECIPES"
"""The environment variable that names the folder with the clones."""
Line = dict[str, Any]


@dataclass(frozen=True)
class Recipe:
    """A script of another project, and all that a run of it needs."""

    repository: str
    """The folder with its clone, and the name of its diff in docs/scripts.md."""
    script: str
    arguments: tuple[str, ...]
    metrics: str
    """A regular expression for the figures in the output that must be equal."""
    files: tuple[str, ...] = ()
    """Other files and folders of the clone that the script needs."""
    imports: bool = False
    """Whether it imports packages from the clone."""
    machine: str = ""
    """Changes for a machine without a GPU, for both runs."""
    undisturbed: str = ""
    """Lines of the page that change the training itself; the undisturbed run has them, too."""
    data: Callable[[Path], None] = lambda folder: None
    """Makes the data in the folder in which the script runs."""
    needs: tuple[str, ...] = ()
    """Packages that the script imports."""
    averages: tuple[str, ...] = ()
    """Classes of averaged weights."""
    ranks: int = 2
    horovod: bool = False
    own_state: bool = False
    """Whether the page's lines replace a state of Horovod's, which makes steps of its own: the
    undisturbed run has them, too."""
    setup_steps: int = 0
    """Steps that the script makes before it trains."""
    kills: tuple[int, ...] = (6, 8)
    """Numbers of steps after which a rank is killed in the next one, each in a job of its own: in
    the middle of an epoch, and in the first step of an epoch, so that the end of the one before is
    done again. With the steps before the training."""


class RecipeJob:
    """The runs of one copy of the script."""

    def __init__(self, recipe: Recipe, clones: Path, folder: Path, diff: str, shm: Path) -> None:
        """`diff`: the lines that a user adds; empty: the undisturbed job, without checkpoints."""
        self._recipe, self._clones, self.folder, self._shm = recipe, clones, folder, shm
        self.runs = 0
        self.work = folder / recipe.repository
        for name in (recipe.script, *recipe.files):
            source, target = clones / recipe.repository / name, self.work / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, target, dirs_exist_ok=True)
            else:
                shutil.copy(source, target)
        self.cwd = (self.work / recipe.script).parent
        recipe.data(self.cwd)
        diffs.apply(recipe.machine, folder)
        diffs.apply(diffs.of_file(diff or recipe.undisturbed, self.work.parent), folder)

    def command(self) -> list[str]:
        """The command that starts all ranks."""
        script = [str(RANK), Path(self._recipe.script).name, *self._recipe.arguments]
        ranks = str(self._recipe.ranks)
        if self._recipe.horovod:
            launcher = [str(HOROVODRUN), "-np", ranks, "--gloo", "--network-interfaces", "lo"]
            return [sys.executable, *launcher, sys.executable, *script]
        if self._recipe.ranks == 1:
            return [sys.executable, *script]
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
        return [sys.executable, *launcher, *script]

    def environment(self, kill: tuple[int, int] | None) -> dict[str, str]:
        order = {
            "folder": str(self.folder),
            "run": self.runs,
            "kill": kill,
            "averages": self._recipe.averages,
        }
        packages = [os.environ["PYTHONPATH"]]
        if self._recipe.imports:
            packages.append(str(self._clones / self._recipe.repository))
        inherited = quiet_environment()
        inherited.pop(CLONES, None)  # in a job it would be a setting with a wrong name
        return {
            **inherited,
            VARIABLE: json.dumps(order),
            "PYTHONPATH": os.pathsep.join(packages),
            "TIERCKPT_SHM_DIR": str(self._shm),
            "GLOO_SOCKET_IFNAME": "lo",
            "HOME": str(self.folder),
        }

    def start(self, kill: tuple[int, int] | None = None) -> None:
        """Run the job to its end. `kill`: a rank, and the number of its steps."""
        self.runs += 1
        log = self.folder / f"run{self.runs}.log"
        with log.open("wb") as output:
            subprocess.run(
                self.command(),
                cwd=self.cwd,
                env=self.environment(kill),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                timeout=PATIENCE_SECONDS,
                check=False,
            )

    def lines(self, rank: int) -> list[Line]:
        """The records of a rank of the last run."""
        path = self.folder / f"run{self.runs}-rank{rank}"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        return lines[self._recipe.setup_steps :]

    def metrics(self) -> list[str]:
        """The figures in the output of rank 0 of the last run."""
        text = (self.folder / f"run{self.runs}-rank0.log").read_text()
        return [match.group() for match in re.finditer(self._recipe.metrics, text)]

    def is_done(self) -> bool:
        """Whether all ranks of the last run came to the end of the script."""
        return all(
            any(line["kind"] == "done" for line in self.lines(rank))
            for rank in range(self._recipe.ranks)
        )

    def output(self) -> str:
        """The output of the last run."""
        paths = sorted(self.folder.glob(f"run{self.runs}*.log"))
        return "\n".join(f"--- {p.name}\n{p.read_text(errors='replace')[-6000:]}" for p in paths)


def resumes_exactly(ours: RecipeJob, plain: RecipeJob, recipe: Recipe, kill_after: int) -> None:
    """Run the job, kill a rank in the middle of a step, run it again; assert that all records and
    figures are those of `plain`."""
    ours.start(kill=(recipe.ranks - 1, kill_after))
    assert (ours.folder / "killed").exists(), ours.output()
    assert not ours.is_done(), ours.output()
    for rank in range(recipe.ranks):
        started, whole = ours.lines(rank), plain.lines(rank)
        assert started == whole[: len(started)], f"rank {rank} before the kill\n{ours.output()}"
    ours.start()
    assert ours.is_done(), ours.output()
    for rank in range(recipe.ranks):
        rest, whole = ours.lines(rank), plain.lines(rank)
        assert 0 < len(rest) < len(whole), ours.output()
        for number, (one, other) in enumerate(zip(rest, whole[-len(rest) :], strict=True)):
            assert one == other, f"rank {rank}, line {number} of {len(rest)}\n{ours.output()}"
    figures, theirs = ours.metrics(), plain.metrics()
    assert figures, ours.output()
    assert figures == theirs[-len(figures) :], f"{figures}\n{theirs}\n{ours.output()}"


__all__ = ["CLONES", "Recipe", "RecipeJob", "resumes_exactly"]
