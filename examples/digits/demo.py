"""The demo: a process of a two-rank job is killed, and the job resumes with the same loss curve.

It makes three runs of `train.py`: with a checkpoint at every step and rank 1 killed in the middle
of a step, under torchrun; then the same without the kill, and without checkpoints. Processes of
these two are forked from this one, which saves them the imports. (With `--launcher horovodrun` all
three are `train_horovod.py` under horovodrun.) The demo prints whether the loss curves are equal
bit for bit, and saves a picture. After torchrun, `cost.py` measures what a checkpoint costs, by two
models that train in turns: two runs one after the other differ by more than that.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import runpy
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

HERE = Path(__file__).resolve().parent
Record = dict[str, object]
Journals = dict[int, list[Record]]
"""The journal of each rank in one run."""


TIMES = "times"
"""File in a run's folder in which `tierckpt run` records the times of a restart."""
# Each starts two processes, and starts them again after one dies.
LAUNCHERS = {
    "torchrun": [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("--max-restarts", "3", "-m", "tierckpt.run", "--times", TIMES, str(HERE / "train.py")),
    ],
    "horovodrun": [str(HERE.parent / "restarts" / "horovod_elastic.sh")],
}
YOURS = {
    "torchrun": "torchrun --nproc-per-node 2 -m tierckpt.run train.py",
    "horovodrun": "horovodrun -np 2 tierckpt run train.py",
}


class Forked:
    """Both ranks of a job, forked from this process after `imports`."""

    returncode: int | None = None

    def __init__(self, script: Path, options: list[str], log: TextIO) -> None:
        from torch.distributed import TCPStore

        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("fork")
        self._ranks = [
            context.Process(target=self._train, args=(rank, script, options, log))
            for rank in (0, 1)
        ]
        for rank in self._ranks:
            rank.start()

    def _train(self, rank: int, script: Path, options: list[str], log: TextIO) -> None:
        os.dup2(log.fileno(), 1), os.dup2(log.fileno(), 2)
        # As torchrun sets them: the store is its own, not rank 0's.
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._store.port)}
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        sys.argv = [str(script), *options]
        runpy.run_path(str(script), run_name="__main__")

    def poll(self) -> int | None:
        """Return the exit status, once both ranks have ended."""
        codes = [rank.exitcode for rank in self._ranks]
        self.returncode = None if None in codes else max(map(abs, codes))  # type: ignore[arg-type]
        return self.returncode

    def terminate(self) -> None:
        """End both ranks."""
        for rank in self._ranks:
            rank.terminate()

    def wait(self) -> None:
        """Wait until both ranks have ended."""
        for rank in self._ranks:
            rank.join()
        self.poll()


def imports() -> None:
    """Import what the ranks need: most of the seconds that a process takes to start."""
    sys.path.insert(0, str(HERE))
    import digits
    import torch

    import ddp_ckpt  # noqa: F401

    torch.optim.AdamW(digits.build_model().parameters())  # imports most of torch


class Run:
    """One job of two ranks, with its folder, its progress bar and the journals of its ranks."""

    def __init__(self, name: str, script: str, steps: int, work: Path, progress: Progress) -> None:
        self.name, self.folder, self._progress = name, work / name.replace(" ", "-"), progress
        self.folder.mkdir()
        self._script = script
        self._options = ["--steps", str(steps), "--journal", str(self.folder)]
        self._options += ["--path", str(self.folder / "ckpts")]
        self._task = progress.add_task(name, total=steps, note="starting two processes")
        self._job: subprocess.Popen[bytes] | Forked

    def begin(self, launcher: list[str] | None, *options: str) -> Run:
        """Start the job by a launcher, or by forks of this process."""
        self._options += options
        with (self.folder / "log").open("w") as log:
            if launcher is None:
                self._job = Forked(HERE / self._script, self._options, log)
            else:
                words = [str(self.folder / TIMES) if word == TIMES else word for word in launcher]
                env = {**os.environ, "PYTHON": sys.executable}
                self._job = subprocess.Popen(
                    [*words, *self._options], stdout=log, stderr=subprocess.STDOUT, env=env
                )
        return self

    def journals(self) -> Journals:
        """Wait for the end of the job; return the journals of both ranks."""
        try:
            while self._job.poll() is None:
                self._show()
                time.sleep(0.1)
        finally:
            self._job.terminate() if self._job.poll() is None else None
            self._job.wait()
        self._show()
        journals = {rank: read(self.folder, rank) for rank in (0, 1)}
        if self._job.returncode or not all(any("done" in r for r in j) for j in journals.values()):
            log = (self.folder / "log").read_text()
            sys.exit(f"The run {self.name!r} failed (exit {self._job.returncode}):\n{log}")
        return journals

    def _show(self) -> None:
        show(read(self.folder, 0), read(self.folder, 1), self._progress, self._task)


def read(folder: Path, rank: int) -> list[Record]:
    """Return the complete lines of one rank's journal."""
    path = folder / f"steps-r{rank}.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def show(first: list[Record], second: list[Record], progress: Progress, task: object) -> None:
    """Update the progress bar and its note."""
    steps = [r["step"] for r in first if "step" in r]
    losses = [str(r["loss"]) for r in first if "loss" in r]
    note = f"loss {float.fromhex(losses[-1]):.4f}" if losses else ""
    killed = [r for r in second if "killed" in r]
    if killed:
        starts = [r for r in first if "start" in r]
        note = f"SIGKILL in step {killed[0]['killed']}"
        note += f", resumed at {starts[1]['start']}" if len(starts) > 1 else ", restarting ..."
    progress.update(task, completed=steps[-1] + 1 if steps else 0, note=note)  # type: ignore[arg-type]


def curve(journal: list[Record]) -> dict[int, str]:
    """Return the exact loss by step; a step that was repeated after the kill must give the same."""
    losses: dict[int, str] = {}
    for record in journal:
        if "step" in record:
            step, loss = int(str(record["step"])), str(record["loss"])
            if losses.setdefault(step, loss) != loss:
                sys.exit(f"step {step} gave {losses[step]} before the kill and {loss} after it")
    return losses


def stalls_ms(journals: Journals) -> list[float]:
    """Return the stall of the training thread for every checkpoint in memory, on all ranks."""
    return [
        1e3 * r["seconds"]["stall"]  # type: ignore[index]
        for journal in journals.values()
        for r in journal
        if r.get("event") == "sealed"
    ]


def step_ms(journals: Journals) -> float:
    """Return the median step of rank 0 after a warm-up."""
    return 1e3 * statistics.median(r["step_seconds"] for r in journals[0][20:] if "step" in r)  # type: ignore[type-var]


@dataclass
class Cost:
    """What a checkpoint costs, by the turns of `cost.py`: medians, on the rank with more."""

    step_ms: float
    """A step without checkpoints."""
    more_percent: float
    """How much longer a step with a checkpoint is."""
    cpu_ms: float
    """CPU time of a checkpoint in the rank's process."""
    agent_cpu_ms: float
    """CPU time in the agent, which serves all ranks of the node."""

    @classmethod
    def of(cls, journals: Journals) -> Cost:
        """Take the differences within each pair of turns."""
        turns = [[r["turn"] for r in journal if "turn" in r] for journal in journals.values()]
        pairs: list[list[tuple[Any, Any]]] = [
            [(turn["plain"], turn["saved"]) for turn in each]  # type: ignore[index]
            for each in turns
        ]
        agents = (
            [float(str(r["agent_cpu_seconds"])) for r in journal if "turn" in r]
            for journal in journals.values()
        )
        return cls(
            1e3 * max(statistics.median(p[0] for p, _ in each) for each in pairs),
            100 * max(statistics.median(s[0] / p[0] - 1 for p, s in each) for each in pairs),
            1e3 * max(statistics.median(s[1] - p[1] for p, s in each) for each in pairs),
            1e3 * sum(statistics.median(each) for each in agents),  # one of the ranks started it
        )


def restart(journals: Journals, times: Path) -> dict[str, Any]:
    """Return the seconds from the kill to the end of the first new step with their parts, and the
    level restored."""
    killed = next(r for r in journals[1] if "killed" in r)
    at = float(str(killed["at"]))
    after = [r for r in journals[0] if float(str(r["at"])) > at]
    restored = next(r for r in after if r.get("event") == "restored")
    # The surviving rank may still finish its step; the new run starts with "start".
    begun = next(i for i, r in enumerate(after) if "start" in r)
    first = next(r for r in after[begun:] if "step" in r)
    back = {
        "level": str(restored["level"]),
        "step": int(str(first["step"])),
        "killed": int(str(killed["killed"])),
        "total": float(str(first["at"])) - at,
        "restore": restored["seconds"]["total"],  # type: ignore[index]
    }
    if times.exists():
        record = json.loads(times.read_text().splitlines()[-1])
        parts = {"the death was noticed": record["failed"] - at}
        parts |= {name: record["parts"][part] for part, name in PARTS.items()}
        back["parts"] = parts
    return back


PARTS = {
    "ended": "other ranks ended",
    "forked": "forked",
    "script": "script began",
    "attach": "imports and model",
    "attached": "attach",
    "restored": "restore",
    "boundary": "step",
}
"""The parts that `tierckpt run` records, as text."""


def picture(
    path: Path, plain: dict[int, str], killed: dict[int, str], at: int, ms: list[float]
) -> None:
    """Draw both loss curves, and the stalls."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    left.plot(
        [float.fromhex(plain[s]) for s in sorted(plain)], lw=4, color="0.8", label="undisturbed"
    )
    left.plot([float.fromhex(killed[s]) for s in sorted(killed)], lw=1, label="rank 1 killed")
    left.axvline(at, color="tab:red", ls=":", label=f"SIGKILL in step {at}")
    left.set(
        xlabel="step", ylabel="loss of rank 0", yscale="log", title="the same curve, bit for bit"
    )
    left.legend()
    right.hist(ms, bins=40)
    right.axvline(statistics.median(ms), color="tab:red", ls=":", label="median")
    right.set(xlabel="stall of one checkpoint (ms)", ylabel="checkpoints", title="the cost")
    right.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Make the three runs and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--launcher", choices=LAUNCHERS, default="torchrun")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--picture", type=Path, default=Path("demo.png"))
    args = parser.parse_args()
    console = Console()
    kill_step = args.steps * 3 // 5
    (plain, calm, killed), back, cost = all_runs(args.launcher, args.steps, kill_step, console)
    same = all(curve(plain[r]) == curve(calm[r]) == curve(killed[r]) for r in (0, 1))
    console.print()
    verdict = "equal bit for bit" if same else "DIFFERENT"
    console.print(f"loss curves of both ranks in all three runs: {verdict}")
    print_cost(plain, calm, cost, console)
    print_restart(back, console)
    picture(args.picture, curve(plain[0]), curve(killed[0]), kill_step, stalls_ms(calm))
    console.print(f"picture: {args.picture.resolve()}", soft_wrap=True)
    console.print(
        f"check your own script: tierckpt prove -- {YOURS[args.launcher]}", soft_wrap=True
    )
    if not same:
        sys.exit("The curves differ. This is a bug: please report it.")


def all_runs(
    launcher: str, steps: int, kill_step: int, console: Console
) -> tuple[list[Journals], dict[str, Any], Cost | None]:
    """Run without checkpoints, with one at every step, and the same with rank 1 killed; under
    torchrun then measure the cost."""
    launch = LAUNCHERS[launcher]
    work = Path(tempfile.mkdtemp(prefix="tierckpt-demo-"))
    columns = (
        TextColumn("{task.description:28}"),
        BarColumn(bar_width=10),
        TextColumn("{task.completed:>3}/{task.total} steps"),
        TextColumn("{task.fields[note]}"),
    )
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        with Progress(*columns, console=console) as progress:

            def job(name: str, steps: int = steps, script: str = "train.py") -> Run:
                return Run(name, script, steps, work, progress)

            kill = job("a checkpoint a step, SIGKILL").begin(launch, "--kill-step", str(kill_step))
            forks = launcher == "torchrun"
            if forks:
                imports()  # while the other processes do that
            killed = kill.journals()
            back = restart(killed, kill.folder / TIMES)
            again = None if forks else launch
            calm = job("the same, without the kill").begin(again).journals()
            plain = job("no checkpoints").begin(again, "--plain").journals()
            cost = None
            if forks:
                turns = 40 * max(steps // 25, 2)
                cost = Cost.of(job("two models in turns", turns, "cost.py").begin(None).journals())
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return [plain, calm, killed], back, cost


def print_cost(plain: Journals, calm: Journals, cost: Cost | None, console: Console) -> None:
    """Print the stall per checkpoint, and the whole cost of one at every step."""
    ms = stalls_ms(calm)
    saved = [r for r in calm[0] if r.get("event") == "committed"]
    console.print(
        f"stall per checkpoint: median {statistics.median(ms):.2f} ms, "
        f"p99 {sorted(ms)[int(0.99 * len(ms))]:.2f} ms "
        f"({len(ms)} in memory; rank 0: {len(saved)} on disk)"
    )
    if cost is None:
        overhead = 100 * (step_ms(calm) / step_ms(plain) - 1)
        console.print(
            f"median step: {step_ms(plain):.1f} ms without checkpoints, {step_ms(calm):.1f} ms "
            f"with one at every step: {overhead:+.1f} % (two runs, one after the other)"
        )
        return
    console.print(
        f"a step of {cost.step_ms:.1f} ms, with a checkpoint at each: {cost.more_percent:+.1f} %; "
        f"CPU time of a checkpoint: {cost.cpu_ms:.2f} ms in each rank, {cost.agent_cpu_ms:.2f} ms "
        "in the agent (medians of two models in the same processes, in turns)"
    )


def print_restart(back: dict[str, Any], console: Console) -> None:
    """Print the step and level of the restart, and its time."""
    console.print(
        f"killed in step {back['killed']}, resumed at step {back['step']} from {back['level']}: "
        f"{back['total']:.2f} s from the kill to the end of the next step, of which restore() took "
        f"{1e3 * float(back['restore']):.0f} ms"
    )
    if parts := back.get("parts"):
        shown = ", ".join(f"{name} {1e3 * seconds:.0f}" for name, seconds in parts.items())
        console.print(f"its parts, ms: {shown}")


if __name__ == "__main__":
    main()
