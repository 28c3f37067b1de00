"""Figures of a row from raw timings. Pure functions of plain values."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from math import floor, sqrt
from statistics import median
from typing import Any

Measure = Callable[[dict[str, Any]], float]  # of one block

UNTIMED_STEPS = 2  # of a block: one to warm up, one to settle


# Above this use of cores by other processes, a visit is not quiet. The kernel threads that write
# back the files of a method use far less.
QUIET_CORES = 0.15
MIN_QUIET_VISITS = 3


@dataclass(frozen=True)
class Spread:
    """Median and range of `count` samples.

    sure: an interval that contains the true median with 95 % confidence or a little more. It comes
    from order statistics, which assume nothing about the noise. None for fewer than 6 samples.
    """

    median: float
    low: float
    high: float
    count: int
    sure: tuple[float, float] | None = None


def spread(samples: Iterable[float]) -> Spread | None:
    """None for no samples."""
    values = sorted(samples)
    if not values:
        return None
    count = len(values)
    outside = max(0, floor((count - 1.96 * sqrt(count)) / 2))
    sure = (values[outside], values[-1 - outside]) if count >= 6 else None
    return Spread(median(values), values[0], values[-1], count, sure)


def figures_of(memory: dict[str, Any], visits: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of a method from its memory blocks and its visits; None where it has none.

    call, wait, durable: seconds of one checkpoint, the slowest rank's, over all checkpoints.
    cpu, slowdown: seconds a checkpoint, over visits. step: seconds a plain step, over visits.
    write: bytes a second of the durable write alone, over checkpoints. phases: seconds of the
    parts of a checkpoint that the method reports. extra: bytes over the plain training's peak,
    all processes. taken, due: checkpoints that were finished, and that were asked for, in all
    visits. others: cores that other processes took. quiet: visits that the other figures are
    from, or 0 if too few were quiet and all were used.
    """
    everything = [merged for visit in visits for merged in merge(visit["checkpoints"])]
    quiet = [visit for visit in visits if noise(visit) <= QUIET_CORES]
    is_quiet = len(quiet) >= min(MIN_QUIET_VISITS, len(visits))
    counted = quiet if is_quiet else visits
    checkpoints = [merged for visit in counted for merged in merge(visit["checkpoints"])]
    finished = [each for each in checkpoints if "durable" in each]
    names = sorted({name for each in finished for name in each["phases"]})
    phases = {
        name: spread(e["phases"][name] for e in finished if name in e["phases"]) for name in names
    }
    found = {
        "call": spread(each["call"] for each in checkpoints),
        "wait": spread(each["wait"] for each in checkpoints),
        "durable": spread(each["durable"] for each in finished),
        "cpu": spread(extra_per_checkpoint(visit, _cpu, UNTIMED_STEPS) for visit in counted),
        "slowdown": spread(extra_per_checkpoint(visit, wall_seconds, 0) for visit in counted),
        "step": spread(plain_step(visit, wall_seconds) for visit in counted),
        "write": spread(each["write"] for each in finished if "write" in each),
        "others": spread(map(noise, visits)),
    }
    return {
        **{name: figure and asdict(figure) for name, figure in found.items()},
        "phases": {name: figure and asdict(figure) for name, figure in phases.items()},
        "extra": {
            key: memory["checkpoints"][key] - memory["plain"][key] for key in memory["plain"]
        },
        "taken": sum("durable" in each for each in everything),
        "due": len(everything),
        "quiet": len(quiet) if is_quiet else 0,
    }


def noise(visit: dict[str, Any]) -> float:
    """Cores that other processes took, in the worst block of a visit."""
    return max(float(block["others"]) for block in visit.values())


def plain_step(visit: dict[str, Any], measure: Measure, untimed: int = 0) -> float:
    """`measure` of one plain step, over the plain blocks before and after."""
    blocks = [visit["before"], visit["after"]]
    steps: int = sum(block["steps"] + untimed for block in blocks)
    return sum(map(measure, blocks)) / steps


def extra_per_checkpoint(visit: dict[str, Any], measure: Measure, untimed: int) -> float:
    """Excess of the block with checkpoints over as many plain steps, per checkpoint.

    untimed: steps beside the timed ones that `measure` covers as well.
    """
    block = visit["checkpoints"]
    steps: int = block["steps"] + untimed
    extra = measure(block) - steps * plain_step(visit, measure, untimed)
    calls = block["ranks"][0]["checkpoints"]
    taken = sum(1 for call in calls.values() if "durable" in call)
    return extra / max(taken or len(calls), 1)


def direct_cpu_share(visit: dict[str, Any]) -> float:
    """CPU seconds of a checkpoint as a share of those of a plain step.

    Without the main threads of the trainers, except inside the method: unlike wall time, it does
    not change with the load of the machine by others.
    """
    extra = extra_per_checkpoint(visit, _direct_cpu, UNTIMED_STEPS)
    return extra / plain_step(visit, _cpu, UNTIMED_STEPS)


def step_cpu(visit: dict[str, Any]) -> float:
    """CPU seconds of a plain step on one rank."""
    return plain_step(visit, _cpu, UNTIMED_STEPS) / len(visit["before"]["ranks"])


def wall_seconds(block: dict[str, Any]) -> float:
    """Wall time of a block's timed steps, over all ranks."""
    ranks = block["ranks"]
    return float(max(rank["ends"][-1] for rank in ranks) - min(rank["start"] for rank in ranks))


def _cpu(block: dict[str, Any]) -> float:
    return float(block["cpu_s"])


def _direct_cpu(block: dict[str, Any]) -> float:
    """CPU seconds without training on the main threads, which is 50 times more and noisy."""
    main = sum(rank["main_cpu_s"] - rank["call_cpu_s"] for rank in block["ranks"])
    return float(block["cpu_s"] - main)


def merge(block: dict[str, Any]) -> list[dict[str, Any]]:
    """One entry per version from the notes of all ranks. The slowest rank counts.

    durable: seconds from the first rank's call to the last rank's end; missing unless all
    ranks have finished the version.
    """
    ranks = [rank["checkpoints"] for rank in block["ranks"]]
    merged = []
    for version in ranks[0]:
        notes = [rank[version] for rank in ranks]
        details = [note["details"] for note in notes]
        waits = [own.get("barrier", note["wait"]) for own, note in zip(details, notes, strict=True)]
        entry = {
            "version": version,
            "call": max(note["call"] for note in notes),
            "wait": max(waits),
            "phases": _phases(details),
        }
        if all("durable" in note for note in notes):
            start = min(note["start"] for note in notes)
            entry["durable"] = max(note["durable"] for note in notes) - start
        if all("write_end" in each and each.get("write") for each in details):
            entry["write"] = _throughput(details)
        merged.append(entry)
    return merged


def _phases(details: list[dict[str, float]]) -> dict[str, float]:
    """The slowest rank's seconds in each phase that all ranks report."""
    names = set.intersection(*(set(each) for each in details)) - {"nbytes", "write_end"}
    return {name: max(each[name] for each in details) for name in names}


def _throughput(details: list[dict[str, float]]) -> float:
    """Bytes of all shards over the time in which at least one of them was being written."""
    spans = sorted((each["write_end"] - each["write"], each["write_end"]) for each in details)
    busy, until = 0.0, float("-inf")
    for start, end in spans:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return sum(each["nbytes"] for each in details) / busy
