"""The end of a job: the waits for disk, other nodes and stores, and trainings that have finished.

Without torch. While one rank waits for its disk, other ranks wait in a collective, and the
scheduler may kill all. So every wait here has a limit, and events name the versions that are
incomplete at that limit.

A finished training made its last step, and closed without an error or a halt. A restart continues
where a run was killed or halted. From the end of a finished training it continues as well (with
more epochs), but a second training that shares its path would take that end for its own result. Two
cases are certain, and refused: the start waited for that run and saw it finish
(`JobFinishedError`), or this process itself has finished it, and a model, an optimizer or a trainer
is another object now (a further fold, fine-tuning, a trial). In all other cases nobody can know,
and a run that makes no step says so.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tierckpt import _milestones
from tierckpt._text import size_text
from tierckpt.agent.client import AgentClient
from tierckpt.config import Config
from tierckpt.coordination.versions import Reports
from tierckpt.core.decisions import EarlyEnd, most_quiet_seconds
from tierckpt.core.levels import LOCAL, PERSISTENT, place_of
from tierckpt.errors import RestoreError
from tierckpt.events import logger
from tierckpt.format.ids import VersionId
from tierckpt.format.records import TRAINING_END
from tierckpt.restore.progress import Progress
from tierckpt.storage.job_directory import JobDirectory
from tierckpt.storage.notes import RunRecords

__all__ = ["Finished", "Shutdown", "WaitProgress", "at_exit", "end_now", "script_failed"]


_ends: dict[tuple[str, int], tuple[int, VersionId, list[weakref.ref[Any]]]] = {}
"""By place and rank: the process, the last version, and the parts of the newest training that this
process has finished there."""


class Finished:
    """One rank's knowledge of finished trainings at its places. Training thread."""

    asked = False
    """The script asks for the newest version by an argument of its framework."""
    trains = False
    """The run is a training for certain, not a look at the result of one."""
    _started_at_end = False
    """The restored version is the last one of a run that has finished."""

    def __init__(
        self, config: Config, rank: int, job: JobDirectory, parts: Sequence[Any], reports: Reports
    ) -> None:
        """`parts`: the objects that stay together in a training; if all are the same again, it is
        the same training."""
        self.parts = parts
        self._config, self._rank, self._job, self._reports = config, rank, job, reports

    def _places(self) -> Iterator[tuple[str, int]]:
        if self._config.uses(LOCAL):
            yield os.path.realpath(self._config.directory), self._rank
        yield str(self._job.path), self._rank
        if self._config.uses(PERSISTENT):
            yield self._config.persistent.path, self._rank

    def refuse(self, found: VersionId) -> None:
        """Raise RestoreError if this process has finished a training with other parts there, and
        `found` would be its end."""
        for place in self._places():
            process, end, parts = _ends.get(place, (0, found, []))
            same = [id(ref()) for ref in parts] == [id(each) for each in self.parts]
            if process == os.getpid() and found.generation <= end.generation and not same:
                _milestones.reached(_milestones.REFUSED)
                raise RestoreError(
                    f"{place[0]} has the end of another training, v{end.version}: this process has "
                    "finished it, and made a model, an optimizer or a trainer since. This one "
                    "would take that end for its own, and make no step or too few",
                    "Give each training a path of its own (with fork_from=THAT PATH it starts with "
                    f"that end). To continue here: restore(version={found.version}), or the "
                    f"setting rollback_to={found.version}",
                )

    def started_with(self, run_id: str, version: int) -> None:
        """The run starts with this version of that run."""
        self._started_at_end = False
        if self._rank == 0 and self._config.uses(LOCAL):
            with contextlib.suppress(Exception):  # it is for a warning only
                end = RunRecords(self._config.directory).end_of(run_id)
                self._started_at_end = end is not None and (
                    (end.reason, end.version) == (TRAINING_END, version)
                )

    def closed(self, last: VersionId, steps: int) -> int | None:
        """The training has closed with this version, after so many steps of this run, and not
        because it was halted. Returns the version if it has finished by itself."""
        if sys.exc_info()[1] is not None:  # close() in a `finally`
            return None
        parts = [weakref.ref(each) for each in self.parts]
        _ends.update(dict.fromkeys(self._places(), (os.getpid(), last, parts)))
        if not steps and (self.trains or self._started_at_end):
            here = " where an earlier run has finished" if self._started_at_end else ""
            self._reports.notice_of_all(
                f"nothing is left to train: this run has made no step. It started with "
                f"v{last.version},{here or ' its last one'}. If it is to continue, raise its "
                "number of steps or epochs; another training needs another path",
                logging.WARNING,
            )
        return last.version if steps else None


NOTICE_SECONDS = 5.0
"""A longer wait for the disk, for other nodes or for the persistent level is reported."""
LINE_SECONDS = 30.0
"""A wait of this time is reported again, with its progress."""


def is_orderly(error: BaseException | None) -> bool:
    """True for `sys.exit(0)`: a normal end of a script."""
    return isinstance(error, SystemExit) and error.code in (None, 0)


def script_failed() -> bool:
    """True if an error ended the script. Called at the end of the process."""
    error = getattr(sys, "last_value", None) or sys.exc_info()[1]
    return error is not None and not is_orderly(error)


_open: set[weakref.WeakMethod[Callable[[], None]]] = set()


def at_exit(end: Callable[[], None]) -> None:
    """Call this method of a checkpointer when the process ends. Keeps no reference to the
    checkpointer.

    A copying thread that still runs while torch shuts down would end the process by SIGABRT,
    whatever the exit status of the script."""
    _open.add(weakref.WeakMethod(end, _open.discard))


_exit_status: list[int] = []
"""Statuses with which checkpointers that were closed at exit want the process to end."""


def end_now(end: Callable[[], None]) -> None:
    """Call a function that closes a checkpointer, in a handler at exit: where Python would ignore a
    SystemExit, the process ends with its status when all are closed."""
    try:
        end()
    except SystemExit as error:
        _exit_status.append(int(error.code or 0))


@atexit.register  # at import: so it runs after all handlers that close checkpointers
def _end_all() -> None:
    for method in list(_open):
        if (end := method()) is not None:
            end_now(end)
    if any(_exit_status):
        logging.shutdown()
        for stream in filter(None, (sys.stdout, sys.stderr)):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(max(_exit_status))


class WaitProgress:
    """Progress of a wait for the agent: a bar on rank 0's terminal, and events now and then.

    The bar appears after a second; the first event comes after NOTICE_SECONDS, from the first rank
    of each node, the next ones after LINE_SECONDS and each time twice as long. Training thread.
    """

    def __init__(
        self, config: Config, agent: AgentClient, reports: Reports, rank: int, speaks: bool
    ) -> None:
        """Start the time now. `speaks`: this is the first rank of its node."""
        self._config, self._agent, self._reports = config, agent, reports
        has_bar = Progress.wanted(rank, None)
        self._bar = Progress(has_bar)
        # The bar has the terminal's line; without logging set up, text would go there as well.
        shown = speaks and not (has_bar and not logger.hasHandlers())
        self._severity = logging.INFO if shown else logging.DEBUG
        self._started = time.monotonic()
        self._line_seconds = LINE_SECONDS
        self._phase, self._done_bytes = ("", 0), 0

    def say(self, text: str) -> None:
        """Emit an event about the wait."""
        self._reports.waiting(text, self._severity)

    def look(self) -> None:
        """Show the progress, and what hangs; called every now and then."""
        for problem in self._agent.problems():
            self._reports.on_agent_message(problem)
        what, done, total = self._state()
        if (what, total) != self._phase or done < self._done_bytes:
            self._phase, self._done_bytes = (what, total), 0
            self._bar.start_phase(what, total)
        self._bar.advance(done - self._done_bytes)
        self._done_bytes = done
        waited = time.monotonic() - self._started
        if waited >= self._line_seconds:
            self._line_seconds *= 2
            amount = f": {size_text(done) or '0 B'} of {size_text(total)}" if total else ""
            self.say(f"still {what}{amount}, for {waited:.0f} s now")

    def _state(self) -> tuple[str, int, int]:
        """The awaited work, its bytes done and in all (0: unknown)."""
        if committing := self._agent.committing():
            return f"writing {committing[-1]} to {self._config.directory}", 0, 0
        behind = self._agent.behind()
        if PERSISTENT in behind:  # a question to no agent would start one
            self._agent.ask_progress()
        place, flush = place_of(PERSISTENT, self._config), self._agent.flush_under_way
        if flush is None or PERSISTENT not in behind:
            places = " and ".join(place_of(level, self._config) for level in behind)
            return f"waiting for {places or 'other ranks'}", 0, 0
        return f"storing {flush.id} on {place}", flush.done_bytes, flush.total_bytes

    def close(self) -> None:
        """Remove the bar."""
        self._bar.close()


class Shutdown:
    """One `close()`. Training thread; not collective."""

    disk_answers = False
    """True once the node's disk has all versions that were on their way to it."""

    def __init__(
        self,
        config: Config,
        agent: AgentClient,
        reports: Reports,
        halting: EarlyEnd,
        nbytes: int,
    ) -> None:
        """Start the time limits now. `nbytes`: size of a version's shards on this node."""
        self._config, self._agent, self._reports, self._halt = config, agent, reports, halting
        self._patience_seconds = seconds = most_quiet_seconds(nbytes)
        granted = halting.seconds_to_wait()
        self.granted_seconds = seconds if granted is None else min(seconds, granted)
        """Longest wait for the node's disk; shorter if the allocation ends soon."""
        self._started = time.monotonic()
        self.last_call = self._started + self.granted_seconds
        """End of that wait, by `time.monotonic()`."""

    def disk_has_all(self, wait: Callable[[float], bool]) -> bool:
        """Wait until all versions are committed, at most until `last_call`. If some are not, emits
        an event for each of them and returns False. `wait` is `Checkpointer.wait`."""
        self.disk_answers = done = wait(max(self.last_call - time.monotonic(), 0.0))
        for id_ in () if done else self._agent.committing():
            waited = time.monotonic() - self._started
            why = f"{self._config.directory} has not stored it in {waited:.0f} s"
            self._reports.not_committed_later(id_, f"{why}, and the job ends; {self._successor()}")
        self._reports.say()
        return done

    def await_others(self, collect: Callable[[], None], progress: WaitProgress) -> None:
        """Wait for other nodes and the persistent level: after the job the scheduler may take the
        node away.

        Waits only while there is progress, so that a hanging store does not keep the job from
        ending, and no longer than `EarlyEnd` grants. Shows `progress`, and emits an event for each
        incomplete version at the end; `collect` reports failures during the wait."""
        granted, look = self._halt.seconds_for_others, progress.look
        if self._agent.wait(min(NOTICE_SECONDS, granted()), everything=True, on_look=look):
            return
        progress.say(f"waiting until all versions are stored on {self._targets()}")
        if self._agent.outlast(self._patience_seconds, granted, collect, look):
            return
        collect()
        if not (incomplete := self._agent.under_way()):  # completed at the last moment
            return
        if granted() <= 0:
            why = f"the job has to end, and not all versions are stored on {self._targets()} yet"
        else:
            quiet = f"for {self._patience_seconds:.0f} s"
            why = f"nothing has moved to {self._targets()} {quiet}, and the job ends"
        text = f"{why}. This node's part stays in {self._config.directory}, and {self._successor()}"
        for level, versions in incomplete.items():
            for id_ in versions:
                self._reports.left_behind(level, id_, text)

    def _targets(self) -> str:
        """The levels that versions are on their way to, as text."""
        return " and ".join(place_of(level, self._config) for level in self._agent.behind())

    def _successor(self) -> str:
        """The process that continues with the incomplete versions, as text."""
        if self._config.agent == "inline":
            return "the next run continues from there"
        return f"the node's agent (process {self._agent.pid}) continues as long as it runs"
