"""The demo: a two-rank job loses a process to SIGKILL and carries on as if nothing had happened.

Three runs of `train.py` under torchrun, or of `train_horovod.py` under horovodrun: without
checkpoints, with a checkpoint at every step, and the same with rank 1 killed in the middle of a
step. Prints whether the loss curves are equal bit for bit and what the checkpoints cost, and saves
a picture.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

HERE = Path(__file__).resolve().parent
Record = dict[str, object]
Journals = dict[int, list[Record]]
"""What each rank wrote of a run."""


# Each starts two processes, and starts them again when one dies.
LAUNCHERS = {
    "torchrun": [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("--max-restarts", "3", "--monitor-interval", "0.1", str(HERE / "train.py")),
    ],
    "horovodrun": [str(HERE.parent / "restarts" / "horovod_elastic.sh")],
}


YOURS = {
    "torchrun": "torchrun --nproc-per-node 2 train.py",
    "horovodrun": "horovodrun -np 2 python train.py",
}


def run(
    launcher: str, name: str, steps: int, work: Path, options: list[str], progress: Progress
) -> Journals:
    """Run one job; returns the journal lines of both ranks."""
    folder = work / name.replace(" ", "-")
    folder.mkdir(parents=True)
    command = [*LAUNCHERS[launcher], "--steps", str(steps), "--journal", str(folder)]
    command += ["--path", str(folder / "ckpts"), *options]
    task = progress.add_task(name, total=steps, note="starting two processes")
    with (folder / "log").open("w") as log:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHON": sys.executable}
        # Else torchrun lets all runs of a job share one key-value store, and a restarted gloo
        # process may read the address of a process that is dead.
        env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        job = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env)
        try:
            while job.poll() is None:
                show(read(folder, 0), read(folder, 1), progress, task)
                time.sleep(0.1)
        finally:
            job.terminate() if job.poll() is None else None
            job.wait()
    journals = {rank: read(folder, rank) for rank in (0, 1)}
    show(journals[0], journals[1], progress, task)
    if job.returncode != 0 or not all(any("done" in r for r in j) for j in journals.values()):
        sys.exit(
            f"The run {name!r} failed (exit {job.returncode}):\n{(folder / 'log').read_text()}"
        )
    return journals


def read(folder: Path, rank: int) -> list[Record]:
    """Complete lines of one rank's journal."""
    path = folder / f"steps-r{rank}.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def show(first: list[Record], second: list[Record], progress: Progress, task: object) -> None:
    """Move the progress bar and say what happened last."""
    steps = [r["step"] for r in first if "step" in r]
    note = f"loss {float.fromhex(last_loss(first)):.4f}" if steps else ""
    killed = [r for r in second if "killed" in r]
    if killed:
        lives = [r for r in first if "start" in r]
        note = f"rank 1 got SIGKILL in step {killed[0]['killed']}"
        note += f", resumed at step {lives[1]['start']}" if len(lives) > 1 else ", restarting ..."
    progress.update(task, completed=steps[-1] + 1 if steps else 0, note=note)  # type: ignore[arg-type]


def last_loss(journal: list[Record]) -> str:
    """The newest loss, as hexadecimal text."""
    return str([r["loss"] for r in journal if "loss" in r][-1])


def curve(journal: list[Record]) -> dict[int, str]:
    """Loss by step, exact; a step that was done again after the kill must have given the same."""
    losses: dict[int, str] = {}
    for record in journal:
        if "step" in record:
            step, loss = int(str(record["step"])), str(record["loss"])
            if losses.setdefault(step, loss) != loss:
                sys.exit(f"step {step} gave {losses[step]} before the kill and {loss} after it")
    return losses


def stalls_ms(journals: Journals) -> list[float]:
    """Training thread's time in every checkpoint to memory, all ranks."""
    return [
        1e3 * r["seconds"]["stall"]  # type: ignore[index]
        for journal in journals.values()
        for r in journal
        if r.get("event") == "sealed"
    ]


def step_ms(journals: Journals) -> float:
    """Median step of rank 0, after a warm-up."""
    return 1e3 * statistics.median(r["step_seconds"] for r in journals[0][20:] if "step" in r)  # type: ignore[type-var]


def restart(journals: Journals) -> dict[str, float | str]:
    """Seconds from the kill until the first new step is done, and where the state came from."""
    killed = next(r for r in journals[1] if "killed" in r)
    at = float(str(killed["at"]))
    after = [r for r in journals[0] if float(str(r["at"])) > at]
    restored = next(r for r in after if r.get("event") == "restored")
    # The surviving rank may still finish the step it was in; the new run begins with "start".
    begun = next(i for i, r in enumerate(after) if "start" in r)
    first = next(r for r in after[begun:] if "step" in r)
    return {
        "level": str(restored["level"]),
        "step": int(str(first["step"])),
        "killed": int(str(killed["killed"])),
        "total": float(str(first["at"])) - at,
        "restore": restored["seconds"]["total"],  # type: ignore[index]
    }


def picture(
    path: Path, plain: dict[int, str], killed: dict[int, str], at: int, ms: list[float]
) -> None:
    """Both loss curves, and the stalls."""
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
    right.set(xlabel="stall of one checkpoint (ms)", ylabel="checkpoints", title="what they cost")
    right.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run it all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--launcher", choices=LAUNCHERS, default="torchrun")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--picture", type=Path, default=Path("demo.png"))
    args = parser.parse_args()
    console = Console()
    kill_step = args.steps * 3 // 5
    plain, calm, killed = three_runs(args.launcher, args.steps, kill_step, console)
    same = all(curve(plain[r]) == curve(calm[r]) == curve(killed[r]) for r in (0, 1))
    console.print()
    console.print(f"loss curves of both ranks equal, bit for bit, in all three runs: {same}")
    tell_the_cost(plain, calm, console)
    tell_of_the_restart(killed, console)
    picture(args.picture, curve(plain[0]), curve(killed[0]), kill_step, stalls_ms(calm))
    console.print(f"picture: {args.picture.resolve()}")
    console.print(f"is your own script exact? ask it: tierckpt prove -- {YOURS[args.launcher]}")
    if not same:
        sys.exit("The curves differ: that is a bug, please report it.")


def three_runs(
    launcher: str, steps: int, kill_step: int, console: Console
) -> tuple[Journals, Journals, Journals]:
    """Without checkpoints, with one at every step, and the same with rank 1 killed."""
    work = Path(tempfile.mkdtemp(prefix="tierckpt-demo-"))
    columns = (
        TextColumn("{task.description:28}"),
        BarColumn(),
        TextColumn("{task.completed:>3}/{task.total} steps"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
    )
    try:
        with Progress(*columns, console=console) as progress:
            plain = run(launcher, "no checkpoints", steps, work, ["--plain"], progress)
            calm = run(launcher, "a checkpoint every step", steps, work, [], progress)
            kill = ["--kill-step", str(kill_step)]
            killed = run(launcher, "the same, and a SIGKILL", steps, work, kill, progress)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return plain, calm, killed


def tell_the_cost(plain: Journals, calm: Journals, console: Console) -> None:
    """Of a checkpoint, and of one at every step."""
    ms = stalls_ms(calm)
    saved = [r for r in calm[0] if r.get("event") == "committed"]
    overhead = 100 * (step_ms(calm) / step_ms(plain) - 1)
    console.print(
        f"stall per checkpoint: median {statistics.median(ms):.2f} ms, "
        f"p99 {sorted(ms)[int(0.99 * len(ms))]:.2f} ms "
        f"({len(ms)} to memory; rank 0: {len(saved)} to disk)"
    )
    console.print(
        f"median step: {step_ms(plain):.1f} ms without checkpoints, {step_ms(calm):.1f} ms "
        f"with one at every step: {overhead:+.1f}%"
    )


def tell_of_the_restart(killed: Journals, console: Console) -> None:
    """From where the job went on, and how long that took."""
    back = restart(killed)
    console.print(
        f"killed in step {back['killed']}, resumed at step {back['step']} from {back['level']}: "
        f"{back['total']:.1f} s from the kill to the next finished step, restore() took "
        f"{1e3 * float(back['restore']):.0f} ms of it (the rest is starting processes)"
    )


if __name__ == "__main__":
    main()
