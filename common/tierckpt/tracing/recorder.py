"""Trace: one rank's activities with their times, on one time axis with the allreduces.

The format is Chrome-trace JSON.

Off unless `trace_dir` is set; then each rank appends to `<trace_dir>/trace-r<rank>.json` during the
first 50 boundaries of its run. `tierckpt trace` reads these files; so do Chrome's
`about:tracing` and Perfetto.

The file is a JSON array, never closed, which both viewers accept: everything written before
a kill is readable. A new run cuts off an incomplete last line and continues after it. Time stamps
are microseconds of Unix time, read once and continued by the monotonic clock, so that setting the
clock during the job changes nothing.

Kinds of entries (their `cat`):

| kind | row | meaning |
|---|---|---|
| `begin` | training | a run starts: rank, process id, host |
| `boundary`, `barrier` | training | the two stalls |
| `update` | training | an optimizer changes the weights |
| `trace` | training | this recorder writes its file |
| `slot` | copier | finding a slot, and waiting for it |
| `copy` | the copying thread | a block (on a GPU: a batch of them), copied and hashed |
| `tree` | the copying thread | the same for the rank tree, which belongs to no layer |
| `seal` | the copying thread | header, manifest and seal |
| `release` | launches | the reduction of these parameters was launched |
| `allreduce` | allreduce | from there to its end, if the adapter knows it |
| `write`, `commit` | agent | durations reported by the agent, drawn from the seal on |
| `names` | training | names of the reductions in another timeline, and their layers |
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from tierckpt._appender import Appender
from tierckpt._text import error_text
from tierckpt.core.parts import Boundary, Part

if TYPE_CHECKING:
    import torch

    from tierckpt.checkpointer.loop import TrainingJob
    from tierckpt.config import Config
    from tierckpt.events import Event, EventLog
    from tierckpt.snapshot.copy_plan import CopyPlan
    from tierckpt.snapshot.snapshot import Snapshot

STEPS = 50
"""Steps of every run in the timeline: a few are enough, and the files of a thousand ranks stay
small."""
ROW_NAMES = ("training", "copier", "launches", "allreduce", "agent")
TRAINING, COPIER, LAUNCHES, ALLREDUCE, AGENT = range(len(ROW_NAMES))

MAX_BYTES = 64 * 1024 * 1024
"""A longer file is not continued, however many steps are left."""
END_SECONDS = 1.0
"""Time that the last boundary waits for reductions that have ended and are not recorded yet."""


class Trace(Part):
    """One rank's recorder; see the module's text.

    Any thread may call `copied`, `span` and `released`, which only append to a queue; all other
    methods belong to the training thread. Times are `time.perf_counter()` seconds. Any error ends
    the recording with a notice, and is never raised.

    Args:
        path: the file; made or continued. Raises OSError if it cannot be, ValueError if it is not a
            trace.
        steps: number of boundaries to record from now on.
        name_of: the name of a parameter.
        notice: called with a sentence when the recording ends early.
        by_child: a child writes the file, see `Appender`.
    """

    def __init__(
        self,
        path: Path,
        rank: int,
        steps: int,
        name_of: Callable[[torch.Tensor], str],
        notice: Callable[[str], object],
        by_child: bool = False,
    ) -> None:
        self.rank = rank
        self._path = path
        self._left = steps
        self._name_of = name_of
        self._notice = notice
        self._trainer = threading.get_ident()
        self._queue: deque[Callable[[], str]] = deque()
        """Functions that make lines; the training thread calls them, to save the other threads the
        time."""
        self._layers: tuple[CopyPlan | None, list[list[str]]] = (None, [])
        self._sealed_at: dict[int, float] = {}
        self._reducing: set[torch.futures.Future[Any]] = set()
        """Reductions with an end not recorded yet."""
        self._update_start: float | None = None
        self._hooks: list[Any] = []
        self._epoch_us = time.time_ns() / 1e3 - 1e6 * time.perf_counter()
        self._file: Appender | None = Appender(_open(path), by_child)
        self._write_head()

    # --- any thread ----------------------------------------------------------------------------

    def span(
        self,
        kind: str,
        start_seconds: float,
        end_seconds: float,
        row: int | None = None,
        **args: Any,
    ) -> None:
        """Record a duration; the default row is that of the calling thread."""
        row = self._row() if row is None else row
        if kind == "seal":
            self._sealed_at[args["version"]] = end_seconds
        self._queue.append(lambda: self._line(kind, kind, row, start_seconds, end_seconds, args))

    def copied(
        self,
        version: int,
        plan: CopyPlan,
        blocks: Sequence[int],
        start_seconds: float,
        end_seconds: float,
    ) -> None:
        """Record that this thread copied and hashed blocks."""
        row = self._row()

        def line() -> str:
            by_block = self._layers_of(plan)
            layers = list(dict.fromkeys(chain.from_iterable(by_block[b] for b in blocks)))
            nbytes = sum(plan.layout.blocks[b].nbytes for b in blocks)
            args = {"version": version, "bytes": nbytes, "layers": layers}
            return self._line("copy", label(layers), row, start_seconds, end_seconds, args)

        self._queue.append(line)

    def released(
        self,
        params: Sequence[torch.Tensor],
        version: int,
        reduction: torch.futures.Future[Any] | None = None,
        launched_seconds: float | None = None,
    ) -> None:
        """Record the launch of a reduction (default: now).

        A `reduction` reports its end. On a GPU it is done as soon as it is enqueued, so its end
        means nothing and is not recorded.
        """
        if self._file is None:
            return
        start, held = launched_seconds or time.perf_counter(), list(params)

        def line(kind: str, row: int, end_seconds: float | None) -> str:
            names = [self._name_of(p) for p in held]
            nbytes = sum(p.nbytes for p in held)
            args = {"version": version, "bytes": nbytes, "layers": names}
            return self._line(kind, label(names), row, start, end_seconds, args)

        self._queue.append(lambda: line("release", LAUNCHES, None))
        if reduction is not None and not any(p.is_cuda for p in held):

            def done(_: Any) -> None:
                end_seconds = time.perf_counter()
                self._queue.append(lambda: line("allreduce", ALLREDUCE, end_seconds))
                self._reducing.discard(reduction)

            self._reducing.add(reduction)
            reduction.add_done_callback(done)

    def _row(self) -> int:
        return TRAINING if threading.get_ident() == self._trainer else COPIER

    # --- training thread -----------------------------------------------------------------------

    def attached(self, job: TrainingJob) -> None:
        """Watch the optimizers, after the hooks that wait for the copy: the wait is no update."""
        steppers = job.state.steppers
        self._hooks = self.watch({name: each[0] for name, each in steppers.items() if each})

    def taken(self, snapshot: Snapshot) -> None:
        """Record the copy."""
        if self._file is not None:
            snapshot.watch.trace = self

    def boundary_ends(self, at: Boundary) -> None:
        """Write the queue; close the file when all requested steps are recorded."""
        if self._file is None:
            return
        start = time.perf_counter()
        self.span("boundary", at.start_seconds, start, version=at.id.version)
        self._left -= 1
        if self._left <= 0:
            self._await_ends()
        self._flush()
        self.span("trace", start, time.perf_counter())
        if self._left <= 0:
            self.close()

    def _await_ends(self) -> None:
        """Wait for the callbacks of reductions that have ended: a waiter may continue before the
        callback, and after the last boundary nothing would write it."""
        give_up = time.monotonic() + END_SECONDS
        while any(r.done() for r in tuple(self._reducing)) and time.monotonic() < give_up:
            time.sleep(0.001)

    def watch(self, optimizers: Mapping[str, torch.optim.Optimizer]) -> list[Any]:
        """Record their updates; returns the hooks' handles. Call it after the barrier's hook is
        installed."""
        handles: list[Any] = []
        for name, optimizer in optimizers.items():
            handles.append(optimizer.register_step_pre_hook(self._before_update))
            handles.append(optimizer.register_step_post_hook(self._after_update(name)))
        return handles

    def name_reductions(self, names: Mapping[str, Sequence[str]]) -> None:
        """Record the names of the reductions in a library's own timeline.

        `names`: for each name the parameters with gradients under it. Mostly one; several if
        reductions that never run at the same time share a name. Empty: that timeline has none of
        this rank's.
        """
        now = time.perf_counter()
        self._queue.append(
            lambda: self._line("names", "names", TRAINING, now, None, {"reductions": dict(names)})
        )

    def _before_update(self, *_: Any) -> None:
        # Horovod's step is a step around a step: the last start is the one of the update.
        self._update_start = time.perf_counter()

    def _after_update(self, name: str) -> Callable[..., None]:
        def after_update(*_: Any) -> None:
            start, self._update_start = self._update_start, None
            if start is not None and self._file is not None:
                self.span("update", start, time.perf_counter(), TRAINING, optimizer=name)

        return after_update

    def on_event(self, event: Event) -> None:
        """A callback of the event log: record the agent's work from its report."""
        if event.name not in ("committed", "failed"):
            return
        start = self._sealed_at.pop(event.version, None)
        if event.name == "committed" and start is not None and self._file is not None:
            for kind in ("write", "commit"):
                end = start + event.seconds[kind]
                self.span(kind, start, end, AGENT, version=event.version, bytes=event.nbytes)
                start = end

    def left(self, abandoned: bool) -> None:
        """Close the file, after the agent's last report."""
        self.close()

    def close(self) -> None:
        """Write the queue and close the file; later records are dropped."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._flush()
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                self._notice(f"{self._path} lacks its end: {error_text(error)}")
        self._queue.clear()
        self._reducing.clear()
        self._layers = (None, [])  # a plan keeps every tensor of the state alive

    # --- the file ------------------------------------------------------------------------------

    def _write_head(self) -> None:
        about = {"rank": self.rank, "pid": os.getpid(), "host": socket.gethostname()}
        names = "".join(map(_encode, row_names(self.rank, f"rank {self.rank}", ROW_NAMES)))
        now = time.perf_counter()
        start = self._line("begin", "begin", TRAINING, now, None, about)
        self._queue.append(lambda: names + start)
        self._flush()

    def _line(
        self, kind: str, name: str, row: int, start: float, end: float | None, args: dict[str, Any]
    ) -> str:
        ts = self._us(start)
        shape: dict[str, Any] = (
            {"ph": "i", "s": "t", "ts": ts}
            if end is None
            else {"ph": "X", "ts": ts, "dur": max(0, self._us(end) - ts)}
        )
        return _encode(
            {"name": name, "cat": kind, **shape, "pid": self.rank, "tid": row, "args": args}
        )

    def _us(self, seconds: float) -> int:
        """Unix time in whole microseconds: a float in JSON has no room for fractions of them."""
        return round(self._epoch_us + 1e6 * seconds)

    def _layers_of(self, plan: CopyPlan) -> list[list[str]]:
        """The parameters of every block, by number of the block."""
        if self._layers[0] is not plan:
            pieces = plan.layout.pieces
            names = [
                list(dict.fromkeys(layer_of(pieces[i].spec.name) for i, _, _ in block.parts))
                for block in plan.layout.blocks
            ]
            self._layers = (plan, names)
        return self._layers[1]

    def _flush(self) -> None:
        """Write the queue in one call, so that only a machine failure leaves an incomplete line."""
        if self._file is None:
            return
        try:
            lines = []
            while self._queue:  # other threads append to it at the same time
                lines.append(self._queue.popleft()())
            data = "".join(lines).encode()
            self._file.write(data)
            if self._file.nbytes > MAX_BYTES:
                raise OSError(f"the file is longer than {MAX_BYTES} bytes")
        except Exception as error:
            file, self._file = self._file, None
            with contextlib.suppress(OSError):
                file.close()
            self._queue.clear()
            self._notice(f"{self._path} is not continued: {error_text(error)}")


def open_trace(
    config: Config, rank: int, name_of: Callable[[torch.Tensor], str], log: EventLog
) -> Trace | None:
    """The recorder that the settings request, if any; a notice if it cannot be opened."""
    if not config.trace_dir:
        return None

    def notice(text: str) -> None:
        log.emit("notice", message=text, severity=logging.WARNING)

    path = Path(config.trace_dir) / f"trace-r{rank:05d}.json"
    try:
        trace = Trace(path, rank, STEPS, name_of, notice, config.agent != "inline")
    except (OSError, ValueError) as error:
        notice(f"no trace is recorded to {path}: {error}; check the setting trace_dir")
        return None
    log.add_callback(trace.on_event)
    return trace


def layer_of(name: str) -> str:
    """The parameter that a stored tensor belongs to, by the tensor's name in a shard."""
    kind, _, rest = name.partition("/")
    if kind == "buffer":
        return "buffers"
    return rest if kind == "model" else rest.rpartition("/")[0]


def label(layers: Sequence[str]) -> str:
    """A short name for some parameters."""
    more = f" +{len(layers) - 1}" if len(layers) > 1 else ""
    return f"{layers[0]}{more}" if layers else "nothing"


def row_names(pid: int, process: str, rows: Sequence[str]) -> list[dict[str, Any]]:
    """Chrome's entries that name a process and its rows, and fix their order."""
    names = [{"name": "process_name", "ph": "M", "pid": pid, "args": {"name": process}}]
    for tid, row in enumerate(rows):
        where = {"ph": "M", "pid": pid, "tid": tid}
        names.append({"name": "thread_name", **where, "args": {"name": row}})
        names.append({"name": "thread_sort_index", **where, "args": {"sort_index": tid}})
    return names


def _open(path: Path) -> BinaryIO:
    """Open the file for another line. Raises ValueError if it is not a trace."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a+b", buffering=0)
    try:
        if file.tell() == 0:
            file.write(b"[\n")
            return file
        file.seek(0)
        content = file.read()
        if not content.startswith(b"[\n"):
            raise ValueError("the file exists, and it is not a trace of Tierckpt")
        # A killed writer may have left an incomplete line.
        file.truncate(content.rindex(b"\n") + 1)
        file.seek(0, os.SEEK_END)
    except BaseException:
        file.close()
        raise
    return file


def _encode(entry: dict[str, Any]) -> str:
    return json.dumps(entry, separators=(",", ":")) + ",\n"
