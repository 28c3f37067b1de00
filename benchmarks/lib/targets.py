"""The targets of the project, judged on the rows of one run."""

from __future__ import annotations

from dataclasses import dataclass

from lib.figures import Row, Spread
from lib.methods.registry import TUNED_PEER

MIB = 1 << 20
RESOLUTION_PERCENT = 4.0
"""The widest confidence interval, in percent, that can show the absence of a slowdown."""

LINK_SHARE = 0.9
"""The required fraction of the speed of a bare copy between GPU and host."""


@dataclass(frozen=True)
class Verdict:
    """A target, the measured value, and `met`, `MISSED` or `not measured`; `why` is the reason."""

    target: str
    measured: str
    verdict: str
    why: str = ""


@dataclass(frozen=True)
class Run:
    """The figures of one run. Sizes in bytes, limits in seconds."""

    rows: dict[str, Row]
    limits: dict[str, Spread]
    launcher: str
    model: str
    every: int
    world: int
    state_bytes: int


def judge(run: Run) -> list[Verdict]:
    """All targets, in the order of the list in the README."""
    verdicts = [_boundary(run), _barrier(run)]
    for judged in (_cpu, _slowdown, _memory, _throughput, _off, _gpu_copy, _gpu_slowdown):
        verdict = judged(run)
        if run.model == "toy" and verdict.verdict != "not measured":
            verdict = _not_measured(verdict.target, "at the toy size fixed costs dominate")
        verdicts.append(verdict)
    return [*verdicts, _resnet(run)]


def _ours(run: Run, name: str) -> Row | None:
    row = run.rows.get(name)
    return row if row is not None and row.status == "ok" else None


def _verdict(target: str, measured: str, met: bool, why: str = "") -> Verdict:
    return Verdict(target, measured, "met" if met else "MISSED", "" if met else why)


def _not_measured(target: str, why: str = "ours did not run") -> Verdict:
    return Verdict(target, "-", "not measured", why)


def _cpu(run: Run) -> Verdict:
    target = "CPU-seconds per durable checkpoint of 192 MB <= 0.10"
    row = _ours(run, "ours-local")
    if row is None or row.cpu is None or row.direct_cpu is None:
        return _not_measured(target)
    # On a shared machine the difference of two large noisy numbers means nothing. The CPU time
    # outside the training's main threads still does.
    figure = row.cpu if row.quiet else row.direct_cpu
    scaled = figure.median * (192 * MIB / run.state_bytes)
    measured = (
        f"{scaled:.3f} ({figure.low:.3f}..{figure.high:.3f}"
        f"{'' if row.quiet else ', direct: the machine was not quiet'})"
    )
    why = f"direct {row.direct_cpu.median:.3f}; bare copy, hash and write {_bare_cpu(run)}"
    return _verdict(target, measured, scaled <= 0.10, why)


def _bare_cpu(run: Run) -> str:
    names = ("copy_cpu", "checksum_cpu", "write_recycled_cpu")
    return f"{sum(run.limits[name].median for name in names if name in run.limits):.3f}"


def _median_ms(run: Run, attribute: str, target: str, why: str) -> Verdict:
    rows = [row for name in ("ours-memory", "ours-local") if (row := _ours(run, name))]
    found = [(row, value) for row in rows if (value := getattr(row, attribute)) is not None]
    if not found:
        return _not_measured(target)
    measured = ", ".join(f"{row.name} {1e3 * value.median:.3f} ms" for row, value in found)
    return _verdict(target, measured, all(value.median < 1e-3 for _, value in found), why)


def _boundary(run: Run) -> Verdict:
    target = "boundary call, median < 1 ms"
    return _median_ms(run, "call", target, "time inside step(), slowest rank")


def _barrier(run: Run) -> Verdict:
    target = "barrier wait, median < 1 ms when the backward is longer than the copy"
    return _median_ms(run, "wait", target, "the copier did not finish during the backward")


def _slowdown(run: Run) -> Verdict:
    target = f"training slowdown per checkpoint <= 0.1 of {TUNED_PEER}'s"
    row, peer = _ours(run, "ours-local"), _ours(run, TUNED_PEER)
    if row is None or row.slowdown is None:
        return _not_measured(target)
    if peer is None or peer.slowdown is None:
        where = "" if run.launcher == "torchrun" else "; it is measured with --launcher torchrun"
        return _not_measured(target, f"{TUNED_PEER} did not run{where}")
    quiet = bool(row.quiet and peer.quiet)
    mine = row.slowdown if quiet else row.cycle_slowdown
    theirs = peer.slowdown if quiet else peer.cycle_slowdown
    if mine is None or theirs is None:
        return _not_measured(target, "blocks shorter than a cycle")
    own, other = 1e3 * mine.median, 1e3 * theirs.median
    measured = f"{own:.1f} ms of {other:.1f} ms"
    if not quiet:
        measured += " (by cycle: the machine was not quiet)"
    why = f"range {1e3 * mine.low:.0f}..{1e3 * mine.high:.0f} ms"
    return _verdict(target, measured, own <= 0.1 * other, why)


def _memory(run: Run) -> Verdict:
    target = "extra memory a rank <= slots * state / world size, all processes counted"
    row = _ours(run, "ours-local")
    if row is None or not row.extra:
        return _not_measured(target)
    extra = row.extra["Pss"] / run.world
    limit = row.slots * run.state_bytes / run.world
    measured = f"{extra / MIB:.1f} of {limit / MIB:.1f} MiB"
    why = f"{(extra - limit) / MIB:.1f} MiB beside the slots, the agent's interpreter among them"
    return _verdict(target, measured, extra <= limit, why)


def _off(run: Run) -> Verdict:
    """Judged per cycle of `every` steps: there are boundaries, but no checkpoints."""
    target = "attached with checkpoints off: slowdown within the noise of training alone"
    row = _ours(run, "ours-off")
    if row is None or row.slowdown is None or row.step is None:
        return _not_measured(target)
    more = "run --methods nothing,ours-off --rounds 24 --steps 8"
    if row.slowdown.sure is None:
        return _not_measured(target, f"{row.slowdown.count} visits are too few: {more}")
    percent = 100 / (run.every * row.step.median)
    low, high = (percent * each for each in row.slowdown.sure)
    measured = f"{percent * row.slowdown.median:+.1f} % (95 %: {low:+.1f}..{high:+.1f})"
    if low <= 0 and high - low > RESOLUTION_PERCENT:
        return _not_measured(target, f"{measured}: too much noise to tell; {more}")
    return _verdict(target, measured, low <= 0, "more than the noise")


def _resnet(run: Run) -> Verdict:
    target = "slowdown of ResNet-18 with a checkpoint at every step <= 5 %"
    if run.model != "resnet18" or run.every != 1:
        return _not_measured(target, "run with --model resnet18 --every 1")
    row = _ours(run, "ours-memory")
    if row is None or row.slowdown is None or row.step is None:
        return _not_measured(target)
    percent = 100 * row.slowdown.median / row.step.median
    why = f"step {1e3 * row.step.median:.0f} ms; taken {row.taken} of {row.due}"
    complete = row.taken == row.due  # skipped checkpoints must not count as speed
    return _verdict(target, f"{percent:.1f} %", percent <= 5.0 and complete, why)


def _gpu_copy(run: Run) -> Verdict:
    target = f"GPU: sustained copy >= {LINK_SHARE} of a bare copy to page-locked memory"
    row, bare = _ours(run, "ours-memory"), run.limits.get("copy_pinned")
    if bare is None:
        return _not_measured(target, "run with --device cuda")
    if run.world > 1:
        return _not_measured(target, "the ranks share one link: run with --world 1")
    if row is None or not {"copy", "checksum"} <= set(row.phases):
        return _not_measured(target)
    hashing = row.phases["checksum"].median
    busy = row.phases["copy"].median + hashing
    measured = f"{bare.median / busy:.2f} ({run.state_bytes / busy / 1e9:.1f} GB/s)"
    why = f"bare {run.state_bytes / bare.median / 1e9:.1f} GB/s; {1e3 * hashing:.0f} ms of "
    why += f"{1e3 * busy:.0f} waited for hashing"
    return _verdict(target, measured, bare.median >= LINK_SHARE * busy, why)


def _gpu_slowdown(run: Run) -> Verdict:
    """Allow for the copy of all ranks over their one link at the required speed."""
    target = "GPU: slowdown with a memory checkpoint at every step < 1 %, or copy less step"
    row, bare = _ours(run, "ours-memory"), run.limits.get("copy_pinned")
    if bare is None:
        return _not_measured(target, "run with --device cuda")
    if run.every != 1:
        return _not_measured(target, "run with --every 1")
    if row is None or row.slowdown is None or row.step is None:
        return _not_measured(target)
    step, copy = row.step.median, run.world * bare.median / LINK_SHARE
    allowed = max(0.01 * step, copy - step)
    measured = f"{1e3 * row.slowdown.median:.2f} of {1e3 * allowed:.2f} ms"
    why = f"step {1e3 * step:.0f} ms, copy {1e3 * copy:.0f} ms; taken {row.taken} of {row.due}"
    # Skipped checkpoints must not count as speed where all could have been taken.
    complete = row.taken == row.due or copy > step
    return _verdict(target, measured, row.slowdown.median < allowed and complete, why)


def _throughput(run: Run) -> Verdict:
    target = "durable write throughput >= 0.9 of a bare O_DIRECT loop over a recycled file"
    row, bare = _ours(run, "ours-local"), run.limits.get("write_recycled")
    if row is None or row.write is None:
        return _not_measured(
            target, "ours did not run" if row is None else "it reports no write time"
        )
    if bare is None:
        return _not_measured(target, "no bare loop was run")
    limit = run.state_bytes / bare.median
    measured = f"{row.write.median / limit:.2f} ({row.write.median / 1e9:.2f} GB/s)"
    why = f"bare loop on the idle machine {limit / 1e9:.2f} GB/s"
    if "write_loaded" in run.limits:
        loaded = run.state_bytes / run.limits["write_loaded"].median / 1e9
        why += f", beside a training {loaded:.2f} GB/s"
    return _verdict(target, measured, row.write.median >= 0.9 * limit, why)
