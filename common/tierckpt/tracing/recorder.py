"""Trace: when this rank did what, as Chrome-trace JSON, for one time axis with the allreduces.

Off unless `trace_dir` is set; then each rank appends to `<trace_dir>/trace-r<rank>.json` through
the first `trace_steps` boundaries of its run. `tierckpt trace` reads these files; so do Chrome's
`about:tracing` and Perfetto.

The file is a JSON array that is never closed, which both viewers accept: whatever kills the
process, what was written before is readable. A new run cuts off a torn last line and goes on
behind it. Time stamps are microseconds of Unix time, taken once and carried on by the monotonic
clock, so that a clock that is set while the job runs bends nothing.

Kinds of entries, which are their `cat`:

| kind | row | what |
|---|---|---|
| `begin` | training | a run begins: rank, process id, host |
| `boundary`, `barrier` | training | the two stalls |
| `update` | training | an optimizer changes the weights |
| `trace` | training | this recorder writes its file |
| `slot` | copier | finding a slot, and waiting for it |
| `copy` | the thread that did it | a block (on a GPU: a batch of them), copied and hashed |
| `tree` | the thread that did it | the same of the rank tree, which belongs to no layer |
| `seal` | the thread that did it | header, manifest and seal |
| `release` | launches | the reduction of these parameters was launched |
| `allreduce` | allreduce | from there to its end, where the adapter can tell |
| `write`, `commit` | agent | durations as the agent told them, drawn from the seal on |
| `names` | training | what another timeline calls the reductions, and of which layers they are |
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    import torch

    from tierckpt.config import Config
    from tierckpt.events import Event, EventLog
    from tierckpt.snapshot.copy_plan import CopyPlan

ROW_NAMES = ("training", "copier", "launches", "allreduce", "agent")
TRAINING, COPIER, LAUNCHES, ALLREDUCE, AGENT = range(len(ROW_NAMES))

MOST_BYTES = 64 * 1024 * 1024
"""A file that is longer takes no more, however many steps are still asked for."""
END_SECONDS = 1.0
"""How long the last boundary waits for what is over already, and only has to say so."""


class Trace:
    """One rank's recorder; see the module's text.

    `copied`, `span` and `released` may be called by any thread and only append to a queue;
    everything else is the training thread's. Times are `time.perf_counter()` seconds. Whatever goes
    wrong ends the recording with a notice, and never raises.

    Args:
        path: the file; made or continued. OSError when that is not possible, ValueError when it is
            something else's.
        steps: so many boundaries are recorded, from now on.
        name_of: the name of a parameter.
        notice: called with a sentence when the recording ends early.
    """

    def __init__(
        self,
        path: Path,
        rank: int,
        steps: int,
        name_of: Callable[[torch.Tensor], str],
        notice: Callable[[str], object],
    ) -> None:
        self.rank = rank
        self._path = path
        self._left = steps
        self._name_of = name_of
        self._notice = notice
        self._trainer = threading.get_ident()
        self._queue: deque[Callable[[], str]] = deque()
        """Lines to be, made by the training thread: the others have better things to do."""
        self._layers: tuple[CopyPlan | None, list[list[str]]] = (None, [])
        self._sealed_at: dict[int, float] = {}
        self._reducing: set[torch.futures.Future[Any]] = set()
        """Reductions whose end was not recorded yet."""
        self._update_begin: float | None = None
        self._epoch_us = time.time_ns() / 1e3 - 1e6 * time.perf_counter()
        self._file: BinaryIO | None = _open(path)
        self._begin()

    # --- any thread ----------------------------------------------------------------------------

    def span(
        self,
        kind: str,
        begin_seconds: float,
        end_seconds: float,
        row: int | None = None,
        **args: Any,
    ) -> None:
        """Something lasted; without a row it is on that of the calling thread."""
        row = self._row() if row is None else row
        if kind == "seal":
            self._sealed_at[args["version"]] = end_seconds
        self._queue.append(lambda: self._line(kind, kind, row, begin_seconds, end_seconds, args))

    def copied(
        self, version: int, plan: CopyPlan, blocks: Sequence[int], begin_seconds: float
    ) -> None:
        """Blocks were copied and hashed, from `begin_seconds` until now."""
        end_seconds, row = time.perf_counter(), self._row()

        def line() -> str:
            known = self._layers_of(plan)
            layers = list(dict.fromkeys(chain.from_iterable(known[b] for b in blocks)))
            nbytes = sum(plan.layout.blocks[b].nbytes for b in blocks)
            args = {"version": version, "bytes": nbytes, "layers": layers}
            return self._line("copy", label(layers), row, begin_seconds, end_seconds, args)

        self._queue.append(line)

    def released(
        self,
        params: Iterable[torch.Tensor],
        version: int,
        reduction: torch.futures.Future[Any] | None = None,
        launched_seconds: float | None = None,
    ) -> None:
        """The reduction of these parameters' gradients was launched: then, or just now.

        A `reduction` tells when it ends. On a GPU it is done as soon as it is enqueued, which
        would tell nothing, so it is not asked.
        """
        begin, held = launched_seconds or time.perf_counter(), list(params)

        def line(kind: str, row: int, end_seconds: float | None) -> str:
            names = [self._name_of(p) for p in held]
            nbytes = sum(p.nbytes for p in held)
            args = {"version": version, "bytes": nbytes, "layers": names}
            return self._line(kind, label(names), row, begin, end_seconds, args)

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

    def boundary(self, version: int, begin_seconds: float) -> Trace | None:
        """A boundary is over: write what was recorded. None once all asked for is recorded."""
        begin = time.perf_counter()
        self.span("boundary", begin_seconds, begin, version=version)
        self._left -= 1
        if self._left <= 0:
            self._await_ends()
        self._flush()
        self.span("trace", begin, time.perf_counter())
        if self._left <= 0:
            self.close()
        return None if self._file is None else self

    def _await_ends(self) -> None:
        """Of reductions that are over: who waited for one may go on before its callback was called,
        and here nothing comes later that would write it."""
        give_up = time.monotonic() + END_SECONDS
        while any(r.done() for r in tuple(self._reducing)) and time.monotonic() < give_up:
            time.sleep(0.001)

    def watch(self, optimizers: Mapping[str, torch.optim.Optimizer]) -> list[Any]:
        """Record their updates; returns the hooks' handles. To be called after the barrier's."""
        handles: list[Any] = []
        for name, optimizer in optimizers.items():
            handles.append(optimizer.register_step_pre_hook(self._before_update))
            handles.append(optimizer.register_step_post_hook(self._after_update(name)))
        return handles

    def know(self, names: Mapping[str, Sequence[str]]) -> None:
        """Record under which names a library's own timeline has the reductions.

        `names`: for each name the parameters whose gradients go by it. Mostly one; several where
        reductions that never run at the same time share a name. Empty: that timeline has none of
        this rank's.
        """
        now = time.perf_counter()
        self._queue.append(
            lambda: self._line("names", "names", TRAINING, now, None, {"reductions": dict(names)})
        )

    def _before_update(self, *_: Any) -> None:
        # Horovod's step is a step around a step: the last beginning is the one of the update.
        self._update_begin = time.perf_counter()

    def _after_update(self, name: str) -> Callable[..., None]:
        def after_update(*_: Any) -> None:
            begin, self._update_begin = self._update_begin, None
            if begin is not None and self._file is not None:
                self.span("update", begin, time.perf_counter(), TRAINING, optimizer=name)

        return after_update

    def on_event(self, event: Event) -> None:
        """A callback of the event log: what the agent did, from what it told."""
        if event.name not in ("committed", "failed"):
            return
        begin = self._sealed_at.pop(event.version, None)
        if event.name == "committed" and begin is not None and self._file is not None:
            for kind in ("write", "commit"):
                end = begin + event.seconds[kind]
                self.span(kind, begin, end, AGENT, version=event.version, bytes=event.nbytes)
                begin = end

    def close(self) -> None:
        """Write what is left and close the file; what is recorded later is dropped."""
        self._flush()
        if self._file is not None:
            self._file.close()
            self._file = None
        self._queue.clear()
        self._reducing.clear()
        self._layers = (None, [])  # a plan holds on to every tensor of the state

    # --- the file ------------------------------------------------------------------------------

    def _begin(self) -> None:
        about = {"rank": self.rank, "pid": os.getpid(), "host": socket.gethostname()}
        names = "".join(map(_encode, row_names(self.rank, f"rank {self.rank}", ROW_NAMES)))
        now = time.perf_counter()
        begin = self._line("begin", "begin", TRAINING, now, None, about)
        self._queue.append(lambda: names + begin)
        self._flush()

    def _line(
        self, kind: str, name: str, row: int, begin: float, end: float | None, args: dict[str, Any]
    ) -> str:
        ts = self._us(begin)
        shape: dict[str, Any] = (
            {"ph": "i", "s": "t", "ts": ts}
            if end is None
            else {"ph": "X", "ts": ts, "dur": max(0, self._us(end) - ts)}
        )
        return _encode(
            {"name": name, "cat": kind, **shape, "pid": self.rank, "tid": row, "args": args}
        )

    def _us(self, seconds: float) -> int:
        """Unix time in whole microseconds, of which a float in JSON can hold no fractions."""
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
        """Write the queue out in one call, so that a line is torn only by a machine that stops."""
        if self._file is None:
            return
        try:
            lines = []
            while self._queue:  # other threads append to it meanwhile
                lines.append(self._queue.popleft()())
            data = "".join(lines).encode()
            if self._file.write(data) != len(data):
                raise OSError("not everything could be written")
            if self._file.tell() > MOST_BYTES:
                raise OSError(f"the file is longer than {MOST_BYTES} bytes")
        except Exception as error:
            file, self._file = self._file, None
            file.close()
            self._queue.clear()
            self._notice(f"{self._path} is not continued: {type(error).__name__}: {error}")


def open_trace(
    config: Config, rank: int, name_of: Callable[[torch.Tensor], str], log: EventLog
) -> Trace | None:
    """The recorder that the settings ask for, if any; a notice when it cannot be had."""
    if not config.trace_dir:
        return None

    def notice(text: str) -> None:
        log.emit("notice", message=text, severity=logging.WARNING)

    path = Path(config.trace_dir) / f"trace-r{rank:05d}.json"
    try:
        trace = Trace(path, rank, config.trace_steps, name_of, notice)
    except (OSError, ValueError) as error:
        notice(f"no trace is recorded to {path}: {error}; see the setting trace_dir")
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
    """A short name for a few parameters."""
    more = f" +{len(layers) - 1}" if len(layers) > 1 else ""
    return f"{layers[0]}{more}" if layers else "nothing"


def row_names(pid: int, process: str, rows: Sequence[str]) -> list[dict[str, Any]]:
    """Chrome's entries that give a process and its rows their names, and keep them in order."""
    names = [{"name": "process_name", "ph": "M", "pid": pid, "args": {"name": process}}]
    for tid, row in enumerate(rows):
        where = {"ph": "M", "pid": pid, "tid": tid}
        names.append({"name": "thread_name", **where, "args": {"name": row}})
        names.append({"name": "thread_sort_index", **where, "args": {"sort_index": tid}})
    return names


def _open(path: Path) -> BinaryIO:
    """The file, ready for another line. Raises ValueError when it is no trace."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a+b", buffering=0)
    try:
        if file.tell() == 0:
            file.write(b"[\n")
            return file
        file.seek(0)
        content = file.read()
        if not content.startswith(b"[\n"):
            raise ValueError("the file is there, and it is not a trace of ours")
        # A killed writer may have left half a line, and nothing can follow on that.
        file.truncate(content.rindex(b"\n") + 1)
        file.seek(0, os.SEEK_END)
    except BaseException:
        file.close()
        raise
    return file


def _encode(entry: dict[str, Any]) -> str:
    return json.dumps(entry, separators=(",", ":")) + ",\n"
