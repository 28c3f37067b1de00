"""The shim of one rank: it forks the script's process, again after every failure of any rank.

`Times` are those of a restart, from the failure to the first boundary of the next attempt.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from tierckpt._milestones import BOUNDARY, RESTART_VARIABLE
from tierckpt._text import error_text

from . import meeting, process
from . import script as script_process
from .coordinator import OUTSIDE, End, Hub, ended_message, say
from .launcher import Options, Place, is_elastic, place_of, take_place
from .meeting import Link, Message, Rendezvous
from .preload import LearnedFile
from .process import Signals, pass_on

__all__ = ["PARTS", "Shim", "Times"]


PARTS = ("noticed", "ended", "forked", "script", "attach", "attached", "restored", BOUNDARY)
"""Moments, in order. Each part of a restart is the time from the moment before."""


class Times:
    """Moments of the current attempt, on rank 0. Seconds since the epoch."""

    def __init__(self, records: bool, path: str) -> None:
        self._records, self._path = records, path
        self._failed: float | None = None
        self._moments: dict[str, float] = {}

    def start(self, order: Message) -> None:
        """An order to start an attempt has come."""
        self._failed, self._moments = order.get("failed"), {"noticed": time.time()}

    def note(self, name: str, at: float | None = None) -> bool:
        """Note a moment. True for the first boundary after a failure, with which the restart is
        complete."""
        if name in self._moments:
            return False
        self._moments[name] = time.time() if at is None else at
        complete = self._records and self._failed is not None and name == BOUNDARY
        if complete and self._path:
            line = {"failed": self._failed, **self._moments, "parts": self.parts()}
            with contextlib.suppress(OSError), open(self._path, "a") as file:
                file.write(json.dumps(line) + "\n")
        return complete

    def since_failure(self) -> str:
        """The failure, and the moments since then, in order; empty at a first start."""
        if self._failed is None:
            return ""
        return " ".join(f"{at:.6f}" for at in (self._failed, *self._moments.values()))

    def parts(self) -> dict[str, float]:
        """Seconds from each moment to the next."""
        assert self._failed is not None
        found, last = {}, self._failed
        for name in PARTS:
            if name in self._moments:
                found[name], last = self._moments[name] - last, self._moments[name]
        return found

    def text(self, attempt: int) -> str:
        """A line for the user."""
        parts = self.parts()
        shown = ", ".join(f"{name} {seconds:.2f}" for name, seconds in parts.items())
        total = sum(parts.values())
        return (
            f"attempt {attempt} passed its first boundary {total:.2f} s after the failure ({shown})"
        )


ELASTIC = (
    "elastic Horovod replaces failed ranks itself, while others continue: tierckpt run only "
    "forwards signals here. Without --min-np, horovodrun leaves restarts to tierckpt run"
)


class _InScript(BaseException):
    """Raised in the script's process right after its fork, through all callers, to `supervise`."""


class Shim:
    """One rank's shim. Main thread; after `supervise` has returned, this process is the script's.

    Nothing may have been forked before, except by the preload: its processes are gone."""

    def __init__(self, options: Options, place: Place, learned: LearnedFile) -> None:
        self._options, self._place, self._learned = options, place, learned
        self._selector = selectors.DefaultSelector()
        self._awake, wake = os.pipe()
        os.set_blocking(self._awake, False)
        os.set_blocking(wake, False)
        self._wake = wake
        self._signals = Signals(wake)
        self._selector.register(self._awake, selectors.EVENT_READ, self._drain)
        self._rendezvous = Rendezvous(place, self._signals)
        self._hub: Hub | None = None
        self._link = Link(self._selector, self._signals, self._obey, self._link_ended)
        self._is_supervised = True
        """The other shims are there, and a failure leads to the next attempt."""
        self._deadline: float | None = None
        self._helper: int | None = None
        self._script: script_process.ScriptProcess | None = None
        self._next: script_process.ScriptProcess | None = None
        """The process of the next attempt, which waits."""
        self._status: int | None = None
        """How the script of this attempt has ended."""
        self._attempt = 0
        self._is_ending = False
        """This rank was asked from outside to end."""
        self._earlier_children = set(process.children())
        """Children from before, as of a shell: `command & exec tierckpt run train.py`."""
        self._has_rank = not options.standby
        self._times = Times(self._has_rank and place.rank == 0, options.times)

    def supervise(self) -> None:
        """Run the script's attempts. Returns in the script's process alone; the shim's process ends
        as the script has ended."""
        process.adopt_orphans()
        self._signals.place_witness()
        with contextlib.suppress(_InScript):
            self._meet()
            self._serve()

    def _serve(self) -> NoReturn:
        while True:
            wait = None if self._deadline is None else max(self._deadline - time.monotonic(), 0.0)
            for key, _ in self._selector.select(wait):
                if self._selector.get_map().get(key.fd) is key:  # not closed by the one before
                    self._safely(key.data)
            self._safely(self._look_at_signals)
            if self._deadline is not None and time.monotonic() >= self._deadline:
                self._deadline = None
                if self._hub is not None:
                    self._safely(self._hub.give_up)

    def _safely(self, work: Callable[[], None]) -> None:
        """Do a part of the shim's work. A fault in it does not end the script: from then on the
        launcher handles failures."""
        try:
            work()
        except Exception as error:
            text = f"rank {self._place.rank} met {error_text(error)}"
            say(f"{text}: the launcher handles failures from now on")
            self._leave()

    # --- the other shims --------------------------------------------------------------------------

    def _meet(self) -> None:
        place = self._place
        if not self._has_rank:
            self._stand_by()
            return
        if is_elastic(os.environ):
            if place.rank == 0:
                say(ELASTIC)
            self._leave()
            return
        where = meeting.meeting_of(place, self._options.rendezvous) if place.size > 1 else None
        if place.size > 1 and where is None:
            if place.rank == 0:
                say(meeting.NOWHERE)
            self._leave()
            return
        hello = meeting.hello_of(place, self._options)
        if place.rank > 0:
            assert where is not None
            self._link.dial(where, hello)
            return
        listener = None
        if where is not None:
            try:
                listener = meeting.Listener(where, place.size)
            except OSError as error:
                say(
                    f"rank 0's shim cannot listen at port {where.port} ({error}); {meeting.NOWHERE}"
                )
                self._leave()
                return
            self._helper = listener.publish(self._signals)
            self._deadline = time.monotonic() + meeting.PATIENCE_SECONDS
        self._hub = Hub(
            hello,
            self._options.max_restarts,
            self._selector,
            listener,
            self._rendezvous,
            self._obey,
        )
        self._hub.start_if_complete()

    def _stand_by(self) -> None:
        """Wait at rank 0's shim for a rank; after its end, for the one that the launcher starts."""
        where = meeting.meeting_of(self._place, self._options.rendezvous)
        assert where is not None
        self._link.dial(where, meeting.hello_of(self._place, self._options))

    def _link_ended(self, was_made: bool) -> None:
        if not was_made and not self._has_rank:
            say(f"there is no job at {self._options.rendezvous} any more: this spare ends")
            self._end(1 << 8)
        if not was_made:
            say(f"rank {self._place.rank} has not found rank 0's shim; {meeting.NOWHERE}")
        self._leave()

    def _end_helper(self) -> None:
        pid, self._helper = self._helper, None
        if pid is not None:
            process.kill_one(pid)

    def _report(self, message: Message) -> None:
        if self._hub is not None:
            self._hub.handle(0, message)
        else:
            self._link.send(message)

    # --- orders -----------------------------------------------------------------------------------

    def _obey(self, message: Message) -> None:
        match message["order"]:
            case "start":
                self._deadline = None
                self._end_helper()
                self._start(message)
            case "leave":
                self._leave()
            case "finish":
                self._end(0)
            case "wait":
                say(f"this spare waits for a rank at {self._options.rendezvous}")
            case "refused":
                say(f"the job at {self._options.rendezvous} runs another program: this spare ends")
                self._end(2 << 8)
            case "dismissed":
                say(f"a spare has taken rank {self._place.rank}")
                self._end_script()
                self._end(1 << 8)

    def _start(self, message: Message) -> None:
        if slot := message.get("place"):
            take_place(os.environ, slot)
            self._place, self._has_rank = place_of(os.environ), True
        self._times.start(message)
        self._end_script()
        self._times.note("ended")
        self._attempt, self._status = message["attempt"], None
        changes = message["environment"]
        if moments := self._times.since_failure():
            changes = {**changes, RESTART_VARIABLE: moments}
        self._begin(changes)
        self._times.note("forked")

    def _leave(self) -> None:
        """Continue without the others: the end of the script is the end of this process."""
        if not self._has_rank:
            if not self._link.is_open:
                self._stand_by()
            return
        self._is_supervised, self._deadline = False, None
        self._end_helper()
        self._link.end_helper()
        self._end_next()
        if self._status is not None:
            self._end(self._status)
        if self._attempt == 0:
            self._attempt = 1
            self._begin({})

    def _begin(self, changes: Mapping[str, str]) -> None:
        """Start the script of this attempt, with these changes of its environment."""
        self._signals.place_witness()
        script, self._next = self._next, None
        if script is None or not script.begin(self._attempt, changes):
            script = self._forked(former=None)
            script.begin(self._attempt, changes)
        self._script = script
        self._selector.register(script.pidfd, selectors.EVENT_READ, self._script_ended)
        self._selector.register(script.reports, selectors.EVENT_READ, self._reported)

    def _forked(self, former: int | None) -> script_process.ScriptProcess:
        found = script_process.fork_script(
            self._signals, self._learned, self._options, self._place, self._close, former
        )
        if found is None:
            raise _InScript
        return found

    def _prepare(self) -> None:
        """Prepare the next attempt, while this one trains."""
        if not self._is_supervised or self._script is None:
            return
        try:
            if self._next is None and self._attempt <= self._options.max_restarts:
                self._next = self._forked(self._script.pid)
            if self._hub is not None:
                self._hub.prepare()
        except Exception as error:  # no more processes, perhaps: it is done after the failure then
            if self._options.verbose:
                say(f"rank {self._place.rank} prepares no restart: {error_text(error)}")

    def _end_next(self) -> None:
        script, self._next = self._next, None
        if script is not None:
            script.close()
            process.kill_one(script.pid)

    def _close(self) -> None:
        """In the script's process: close everything of the shim."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, int):
                os.close(key.fileobj)
            else:
                closing: Any = key.fileobj
                closing.close()
        self._selector.close()
        self._rendezvous.forget()
        os.close(self._wake)

    # --- the script -------------------------------------------------------------------------------

    def _reported(self) -> None:
        assert self._script is not None
        for name, at in self._script.read():
            if self._times.note(name, at) and self._options.verbose:
                say(self._times.text(self._attempt))
            if name == BOUNDARY:
                self._prepare()

    def _script_ended(self) -> None:
        script = self._script
        assert script is not None
        self._look_for_outside_end(or_comes=True)  # the script may be quicker than this process
        self._reported()
        self._forget(script)
        _, self._status = os.waitpid(script.pid, 0)
        if self._is_supervised:
            final = self._is_ending or script.is_halting
            end = End(
                self._status, script.milestone, script.passed_boundary, final, script.uses_mpi
            )
            self._report(ended_message(self._attempt, end))
        else:
            self._end(self._status)

    def _forget(self, script: script_process.ScriptProcess) -> None:
        self._selector.unregister(script.pidfd)
        self._selector.unregister(script.reports)
        script.close()
        self._script = None

    def _end_script(self) -> None:
        """End the script and its workers."""
        script = self._script
        if script is not None:
            self._forget(script)
        process.kill_tree(script.pid if script is not None else None, self._own())

    def _own(self) -> set[int]:
        """Children that do not belong to the script."""
        waiting = None if self._next is None else self._next.pid
        own = (self._signals.witness, self._helper, self._link.helper, *self._rendezvous.helpers)
        return {*self._earlier_children, *(pid for pid in (*own, waiting) if pid is not None)}

    def _end(self, status: int) -> NoReturn:
        if self._hub is not None:
            self._hub.close()
        self._end_next()
        self._signals.remove_witness()
        self._rendezvous.close()
        process.end_like(status)

    # --- signals ----------------------------------------------------------------------------------

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._awake, 4096)
        script = {self._script.pid} if self._script is not None else set()
        process.reap((self._own() | script) - self._earlier_children)

    def _look_at_signals(self) -> None:
        self._look_for_outside_end()
        numbers, self._signals.received = self._signals.received, []
        if self._script is not None:
            pass_on(self._script.pid, numbers, self._signals.was_for_all)
            self._signals.place_witness()
        elif numbers and self._status is not None:
            self._end(self._status)
        elif fatal := [number for number in numbers if number in OUTSIDE]:
            self._end(fatal[0])

    def _look_for_outside_end(self, or_comes: bool = False) -> None:
        """If the job is being ended from outside, the launcher decides on restarts."""
        ended = self._signals.end_of_witness(or_comes)
        if ended in OUTSIDE or any(number in OUTSIDE for number in self._signals.received):
            self._is_ending = True
            if self._is_supervised:
                self._report({"leaving": True})
