"""The table and the verdicts of goodput.py."""

from __future__ import annotations

from statistics import median

from lib.goodput.methods import RESUMABLE
from lib.goodput.runs import Result
from lib.report import align

NOISE = "not judged: the reference's pace is noise here"
"""Shown in place of a goodput above 100 %."""
TARGETS = (("ours", 60.0, 0.95), ("ours-run", 10.0, 0.95), ("ours-run", 60.0, 0.995))
HEADERS = ("failure every", "method", "goodput", "interval", "cost ms", "kills", "back s", "lost")


def table(results: list[Result]) -> str:
    """The table, one line per method and rate."""
    return align([HEADERS, *(_cells(result) for result in results)])


def _cells(result: Result) -> tuple[str, ...]:
    if result.status != "ok":
        return (f"{result.mtbf_seconds:g} s", f"{result.method}: {result.status.splitlines()[0]}")
    back = f"{median(result.back_seconds):.2f}" if result.back_seconds else "-"
    return (
        f"{result.mtbf_seconds:g} s",
        result.title,
        f"{100 * result.goodput:.1f} %" if result.judged else NOISE,
        f"{result.every_steps} steps",
        f"{1e3 * result.cost_seconds:.1f}",
        str(result.failures),
        back,
        f"{result.made_steps - result.useful_steps} steps",
    )


def verdicts(results: list[Result]) -> list[str]:
    """The verdicts on the targets."""
    lines = []
    done = [result for result in results if result.status == "ok"]
    for mtbf in sorted({result.mtbf_seconds for result in done}):
        here = {r.method: r.goodput for r in done if r.mtbf_seconds == mtbf}
        noisy = [r.title for r in done if r.mtbf_seconds == mtbf and not r.judged]
        if noisy:
            lines.append(f"{NOISE} (failures every {mtbf:g} s: {', '.join(noisy)})")
        peers = [goodput for name, goodput in here.items() if not name.startswith("ours")]
        if "ours" in here and peers and not noisy:
            word = "met" if here["ours"] > max(peers) else "MISSED"
            lines.append(
                f"{word}: highest goodput at a failure every {mtbf:g} s "
                f"({100 * here['ours']:.1f} %, the next best {100 * max(peers):.1f} %)"
            )
    return [*lines, *(_verdict(done, *target) for target in TARGETS)]


def _verdict(done: list[Result], method: str, mtbf: float, least: float) -> str:
    target = f"{RESUMABLE[method].title}: {100 * least:g} % at a failure every {mtbf:g} s"
    found = [r for r in done if r.method == method and r.mtbf_seconds == mtbf]
    if not found:
        return f"not measured: {target} (--mtbf {mtbf:g})"
    if not found[0].judged:
        return f"{NOISE} ({target})"
    word = "met" if found[0].goodput >= least else "MISSED"
    return f"{word}: {target} ({100 * found[0].goodput:.1f} %)"
