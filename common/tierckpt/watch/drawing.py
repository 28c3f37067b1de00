"""The view as text for people, in 80 columns or more."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tierckpt._text import counted, size_text, some
from tierckpt.agent.status import GONE, SILENT

from .view import ENDING, RUNS, STOPPED, AgentView, EventsView, LevelView, Slow, View, Work

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

WIDE_COLUMNS = 100
"""A terminal with as many has room for the counts of events beside each level."""
MAX_LINES = 8
"""Number of agents, and of versions under way, that are shown."""
STYLES = {RUNS: "green", ENDING: "yellow", STOPPED: "red"}
DAY_SECONDS = 86400.0


def drawn(view: View, width: int, bars: bool = True) -> list[RenderableType]:
    """The parts of the picture, one below the other. Lines of text may be longer than `width`:
    the caller folds them, or not. `bars`: draw the progress of work."""
    work = _work(view, bars)
    return [*_head(view), *_levels(view, width), *work, *_agents(view), *_tail(view)]


# --- parts ---------------------------------------------------------------------------------------


def _head(view: View) -> Iterator[Text]:
    from rich.text import Text

    job = view.job
    name = job.job_id or ", ".join(view.paths)
    line = Text(f"{clock(view.time_seconds, view.time_seconds)}  job {name}: ")
    line.append(job.state, STYLES.get(job.state, ""))
    line.append(f" ({job.evidence})")
    if job.steps_per_second and job.state == RUNS:
        line.append(f", {job.steps_per_second:.3g} steps/s")
    yield line
    if job.state != RUNS and job.last_seen_seconds is not None:
        ago = span(max(view.time_seconds - job.last_seen_seconds, 0.0))
        seen = clock(job.last_seen_seconds, view.time_seconds)
        yield Text(f"last seen {seen}, {ago} ago")
    if job.restart is not None:
        after = "" if job.restart.iteration is None else f" (iteration {job.restart.iteration})"
        text = f"a restart takes v{job.restart.version}{after} from "
        text += " and ".join(job.restart.levels)
        text += f", {_age(job.restart.age_seconds)}" if job.restart.age_seconds else ""
        if job.restart.journal is not None:
            text += f", and its journal leads on to v{job.restart.journal}"
        yield Text(text)
    elif view.levels:
        yield Text("no version is complete here: a restart needs other nodes or levels", "yellow")
    dead = [node.host for node in view.nodes if not node.lives]
    if len(view.nodes) > 1:
        gone = f", gone: {some(dead, 4)}" if dead else ""
        yield Text(f"{len(view.nodes) - len(dead)} of {len(view.nodes)} nodes live{gone}")


def _levels(view: View, width: int) -> Iterator[RenderableType]:
    from rich.table import Table

    yield ""
    if not view.levels:
        yield "no versions yet"
        return
    wide = width >= WIDE_COLUMNS and view.events is not None
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("level", no_wrap=True)
    titles = ["newest", "shards", "age", "durable since", "load", "writes at"]
    for title in titles + (["stored", "skipped", "failed"] if wide else []):
        table.add_column(title, justify="right", no_wrap=True)
    for level in view.levels:
        table.add_row(*_cells(level, view.time_seconds, wide))
    yield table


def _cells(level: LevelView, now: float, wide: bool) -> list[str]:
    since = level.durable_since_seconds
    cells = [
        level.level,
        f"v{level.version}",
        f"{level.shards_seen} of {level.shards}",
        _age_cell(level, now),
        "" if since is None else clock(since, now),
        _rate(level.bytes_per_second),
        _rate(level.write_bytes_per_second),
    ]
    counts = (level.stored, level.skipped, level.failed)
    return cells + (["" if each is None else str(each) for each in counts] if wide else [])


def _age_cell(level: LevelView, now: float) -> str:
    """The age; a lower bound where only the time of the commit is known."""
    since = level.durable_since_seconds
    if level.age_seconds is None and since is not None:
        return f">{span(max(now - since, 0.0))}"
    return span(level.age_seconds)


def _work(view: View, bars: bool) -> Iterator[RenderableType]:
    from rich.text import Text

    if view.work:
        yield ""
        yield Text("under way", "bold")
        for work in view.work[:MAX_LINES]:
            yield _work_line(work, bars)
        if (more := len(view.work) - MAX_LINES) > 0:
            yield f"  and {more} more; --json shows all"


def _work_line(work: Work, bars: bool) -> RenderableType:
    from rich.columns import Columns
    from rich.progress_bar import ProgressBar
    from rich.text import Text

    shard = "" if work.shard is None else f" shard {work.shard}"
    text = f"  {work.level} v{work.version}{shard}"
    text += f" from {work.node}" if work.node else " of all nodes"
    if work.total_shards:
        text += f": {work.done_shards} of {counted(work.total_shards, 'shard')} stored"
    elif work.total_bytes:
        text += f": {size_text(work.done_bytes) or '0 B'} of {size_text(work.total_bytes)}"
    if work.seconds:
        text += f", {span(work.seconds)}"
        if work.done_bytes and work.seconds > 0.1:
            text += f", {_rate(work.done_bytes / work.seconds)}"
    if work.waits_for:
        text += f", missing: {work.waits_for}"
    line = Text(text)
    done, total = max((work.done_bytes, work.total_bytes), (work.done_shards, work.total_shards))
    if not (bars and total):
        return line
    bar = ProgressBar(total, min(done, total), width=16)
    return Columns([line, bar], padding=(0, 2))


def _agents(view: View) -> Iterator[RenderableType]:
    from rich.text import Text

    if not view.agents and view.job.trainers_here:
        yield ""
        text = "no agent process: the first version that goes to local starts one"
        yield Text(f"{text}, unless the setting agent is inline")
    if view.agents:
        yield ""
        yield Text("agents on this machine", "bold")
        for agent in view.agents[:MAX_LINES]:
            style = "red" if agent.state in (GONE, SILENT) else ""
            yield Text(f"  {_agent_text(agent, view.time_seconds)}", style)
        if (more := len(view.agents) - MAX_LINES) > 0:
            yield f"  and {more} more; --json shows all"


def _agent_text(agent: AgentView, now: float) -> str:
    text = f"{agent.node}, process {agent.pid or 'unknown'}: "
    if agent.state == GONE:
        return text + "gone, it was killed; the next commit of a trainer starts another one"
    if agent.state == SILENT:
        return text + f"does not answer{f' ({agent.note})' if agent.note else ''}"
    parts = [f"runs for {span(now - agent.began_seconds)}" if agent.began_seconds else "runs"]
    if agent.trainers:
        parts.append(f"serves {_ranks(agent.trainers)}")
    if agent.awaited:
        parts.append(f"waits for {_ranks(agent.awaited)} to come back")
    if not (agent.trainers or agent.awaited):
        parts.append("without a trainer")
    parts += [f"{n} waiting for {level}" for level, n in agent.waiting.items()]
    if agent.quiet_seconds > 5:
        parts.append(f"its flush has not moved for {span(agent.quiet_seconds)}")
    if agent.note:
        parts.append(agent.note)
    return text + ", ".join(parts)


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {some(ranks, 8)}"


def _tail(view: View) -> Iterator[RenderableType]:
    from rich.text import Text

    yield ""
    if view.events is not None:
        yield from _events(view.events, view.time_seconds)
    for version, reason in list(view.job.suspects.items())[-MAX_LINES:]:
        yield Text(f"suspect, as replicas differed: {version}: {reason}", "yellow")
    for text in view.problems[:MAX_LINES]:
        yield Text(f"cannot be read: {text}", "yellow")
    for text in view.notes:
        yield Text(text, "dim")


def _events(events: EventsView, now: float) -> Iterator[Text]:
    from rich.text import Text

    since = "" if events.since_seconds is None else f" since {clock(events.since_seconds, now)}"
    head = f"events of {counted(events.files, 'rank')}{since}"
    bad = [
        f"{number} {name.replace('/', ' on ')}"
        for name, number in events.counts.items()
        if name.partition("/")[0] in ("skipped", "failed", "drifted", "rejected")
    ]
    yield Text(f"{head}: {', '.join(bad) or 'none skipped, none failed'}", "red" if bad else "")
    if events.stall_seconds is not None and events.worst_stall_seconds is not None:
        median, worst = span(events.stall_seconds), span(events.worst_stall_seconds)
        yield Text(f"stall of the training: {median} (median), {worst} (longest)")
    slow = [_slow_text(each) for each in events.slow if each.ranks > 1]
    if slow:
        yield Text(f"slowest: {'; '.join(slow)}")
    for each in events.incidents[:4]:
        what = " ".join(filter(None, (each.name, each.level, f"v{each.version}")))
        yield Text(f"{clock(each.time_seconds, now)} [rank {each.rank}] {what}: {each.message}")


def _slow_text(slow: Slow) -> str:
    times = f"{span(slow.seconds)}, median {span(slow.median_seconds)}"
    return f"{slow.work}: rank {slow.rank} ({times})"


# --- numbers -------------------------------------------------------------------------------------


def span(seconds: float | None) -> str:
    """A duration: 3.2 ms, 12 s, 4.5 min, 3.1 h, 2.5 d; empty if it is unknown."""
    if seconds is None:
        return ""
    for limit, unit, name in ((1.0, 1e-3, "ms"), (100.0, 1.0, "s"), (6000.0, 60.0, "min")):
        if seconds < limit:
            return _digits(seconds / unit, name)
    if seconds < 2 * DAY_SECONDS:
        return _digits(seconds / 3600, "h")
    return _digits(seconds / DAY_SECONDS, "d")


def _digits(value: float, unit: str) -> str:
    return f"{value:.1f} {unit}" if value < 10 else f"{value:.0f} {unit}"


def clock(seconds: float, now: float) -> str:
    """The time of day; with the date if it is more than half a day from `now`."""
    near = abs(now - seconds) < DAY_SECONDS / 2
    return time.strftime("%H:%M:%S" if near else "%m-%d %H:%M", time.localtime(seconds))


def _age(seconds: float | None) -> str:
    return "" if seconds is None else f"{span(seconds)} old"


def _rate(bytes_per_second: float | None) -> str:
    return f"{size_text(round(bytes_per_second)) or '0 B'}/s" if bytes_per_second else ""


__all__ = ["clock", "drawn", "span"]
