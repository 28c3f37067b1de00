"""The tables of LightCheck (ICCD 2023): how often can a job take checkpoints at 5 % overhead?

For each model and method: the fewest iterations between checkpoints at which they cost at most 5 %
by the rule (`lib.papers.rule`), and the cost there. One team of processes at a time, so that the
largest model fits into memory; its plain steps before and after the steps with checkpoints are the
comparison, so a drift of the machine cancels out. Recovery: all ranks of a job kill themselves, it
starts again, and its curve is compared with that of an undisturbed job.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from lib.jobs.plan import Plan, losses_of, planned
from lib.jobs.processes import Processes
from lib.jobs.restarts import restarted, undisturbed
from lib.methods.checkfreq import tuned_interval
from lib.methods.registry import METHODS
from lib.models import OF_PAPERS
from lib.papers.frequency import Frequency, attached
from lib.papers.models import MODELS
from lib.papers.results import Row
from lib.papers.rule import Interval, Judged, cost_of, interval, table

CHOICES = {
    "models": ("resnet18", "vgg16", "inception-v3", "alexnet", "gpt2", "bert"),
    "methods": ("ours-memory", "ours-local", "checkfreq", "torch-save"),
    "parts": ("frequency", "recovery"),
}
TOY = {"models": ("toy-cnn",), "methods": ("ours-memory",), "parts": ("recovery",)}
KEY = ("model", "method", "part")
PICTURE = "papers-lightcheck.png"
BUDGET = 0.05
"""LightCheck's allowed overhead."""
WORLD = 2
MAX_EVERY = 6
"""The longest measured interval; longer ones are computed."""
FIRST = {"torch-save": 3, "checkfreq": 3}
"""The first measured interval, if it is not 1."""


def keys(options: argparse.Namespace) -> Iterator[Row]:
    """What identifies each row of the chosen models and methods."""
    for model, method, part in product(options.models, options.methods, options.parts):
        yield {"model": model, "method": method, "part": part}


def measure(options: argparse.Namespace, key: Row) -> Row:
    """Measure a row."""
    name, method = key["model"], key["method"]
    model = MODELS[name]
    about = {
        "title": model.title,
        "method_title": METHODS["torchrun"][method].title,
        "batch": model.shape,
        "world": WORLD,
    }
    if key["part"] == "recovery":
        every = 1 if method == "ours-memory" else EVERY
        job = (OF_PAPERS + name, method, WORLD, STEPS, every)
        with planned(options.dir, *job, killed_at=(KILLED_AT,)) as plan:
            return {**about, **_recovery(plan, options.timeout)}
    with attached(options, method, name) as frequency:
        return {**about, **shortest(frequency, method)}


# --- how often, and at which overhead -------------------------------------------------------------


def shortest(frequency: Frequency, method: str) -> Row:
    """Try intervals until one keeps to the budget, by the rule.

    Ours starts at every iteration, the others at an interval that shows their cost. Where
    checkpoints are skipped, or wait for the previous one, or cost more than the budget, the next
    try is the interval in which one is finished. The page finds the interval again from `tried`.
    """
    every = FIRST.get(method, 1)
    tried = [frequency.at(every)]
    alone = min(MAX_EVERY, _until_done(tried[0]))
    first = cost_of(tried[0])
    crowded = first.taken < first.due or first.share > BUDGET
    if method != "torch-save" and crowded and alone > every:
        tried.append(frequency.at(alone))
        found = interval_of(tried, method).iterations
        if alone < found <= MAX_EVERY:
            tried.append(frequency.at(found))
    return {
        "state_bytes": tried[-1].pop("state_bytes"),
        "step_seconds": tried[-1]["step_seconds"],
        "durable_seconds": tried[-1]["durable_seconds"],
        "tried": tried,
    }


def _until_done(tried: Row) -> int:
    """Steps until a checkpoint is finished, so that the next one need not wait."""
    seconds = tried["durable_seconds"]
    return math.ceil(seconds / tried["step_seconds"]) + 1 if seconds else MAX_EVERY


def interval_of(tried: Sequence[Row], method: str) -> Interval:
    """The fewest iterations within the budget. CheckFreq has a rule of its own besides."""
    last, own = tried[-1], 1
    if method == "checkfreq" and last["phases"]:
        parts, step = last["phases"], last["step_seconds"]
        own = tuned_interval(parts["snapshot"], parts["persist"], step, 0.0, BUDGET)
    return interval(tried, BUDGET, own)


# --- recovery, and the curve after it -------------------------------------------------------------

STEPS, KILLED_AT, EVERY = 8, 6, 2
"""Steps of the job; the step after which its ranks kill themselves; the interval of versions on
disk."""


def _recovery(plan: Plan, limit_s: float) -> Row:
    """Kill a job, and compare it with one that was not killed. For our disk memory is lost, too."""

    def lose(job: Processes) -> None:
        if plan.method == "ours-local":
            job.lose_memory()

    (start,), _ = restarted(plan, limit_s, lose)
    own, right = losses_of(plan), undisturbed(plan, limit_s)
    curve = []
    for step in range(start.resumed_from + 1, STEPS + 1):
        theirs = right[0, step]
        mine = own[0, step] - theirs or theirs  # of a step made twice the loss that differs
        curve.append([step, *(float.fromhex(min(each)) for each in (mine, theirs))])
    return {
        "resumed_from": start.resumed_from,
        "load_seconds": start.load_seconds,
        "back_seconds": start.back_seconds - start.parts["started"] - start.parts["imported"],
        "loss_difference": max(abs(mine - theirs) for _, mine, theirs in curve),
        "curve": curve,
    }


# --- the page -----------------------------------------------------------------------------------


OURS = ("ours-memory", "ours-local")
BASELINES = ("checkfreq", "torch-save")
GOALS = (0.01, 0.05)
SHORT = {
    "ours-memory": "**memory**",
    "ours-local": "**local disk**",
    "checkfreq": "CheckFreq",
    "torch-save": "`torch.save`",
}

By = dict[tuple[str, str], Row]


def section(rows: list[Row], published: dict[str, Any]) -> list[str]:
    """Paragraphs and tables."""
    by = _by(rows)
    names = list(dict.fromkeys([*published["models"], *(row["model"] for row in rows)]))
    models = [name for name in names if any((name, m) in by for m in SHORT)]
    parts = [
        "DDP over gloo, two ranks, one thread each. Iterations between checkpoints that cost at "
        f"most {100 * GOALS[1]:.0f} %, and the cost. *By*: computed from the cost of a version at "
        "that interval. There: iterations and overhead.",
        table([_HEAD, *(_frequency_line(by, name, published) for name in models)]),
        "**At the same frequency**: the cost of all in %, computed from the cost of a version; "
        "there, at LightCheck's interval.",
        table([_HEAD_SAME, *(_same(by, name, published) for name in models)]),
        f"MB of the models here (there), and a rank's batch: "
        f"{'; '.join(_model(by, name, published) for name in models)}.",
    ]
    resumed = [name for name in models if any("back_seconds" in r for r in _of(by, name))]
    if resumed:
        back = [row["load"] for row in rows if "back_seconds" in row and "load" in row]
        parts += [
            "Recovery over the models, s: from the SIGKILL of a rank to the end of the next step, "
            f"without imports, one each: {'; '.join(_recoveries(by, resumed))}. {_others(back)}"
            f"There, with lost iterations: {'; '.join(_recoveries_there(published))}.",
            "The largest difference of the loss after the restart from that of an undisturbed job "
            f"(0: bit for bit): {'; '.join(_curves(by, resumed))}.",
        ]
    return parts


def verdicts(rows: list[Row], published: dict[str, Any]) -> Iterator[Judged]:
    """The goals: a checkpoint to memory at each iteration, at 1 % and at 5 %; the curve."""
    by = _by(rows)
    names = [name for name in published["models"] if (name, "ours-memory") in by]
    costs = [
        (by[name, "ours-memory"]["title"], cost_of(tried))
        for name in names
        for tried in by[name, "ours-memory"].get("tried", ())
        if tried["every"] == 1
    ]
    for goal in GOALS:
        text = f"LightCheck: a version in memory at each iteration, at most {100 * goal:.0f} %"
        yield Judged(text, [(title, cost.verdict(goal)) for title, cost in costs])
    curves = [row for (_, method), row in by.items() if method in OURS and "loss_difference" in row]
    exact: dict[str, bool] = {}
    for row in curves:
        exact[row["title"]] = exact.get(row["title"], True) and not _difference(row)
    same = [(title, "met" if is_exact else "missed") for title, is_exact in exact.items()]
    yield Judged("LightCheck: the curve after a restart, bit for bit", same)


def _by(rows: list[Row]) -> By:
    by: By = {}
    for row in rows:
        key = row["model"], row["method"]
        by[key] = {**by.get(key, {}), **row}
    return by


def _others(load_averages: list[float]) -> str:
    """A sentence about other work on the machine, if there was some."""
    if max(load_averages, default=0) < 1:
        return ""
    most = max(load_averages)
    return f"With other work (load averages up to {most:.0f}), so upper limits. "


_HEAD = [
    "model",
    *(f"{SHORT[method]}" for method in (*OURS, *BASELINES)),
    "LightCheck",
    "its disk",
    "CheckFreq there",
    "`torch.save` there",
]
_HEAD_SAME = [
    *("model", "every", "**memory**", "CheckFreq", "`torch.save`", "every, there", "LightCheck"),
    *("CheckFreq there", "`torch.save` there"),
]


def _of(by: By, name: str) -> list[Row]:
    return [by[name, method] for method in SHORT if (name, method) in by]


def _model(by: By, name: str, published: dict[str, Any]) -> str:
    """A model's sizes, here and published."""
    rows = _of(by, name)
    sizes = [f"{row['state_bytes'] / 1e6:,.0f}" for row in rows if "state_bytes" in row] or ["-"]
    theirs = published["models"].get(name, {}).get("megabytes", 0)
    return f"{rows[0]['title']} {sizes[0]} ({theirs:,}), {rows[0]['batch']}"


def _interval(by: By, name: str, method: str) -> Interval | None:
    tried = by.get((name, method), {}).get("tried")
    return interval_of(tried, method) if tried else None


def _frequency_line(by: By, name: str, published: dict[str, Any]) -> list[str]:
    theirs = published["models"].get(name)
    cells = [_of(by, name)[0]["title"]]
    for method in (*OURS, *BASELINES):
        found = _interval(by, name, method)
        cells.append(found.text if found else "-")
    return [*cells, *(_published(theirs) if theirs else "----")]


def _same(by: By, name: str, published: dict[str, Any]) -> list[str]:
    """The costs at the interval of ours, and the published ones at LightCheck's."""
    theirs, mine = published["models"].get(name), _interval(by, name, "ours-memory")
    every = mine.iterations if mine else 1
    cells = [_of(by, name)[0]["title"], f"{every}"]
    for method in ("ours-memory", *BASELINES):
        found = _interval(by, name, method)
        least = "≥ " if found and found.cost.others else ""
        cells.append(f"{least}{100 * found.cost.of_one / every:.1f}" if found else "-")
    if not theirs:
        return [*cells, *"----"]
    count, overhead = min(zip(theirs["iterations"][:3], theirs["overhead"][:3], strict=True))
    return [*cells, f"{count}", *(f"{each:g}" for each in (overhead, *theirs["same_frequency"]))]


def _published(theirs: dict[str, Any]) -> list[str]:
    pairs = list(zip(theirs["iterations"], theirs["overhead"], strict=True))
    best = min(pairs[:3])
    return [f"{count:,} at {percent:g}" for count, percent in (best, *pairs[3:])]


def _recoveries(by: By, names: list[str]) -> Iterator[str]:
    """The range of each method over the models."""
    for method in (*OURS, *BASELINES):
        rows = [by[name, method] for name in names if (name, method) in by]
        found = [row["back_seconds"] for row in rows if "back_seconds" in row]
        if found:
            yield f"{SHORT[method].strip('*')} {min(found):.1f} to {max(found):.1f}"


def _recoveries_there(published: dict[str, Any]) -> Iterator[str]:
    names = ("LightCheck", "CheckFreq", "`torch.save`")
    columns = zip(*(model["recovery"] for model in published["models"].values()), strict=True)
    for name, seconds in zip(names, columns, strict=True):
        yield f"{name} {min(seconds):g} to {max(seconds):g}"


def _difference(row: Row) -> float:
    """Of the curves: of the loss, or of the norm of the gradients where the file has it."""
    return max(float(row["loss_difference"]), float(row.get("gradient_difference", 0.0)))


def _curves(by: By, names: list[str]) -> Iterator[str]:
    """A sentence's part for each method: its differences over the models."""
    for method in (*OURS, *BASELINES):
        rows = [by[name, method] for name in names if (name, method) in by]
        found = [row["loss_difference"] for row in rows if "loss_difference" in row]
        exact = sum(each == 0 for each in found)
        most = f", else up to {max(found):.2g}" if exact < len(found) else ""
        yield f"{SHORT[method].strip('*')}: 0 for {exact} of {len(found)} models{most}"


BARS = {
    "ours-memory": ("Tierckpt, memory", "#1b7837"),
    "ours-local": ("Tierckpt, local disk", "#7fbf7b"),
    "checkfreq": ("CheckFreq, here", "#9970ab"),
    "torch-save": ("torch.save, here", "#999999"),
}
THERE = {
    0: ("LightCheck, published", "#2166ac"),
    3: ("its disk, published", "#92c5de"),
    4: ("CheckFreq, published", "#d6b3e6"),
    5: ("torch.save, published", "#cccccc"),
}


def draw(rows: list[Row], published: dict[str, Any], path: Path) -> None:
    """Draw the bars of all models with a measured interval."""
    from matplotlib.figure import Figure

    by = {
        (r["model"], r["method"]): interval_of(r["tried"], r["method"]).iterations
        for r in rows
        if "tried" in r
    }
    models = [name for name in published["models"] if any(model == name for model, _ in by)]
    figure = Figure(figsize=(10, 4), layout="constrained")
    axis = figure.subplots()
    width = 0.8 / (len(BARS) + len(THERE))
    for place, (method, (label, color)) in enumerate(BARS.items()):
        found = [(x, by[name, method]) for x, name in enumerate(models) if (name, method) in by]
        if found:
            where = [x + place * width for x, _ in found]
            axis.bar(where, [count for _, count in found], width, label=label, color=color)
    for place, (column, (label, color)) in enumerate(THERE.items(), len(BARS)):
        values = [published["models"][name]["iterations"][column] for name in models]
        where = [x + place * width for x in range(len(models))]
        axis.bar(where, values, width, label=label, color=color, hatch="//", edgecolor="white")
    axis.set_yscale("log")
    axis.set_ylabel("iterations")
    titles = {row["model"]: row["title"] for row in rows}
    axis.set_xticks([x + 0.4 - width / 2 for x in range(len(models))])
    axis.set_xticklabels([titles[name] for name in models])
    axis.set_title("Iterations between checkpoints at 5 % overhead (fewer is better)")
    figure.legend(loc="outside lower center", ncols=4, fontsize="small", frameon=False)
    figure.savefig(path, dpi=110)
