"""The tables of LightCheck from rows and published values."""

from __future__ import annotations

from typing import Any

from lib.papers.page import table
from lib.papers.results import Row

OURS = ("ours-memory", "ours-local")
BASELINES = ("checkfreq", "torch-save")
GOAL = 0.01
SHORT = {
    "ours-memory": "**memory**",
    "ours-local": "**local disk**",
    "checkfreq": "CheckFreq",
    "torch-save": "`torch.save`",
}


def section(rows: list[Row], published: dict[str, Any]) -> list[str]:
    """Paragraphs and tables."""
    back = [row.get("load", 0.0) for row in rows if "back_seconds" in row]
    by: dict[tuple[str, str], Row] = {}
    for row in rows:
        key = row["model"], row["method"]
        by[key] = {**by.get(key, {}), **row}
    names = list(dict.fromkeys([*published["models"], *(row["model"] for row in rows)]))
    models = [name for name in names if any((name, m) in by for m in SHORT)]
    parts = [
        "DDP over gloo, two ranks, one thread each; the size of a step and its ratio to the bytes "
        "decide. *Copy* and *write* are the bare copy of a rank's share, and the bare write of "
        "the whole state, as a share of a step: where the copy is well below 1, a checkpoint at "
        "every iteration is possible, and to the disk where the write is.",
        table([_HEAD_MODELS, *(_model(by, name, published) for name in models)]),
        "Iterations between checkpoints at an overhead of at most 5 %, and the overhead there in "
        "percent. In parentheses: computed from the measured cost of a checkpoint, not measured "
        "at that interval. A negative overhead is noise. "
        "*LightCheck*: its best of three variants in memory, and on disk.",
        table([_HEAD, *(_frequency(by, name, published) for name in models)]),
        _verdict(by, models),
        "What was measured last, in percent: the interval and its overhead (with the range, if "
        "there was more than one visit); the CPU time of a checkpoint, of all processes and "
        "beyond the training's main threads, as a share of that of a step; and the cores that "
        "other work took at the same time, which is the noise. The training uses all cores, so "
        "this CPU time is what a checkpoint costs at least; where a GPU computes, it is not felt.",
        table([_HEAD_COST, *(_cost(by, name) for name in models)]),
    ]
    resumed = [name for name in models if any("back_seconds" in r for r in _of(by, name))]
    if resumed:
        parts += [
            "Recovery, in seconds: from the SIGKILL of a rank to the end of the next step (of "
            "it the load), and with half an interval of lost iterations. Ranks are forked from a "
            "process that has imported torch; all processes of the job start again. "
            f"{_others(max(back))}Theirs grow with the interval: lost iterations are in them.",
            table([_HEAD_RECOVERY, *(_recovery(by, name, published) for name in resumed)]),
            "The curve after the restart, compared with a job that was not killed: the largest "
            "difference of the loss (of the norm of the gradients). 0 is equality bit for bit. "
            "Models with dropout differ without the random streams, and BatchNorm's statistics "
            "where they are copied during a forward pass.",
            table([_HEAD_CURVE, *(_curve(by, name) for name in resumed)]),
        ]
    failed = [row for row in rows if row.get("status", "ok") != "ok"]
    parts += [
        f"- {row['title']}, {row['method_title']}: {row['status'].splitlines()[-1]}"
        for row in failed
    ]
    return parts


def _others(load_average: float) -> str:
    """A sentence about other work on the machine, if there was some."""
    if load_average < 1:
        return ""
    return (
        f"Other work shared the two cores (load averages up to {load_average:.0f}), so these are "
        "upper limits. "
    )


def _verdict(by: dict[tuple[str, str], Row], models: list[str]) -> str:
    """The goal, and the models that meet it."""
    found = [by[name, "ours-memory"] for name in models if (name, "ours-memory") in by]
    found = [row for row in found if "iterations" in row]
    met = [row["title"] for row in found if row["iterations"] == 1]
    missed = [row["title"] for row in found if row["iterations"] > 1]
    best = [row["title"] for row in found if row["iterations"] == 1 and row["overhead"] <= GOAL]
    return (
        "Goal: a checkpoint to memory at every iteration, at 1 % or less where the copy fits into "
        f"the step. That is met by {', '.join(best) or 'none'}; at 5 % or less by "
        f"{', '.join(met) or 'none'}" + (f"; **missed by {', '.join(missed)}**." if missed else ".")
    )


_HEAD_MODELS = ["model", "batch a rank", "MB: here", "there", "step, s", "copy", "write"]
_HEAD = [
    "model",
    *(f"{SHORT[method]}" for method in (*OURS, *BASELINES)),
    "LightCheck",
    "its disk",
    "CheckFreq there",
    "`torch.save` there",
]
_HEAD_COST = ["model", *(SHORT[method] for method in (*OURS, *BASELINES))]
_HEAD_RECOVERY = [
    "model",
    *(SHORT[method] for method in (*OURS, *BASELINES)),
    "LightCheck",
    "CheckFreq there",
    "`torch.save` there",
]
_HEAD_CURVE = ["model", *(SHORT[method] for method in (*OURS, *BASELINES))]


def _of(by: dict[tuple[str, str], Row], name: str) -> list[Row]:
    return [by[name, method] for method in SHORT if (name, method) in by]


def _model(by: dict[tuple[str, str], Row], name: str, published: dict[str, Any]) -> list[str]:
    rows = [row for row in _of(by, name) if "state_bytes" in row]
    first = _of(by, name)[0]
    theirs = published["models"].get(name, {})
    if not rows:
        return [first["title"], first["batch"], "-", f"{theirs.get('megabytes', '-')}", *"---"]

    def middle(key: str) -> float:
        values = sorted(row[key] for row in rows)
        return float(values[len(values) // 2])

    return [
        first["title"],
        first["batch"],
        f"{rows[0]['state_bytes'] / 1e6:,.0f}",
        f"{theirs['megabytes']:,}" if theirs else "-",
        f"{middle('step_seconds'):.2f}",
        f"{middle('copy_of_step'):.3f}",
        f"{middle('write_of_step'):.2f}",
    ]


def _frequency(by: dict[tuple[str, str], Row], name: str, published: dict[str, Any]) -> list[str]:
    theirs = published["models"].get(name)
    cells = [_of(by, name)[0]["title"]]
    for method in (*OURS, *BASELINES):
        row = by.get((name, method), {})
        if "iterations" not in row:
            cells.append("-")
            continue
        text = f"{row['iterations']:,} at {100 * row['overhead']:.1f}"
        text = text if row["measured"] else f"({text})"
        cells.append(f"**{text}**" if method in OURS else text)
    return [*cells, *(_published(theirs) if theirs else "----")]


def _published(theirs: dict[str, Any]) -> list[str]:
    pairs = list(zip(theirs["iterations"], theirs["overhead"], strict=True))
    best = min(pairs[:3])
    return [f"{count:,} at {percent:g}" for count, percent in (best, *pairs[3:])]


def _cost(by: dict[tuple[str, str], Row], name: str) -> list[str]:
    cells = [_of(by, name)[0]["title"]]
    for method in (*OURS, *BASELINES):
        row = by.get((name, method), {})
        if "tried" not in row:
            cells.append("-")
            continue
        last = row["tried"][-1]
        low, high = (100 * share for share in last["overhead_range"])
        spread = f" ({low:.1f} to {high:.1f})" if low < high else ""
        cells.append(
            f"every {last['every']}: {100 * last['overhead']:.1f}{spread}, "
            f"CPU {100 * last['cpu_share']:.1f}, others {last['others_cores']:.1f}"
        )
    return cells


def _recovery(by: dict[tuple[str, str], Row], name: str, published: dict[str, Any]) -> list[str]:
    cells = [_of(by, name)[0]["title"]]
    for method in (*OURS, *BASELINES):
        row = by.get((name, method), {})
        if "back_seconds" not in row:
            cells.append("-")
            continue
        total = ""
        if "iterations" in row:  # a failure comes at any moment: half of an interval is lost
            lost = row["iterations"] / 2 * row["step_seconds"]
            total = f", {row['back_seconds'] + lost:.1f}"
        cells.append(f"{row['back_seconds']:.1f} ({row['load_seconds']:.2f}){total}")
    theirs = published["models"].get(name)
    return (
        [*cells, *(f"{seconds:g}" for seconds in theirs["recovery"])]
        if theirs
        else [
            *cells,
            *"---",
        ]
    )


def _curve(by: dict[tuple[str, str], Row], name: str) -> list[str]:
    cells = [_of(by, name)[0]["title"]]
    for method in (*OURS, *BASELINES):
        row = by.get((name, method), {})
        if "loss_difference" not in row:
            cells.append("-")
            continue
        cells.append(f"{row['loss_difference']:.3g} ({row['gradient_difference']:.3g})")
    return cells
