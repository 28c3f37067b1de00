"""The tables and the picture of stall.py, and the list of targets of all benchmarks."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lib.figures import QUIET_CORES, Row, Spread
from lib.targets import Run, Verdict

HEADERS = (
    "method",
    "call ms",
    "wait ms",
    "CPU-s",
    "direct",
    "durable ms",
    "fsync",
    "slowdown ms (min..max)",
    "by cycle",
    "%step",
    "PSS MB",
    "RSS MB",
    "taken",
    "CPU x",
    "slow x",
    "others",
    "quiet",
)


def table(rows: list[Row]) -> str:
    """The table, one line per method, with ratios to the best alternative."""
    best_cpu = best_peer(rows, lambda row: row.direct_cpu)  # the one with less noise
    best_slowdown = best_peer(rows, lambda row: row.slowdown)
    lines = [_cells(row, best_cpu, best_slowdown) for row in rows]
    return align([HEADERS, *lines])


def best_peer(rows: list[Row], figure: Callable[[Row], Spread | None]) -> float | None:
    """The smallest median among the alternatives that ran."""
    values = [value.median for row in rows if row.peer and (value := figure(row)) is not None]
    return min(values, default=None)


def warning(rows: list[Row]) -> str | None:
    """A sentence for below the table if the machine was not quiet."""
    loud = [row.name for row in rows if row.others is not None and not row.quiet]
    if not loud:
        return None
    return (
        f"Other processes took more than {QUIET_CORES} cores in most visits to {', '.join(loud)}: "
        "trust direct, by cycle, call and memory more than slowdown, durable and CPU-s."
    )


def _cells(row: Row, best_cpu: float | None, best_slowdown: float | None) -> tuple[str, ...]:
    if row.status != "ok":
        return (row.title, row.status.splitlines()[-1])
    return (
        row.title,
        _ms(row.call),
        _ms(row.wait),
        _seconds(row.cpu),
        _seconds(row.direct_cpu),
        _ms(row.durable),
        row.fsync,
        _range_ms(row.slowdown),
        _ms(row.cycle_slowdown),
        _percent(row.slowdown, row.step),
        f"{row.extra['Pss'] / 1e6:.0f}",
        f"{row.extra['Rss'] / 1e6:.0f}",
        f"{row.taken}/{row.due}",
        _ratio(row.direct_cpu, best_cpu) if row.taken else "-",
        _ratio(row.slowdown, best_slowdown) if row.taken else "-",
        f"{row.others.median:.2f}" if row.others else "-",
        f"{row.quiet}/{row.others.count}" if row.others else "-",
    )


def align(lines: list[tuple[str, ...]]) -> str:
    """Pad columns to equal width; a line with fewer cells ends in free text."""
    full = [line for line in lines if len(line) == len(lines[0])]
    widths = [max(len(line[column]) for line in full) for column in range(len(lines[0]))]
    widths[0] = max(len(line[0]) for line in lines)
    padded = []
    for line in lines:
        cells = [line[0].ljust(widths[0])]
        if len(line) == len(widths):
            cells += [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        else:
            cells += line[1:]
        padded.append("  ".join(cells).rstrip())
    return "\n".join(padded)


def limits_table(run: Run) -> str:
    """The bare limits for the whole state, and our phases as a fraction of them."""
    # The copy phase of Tierckpt includes the checksum of each block while it is in the cache.
    pairs = {"copy_checksum": "copy", "write_recycled": "write"}
    lines: list[tuple[str, ...]] = [
        ("bare limit", "ms (min..max)", "GB/s", "CPU-s", "Tierckpt / bare")
    ]
    ours = run.rows.get("ours-local")
    for name, value in run.limits.items():
        if name.endswith("_cpu"):
            continue
        phase = ours.phases.get(pairs.get(name, "")) if ours is not None else None
        # Every rank has its share of the bytes; a phase's time is the slowest rank's.
        share = value.median / run.world
        moved_bytes = run.state_bytes / (run.world if name == "copy_pinned" else 1)
        lines.append(
            (
                name,
                _range_ms(value),
                f"{moved_bytes / value.median / 1e9:.2f}",
                _seconds(run.limits.get(f"{name}_cpu")),
                f"{phase.median / share:.2f} x" if phase else "-",
            )
        )
    return align(lines)


def targets_text(verdicts: list[Verdict]) -> str:
    """One line a target; the reason follows where it was missed or not measured."""
    lines = []
    for each in verdicts:
        why = f" [{each.why}]" if each.why else ""
        lines.append(f"{each.verdict:>12}  {each.target}: {each.measured}{why}")
    return "\n".join(lines)


def plot(path: Path, run: Run) -> str | None:
    """Draw the picture; return a sentence instead if matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        return "no picture: matplotlib is not installed"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in run.rows.values() if row.status == "ok"][::-1]
    panels: list[tuple[str, Callable[[Row], Spread | None], float]] = [
        ("training slowdown per checkpoint, ms", lambda row: row.slowdown, 1e3),
        ("CPU-s per checkpoint, without main threads", lambda row: row.direct_cpu, 1.0),
        ("call + wait, ms (longer one's range)", _blocked, 1e3),
        ("time to durable, ms", lambda row: row.durable, 1e3),
    ]
    height = 1.2 + 0.35 * len(rows)
    figure, axes = pyplot.subplots(1, 4, figsize=(15, height), sharey=True)
    for axis, (title, pick, scale) in zip(axes, panels, strict=True):
        _bars(axis, rows, pick, scale)
        axis.set_title(title, fontsize=10)
    figure.suptitle(
        f"{run.model}: {run.state_bytes / 1e6:.1f} MB of state, {run.world} ranks, "
        f"{run.launcher}, a checkpoint every {run.every} steps (median, min..max)",
        fontsize=11,
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return None


def _bars(axis: Any, rows: list[Row], pick: Callable[[Row], Spread | None], scale: float) -> None:
    for place, row in enumerate(rows):
        value = pick(row)
        if value is None:
            continue
        middle = scale * value.median
        reach = [[middle - scale * value.low], [scale * value.high - middle]]
        color = "tab:orange" if row.name.startswith("ours") else "tab:blue"
        axis.barh(place, middle, xerr=reach, color=color, error_kw={"elinewidth": 0.8})
    axis.set_yticks(range(len(rows)), [row.title for row in rows])
    axis.grid(axis="x", alpha=0.3)


def _blocked(row: Row) -> Spread | None:
    """Call plus wait: the time for which the main thread of the training is blocked."""
    if row.call is None or row.wait is None:
        return None
    longer = max(row.call, row.wait, key=lambda value: value.high)
    both = row.call.median + row.wait.median
    return Spread(both, min(both, longer.low), max(both, longer.high), row.call.count)


def _ms(value: Spread | None) -> str:
    if value is None:
        return "-"
    scaled = 1e3 * value.median
    return f"{scaled:.3f}" if 0 <= scaled < 1 else f"{scaled:.1f}"


def _seconds(value: Spread | None) -> str:
    return "-" if value is None else f"{value.median:.3f}"


def _range_ms(value: Spread | None) -> str:
    if value is None:
        return "-"
    return f"{1e3 * value.median:.1f} ({1e3 * value.low:.0f}..{1e3 * value.high:.0f})"


def _percent(part: Spread | None, whole: Spread | None) -> str:
    return "-" if part is None or whole is None else f"{100 * part.median / whole.median:.0f}"


def _ratio(value: Spread | None, best: float | None) -> str:
    if value is None or best is None or best <= 0 or not math.isfinite(value.median):
        return "-"
    return f"{value.median / best:.2f}"
