"""The experiment: eight nodes and four spares, and a node is lost five times.

Nodes are names here. Each has its own disk, memory and agent; there is no shared storage. To lose a
node means SIGKILL to its trainer and its agent, and deletion of both folders. Four times a spare
replaces it, and training resumes from the redundancy on the other nodes. The fifth time there is no
spare, and the job resumes with seven ranks. The script prints the start of each run, and whether
the loss of every rank equals that of an undisturbed run bit for bit, and saves a picture.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from rich.console import Console

HERE = Path(__file__).resolve().parent
EPOCH = 12
"""Steps between two failures."""
PATIENCE_SECONDS = 240.0
KEPT = ("committed", "peer")


@dataclass
class Cluster:
    """The folders of the job, and the processes of one run."""

    work: Path
    shm: Path
    runs: int = 0
    ranks: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    """Processes by node, in the order of ranks."""

    def start(self, nodes: list[str], steps: int) -> None:
        """Start a run of the job on these nodes."""
        self.runs += 1
        meeting = self.work / f"meeting{self.runs}"
        self.ranks = {}
        for rank, node in enumerate(nodes):
            env = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(len(nodes)),
                "TIERCKPT_NODE": node,
                "TIERCKPT_SHM_DIR": str(self.shm),
                "TIERCKPT_AGENT_LINGER_SECONDS": "30",
                "OMP_NUM_THREADS": "1",
            }
            command = [sys.executable, str(HERE / "train.py"), str(self.work), str(meeting)]
            with (self.work / f"run{self.runs}-{node}.log").open("wb") as log:
                self.ranks[node] = subprocess.Popen(
                    [*command, str(steps)], env=env, stdout=log, stderr=log
                )

    def lines(self, rank: int) -> list[dict[str, object]]:
        """Return the journal of a rank, with all runs."""
        path = self.work / f"journal-r{rank}.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(x) for x in text.splitlines(keepends=True) if x.endswith("\n")]

    def wait_until(self, step: int) -> None:
        """Wait until rank 0 has done `step`, and the nodes have protected a version of this run.

        The loss of a node before that could not be repaired.
        """
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            journals = [self.newest_run(rank) for rank in range(len(self.ranks))]
            done = [int(str(x["step"])) for x in journals[0] if "step" in x]
            kept = [
                {x["version"] for x in journal if (x.get("event"), x.get("level")) == KEPT}
                for journal in journals
            ]
            if set.intersection(*kept) and done and done[-1] >= step:
                return
            for node, rank in self.ranks.items():
                if rank.poll() is not None or time.monotonic() > deadline:
                    self.give_up(node)
            time.sleep(0.05)

    def newest_run(self, rank: int) -> list[dict[str, object]]:
        """Return the journal of a rank in the newest run."""
        lines = self.lines(rank)
        begins = [i for i, x in enumerate(lines) if "start" in x]
        return lines[begins[-1] :] if len(begins) == self.runs else []

    def lose(self, node: str) -> None:
        """Lose a node: its processes, memory and disk. The launcher ends the other ranks."""
        self.ranks[node].kill()
        for pid in agents_of(self.shm, node):
            os.kill(pid, signal.SIGKILL)
        for folder in self.shm.glob(f"tierckpt-*/*@{node}"):
            shutil.rmtree(folder)
        shutil.rmtree(self.work / "disks" / node)
        self.stop()

    def stop(self) -> None:
        """Kill the trainers of this run; agents stay."""
        for rank in self.ranks.values():
            rank.kill()
            rank.wait()

    def finish(self) -> None:
        """Wait until all ranks have ended. Success is a line in the journal, not the exit status:
        gloo sometimes aborts a process after its work."""
        for rank, (node, process) in enumerate(self.ranks.items()):
            process.wait(PATIENCE_SECONDS)
            if not any("done" in line for line in self.newest_run(rank)):
                self.give_up(node)

    def give_up(self, node: str) -> NoReturn:
        """Exit with the log of the rank on `node`."""
        self.stop()
        log = (self.work / f"run{self.runs}-{node}.log").read_text()
        sys.exit(f"run {self.runs} of the job failed on {node}; the end of its log:\n{log[-3000:]}")


def agents_of(shm: Path, node: str) -> list[int]:
    """Return the process ids of the agents of a node, from their locks."""
    locks = shm.glob(f"tierckpt-*/*@{node}/agent*.lock")
    return [int(lock.read_text()) for lock in locks]


def curve(cluster: Cluster, rank: int, nodes: int) -> dict[int, str]:
    """Return the exact loss by step with all ranks; repeated steps must give the same loss."""
    losses: dict[int, str] = {}
    ranks = 0
    for line in cluster.lines(rank):
        ranks = int(str(line.get("ranks", ranks)))
        if "step" in line and ranks == nodes:
            step, loss = int(str(line["step"])), str(line["loss"])
            if losses.setdefault(step, loss) != loss:
                sys.exit(f"rank {rank}, step {step}: {losses[step]} first, then {loss}")
    return losses


def picture(
    path: Path, title: str, calm: dict[int, str], broken: dict[int, str], lost: list[int]
) -> None:
    """Draw both curves with the failures."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 4))
    for curve_, style in (
        (calm, {"lw": 5, "color": "0.8", "label": "undisturbed"}),
        (broken, {"lw": 1, "label": "nodes lost"}),
    ):
        axes.plot(sorted(curve_), [float.fromhex(curve_[s]) for s in sorted(curve_)], **style)
    for number, step in enumerate(lost):
        axes.axvline(step, color="tab:red", ls=":", label="node lost" if number == 0 else None)
    axes.set(xlabel="step", ylabel="loss of rank 0", title=title)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run the experiment in temporary folders."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--picture", type=Path, default=Path("spares.png"))
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--spares", type=int, default=4)
    args = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="tierckpt-spares-"))
    shm = Path(tempfile.mkdtemp(prefix="tierckpt-spares-", dir="/dev/shm"))
    try:
        calm, broken = (Cluster(work / name, shm / name) for name in ("calm", "broken"))
        for cluster in (calm, broken):
            cluster.work.mkdir()
            cluster.shm.mkdir()
        experiment(calm, broken, args, Console())
    finally:
        shutil.rmtree(shm, ignore_errors=True)
        shutil.rmtree(work, ignore_errors=True)


def experiment(calm: Cluster, broken: Cluster, args: argparse.Namespace, console: Console) -> None:
    """Make both jobs and compare them. Exits with an error if they differ."""
    ranks: int = args.nodes
    nodes = [f"node{i}" for i in range(ranks)]
    steps = (args.spares + 2) * EPOCH
    console.print(f"undisturbed: {ranks} ranks, {steps} steps")
    calm.start(nodes, steps)
    calm.finish()
    spares = [f"spare{i}" for i in range(args.spares)]
    lost = lose_again_and_again(broken, nodes, spares, steps, console)
    levels = print_runs(broken, lost, console)

    of_calm, of_broken = ([curve(c, r, ranks) for r in range(ranks)] for c in (calm, broken))
    pairs = zip(of_calm, of_broken, strict=True)
    same = all(mine.items() <= undisturbed.items() for undisturbed, mine in pairs)
    title = f"{ranks} nodes, {args.spares} spares"
    picture(args.picture, title, of_calm[0], of_broken[0], lost)
    verdict = "equals the undisturbed run bit for bit" if same else "DIFFERS"
    console.print(f"the loss of all {ranks} ranks {verdict}")
    console.print(f"picture: {args.picture.resolve()}", soft_wrap=True)
    if not same or not all("peer" in each for each in levels):
        sys.exit("The losses or levels are wrong. This is a bug: please report it.")


def lose_again_and_again(
    cluster: Cluster, nodes: list[str], spares: list[str], steps: int, console: Console
) -> list[int]:
    """Train to the end, and lose a node in every epoch but the last; return the steps of failures.

    A spare replaces the node as long as there is one; then the job resumes with fewer nodes.
    """
    nodes, lost = list(nodes), []
    for failure in range(len(spares) + 1):
        cluster.start(nodes, steps)
        cluster.wait_until((failure + 1) * EPOCH - EPOCH // 2)
        victim = nodes[(3 * failure + 1) % len(nodes)]
        cluster.lose(victim)
        lost.append(int(str([x["step"] for x in cluster.lines(0) if "step" in x][-1])))
        place = nodes.index(victim)
        if failure < len(spares):
            nodes[place] = spares[failure]
            console.print(f"lost {victim} in step {lost[-1]}; {nodes[place]} replaces it")
        else:
            nodes.pop(place)
            console.print(f"lost {victim} in step {lost[-1]}; no spare is left")
    cluster.start(nodes, steps)
    cluster.finish()
    return lost


def print_runs(cluster: Cluster, lost: list[int], console: Console) -> list[dict[str, int]]:
    """Print the start of each run after a failure; return its numbers of shards by level."""
    starts = [x for x in cluster.lines(0) if "start" in x][1:]
    for number, begun in enumerate(starts):
        console.print(
            f"run {number + 2}: {begun['ranks']} ranks resumed at step {begun['start']} after the "
            f"failure in step {lost[number]}; shards from {begun['levels']}; "
            f"restore() took {1e3 * float(str(begun['seconds'])):.0f} ms"
        )
    return [begun["levels"] for begun in starts]  # type: ignore[misc]


if __name__ == "__main__":
    main()
