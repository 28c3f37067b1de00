"""The common part of exporters: metrics, ranks that export, the thread, and its failures.

The training thread only appends an event to a queue. All else is done by a daemon thread, in
turns.

The metrics have names, kinds, units and labels for all exporters, and the events that change them.
Names follow the conventions of Prometheus: base units, a counter ends in `_total`. The labels have
few values (a level, a reason, a phase), whatever the events say and however large the job is.

Tools that log the training itself get curves over versions. Between two exports a curve has one
point: a counter's total, the newest value of a gauge, and the largest observation of a histogram.

The setting `export`: exporters by name, `"prometheus 9400, tensorboard runs/demo"`.

An exporter with other arguments is given in `callbacks`.
"""

from __future__ import annotations

import abc
import importlib.util
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from typing import Literal

from msgspec import Struct

from tierckpt.callbacks import Callbacks, Job
from tierckpt.errors import ConfigError
from tierckpt.events import Event

__all__ = [
    "EVERY_SECONDS",
    "METRICS",
    "Exporter",
    "Kind",
    "Metric",
    "Points",
    "Ranks",
    "Sample",
    "ScalarExporter",
    "exporters_of",
    "require",
    "samples",
    "zeros",
]


PREFIX = "tierckpt"


class Kind(StrEnum):
    """Kind of a metric, as in Prometheus and OpenTelemetry."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Metric(Struct, frozen=True):
    """One metric. Equal on all exporters."""

    name: str
    """Name without prefix, unit and `_total`."""
    kind: Kind
    help: str
    unit: str = ""
    """`seconds`, `bytes`, or empty."""
    labels: tuple[str, ...] = ()
    is_plotted: bool = False
    """It is a curve over versions, for tools that plot scalars."""
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets."""

    @property
    def full_name(self) -> str:
        """The name in Prometheus."""
        total = "total" if self.kind is Kind.COUNTER else ""
        return "_".join(filter(None, (PREFIX, self.name, self.unit, total)))

    def curve(self, labels: tuple[str, ...]) -> str:
        """The name of a curve: `tierckpt/store_seconds/local`."""
        name = "_".join(filter(None, (self.name, self.unit)))
        return "/".join((PREFIX, name, *labels))


class Sample(Struct, frozen=True):
    """A change of a metric: what a counter grows by, a gauge's value, or an observation."""

    metric: Metric
    value: float
    labels: tuple[str, ...] = ()
    """Values of the metric's labels."""


STALL_BUCKETS = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1, 5)
STORE_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 900, 3600)

LEVEL = ("level",)
COUNTER, GAUGE, HISTOGRAM = Kind

STORED = Metric("stored", COUNTER, "Versions stored on a level.", labels=LEVEL)
WRITTEN = Metric("written", COUNTER, "Bytes stored on a level.", "bytes", LEVEL)
SKIPPED = Metric(
    "skipped",
    COUNTER,
    "Versions that were due on a level, and left out: it was busy, or a newer version superseded "
    "them.",
    labels=("level", "reason"),
    is_plotted=True,
)
FAILED_WRITES = Metric(
    "failed", COUNTER, "Versions that a level lost to an error.", labels=LEVEL, is_plotted=True
)
NEWEST = Metric("newest_version", GAUGE, "Newest version stored on a level.", labels=LEVEL)
NEWEST_TIME = Metric(
    "newest_version_timestamp",
    GAUGE,
    "Unix time at which a level got its newest version.",
    "seconds",
    LEVEL,
)
VERSION_BYTES = Metric(
    "version", GAUGE, "Size of the newest version on a level.", "bytes", LEVEL, is_plotted=True
)
STORE = Metric(
    "store",
    HISTOGRAM,
    "Time to store a version on a level: in memory from its boundary to its seal, else the write.",
    "seconds",
    LEVEL,
    is_plotted=True,
    buckets=STORE_BUCKETS,
)
STALL = Metric(
    "stall",
    HISTOGRAM,
    "Time that the training thread spent on a version.",
    "seconds",
    is_plotted=True,
    buckets=STALL_BUCKETS,
)
LIVE = Metric("live_version", GAUGE, "Version of the live state: completed optimizer steps.")
RESTORES = Metric("restores", COUNTER, "Restores that ended, with a version or without one.")
RESTORED = Metric("restored_version", GAUGE, "Version that the last restore loaded; 0: none.")
REWRITTEN = Metric(
    "restored", GAUGE, "Size of the version that the last restore loaded, on all ranks.", "bytes"
)
RESTORE = Metric(
    "restore", GAUGE, "Time of the last restore, by phase.", "seconds", ("phase",), is_plotted=True
)
REJECTED = Metric("rejected", COUNTER, "Reports of copies that were found and not trusted.")
DRIFTED = Metric("drifted", COUNTER, "Reports that replicas differ between ranks.", is_plotted=True)
NOTICES = Metric("notices", COUNTER, "Warnings and errors.", labels=("severity",))
RUNNING = Metric("running", GAUGE, "1 from the start of a job, 0 after its clean end.")
INTERRUPTED = Metric(
    "interrupted",
    GAUGE,
    "1 after an end by a signal, a notice of the cloud or the end of the allocation, else 0.",
)
RANKS = Metric("ranks", GAUGE, "Ranks of the job.")

METRICS = (
    *(STORED, WRITTEN, SKIPPED, FAILED_WRITES, NEWEST, NEWEST_TIME, VERSION_BYTES, STORE, STALL),
    *(LIVE, RESTORES, RESTORED, REWRITTEN, RESTORE, REJECTED, DRIFTED, NOTICES, RUNNING),
    *(INTERRUPTED, RANKS),
)
"""All metrics."""
REASONS = ("busy", "superseded")
PHASES = ("inventory", "verify", "rebuild", "load", "total")
SEVERITIES = ("warning", "error")


def zeros(levels: tuple[str, ...]) -> Iterator[Sample]:
    """Counters at the start: a rate sees the first change only if the counter was there before."""
    for metric in (STORED, WRITTEN, FAILED_WRITES):
        yield from (Sample(metric, 0, (level,)) for level in levels)
    yield from (Sample(SKIPPED, 0, (level, reason)) for level in levels for reason in REASONS)
    yield from (Sample(NOTICES, 0, (severity,)) for severity in SEVERITIES)
    yield from (Sample(metric, 0) for metric in (RESTORES, REJECTED, DRIFTED))


def samples(event: Event) -> Iterator[Sample]:
    """The changes that an event makes. Any thread."""
    seconds, level = event.seconds, (event.level,)
    match event.name:
        case "sealed":
            yield Sample(STALL, seconds["stall"])
            yield from _stored(event, seconds["sealed_after"])
        case "committed":
            yield from _stored(event, sum(seconds.values()))
        case "skipped":
            yield Sample(SKIPPED, 1, (event.level, event.reason))
        case "failed":
            yield Sample(FAILED_WRITES, 1, level)
        case "restored":
            yield Sample(RESTORES, 1)
            yield Sample(RESTORED, event.version)
            yield Sample(REWRITTEN, event.nbytes)
            for phase in PHASES:
                if phase in seconds:
                    yield Sample(RESTORE, seconds[phase], (phase,))
        case "rejected":
            yield Sample(REJECTED, 1)
        case "drifted":
            yield Sample(DRIFTED, 1)
        case "closed":
            yield Sample(RUNNING, 0)
            yield Sample(INTERRUPTED, int(event.facts.get("interrupted", False)))
        case "notice" if event.severity >= logging.WARNING:
            severe = event.severity >= logging.ERROR
            yield Sample(NOTICES, 1, (SEVERITIES[severe],))


def _stored(event: Event, store_seconds: float) -> Iterator[Sample]:
    level = (event.level,)
    yield Sample(STORED, 1, level)
    yield Sample(WRITTEN, event.nbytes, level)
    yield Sample(NEWEST, event.version, level)
    yield Sample(NEWEST_TIME, event.time_seconds, level)
    yield Sample(VERSION_BYTES, event.nbytes, level)
    yield Sample(STORE, store_seconds, level)


logger = logging.getLogger("tierckpt")

Ranks = Literal["first", "node", "all"]
MAX_EVENTS = 10_000
"""Events that wait at most, while a library waits for its server."""
END_SECONDS = 5.0
"""Longest wait for an exporter when a job ends."""


def require(package: str, extra: str) -> None:
    """Raise ConfigError if a package is not installed, without importing it."""
    try:
        found = importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # of a parent package
        found = False
    if not found:
        raise ConfigError(
            f"the exporter to {extra} needs the package {package}, which is not installed; run: "
            f"pip install 'tierckpt[{extra}]'"
        )


class Exporter(Callbacks, abc.ABC):
    """Hands the metrics of a job to a library. Give it to a Checkpointer in `callbacks`.

    `ranks` says who exports: the `first` rank of the job, the first rank of each `node`, or `all`.
    An exporter never disturbs the training: a failure is logged once, and the work is tried again.

    Subclasses implement `record` and `export`, and perhaps `begin` and `end`; all are called on the
    exporter's thread, and may raise.
    """

    turn_seconds = 1.0
    """Pause between two turns."""
    is_live_exported = True
    """The version of the live state is a metric of this exporter."""

    def __init__(self, ranks: Ranks) -> None:
        if ranks not in ("first", "node", "all"):
            raise ConfigError(f"ranks is {ranks!r}; valid: first, node, all")
        self.ranks: Ranks = ranks
        self.job: Job | None = None
        """The job, while it is attached and this rank exports."""
        self._queue: deque[Event] = deque()
        self._dropped = 0
        self._live = -1
        # Made for each job: spawning launchers pickle what the script made before.
        self._stop: threading.Event | None = None
        self._thread: threading.Thread | None = None
        self._failed: set[tuple[str, type[Exception]]] = set()
        """Failures that were logged: the method, and the kind of error."""

    # --- training thread ------------------------------------------------------------------------

    def on_attached(self, job: Job) -> None:
        """Start the thread, if this rank exports."""
        self.on_closed()
        rank = {"first": job.rank, "node": job.local_rank, "all": 0}[self.ranks]
        if rank != 0:
            return
        self._stop, self._queue, self._live = threading.Event(), deque(), -1
        self.job = job
        name, work = f"tierckpt {type(self).__name__}", (job, self._stop, self._queue)
        self._thread = threading.Thread(target=self._work, args=work, name=name, daemon=True)
        self._thread.start()

    def on_event(self, event: Event) -> None:
        """Leave the event to the thread."""
        if self.job is None:
            return
        if len(self._queue) >= MAX_EVENTS:
            self._dropped += 1
        else:
            self._queue.append(event)

    def on_step_boundary(self, version: int) -> None:
        """Note the version."""
        self._live = version

    def on_closed(self) -> None:
        """Export what is left, and end the thread. Waits END_SECONDS at most."""
        thread, stop, self._thread, self._stop = self._thread, self._stop, None, None
        self.job = None
        if thread is not None and stop is not None:
            stop.set()
            thread.join(END_SECONDS)
            if thread.is_alive():
                text = "%s: not all could be exported in %.0f s; the job ends"
                logger.warning(text, self, END_SECONDS)

    def __repr__(self) -> str:
        return type(self).__name__

    # --- the exporter's thread ------------------------------------------------------------------

    def begin(self, job: Job) -> None:
        """Prepare for a job. Repeated in the next turn if it raises."""

    @abc.abstractmethod
    def record(self, sample: Sample, event: Event | None) -> None:
        """Take a sample; `event` is its cause, None for figures about the job itself."""

    def record_event(self, event: Event) -> None:
        """Take an event with all its samples."""
        for sample in samples(event):
            self.record(sample, event)

    @abc.abstractmethod
    def export(self) -> bool:
        """Write, serve or send what was recorded, if it is time; True if so. Called in every turn,
        and repeated in the next one if it raises."""

    def end(self) -> None:
        """Free what `begin` and `export` took: the last call for a job."""

    def _work(self, job: Job, stop: threading.Event, queue: deque[Event]) -> None:
        ready = self._try("start", self._prepare, job)
        while not stop.wait(self.turn_seconds):
            ready = ready or self._try("start", self._prepare, job)
            if ready:
                self._turn(queue)
        if ready:
            self._turn(queue)
            self._try("end", self.end)

    def _prepare(self, job: Job) -> bool:
        self.begin(job)
        state = (Sample(RUNNING, 1), Sample(INTERRUPTED, 0), Sample(RANKS, job.ranks))
        for sample in (*zeros(job.levels), *state):
            self.record(sample, None)
        return True

    def _turn(self, queue: deque[Event]) -> None:
        for _ in range(len(queue)):
            event = queue.popleft()
            self._try("record", self.record_event, event)
        if self._live >= 0 and self.is_live_exported:
            self._try("record", self.record, Sample(LIVE, self._live), None)
        if self._dropped:
            logger.warning("%s: events are left out, as it is too slow for them", self)
            self._dropped = 0
        self._try("export", self.export)

    def _try(self, what: str, call: Callable[..., bool | None], *args: object) -> bool:
        """Call a function; log a failure once, until it works again. Returns the result."""
        try:
            done = bool(call(*args))
        except Exception as error:
            kind = (what, type(error))
            if kind not in self._failed:
                self._failed.add(kind)
                logger.error(FAILED[what], self, type(error).__name__, error)
            return False
        if done and (failed := {kind for kind in self._failed if kind[0] == what}):
            self._failed -= failed
            logger.info("%s works again", self)
        return done


FAILED = {
    "start": "%s cannot start; training continues, and it is tried again. %s: %s",
    "record": "%s: an event is left out. %s: %s",
    "export": "%s does not export; training continues, and it is tried again. %s: %s",
    "end": "%s: the last values are not exported. %s: %s",
}


Points = Mapping[str, tuple[int, float]]
"""Version and value of each curve's new point."""


class ScalarExporter(Exporter):
    """An exporter of curves. By default of rank 0 alone."""

    is_live_exported = False

    def __init__(self, every_seconds: float, ranks: Ranks) -> None:
        super().__init__(ranks)
        self._every_seconds = every_seconds
        self._next_seconds = 0.0
        self._totals: dict[str, float] = {}
        self._points: dict[str, tuple[int, float]] = {}

    def begin(self, job: Job) -> None:
        """See `Exporter`."""
        self._totals, self._points = {}, {}
        self._next_seconds = time.monotonic() + self._every_seconds

    def record(self, sample: Sample, event: Event | None) -> None:
        """See `Exporter`."""
        metric, value = sample.metric, sample.value
        if event is None or event.version < 0 or not metric.is_plotted:
            return
        curve = metric.curve(sample.labels)
        if metric.kind is Kind.COUNTER:
            value += self._totals.get(curve, 0.0)
            self._totals[curve] = value
        version, before = self._points.get(curve, (event.version, value))
        if metric.kind is Kind.HISTOGRAM and before > value:
            self._points[curve] = (version, before)
        else:
            self._points[curve] = (event.version, value)

    def export(self) -> bool:
        """Log the new points, if it is time."""
        return time.monotonic() >= self._next_seconds and self._log()

    def end(self) -> None:
        """Log the last points."""
        self._log()

    def _log(self) -> bool:
        if not self._points:
            return False
        self._next_seconds = time.monotonic() + self._every_seconds
        done = self.log(self._points)
        if done:
            self._points = {}
        return done

    @abc.abstractmethod
    def log(self, points: Points) -> bool:
        """Log these points. False if not possible yet: they are kept. The exporter's
        thread; may raise."""


EVERY_SECONDS = 10.0
"""Default interval of the points."""


SHAPES = (
    "prometheus [ADDRESS:]PORT",
    "prometheus FILE.prom",
    "opentelemetry [URL]",
    "tensorboard FOLDER",
    "wandb [PROJECT]",
    "mlflow [EXPERIMENT]",
)


def exporters_of(text: str) -> list[Exporter]:
    """The exporters that the setting names. Nothing is opened or imported yet.

    Raises ConfigError for an unknown one, an argument that it does not take, and a missing package.
    """
    return [_exporter(part.split(), text) for part in text.split(",") if text.strip()]


def _exporter(words: list[str], text: str) -> Exporter:
    name, *arguments = words or [""]
    make = MAKERS.get(name)
    if make is None or len(arguments) > 1:
        raise ConfigError(_misfit(text))
    try:
        return make(*arguments)
    except TypeError:  # it needs an argument
        raise ConfigError(_misfit(text)) from None
    except ConfigError as error:
        raise ConfigError(f"export is {text!r}: {error}") from None


def _misfit(text: str) -> str:
    return (
        f"export is {text!r}; it takes one or several of these, separated by commas: "
        f"{'; '.join(SHAPES)}"
    )


def _prometheus(where: str) -> Exporter:
    from .prometheus import ALL, LOOPBACK, PrometheusFile, PrometheusPort

    address, _, port = where.rpartition(":")
    if port.isdigit() and "/" not in address:
        address = ALL if address == "*" else address.strip("[]") or LOOPBACK
        return PrometheusPort(int(port), address)
    return PrometheusFile(where)


def _opentelemetry(endpoint: str = "") -> Exporter:
    from .opentelemetry import OpenTelemetry

    return OpenTelemetry(endpoint)


def _tensorboard(folder: str) -> Exporter:
    from .tensorboard import TensorBoard

    return TensorBoard(folder)


def _wandb(project: str = "") -> Exporter:
    from .wandb import WandB

    return WandB(project)


def _mlflow(experiment: str = "") -> Exporter:
    from .mlflow import MLflow

    return MLflow(experiment)


MAKERS: dict[str, Callable[..., Exporter]] = {
    "prometheus": _prometheus,
    "opentelemetry": _opentelemetry,
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "mlflow": _mlflow,
}
