"""The common part of exporters: which ranks export, the thread that does it, and its failures.

The training thread only appends an event to a queue. All else is done by a daemon thread, in turns.
"""

from __future__ import annotations

import abc
import importlib.util
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Literal

from tierckpt.callbacks import Callbacks, Job
from tierckpt.errors import ConfigError
from tierckpt.events import Event

from .metrics import INTERRUPTED, LIVE, RANKS, RUNNING, Sample, samples, zeros

logger = logging.getLogger("tierckpt")

Ranks = Literal["first", "node", "all"]
MOST_EVENTS = 10_000
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
        if len(self._queue) >= MOST_EVENTS:
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
        begun = self._try("start", self._begin, job)
        while not stop.wait(self.turn_seconds):
            begun = begun or self._try("start", self._begin, job)
            if begun:
                self._turn(queue)
        if begun:
            self._turn(queue)
            self._try("end", self.end)

    def _begin(self, job: Job) -> bool:
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
    "start": "%s cannot start; training goes on, and it is tried again. %s: %s",
    "record": "%s: an event is left out. %s: %s",
    "export": "%s does not export; training goes on, and it is tried again. %s: %s",
    "end": "%s: the last values are not exported. %s: %s",
}


__all__ = ["Exporter", "Ranks", "require"]
