"""SCR-Exa's experiment: one checkpoint an epoch, over ranks, DDP and Horovod.

An epoch has a few steps here. *Root checkpointing* writes to one shared parallel file system with
simulated bandwidth; ours takes each version to memory, or to local
disk, or flushes one of ten. More ranks than the machine holds are simulated (`scale`). Then jobs
that are killed every ten epochs: as a whole (`restarts`), or one of their nodes (`spares`). Their
logs are compared with that of an undisturbed job.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from lib.jobs.plan import Plan, figures_of, planned
from lib.jobs.processes import Processes
from lib.jobs.restarts import restarted
from lib.methods.alternatives import BYTES_PER_SECOND
from lib.methods.ours import FLUSHED_OF
from lib.methods.registry import METHODS
from lib.methods.resumable import RESUMABLE
from lib.models import OF_PAPERS
from lib.papers import scr_exa_spares
from lib.papers.frequency import attached
from lib.papers.models import MODELS
from lib.papers.results import Row
from lib.papers.rule import Judged, cost_of, table
from lib.papers.scr_exa_scale import WORLDS, simulated
from lib.training.launchers import LAUNCHERS

CHOICES = {
    "models": ("resnet50", "edsr"),
    "launchers": ("torchrun", "horovod"),
    "methods": ("root-shared", "ours-memory", "ours-local", "ours-flushed", "ours-xor"),
    "parts": ("epochs", "restarts", "spares", "scale"),
    "worlds": ("1", "2", "4", "8"),
    "epochs": ("4",),
}
TOY = {
    "models": ("edsr-toy",),
    "launchers": ("torchrun",),
    "methods": ("ours-flushed",),
    "parts": ("epochs",),
    "worlds": ("2",),
}
KEY = ("model", "part", "launcher", "world", "method", "epoch_steps")
SHORT = {"torchrun": "DDP", "horovod": "Horovod"}
EPOCH = 4
"""Steps of an epoch in jobs that are killed."""
BETWEEN = 10
"""Epochs between two failures, which come in the middle of an epoch."""
COLD_RESTARTS = 2
NODES, SPARES = 8, 4
OF_PARTS = {
    "epochs": ("root-shared", "ours-memory", "ours-local", "ours-flushed"),
    "restarts": ("root-shared", "ours-memory", "ours-local"),
    "spares": ("root-shared", "ours-xor"),
    "scale": ("root-shared", "ours-flushed"),
}
"""The methods of each part."""


def keys(options: argparse.Namespace) -> Iterator[Row]:
    """What identifies each row. Those of `scale` are simulated from the others."""
    for model in options.models:
        for launcher in options.launchers:
            jobs = [
                *(("epochs", int(w), int(e)) for e in options.epochs for w in options.worlds),
                ("restarts", 2, EPOCH),
                ("spares", 2 if options.toy else NODES, EPOCH),
                *(("scale", world, 0) for world in WORLDS),
            ]
            for part, world, steps in jobs:
                if part not in options.parts or (part, launcher) == ("spares", "horovod"):
                    continue
                for method in OF_PARTS[part]:
                    if method in options.methods:
                        yield {
                            "model": model,
                            "part": part,
                            "launcher": launcher,
                            "world": world,
                            "method": method,
                            "epoch_steps": steps,
                        }


def missing(options: argparse.Namespace) -> list[str | None]:
    """Why the chosen rows cannot be measured here, besides models."""
    return [LAUNCHERS[launcher].missing() for launcher in options.launchers]


def measure(options: argparse.Namespace, key: Row) -> Row:
    """Measure a row."""
    part, model = key["part"], MODELS[key["model"]]
    is_killed = part in ("restarts", "spares")
    method = (RESUMABLE if is_killed else METHODS[key["launcher"]])[key["method"]]
    about = {"title": model.title, "batch": model.shape, "method_title": method.title}
    how = {
        "epochs": _epochs,
        "restarts": _restarts,
        "spares": _spares,
        "scale": simulated,
    }
    return {**about, **how[part](options, key)}


def _epochs(options: argparse.Namespace, key: Row) -> Row:
    epochs = 2 if options.toy else FLUSHED_OF
    who = (key["method"], key["model"], key["launcher"], key["world"])
    with attached(options, *who) as frequency:
        found = frequency.at(key["epoch_steps"], checkpoints=epochs)
        return {"store_bytes_per_second": BYTES_PER_SECOND, **found}


def _restarts(options: argparse.Namespace, key: Row) -> Row:
    def lose(job: Processes) -> None:
        if key["method"] != "ours-memory":
            job.lose_memory()

    with _plan(options, key, 1 if options.toy else COLD_RESTARTS) as plan:
        plan = replace(plan, killed_at=plan.held_at, held_at=())
        starts, losses = restarted(plan, options.timeout, lose)
        return {**losses, **figures_of(starts)}


def _spares(options: argparse.Namespace, key: Row) -> Row:
    count = 1 if options.toy else SPARES
    with _plan(options, key, count) as plan:
        return scr_exa_spares.measure(plan, count, options.timeout)


def _plan(options: argparse.Namespace, key: Row, count: int) -> AbstractContextManager[Plan]:
    """A job with so many failures. It ends as many epochs after its last one as lie between two."""
    epochs = 2 if options.toy else BETWEEN
    failures = [number * epochs * EPOCH + EPOCH // 2 for number in range(1, count + 1)]
    steps = failures[-1] + failures[0] - EPOCH
    job = (OF_PAPERS + key["model"], key["method"], key["world"], steps, EPOCH)
    return planned(options.dir, *job, launcher=key["launcher"], held_at=tuple(failures))


GOAL = 0.01
"""The overhead that ours is to have at most."""
_OF_SPARES = "method, lost nodes survived, wall (s), goodput (%), next step (s), load (s), losses"
_BUCKETS = (
    "After *root* DDP starts with provisional buckets, and three ranks or more then "
    "round differently; Tierckpt restores [the buckets](internals/ddp.md)."
)


def section(rows: list[Row], published: dict[str, Any]) -> list[str]:
    """Paragraphs and tables."""
    of_parts = {
        part: sorted((row for row in rows if row["part"] == part), key=_order)
        for part in ("epochs", "scale", "restarts", "spares")
    }
    parts = []
    if epochs := of_parts["epochs"]:
        parts += _epochs_text(epochs)
    if scale := of_parts["scale"]:
        parts += _scale(scale, published)
    if restarts := of_parts["restarts"]:
        parts += _restarts_text(restarts)
    if spares := of_parts["spares"]:
        parts += _spares_text(spares)
    return parts


def _order(row: Row) -> tuple[Any, ...]:
    is_horovod = row["launcher"] == "horovod"
    return row["model"], is_horovod, row["epoch_steps"], row["method"], row["world"]


def _bold(row: Row) -> str:
    if row["method"] == "root-shared":
        return "root"
    title = row["method_title"].removeprefix("Tierckpt, to ").replace("every 10th", "10th")
    return f"**{title}**"


# --- one checkpoint an epoch ---------------------------------------------------------------------


def verdicts(rows: list[Row], published: dict[str, Any]) -> Iterator[Judged]:
    """The goals of an epoch's checkpoint, and those of lost nodes and cold restarts."""
    epochs = [r for r in rows if (r["part"], r["method"]) == ("epochs", "ours-flushed")]
    costs = [(_place(row), cost_of(row)) for row in sorted(epochs, key=_order)]
    yield Judged(
        f"SCR-Exa: one checkpoint an epoch, every 10th flushed, at most {100 * GOAL:g} %",
        [(place, cost.verdict(GOAL)) for place, cost in costs],
    )
    for part, goal in (("restarts", "cold restarts"), ("spares", "lost nodes survived")):
        own = [r for r in rows if r["part"] == part and r["method"].startswith("ours")]
        kept: dict[str, bool] = {}
        for row in own:
            name = f"{row['title'].split()[0]} {SHORT[row['launcher']]}"
            survived = row.get("survived", 0) == len(row.get("lost_at", ()))
            kept[name] = kept.get(name, True) and survived and not row["losses_differing"]
        cases = [(name, "met" if is_kept else "missed") for name, is_kept in kept.items()]
        yield Judged(f"SCR-Exa: {goal}, all losses bit for bit", cases)


def _epochs_text(rows: list[Row]) -> list[str]:
    worlds = sorted({row["world"] for row in rows})
    store = rows[0]["store_bytes_per_second"] / 1e6
    head = ["of an epoch", "method"]
    head += [f"{world} ranks" if world > 1 else "1 rank" for world in worlds]
    return [
        "One checkpoint an epoch; all ranks share two cores. Bold: Tierckpt. *Root*: `torch.save` "
        f"on rank 0 to a shared file system of simulated bandwidth ({store:g} MB/s). Cost in %:",
        table([head, *_lines(rows, worlds)]),
    ]


def _scale(rows: list[Row], published: dict[str, Any]) -> list[str]:
    """The published figure's form, simulated."""
    worlds = sorted({row["world"] for row in rows})
    return [
        f"**Simulated** from these costs: {_datasets(rows)}; N ranks have an N-th of the steps. "
        "A rank has a core, a node's disk and network 1 GB/s (assumed). Cost in % of an epoch, by "
        "ranks. There: root checkpointing grows, SCR stays nearly flat below "
        f"{published['overhead']} %. Here both grow, as a version has a fixed cost. Other work "
        "lengthened rows with ~: compare within a job.",
        table(
            [
                ["job", "method", "ms a version"]
                + [f"{world:,}" for world in worlds]
                + ["MB a rank, last", "cold load, s: 8", f"{worlds[-1]:,}"],
                *(_simulated(group, worlds) for group in _by_method(rows)),
            ]
        ),
        f"The busiest node has {rows[-1]['node_packets_a_step']:.0f} packets a step at 512 and "
        f"{worlds[-1]:,} ranks ([calculated](simulate.md#what-a-step-costs)).",
    ]


def _datasets(rows: list[Row]) -> str:
    found = {row["title"]: row["epoch_samples"] for row in rows}
    return ", ".join(f"{count:,} samples an epoch ({title})" for title, count in found.items())


def _by_method(rows: list[Row]) -> list[dict[int, Row]]:
    groups: dict[tuple[str, str, str], dict[int, Row]] = {}
    for row in rows:
        groups.setdefault((row["title"], row["launcher"], row["method"]), {})[row["world"]] = row
    return list(groups.values())


def _simulated(by: dict[int, Row], worlds: list[int]) -> list[str]:
    last = by[max(by)]
    mark = "~" if last["is_cpu_alone"] else ""
    restores = [by[world]["restore_seconds"] if world in by else None for world in (8, worlds[-1])]
    return [
        *(f"{last['title']}, {SHORT[last['launcher']]}", _bold(last)),
        f"{mark}{1e3 * last['version_seconds']:.0f}",
        *(_percent(by[world]["overhead"]) if world in by else "-" for world in worlds),
        f"{last['rank_bytes'] / 1e6:,.2f}",
        *("-" if each is None else f"{each:.2f}" for each in restores),
    ]


def _percent(share: float) -> str:
    return f"{100 * share:.2g}" if share >= 1e-4 else "<0.01"


def _groups(rows: list[Row]) -> dict[tuple[str, str, int], dict[str, dict[int, Row]]]:
    """Rows by model, launcher and steps of an epoch, then method, then ranks."""
    groups: dict[tuple[str, str, int], dict[str, dict[int, Row]]] = {}
    for row in rows:
        methods = groups.setdefault((row["title"], row["launcher"], row["epoch_steps"]), {})
        methods.setdefault(row["method"], {})[row["world"]] = row
    return groups


def _lines(rows: list[Row], worlds: list[int]) -> list[list[str]]:
    lines = []
    for (title, launcher, steps), methods in _groups(rows).items():
        measured = [r for by in methods.values() for r in by.values()]
        size = max(row["state_bytes"] for row in measured)
        who = f"{title}, {size / 1e6:,.0f} MB, {SHORT[launcher]}, {steps} steps"
        lines.append([who, "an epoch alone", *_plain(measured, worlds)])
        for by in methods.values():
            cells = [cost_of(by[world]).text if world in by else "-" for world in worlds]
            lines.append(["", _bold(next(iter(by.values()))), *cells])
    return lines


def _plain(measured: list[Row], worlds: list[int]) -> list[str]:
    cells = []
    for world in worlds:
        own = [row for row in measured if row["world"] == world]
        quiet = [row for row in own if not cost_of(row).others]
        seconds = [row["step_seconds"] * row["epoch_steps"] for row in quiet or own]
        mark = "" if quiet else "~"
        cells.append(f"{mark}{sum(seconds) / len(seconds):.2f} s" if seconds else "-")
    return cells


def _place(row: Row) -> str:
    launcher = SHORT[row["launcher"]]
    return f"{row['title'].split()[0]} {launcher} x {row['world']}, {row['epoch_steps']} steps"


# --- jobs that are killed ------------------------------------------------------------------------


def _losses(row: Row) -> str:
    """Whether the log is that of the undisturbed job."""
    if row["losses_differing"]:
        return f"**{row['losses_differing']} of {row['losses_compared']:,} differ**"
    return f"all {row['losses_compared']:,} equal"


def _restarts_text(rows: list[Row]) -> list[str]:
    jobs: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        who = f"{row['title']}, {SHORT[row['launcher']]}"
        jobs.setdefault((who, _losses(row)), {})[row["method"]] = row
    lines = [
        [who, *(_load(by.get(method)) for method in _RESTARTED), losses]
        for (who, losses), by in jobs.items()
    ]
    return [
        "**Cold restarts** of two ranks, in the middle of every tenth epoch, medians of two: the "
        "load; to the end of the first step, with the start of Python, s. For the disk the memory "
        "is lost, too. *Losses*: of each rank and step, beside an undisturbed job.",
        table([["job", *_RESTARTED.values(), "losses"], *lines]),
    ]


_RESTARTED = {
    "ours-memory": "**memory**",
    "ours-local": "**local disk**",
    "root-shared": "root",
}


def _load(row: Row | None) -> str:
    return f"{row['load_seconds']:.2f}; {row['back_seconds']:.2f}" if row else "-"


def _spares_text(rows: list[Row]) -> list[str]:
    first = rows[0]
    return [
        f"**Lost nodes**: {first['world']} nodes and {first.get('spares', '')} spares "
        f"({first['title']}, DDP, network namespaces); every ten epochs a node is lost with its "
        "memory and disk, never rank 0's; one job each. *By hand*: started again at once. "
        "*Goodput*: useful steps at the undisturbed pace, over wall time. *Next step*: median, "
        "from the loss.",
        table(
            [
                _OF_SPARES.split(", "),
                *(line for row in rows for line in _spare(row)),
            ]
        ),
        *([_BUCKETS] if any(row.get("losses_differing") for row in rows) else []),
    ]


def _spare(row: Row) -> list[list[str]]:
    cells = [
        f"{row['survived']} of {len(row['lost_at'])}",
        f"{row['wall_seconds']:.0f}",
        f"{100 * row['goodput']:.0f}",
        f"{row['back_seconds']:.1f}",
        f"{row['load_seconds']:.2f}",
        _losses(row),
    ]
    if row["method"] != "root-shared":
        return [[_bold(row), *cells]]
    title = _bold(row)
    return [
        [title, f"0 of {len(row['lost_at'])}", *["-"] * 5],
        [f"{title}, by hand", *cells],
    ]
