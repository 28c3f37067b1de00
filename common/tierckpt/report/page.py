"""The page: figures, tables and sentences of one job, or of two side by side, as one HTML file."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from matplotlib import rc_context

from tierckpt._event_files import Record
from tierckpt._text import counted, size_text
from tierckpt._version import __version__
from tierckpt.goodput.tables import category_lines, conclusions, run_lines
from tierckpt.lineage.branches import Branch, branches_of, job_text
from tierckpt.tracing.summary import size_buckets, summarize
from tierckpt.watch.drawing import clock
from tierckpt.watch.drawing import span as time_text

from . import figures
from .sources import Job

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FONTS: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "legend.fontsize": 8.5,
    "svg.fonttype": "none",
    "svg.hashsalt": "tierckpt",
    "text.parse_math": False,
}
NEW_LINE = "\n"
MOST_INCIDENTS = 40
MOST_RANKS = 16
Lines = Sequence[Sequence[str]]
"""A table, titles first."""
STYLE = """
body { font: 15px/1.45 Verdana, "DejaVu Sans", sans-serif; color: #222; margin: 2em auto;
       max-width: 62em; padding: 0 1em }
body.two { max-width: 110em }
h1 { font-size: 1.5em } h2 { font-size: 1.2em; border-bottom: 1px solid #bbb; margin-top: 2em }
h3 { font-size: 1em; margin: 1.4em 0 .3em }
.jobs { display: grid; grid-template-columns: minmax(0, 1fr); gap: 2em }
.two .jobs { grid-template-columns: minmax(0, 1fr) minmax(0, 1fr) }
figure { margin: .5em 0; break-inside: avoid }
figure svg { width: 100%; height: auto }
figcaption, .note { color: #555; font-size: .9em }
table { border-collapse: collapse; font-size: .87em; margin: .6em 0 }
th, td { padding: .15em .8em .15em 0; text-align: left; vertical-align: top }
th { font-weight: 600 } .head th { border-bottom: 1px solid #bbb }
.number { text-align: right; white-space: nowrap }
.wide { overflow-x: auto }
ul { list-style: none; margin: 0; padding-left: .6em; font-size: 14px; overflow-wrap: anywhere }
ul ul { border-left: 2px solid #4c78a8; margin-left: .5em }
li { padding: .12em 0 } ul ul > li::before { content: "─ "; color: #4c78a8; margin-left: -.6em }
summary { cursor: pointer; color: #225 }
.missing { background: #f4f4f4; padding: .8em 1em; color: #444 }
@media print { details::details-content { content-visibility: visible; height: auto }
  body { margin: 0; max-width: none; font-size: 11px } h2, h3 { break-after: avoid } }
"""


@dataclass(frozen=True)
class Section:
    """A part of the page: for each job its figures, and what is below them."""

    title: str
    text: str
    draws: tuple[tuple[str, figures.Draw], ...]
    """Title and drawing of each figure."""
    below: Callable[[Job], Iterable[str]]
    """HTML below the figures of a job."""
    lacks: Callable[[Job], str]
    """Why a job has nothing for this section, and what would help."""


def page(jobs: Sequence[Job]) -> tuple[str, int]:
    """The whole file, and the number of figures in it."""
    several, short = bool(jobs[1:]), {job.name for job in jobs}
    names = [job.name if len(short) == len(jobs) else job.path for job in jobs]
    titles = [f"<h3>{escape(name)}</h3>" if several else "" for name in names]
    width = figures.HALF_INCHES if several else figures.WIDTH_INCHES
    parts = [_beside(titles, [_overview(job) for job in jobs])]
    with rc_context({**FONTS, "figure.figsize": (width, 3)}):
        parts += [_section(section, jobs, titles) for section in SECTIONS]
    text = (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        '<link rel="icon" href="data:,">'
        f"<title>Tierckpt: {escape(' and '.join(names))}</title><style>{STYLE}</style></head>\n"
        f'<body class="{"two" if several else "one"}">'
        f"<h1>Tierckpt: report of {escape(' and '.join(names))}</h1>\n"
        f'<p class="note">Made {time.strftime("%Y-%m-%d %H:%M:%S")} by tierckpt '
        f"{escape(__version__)}.</p>\n{NEW_LINE.join(parts)}\n</body></html>\n"
    )
    return text, text.count("<svg")


def _beside(titles: Sequence[str], parts: Sequence[str]) -> str:
    """What several jobs have, side by side."""
    cells = [f"<div>{each}{part}</div>" for each, part in zip(titles, parts, strict=True)]
    return f'<div class="jobs">{"".join(cells)}</div>'


def _section(section: Section, jobs: Sequence[Job], titles: Sequence[str]) -> str:
    html = [f"<section><h2>{section.title}</h2><p>{section.text}</p>"]
    drawn = [[draw(job) for job in jobs] for _, draw in section.draws]
    below = ["".join(section.below(job)) for job in jobs]
    lacks = {
        place: _missing(section.lacks(job))
        for place, job in enumerate(jobs)
        if not below[place] and not any(row[place] for row in drawn)
    }
    for (title, _), row in zip(section.draws, drawn, strict=True):
        figures.share_scales([figure for figure in row if figure is not None])
        cells = [_figure(title, each) if each else _missing(f"{title}: none") for each in row]
        if any(row):
            html.append(_beside(titles, [lacks.pop(n, cell) for n, cell in enumerate(cells)]))
    below = [lacks.get(place, text) for place, text in enumerate(below)]
    html.append(_beside(titles, below) if any(below) else "")
    return "\n".join([*html, "</section>"])


def _missing(text: str) -> str:
    return f'<p class="missing">{escape(text)}</p>'


def _figure(title: str, figure: Figure) -> str:
    """A figure as SVG inside the page. Names that nothing refers to are left out, as those of
    several figures would be the same."""
    out = io.StringIO()
    figure.savefig(out, format="svg", transparent=True)
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = re.sub(r' (width|height)="[^"]*pt"', "", svg, count=2)
    svg = re.sub(r' xmlns(:xlink)?="[^"]*"', "", svg).replace("xlink:href", "href")
    label = f'<svg role="img" aria-label="{escape(title)}"'
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>{svg.replace('<svg', label, 1)}</figure>"
    )


def _table(lines: Lines, summary: str = "") -> str:
    """A table, folded below its `summary` if there is one."""
    if not lines[1:]:
        return ""
    numbers = {
        column
        for column in range(len(lines[0]))
        if all(re.match(r"^[-+~]?\d[^a-z]*$|^$|^[\d.]+ \w+$", line[column]) for line in lines[1:])
    }

    def row(cells: Sequence[str], tag: str) -> str:
        kinds = [' class="number"' if n in numbers else "" for n in range(len(cells))]
        shown = zip(cells, kinds, strict=True)
        head = ' class="head"' if tag == "th" else ""
        return f"<tr{head}>{''.join(f'<{tag}{kind}>{escape(c)}</{tag}>' for c, kind in shown)}</tr>"

    rows = [row(lines[0], "th"), *(row(line, "td") for line in lines[1:])]
    table = f'<div class="wide"><table>{"".join(rows)}</table></div>'
    return f"<details><summary>{escape(summary)}</summary>{table}</details>" if summary else table


def _sentences(texts: Iterable[str]) -> Iterable[str]:
    return [f"<p>{escape(text)}</p>" for text in texts]


def _when(event: Record) -> str:
    return clock(event["time_seconds"], time.time())


# --- the parts -----------------------------------------------------------------------------------


def _overview(job: Job) -> str:
    lines: list[tuple[str, ...]] = [("folder", job.path)]
    view = job.view
    if view is not None:
        state = view.job
        lines.append(("state", f"{state.state} ({state.evidence})"))
        if state.restart is not None:
            levels = " and ".join(state.restart.levels)
            lines.append(("a restart takes", f"v{state.restart.version} from {levels}"))
    if job.account is not None:
        account = job.account
        lines += [
            ("goodput", f"{100 * account.goodput:.1f} % of {time_text(account.elapsed_seconds)}"),
            (
                "runs",
                f"{len(account.runs)}, the last one on {counted(account.runs[-1].world, 'rank')}",
            ),
            ("steps", f"{account.made_steps}, {account.lost_steps} of them made again"),
            ("failures", str(account.failures)),
        ]
    rows = "".join(f"<tr><th>{k}</th><td>{escape(value)}</td></tr>" for k, value in lines)
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in dict.fromkeys(job.notes))
    return f"<table>{rows}</table>{notes}"


def _goodput(job: Job) -> Iterable[str]:
    if job.account is not None:
        yield from _sentences(conclusions(job.account))
        yield _table(category_lines(job.account), "The time by category")
        yield _table(run_lines(job.account), "The runs")


def _restarts(job: Job) -> Iterable[str]:
    lines: list[tuple[str, ...]] = [("restore", "at", "version", "from", "parts")]
    for number, event in enumerate(job.restores, 1):
        parts = [f"{name} {time_text(s)}" for name, s in event["seconds"].items() if s > 0]
        lines.append(
            (str(number), _when(event), f"v{event['version']}", event["level"], ", ".join(parts))
        )
    yield _table(lines)


def _history(job: Job) -> Iterable[str]:
    if job.history is not None and job.history.runs:
        yield f"<p>{escape(job_text(job.history))}</p>{_tree(branches_of(job.history, False))}"


def _tree(branches: Sequence[Branch]) -> str:
    lines = [f"<li>{escape(branch.text)}{_tree(branch.below)}</li>" for branch in branches]
    return f"<ul>{''.join(lines)}</ul>" if lines else ""


def _levels(job: Job) -> Iterable[str]:
    lines: list[tuple[str, ...]] = [
        ("level", "versions", "size", "cost, median", "longest", "skipped", "failed")
    ]
    for name in dict.fromkeys(copy.level for copy in job.copies):
        copies = [copy for copy in job.copies if copy.level == name]
        spent = sorted(copy.seconds for copy in copies)
        counts = [str(job.counts[f"{kind} on {name}"]) for kind in ("skipped", "failed")]
        times = [time_text(spent[len(spent) // 2]), time_text(spent[-1])]
        size = size_text(copies[-1].nbytes)
        lines.append((name, str(len(copies)), size, *times, *counts))
    yield _table(lines)


def _drift(job: Job) -> Iterable[str]:
    found = [event for event in job.incidents if event["name"] == "drifted"]
    suspects = job.view.job.suspects if job.view else {}
    lines: list[tuple[str, ...]] = [("version", "at", "finding")]
    for event in found[-MOST_INCIDENTS:]:
        lines.append((f"v{event['version']}", _when(event), event["message"]))
    yield _table(lines)
    yield _table([("suspect version", "reason"), *suspects.items()])
    if not (found or suspects) and not job.events_hint:
        yield from _sentences(["No difference between the replicas was reported."])


def _incidents(job: Job) -> Iterable[str]:
    found = [event for event in job.incidents if event["name"] != "drifted"]
    lines: list[tuple[str, ...]] = [("event", "level", "version", "at", "reason")]
    for event in found[-MOST_INCIDENTS:]:
        what = (
            event["name"],
            event["level"],
            f"v{event['version']}",
            _when(event),
            event["message"],
        )
        lines.append(what)
    yield _table(lines, f"The last {len(lines) - 1} of {len(found)} versions without a copy")


def _allreduces(job: Job) -> Iterable[str]:
    if job.timeline is None:
        return
    found = summarize(job.timeline)
    hidden = found.hidden
    if hidden.copy_us and found.buckets:
        share = 100 * hidden.share(hidden.communication_us)
        whole = 100 * hidden.share(hidden.computing_us)
        yield from _sentences(
            [
                f"{share:.0f} % of the copying was under an allreduce, and {whole:.0f} % between "
                "a boundary and the wait before the next update, where the training computes."
            ]
        )
    lines: list[tuple[str, ...]] = [
        ("rank", "size", "calls", "in all", "mean", "shortest", "longest")
    ]
    for rank in job.timeline.ranks()[:MOST_RANKS]:
        for bucket in size_buckets(job.timeline.communication(rank)):
            times = bucket.latency
            total = times.count * times.avg_us
            each = [time_text(us / 1e6) for us in (total, times.avg_us, times.min_us, times.max_us)]
            lines.append((str(rank), bucket.size, str(times.count), *each))
    yield _table(lines, "The allreduces of each rank by size")


def _cores(job: Job) -> Iterable[str]:
    yield _table(figures.mean_cores(job))


def _lacks_events(job: Job) -> str:
    return job.events_hint or "The events have no such record yet."


def _lacks_allreduces(job: Job) -> str:
    return job.trace_hint or (
        "The trace has no allreduce. Under Horovod its own timeline has them: start the job with "
        "HOROVOD_TIMELINE=FILE, FILE being in the folder of trace_dir, with a name in .json. "
        "On a GPU, and in a job of one process, there are none."
    )


def _lacks_cores(job: Job) -> str:
    return job.trace_hint or (
        "The agent records the cores in use, from the first version on that goes to a level other "
        "than memory; a job with agent='inline' has no such record."
    )


def _lacks_history(job: Job) -> str:
    return f"{job.path} has no versions and no records of runs: give the job's path."


SECTIONS: tuple[Section, ...] = (
    Section(
        "Where the time went",
        "Only training that counted is goodput. A time without the job is cut short.",
        (("Time by run, and the shares of all", figures.time_of_runs),),
        _goodput,
        _lacks_events,
    ),
    Section(
        "Restarts",
        "Each restart after a failure, with its parts, and what was restored.",
        (("Parts of each restart", figures.restarts),),
        _restarts,
        lambda job: job.events_hint or "No run failed, and none restored a version.",
    ),
    Section(
        "History",
        "A run goes on where another one ended, goes back to an older version, or is a fork.",
        (),
        _history,
        _lacks_history,
    ),
    Section(
        "Levels",
        "A failure costs the steps since the newest version on the level that survives it.",
        (
            ("Newest version on each level", figures.newest_versions),
            ("Cost of each copy", figures.costs),
        ),
        lambda job: [*_levels(job), *_incidents(job)],
        _lacks_events,
    ),
    Section(
        "Allreduces, and copies under them",
        "From the trace: the first steps of each run.",
        (
            ("Time of an allreduce by its size: mean, shortest and longest", figures.allreduces),
            ("A step of median duration", figures.one_step),
        ),
        _allreduces,
        _lacks_allreduces,
    ),
    Section(
        "Cores in use",
        "A sample every 50 ms, by the agent, during the traced steps. Loader workers are not "
        "counted.",
        (("Cores in use on the node of the first rank, for 20 s at most", figures.cores),),
        _cores,
        _lacks_cores,
    ),
    Section(
        "Replicas",
        "Ranks compare the state that they share. Versions taken while it differed are suspect.",
        (),
        _drift,
        _lacks_events,
    ),
)


__all__ = ["page"]
