"""The tables of LightCheck from rows and published values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lib.papers.lightcheck import interval_of
from lib.papers.page import Judged, table
from lib.papers.results import Row
from lib.papers.rule import Interval, cost_of

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
        table([_HEAD, *(_frequency(by, name, published) for name in models)]),
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


def _frequency(by: By, name: str, published: dict[str, Any]) -> list[str]:
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
    """Of the curves: of the loss, or of the norm of the gradients."""
    return max(float(row["loss_difference"]), float(row["gradient_difference"]))


def _curves(by: By, names: list[str]) -> Iterator[str]:
    """A sentence's part for each method: its differences over the models."""
    for method in (*OURS, *BASELINES):
        rows = [by[name, method] for name in names if (name, method) in by]
        found = [row["loss_difference"] for row in rows if "loss_difference" in row]
        exact = sum(each == 0 for each in found)
        most = f", else up to {max(found):.2g}" if exact < len(found) else ""
        yield f"{SHORT[method].strip('*')}: 0 for {exact} of {len(found)} models{most}"
