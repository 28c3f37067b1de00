"""The tables of levels.py, and the targets for the levels."""

from __future__ import annotations

from lib.figures import Spread
from lib.levels.figures import AllLevels, Row
from lib.report import align, targets_text
from lib.targets import Verdict

OVERLAP = 0.95
SLOWDOWN = 0.05

HEADERS = (
    "level",
    "GB/s (min..max)",
    "bare",
    "bare GB/s",
    "of the bare (min..max)",
    "CPU-s/GB, Tierckpt / bare",
    "slowdown % (min..max)",
    "overlap % (min..max)",
    "bare overlap",
)


def table(rows: list[Row]) -> str:
    """The table, one line per level. GB are GB of shards."""
    return align([HEADERS, *map(_cells, rows)])


def _cells(row: Row) -> tuple[str, ...]:
    if not (row.seconds and row.bare_seconds and row.of_bare and row.cpu_s and row.bare_cpu_s):
        return (row.name, "not measured")
    middle, low, high = (
        row.data_bytes / s / 1e9 for s in (row.seconds.median, row.seconds.high, row.seconds.low)
    )
    return (
        row.name,
        f"{middle:.3f} ({low:.3f}..{high:.3f})",
        row.bare,
        f"{row.data_bytes / row.bare_seconds.median / 1e9:.3f}",
        f"{row.of_bare.median:.2f} ({row.of_bare.low:.2f}..{row.of_bare.high:.2f})",
        " / ".join(
            f"{cpu_s.median / row.data_bytes * 1e9:.2f}" for cpu_s in (row.cpu_s, row.bare_cpu_s)
        ),
        _percent(row.slowdown),
        _percent(row.overlap),
        _percent(row.bare_overlap),
    )


def all_levels_text(found: AllLevels, state_bytes: int) -> str:
    """A paragraph about the training with all levels on."""
    if not (found.step_s and found.version_s):
        return "all levels on: not measured"
    extra, step = found.version_s, found.step_s
    return (
        f"all levels on, {state_bytes / 1e6:.1f} MB of state, 2 ranks, each a node: a version of "
        f"every {found.every} steps (of {1e3 * step.median:.0f} ms) costs the training "
        f"{extra.median:.2f} s ({extra.low:.2f}..{extra.high:.2f}), {_percent(found.slowdown)} %; "
        f"{found.taken} of {found.due} taken"
    )


def judge(rows: list[Row], all_levels: AllLevels, toy: bool, no_network: str) -> list[Verdict]:
    """The verdicts on throughput, overlap and slowdown."""
    why = "at the toy size fixed costs dominate" if toy else ""
    verdicts = [_throughput(row, why) for row in rows if row.target is not None]
    for row in rows:
        if row.target is None:
            verdicts.append(_overlap(row, why, no_network))
    return [*verdicts, _slowdown(all_levels, why)]


def _throughput(row: Row, why: str) -> Verdict:
    target = f"{row.name} at {row.target} or more of the bare device"
    if why or row.of_bare is None or row.target is None:
        return Verdict(target, "-", "not measured", why)
    measured = f"{row.of_bare.median:.2f} ({row.of_bare.low:.2f}..{row.of_bare.high:.2f})"
    met = row.of_bare.median >= row.target
    return Verdict(target, measured, "met" if met else "MISSED", "" if met else f"bare: {row.bare}")


def _overlap(row: Row, why: str, no_network: str) -> Verdict:
    target = f"{row.name}: overlap >= {100 * OVERLAP:.0f} % when the link is the limit"
    if not row.linked:
        why = why or no_network or "the links have no limit: run with --link-mbit"
    if why or row.overlap is None or row.of_bare is None:
        return Verdict(target, "-", "not measured", why)
    met = row.overlap.median >= OVERLAP
    share = f"{row.of_bare.median:.2f} of the bare link"
    measured = f"{_percent(row.overlap)} %, {share}"
    limit = f"bare sockets: {_percent(row.bare_overlap)} %"
    if row.bare_overlap is not None and row.bare_overlap.median < OVERLAP:
        limit += ", so the link is not the limit: choose slower cables with --link-mbit"
    return Verdict(target, measured, "met" if met else "MISSED", "" if met else limit)


def _slowdown(found: AllLevels, why: str) -> Verdict:
    target = f"slowdown < {100 * SLOWDOWN:.0f} % with all levels on"
    if why or not (found.slowdown and found.version_s and found.step_s):
        return Verdict(target, "-", "not measured", why)
    apart_s = found.every * found.step_s.median
    measured = f"{_percent(found.slowdown)} %, a version to all levels every {apart_s:.0f} s"
    if found.slowdown.median < SLOWDOWN and found.taken == found.due:
        return Verdict(target, measured, "met")
    needed_s = found.version_s.median / SLOWDOWN
    reason = f"taken {found.taken} of {found.due}; held when they are {needed_s:.0f} s apart"
    return Verdict(target, measured, "MISSED", reason)


def _percent(value: Spread | None) -> str:
    if value is None:
        return "-"
    return f"{100 * value.median:.1f} ({100 * value.low:.1f}..{100 * value.high:.1f})"


__all__ = ["all_levels_text", "judge", "table", "targets_text"]
