"""The experiment: eight nodes, four spares, and a node lost again and again (or as many as asked).

Nodes are names here: each has its own disk, memory and agent, and losing one means SIGKILL to its
trainer and its agent, and both folders wiped. Four times a spare takes the place, and training goes
on from what the other nodes kept for the lost one; there is no shared storage at all. The fifth
time there is no spare, and the job goes on with seven ranks. Prints how each run began, whether
the loss of every rank is bit for bit that of a run that nobody disturbed, and saves a picture.
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
"""Steps; a node is lost in the middle of each."""
PATIENCE_SECONDS = 240.0
KEPT = ("committed", "peer")


@dataclass
class Cluster:
    """The job's place: folders, and the processes of one run."""

    work: Path
    shm: Path
    lives: int = 0
    ranks: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    """By the node they run on, in the order of their numbers."""

    def start(self, nodes: list[str], steps: int) -> None:
        """A run of the job on these nodes."""
        self.lives += 1
        meeting = self.work / f"meeting{self.lives}"
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
            with (self.work / f"life{self.lives}-{node}.log").open("wb") as log:
                self.ranks[node] = subprocess.Popen(
                    [*command, str(steps)], env=env, stdout=log, stderr=log
                )

    def lines(self, rank: int) -> list[dict[str, object]]:
        """What a rank wrote, in all runs."""
        path = self.work / f"journal-r{rank}.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(x) for x in text.splitlines(keepends=True) if x.endswith("\n")]

    def wait_until(self, step: int) -> None:
        """Return when rank 0 has done `step`, and the nodes have protected a version of this run.

        A node that is lost before that takes the job back to where no redundancy was yet.
        """
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            lives = [self.newest_life(rank) for rank in range(len(self.ranks))]
            done = [int(str(x["step"])) for x in lives[0] if "step" in x]
            kept = [
                {x["version"] for x in life if (x.get("event"), x.get("level")) == KEPT}
                for life in lives
            ]
            if set.intersection(*kept) and done and done[-1] >= step:
                return
            for node, rank in self.ranks.items():
                if rank.poll() is not None or time.monotonic() > deadline:
                    self.give_up(node)
            time.sleep(0.05)

    def newest_life(self, rank: int) -> list[dict[str, object]]:
        """What a rank wrote since it began last."""
        lines = self.lines(rank)
        begins = [i for i, x in enumerate(lines) if "start" in x]
        return lines[begins[-1] :] if len(begins) == self.lives else []

    def lose(self, node: str) -> None:
        """The node is gone: its processes, its memory, its disk. The launcher ends the others."""
        self.ranks[node].kill()
        for pid in agents_of(self.shm, node):
            os.kill(pid, signal.SIGKILL)
        for folder in self.shm.glob(f"tierckpt-*/*@{node}"):
            shutil.rmtree(folder)
        shutil.rmtree(self.work / "disks" / node)
        self.stop()

    def stop(self) -> None:
        """Kill what is left of this run; agents stay."""
        for rank in self.ranks.values():
            rank.kill()
            rank.wait()

    def finish(self) -> None:
        """Return when all ranks have ended well, by what they wrote: gloo sometimes aborts in a
        process that is through with its work."""
        for rank, (node, process) in enumerate(self.ranks.items()):
            process.wait(PATIENCE_SECONDS)
            if not any("done" in line for line in self.newest_life(rank)):
                self.give_up(node)

    def give_up(self, node: str) -> NoReturn:
        """Show what the rank on `node` said."""
        self.stop()
        log = (self.work / f"life{self.lives}-{node}.log").read_text()
        sys.exit(f"life {self.lives} of the job failed on {node}, which said:\n{log[-3000:]}")


def agents_of(shm: Path, node: str) -> list[int]:
    """Process ids of the agents of a node, from their locks."""
    locks = shm.glob(f"tierckpt-*/*@{node}/agent*.lock")
    return [int(lock.read_text()) for lock in locks]


def curve(cluster: Cluster, rank: int, nodes: int) -> dict[int, str]:
    """Exact loss by step while there were all ranks; what was done again must be the same."""
    losses: dict[int, str] = {}
    ranks = 0
    for line in cluster.lines(rank):
        ranks = int(str(line.get("ranks", ranks)))
        if "step" in line and ranks == nodes:
            step, loss = int(str(line["step"])), str(line["loss"])
            if losses.setdefault(step, loss) != loss:
                sys.exit(f"rank {rank}, step {step}: {losses[step]} once, then {loss}")
    return losses


def picture(
    path: Path, title: str, calm: dict[int, str], broken: dict[int, str], lost: list[int]
) -> None:
    """Both curves, and the failures on them."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 4))
    for curve_, style in (
        (calm, {"lw": 5, "color": "0.8", "label": "undisturbed"}),
        (broken, {"lw": 1, "label": "a node lost again and again"}),
    ):
        axes.plot(sorted(curve_), [float.fromhex(curve_[s]) for s in sorted(curve_)], **style)
    for number, step in enumerate(lost):
        axes.axvline(step, color="tab:red", ls=":", label="node lost" if number == 0 else None)
    axes.set(xlabel="step", ylabel="loss of rank 0", title=title)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run it all."""
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
    """Both runs, and what came of them; ends with an error where that is not what was promised."""
    ranks: int = args.nodes
    nodes = [f"node{i}" for i in range(ranks)]
    steps = (args.spares + 2) * EPOCH
    console.print(f"undisturbed: {ranks} ranks, {steps} steps")
    calm.start(nodes, steps)
    calm.finish()
    spares = [f"spare{i}" for i in range(args.spares)]
    lost = lose_again_and_again(broken, nodes, spares, steps, console)
    levels = tell_of_lives(broken, lost, console)

    of_calm, of_broken = ([curve(c, r, ranks) for r in range(ranks)] for c in (calm, broken))
    pairs = zip(of_calm, of_broken, strict=True)
    same = all(mine.items() <= undisturbed.items() for undisturbed, mine in pairs)
    title = f"{ranks} nodes, {args.spares} spares"
    picture(args.picture, title, of_calm[0], of_broken[0], lost)
    console.print(f"loss of all {ranks} ranks as if nothing had happened, bit for bit: {same}")
    console.print(f"picture: {args.picture.resolve()}")
    if not same or not all("peer" in each for each in levels):
        sys.exit("That is not what was promised: please report it.")


def lose_again_and_again(
    cluster: Cluster, nodes: list[str], spares: list[str], steps: int, console: Console
) -> list[int]:
    """Train to the end, and lose a node in every epoch but the last; returns the steps in which.

    A spare takes the node's place as long as there is one; then the job goes on with fewer.
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
            console.print(f"lost {victim} in step {lost[-1]}; {nodes[place]} takes its place")
        else:
            nodes.pop(place)
            console.print(f"lost {victim} in step {lost[-1]}; no spare is left")
    cluster.start(nodes, steps)
    cluster.finish()
    return lost


def tell_of_lives(cluster: Cluster, lost: list[int], console: Console) -> list[dict[str, int]]:
    """How each run after a failure began; returns from which levels, and how many shards each."""
    starts = [x for x in cluster.lines(0) if "start" in x][1:]
    for number, begun in enumerate(starts):
        console.print(
            f"life {number + 2}: {begun['ranks']} ranks went on from step {begun['start']}, "
            f"lost in step {lost[number]}; shards from {begun['levels']}; "
            f"restore() took {1e3 * float(str(begun['seconds'])):.0f} ms"
        )
    return [begun["levels"] for begun in starts]  # type: ignore[misc]


if __name__ == "__main__":
    main()
