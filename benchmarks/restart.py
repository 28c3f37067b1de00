"""How long does a job take from the start of its processes to its first useful step?

    python benchmarks/restart.py --toy
    python benchmarks/restart.py --json restart.json
    python benchmarks/restart.py --kill 5
    python benchmarks/restart.py --lose 2

Two ranks train, take a checkpoint and are killed; then new processes restart from it, again and
again. Their losses must equal those of an undisturbed job bit for bit. Linear layers with Adam;
`--ways` selects:

ours-memory       processes were lost: slots are mapped
ours-local        the memory of all nodes was lost: shards are mapped from disk
ours-peer         and the last node's disk: `partner`, lost shards are rebuilt
ours-persistent   all nodes were lost: shards are fetched and broadcast
torch-load        rank 0 loads and broadcasts
dcp               every rank loads
nothing           start afresh: the cost of any restart

cache     cold: files not in the page cache, as after a reboot
total     from the start of the processes to the end of the first step
restore   its part from when all ranks have made their models until the state is restored

`--kill N`: rank 1 kills itself N times in a job under torchrun, and under `tierckpt run`, with a
version to memory at every step. *total* runs from a SIGKILL to the end of the next step on rank
0: *started* (others ended, the script starts), *imported*, *met* (process group), *built* (model,
DDP, optimizer), *attached*, *restored*, *stepped*. The first kill does not count. Elastic Horovod
(its own commits) and NVIDIA's in-process wrapper (Tierckpt's checkpoints, a reserve rank a kill)
follow where they are installed; rank 0 survives there, and *started* ends with its return to the
training.

`--lose N`: two nodes of one rank and a spare one, names on this machine. The second node loses
its processes, memory and disk as soon as the peer level protects a version and the spare is
ready. Rows: torchrun with a spare agent and its limit of 15 s without a sign of life, with 3 s,
and `tierckpt run --standby`.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lib import machine
from lib.figures import spread
from lib.files import clean_up_when_terminated, evict
from lib.jobs.nodes import Names
from lib.jobs.plan import Plan, Start, kills_of, planned, starts_of
from lib.jobs.processes import HERE, SHIM, JobError, Processes, horovodrun, torchrun
from lib.jobs.restarts import restarted
from lib.methods.resumable import RESUMABLE
from lib.models import OF_BYTES
from lib.report import publish
from lib.terminal import parser_of, say
from tierckpt.testing import free_ports

WORLD, EVERY, EACH = 2, 2, 6
"""Ranks; steps between the checkpoints of the ways; steps of a start before a kill."""
LIMIT_SECONDS = 600.0
WAYS = {
    "nothing": "nothing",
    "ours-memory": "ours-memory",
    "ours-local": "ours-local",
    "ours-peer": "ours-peer",
    "ours-persistent": "ours-persistent",
    "torch-load": "torch-load",
    "dcp": "dcp-thread",
}
"""The methods of the ways."""
TORCHRUN, RUN, ELASTIC, INPROCESS = "torchrun", "tierckpt run", "hvd.elastic", "NVRx in-process"
PACKAGES = {TORCHRUN: "torch", RUN: "torch", ELASTIC: "horovod", INPROCESS: "nvidia_resiliency_ext"}
NODES: dict[str, tuple[bool, tuple[str, ...]]] = {
    "torchrun": (False, ()),
    "torchrun, 3 s": (
        False,
        ("--rdzv-conf", "keep_alive_interval=1,keep_alive_max_attempt=3"),
    ),
    "tierckpt run --standby": (True, ()),
}
"""Launchers of nodes: whether they are `tierckpt run`, and torchrun's settings. A spare agent is
let in when the lost one has sent no sign of life for 15 s, or for 3."""


def restarts(way: str, plan: Plan) -> dict[str, Any]:
    """A row of the ways: the restarts of one job, in seconds."""
    row = {
        "way": way,
        "title": RESUMABLE[plan.method].title,
        "cache": "-" if way in ("nothing", "ours-memory") else "cold",
        "world": plan.world,
        "state_bytes": int(plan.model.removeprefix(OF_BYTES)),
    }

    def lose(job: Processes) -> None:
        if way != "ours-memory":
            job.lose_memory()
        nodes = sorted(Path(plan.folder).glob("node*"))
        for node in {"ours-peer": nodes[-1:], "ours-persistent": nodes}.get(way, []):
            shutil.rmtree(node)
        evict(Path(plan.folder))

    try:
        starts, losses = restarted(plan, LIMIT_SECONDS, lose)
        if way != "nothing":
            if losses["losses_differing"]:
                raise JobError("the restored state differs from the saved one")
            if [start.resumed_from for start in starts] != list(plan.killed_at):
                raise JobError(f"other versions were restored: {starts}")
    except JobError as error:
        say(str(error))
        return {**row, "status": str(error).splitlines()[-1][:200]}
    total = spread(start.back_seconds for start in starts)
    restore = spread(start.load_seconds for start in starts)
    return {**row, "status": "ok", "total": asdict(total), "restore": asdict(restore)}


def kills(launcher: str, plan: Plan) -> list[Start]:
    """The starts of a job in which rank 1 kills itself."""
    with closing(Processes(plan)) as job:
        if launcher == ELASTIC:
            script = [sys.executable, str(HERE / "elastic.py"), plan.to_json()]
            job.start([*horovodrun(plan.world, plan.folder), *script])
        elif launcher == INPROCESS:
            # One reserve rank for each kill. No launcher: it would end the survivors.
            size, port = plan.world + len(plan.killed_at), free_ports(1)[0]
            place = {"WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            for each in range(size):
                script = [sys.executable, str(HERE / "inprocess.py"), plan.to_json()]
                job.start(script, **place, RANK=each)
        else:
            job.start([*torchrun(plan.world, SHIM if launcher == RUN else ()), *job.rank])
        if job.all[0].wait(LIMIT_SECONDS):
            raise JobError(job.last_words())
        return starts_of(plan, kills_of(plan))


def losses(launcher: str, plan: Plan) -> list[Start]:
    """The starts of a job that loses its second node again and again."""
    shims, settings = NODES[launcher]
    since = []
    with closing(Names(plan, LIMIT_SECONDS, shims, settings)) as nodes:
        nodes.start_all()
        nodes.wait_for_a_step(after=0.0)  # or a spare takes a rank at once
        for number, step in enumerate(plan.held_at):
            nodes.add_spare()  # one at a time: with two torchrun started again and again
            since.append(nodes.lose(rank=1, step=step, spare=plan.world + number))
            nodes.wait_for_a_step(since[-1])
        return starts_of(plan, since)


def failures(options: argparse.Namespace, launcher: str, size: int) -> dict[str, Any]:
    """A row of `--kill` or `--lose`: the restarts of one job. The first one does not count: the
    machine's caches are cold, and the shim has learned no imports."""
    count = (options.kill or options.lose) + 1
    steps = tuple(EACH * number for number in range(1, count + 1))
    what = {"killed_at": steps, "victims": (1,)} if options.kill else {"held_at": steps}
    method = "ours-memory" if options.kill else "ours-nodes"
    job = (f"{OF_BYTES}{size}", method, WORLD, EACH * (count + 1), 1)
    with planned(options.dir, *job, **what) as plan:
        starts = (kills if options.kill else losses)(launcher, plan)[1:]
    return {
        "launcher": launcher,
        "world": WORLD,
        "state_bytes": size,
        "total": asdict(spread(start.back_seconds for start in starts)),
        "parts": {
            name: asdict(spread(start.parts[name] for start in starts)) for name in starts[0].parts
        },
    }


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of(
        __doc__, toy="12 MB, one round", place="where checkpoints go; default: a disk"
    )
    parser.add_argument("--megabytes", help="sizes of the state; default 48,192, toy 12")
    parser.add_argument("--rounds", type=int, help="restarts of each way; default 5, toy 1")
    parser.add_argument("--ways", help=f"some of {','.join(WAYS)}")
    text = "measure only the time from a SIGKILL to the next finished step, N times each"
    parser.add_argument("--kill", type=int, default=0, metavar="N", help=text)
    text = "measure only the time from the loss of a node to the next finished step, N times each"
    parser.add_argument("--lose", type=int, default=0, metavar="N", help=text)
    text = "for --kill and --lose: some of the launchers, separated by semicolons"
    parser.add_argument("--launchers", help=text)
    options = parser.parse_args()
    sizes = options.megabytes or ("12" if options.toy else "48,192")
    options.sizes = [int(each) << 20 for each in sizes.split(",")]
    few = ["ours-memory", "ours-peer", "ours-persistent", "dcp"]
    usual = few if options.toy else [*WAYS]
    options.ways = options.ways.split(",") if options.ways else usual
    options.rounds = options.rounds or (1 if options.toy else 5)
    options.dir = options.dir or machine.scratch_parent()
    here = [name for name, package in PACKAGES.items() if importlib.util.find_spec(package)]
    known: Sequence[str] = [*NODES] if options.lose else here
    options.launchers = options.launchers.split(";") if options.launchers else known
    for chosen, of in ((options.launchers, known), (options.ways, WAYS)):
        if unknown := set(chosen) - {*of}:
            parser.error(f"{', '.join(sorted(unknown))}: choose from {', '.join(of)}")
    return options


def main() -> None:
    options = arguments()
    clean_up_when_terminated()
    os.environ["OMP_NUM_THREADS"] = "1"
    about = machine.description(options.dir)
    if options.kill or options.lose:
        rows = [
            failures(options, launcher, size)
            for size in options.sizes
            for launcher in options.launchers
        ]
        publish(options.json, about, kills=rows)
        return
    cases = []
    for size in options.sizes:
        rows = []
        for way in options.ways:
            say(f"{size >> 20} MiB: {way}")
            killed_at = tuple(EVERY * number for number in range(1, options.rounds + 1))
            job = (f"{OF_BYTES}{size}", WAYS[way], WORLD, killed_at[-1] + EVERY, EVERY)
            if way == "nothing":
                killed_at = (EVERY,) * options.rounds
            with planned(options.dir, *job, killed_at=killed_at, drains=True) as plan:
                rows.append(restarts(way, plan))
        cases.append({"rows": rows})
    publish(options.json, about, cases=cases, rows=[row for case in cases for row in case["rows"]])


if __name__ == "__main__":
    main()
