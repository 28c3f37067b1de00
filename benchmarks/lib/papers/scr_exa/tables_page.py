"""The tables of SCR-Exa's experiment from rows."""

from __future__ import annotations

from typing import Any

from lib.papers.page import table
from lib.papers.results import Row

GOAL = 0.01
"""The overhead that ours is to have at most."""
QUIET_CORES = 0.15
"""That other processes may take in a quiet measurement, as in stall.py."""
_OF_RESTARTS = "model, launcher, method, resumed from, first step (s), start (s), load (s), losses"
_OF_SPARES = (
    "method, lost nodes survived, useful steps, wall (s), goodput (%), next step (s), load (s), "
    "resumed from, losses of all ranks"
)
_BUCKETS = (
    "The losses after a restart by root checkpointing differ, since DDP starts with provisional "
    "buckets, and three ranks or more then round differently; ours restores "
    "[the buckets](internals/ddp.md), too. Two ranks, as above, round in one way."
)
LAUNCHERS = {"torchrun": "DDP", "horovod": "Horovod"}


def section(rows: list[Row], published: dict[str, Any]) -> list[str]:
    """Paragraphs and tables."""
    of_parts = {
        part: sorted((row for row in rows if row["part"] == part), key=_order)
        for part in ("epochs", "restarts", "spares")
    }
    parts = []
    if epochs := of_parts["epochs"]:
        parts += _epochs(epochs, published)
    if restarts := of_parts["restarts"]:
        parts += _restarts(restarts)
    if spares := of_parts["spares"]:
        parts += _spares(spares)
    return parts


def _order(row: Row) -> tuple[Any, ...]:
    is_horovod = row["launcher"] == "horovod"
    return row["model"], is_horovod, row["epoch_steps"], row["method"], row["world"]


def _bold(row: Row) -> str:
    title = str(row["method_title"])
    return f"**{title}**" if row["method"].startswith("ours") else title


def _failed(row: Row) -> str:
    return "failed" if row["status"] != "ok" else ""


# --- one checkpoint an epoch ---------------------------------------------------------------------


def _epochs(rows: list[Row], published: dict[str, Any]) -> list[str]:
    worlds = sorted({row["world"] for row in rows})
    store = rows[0]["store_bytes_per_second"] / 1e6
    head = ["model", "MB", "launcher", "steps", "method"]
    head += [f"{world} ranks" if world > 1 else "1 rank" for world in worlds]
    return [
        "One checkpoint an epoch of so many steps: overhead in percent of the training, over "
        "ranks that share two cores (below 0 is noise); in parentheses the CPU time of a "
        "checkpoint, of all processes and beyond the training's main threads, in percent of that "
        "of an epoch: with busy cores a checkpoint costs at least this, and it is less noisy. The "
        "first line of a model is the time of an epoch without checkpoints. *Shared file system*: "
        f"simulated, a write there lasts as long as at {store:g} MB/s. *1 % from*: the steps of "
        "an epoch with an overhead of 1 %, computed from the most expensive column (the larger one "
        "of overhead and CPU time). *~*: other processes took more than "
        f"{QUIET_CORES:g} cores at the same time, so the overhead is noise, and only the CPU time "
        "counts. Real epochs have hundreds of steps and more. "
        f"There: under {published['overhead']} % for SCR, nearly constant in ranks.",
        table([[*head, "1 % from"], *_lines(rows, worlds)]),
        _goal(rows),
    ]


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
        measured = [r for by in methods.values() for r in by.values() if r["status"] == "ok"]
        size = max((row["state_bytes"] for row in measured), default=0)
        first = [title, f"{size / 1e6:,.0f}", LAUNCHERS[launcher], f"{steps}"]
        lines.append([*first, "training alone", *_plain(measured, worlds), "-"])
        for by in methods.values():
            cells = [_share(by[world]) if world in by else "-" for world in worlds]
            lines.append([*first, _bold(next(iter(by.values()))), *cells, _enough(by)])
    return lines


def _plain(measured: list[Row], worlds: list[int]) -> list[str]:
    cells = []
    for world in worlds:
        seconds = [r["step_seconds"] * r["epoch_steps"] for r in measured if r["world"] == world]
        cells.append(f"{sum(seconds) / len(seconds):.2f} s" if seconds else "-")
    return cells


def _share(row: Row) -> str:
    if row["status"] != "ok":
        return "failed"
    mark = "~" if _is_noisy(row) else ""
    return f"{mark}{100 * row['total_overhead']:.1f} (CPU {100 * _cpu(row):.1f})"


def _cpu(row: Row) -> float:
    return float(row["cpu_share"]) / float(row["epoch_steps"])


def _is_noisy(row: Row) -> bool:
    return bool(row["others_cores"] > QUIET_CORES)


def _cost(row: Row) -> float:
    """The overhead that counts: with busy cores it is not below the share of the CPU time, and
    beside other work only that is known."""
    return _cpu(row) if _is_noisy(row) else max(float(row["total_overhead"]), _cpu(row))


def _enough(by: dict[int, Row]) -> str:
    """Steps of an epoch in which a checkpoint costs 1 %; of all numbers of ranks the most."""
    shares = [_cost(row) for row in by.values() if row["status"] == "ok"]
    every = next(iter(by.values()))["epoch_steps"]
    return f"{max(shares) * every / GOAL:,.0f} steps" if shares else "-"


def _goal(rows: list[Row]) -> str:
    ours = [row for row in rows if row["method"] == "ours-flushed" and row["status"] == "ok"]
    met = [_place(row) for row in ours if _cost(row) <= GOAL]
    missed = [_place(row) for row in ours if _cost(row) > GOAL]
    return (
        f"Goal: flat in ranks, and at most {100 * GOAL:g} % with every 10th flushed; the larger "
        f"one of overhead and CPU time counts. Met by {', '.join(met) or 'none'}"
        + (f"; **missed by {', '.join(missed)}**." if missed else ".")
        + _times(rows)
    )


def _times(rows: list[Row]) -> str:
    """How much more a checkpoint by root costs than ours, at each place with both."""
    costs: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["status"] == "ok" and not _is_noisy(row):
            costs.setdefault(_place(row), {})[row["method"]] = _cost(row)
    ratios = [
        by["root-shared"] / by["ours-flushed"]
        for by in costs.values()
        if {"root-shared", "ours-flushed"} <= by.keys()
    ]
    if not ratios:
        return ""
    return f" Root checkpointing costs {min(ratios):.1f} to {max(ratios):.1f} times as much."


def _place(row: Row) -> str:
    ranks = f"{row['world']} rank{'s' if row['world'] > 1 else ''}"
    return f"{row['title']} ({LAUNCHERS[row['launcher']]}, {ranks}, {row['epoch_steps']} steps)"


# --- jobs that are killed ------------------------------------------------------------------------


def _losses(row: Row) -> str:
    """Whether the log is that of the undisturbed job."""
    if row["losses_differing"]:
        return f"**{row['losses_differing']} of {row['losses_compared']:,} differ**"
    return f"all {row['losses_compared']:,} equal"


def _resumed(row: Row) -> str:
    return ", ".join(str(start["resumed_from"]) for start in row["starts"])


def _restarts(rows: list[Row]) -> list[str]:
    return [
        "Cold restarts: every ten epochs, in the middle of an epoch, all processes of a job of two "
        "ranks are killed, and new ones start. To memory, the memory of the machine stays; "
        "otherwise it is lost as well, with the agent. Root checkpointing reads from the shared "
        "file system on rank 0, and broadcasts. Medians in seconds: from the start of the job to "
        "the end of its first step, of it the start of Python and of the model (the same for all: "
        "its difference is noise), and the load. *Losses*: the exact loss of each rank at each "
        "step, with checkpoints and restarts, beside a job without either.",
        table(
            [
                _OF_RESTARTS.split(", "),
                *map(_restart, rows),
            ]
        ),
        *_ratios(rows),
    ]


def _restart(row: Row) -> list[str]:
    first = [row["title"], LAUNCHERS[row["launcher"]], _bold(row)]
    if row["status"] != "ok":
        return [*first, _failed(row), "-", "-", "-", "-"]
    seconds = [f"{row[f'{name}_seconds']:.2f}" for name in ("back", "built", "load")]
    return [*first, _resumed(row), *seconds, _losses(row)]


def _ratios(rows: list[Row]) -> list[str]:
    """How much longer root checkpointing loads."""
    loads: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        if row["status"] == "ok":
            place = (row["title"], LAUNCHERS[row["launcher"]])
            loads.setdefault(place, {})[row["method"]] = row["load_seconds"]
    found = [
        f"{title} ({launcher}): {by['root-shared'] / by['ours-memory']:.1f} times as long as from "
        f"memory, {by['root-shared'] / by['ours-local']:.1f} times as long as from the disk"
        for (title, launcher), by in loads.items()
        if {"root-shared", "ours-memory", "ours-local"} <= by.keys()
    ]
    return [f"The load of root checkpointing takes, {'; '.join(found)}."] if found else []


def _spares(rows: list[Row]) -> list[str]:
    first = rows[0]
    return [
        f"{first['world']} nodes and {first.get('spares', '')} spares ({first['title']}, DDP); "
        "every ten epochs, in the middle of an epoch, a node is lost, with its processes, memory "
        "and disk. Nodes are network namespaces on this machine, with a folder each for disk and "
        "memory, and without limits of their cables; rank 0's node, where all meet, is never lost. "
        "Ours runs under `tierckpt run`, whose spares have imported all before. Root checkpointing "
        "ends with the first loss; *by hand*: it is started again at once, with a spare in the "
        "place of the node, and all ranks start Python on two cores. *Goodput*: useful steps at "
        "the undisturbed pace of the same nodes, over the wall time since the first start was "
        "ready. Seconds are medians from the loss to the end of the next step, of them the load. "
        "(The time until somebody notices is not in them.)",
        table(
            [
                _OF_SPARES.split(", "),
                *(line for row in rows for line in _spare(row)),
            ]
        ),
        *_verdict(rows),
    ]


def _spare(row: Row) -> list[list[str]]:
    if row["status"] != "ok":
        return [[_bold(row), _failed(row), *["-"] * 7]]
    cells = [
        f"{row['survived']} of {len(row['lost_at'])}",
        f"{row['steps']} of {row['steps']}",
        f"{row['wall_seconds']:.0f}",
        f"{100 * row['goodput']:.0f}",
        f"{row['back_seconds']:.1f}",
        f"{row['load_seconds']:.2f}",
        _resumed(row),
        _losses(row),
    ]
    if row["method"] != "root-shared":
        return [[_bold(row), *cells]]
    kept = f"{row['starts'][0]['resumed_from']} of {row['steps']}"
    title = row["method_title"]
    return [
        [title, f"0 of {len(row['lost_at'])}", kept, *["-"] * 6],
        [f"{title}, by hand", *cells],
    ]


def _verdict(rows: list[Row]) -> list[str]:
    ours = [row for row in rows if row["method"] == "ours-xor" and row["status"] == "ok"]
    is_met = [r["survived"] == len(r["lost_at"]) and not r["losses_differing"] for r in ours]
    if not ours:
        return []
    root = any(row["method"] == "root-shared" and row.get("losses_differing") for row in rows)
    return [
        *([_BUCKETS] if root else []),
        "Goal: all losses of nodes survived, and the log that of the undisturbed job bit for bit: "
        + ("met." if all(is_met) else "**missed**."),
    ]
