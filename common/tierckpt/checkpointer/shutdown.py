"""Ending: what the end of a job waits for, how long, and what it says meanwhile.

Other ranks wait in a collective while one waits for its disk, and a scheduler waits for nobody. So
every wait here has an end, and what is behind then is named.
"""

from __future__ import annotations

import atexit
import logging
import sys
import time
import weakref
from collections.abc import Callable, Iterable

from tierckpt.agent.client import AgentClient
from tierckpt.config import Config
from tierckpt.coordination.error_barrier import by_rank
from tierckpt.coordination.reports import Reports
from tierckpt.core.levels import place_of
from tierckpt.core.stall_timeout import most_quiet_seconds
from tierckpt.group import Group
from tierckpt.halt.controller import HaltController

NOTICE_SECONDS = 5.0
"""When a wait for the disk, for other nodes or for the persistent level is longer, it is said."""


def is_orderly(error: BaseException | None) -> bool:
    """True for `sys.exit(0)`, which ends a script and is no failure."""
    return isinstance(error, SystemExit) and error.code in (None, 0)


def script_failed() -> bool:
    """When the process ends: whether an error ended the script."""
    error = getattr(sys, "last_value", None) or sys.exc_info()[1]
    return error is not None and not is_orderly(error)


def no_moment(
    group: Group, steps_made: int, turns: int, parted: bool, torn: bool, stepping: Iterable[str]
) -> tuple[str, bool, bool]:
    """Why what is live now is no version: it is not of one moment on all ranks; empty if it is.
    And whether all have cast as many votes (`turns`), and made as many steps. Collective.

    `parted`: this rank found before that others make other steps. `stepping` names optimizers
    whose step began and did not end.
    """
    mine = ""
    if torn:
        mine = "a restore did not come to its end, so the live state is torn"
    elif names := ", ".join(sorted(stepping)):
        mine = f"the step of {names} did not come to its end"
    everyone = group.all_gather_object((steps_made, turns, parted, mine))
    same_votes = len({turns for _, turns, _, _ in everyone}) == 1
    troubles = by_rank([why for *_, why in everyone])
    counts = [steps for steps, *_ in everyone]
    if not troubles and min(counts) < max(counts):
        ahead, behind = counts.index(max(counts)), counts.index(min(counts))
        troubles.append(
            f"rank {ahead} has {counts[ahead]} steps behind it, and rank {behind} {counts[behind]}"
        )
    if not troubles and any(parted for _, _, parted, _ in everyone):
        troubles.append(
            "ranks made as many steps, in different iterations (some rank skipped a step that "
            "others made)"
        )
    return next(iter(troubles), ""), same_votes, min(counts) == max(counts)


_open: set[weakref.WeakMethod[Callable[[], None]]] = set()


def at_exit(end: Callable[[], None]) -> None:
    """Have this method of a checkpointer called when the process ends: a thread of ours that copies
    while torch is taken down would end the process by SIGABRT, whatever the script's own status
    was. The checkpointer is not kept alive."""
    _open.add(weakref.WeakMethod(end, _open.discard))


@atexit.register  # when this is imported: so it comes after all that is registered to close them
def _end_all() -> None:
    for method in list(_open):
        if (end := method()) is not None:
            end()


class Shutdown:
    """One `close()`. Training thread; not collective."""

    disk_answers = False
    """The node's disk has all that was on its way there."""

    def __init__(
        self,
        config: Config,
        agent: AgentClient,
        reports: Reports,
        halting: HaltController,
        nbytes: int,
    ) -> None:
        """It begins now. `nbytes`: of a version, all shards of this node together."""
        self._config, self._agent, self._reports, self._halt = config, agent, reports, halting
        self._patience_seconds = seconds = most_quiet_seconds(nbytes)
        granted = halting.seconds_to_wait()
        self.granted_seconds = seconds if granted is None else min(seconds, granted)
        """So long the node's disk is waited for: less where the allocation ends."""
        self.last_call = time.monotonic() + self.granted_seconds
        """Until then, by `time.monotonic()`."""

    def disk_has_all(self, wait: Callable[[float], bool]) -> bool:
        """Until all is committed, at most until `last_call`. False when it is not, which an event
        then says of each version. `wait` is `Checkpointer.wait`."""
        self.disk_answers = done = wait(max(self.last_call - time.monotonic(), 0.0))
        for id_ in () if done else self._agent.committing():
            why = f"{self._config.directory} has not taken it in {self.granted_seconds:.0f} s"
            self._reports.not_committed_later(id_, f"{why}, and the job ends; {self._heir()}")
        self._reports.say()
        return done

    def await_others(self, hear: Callable[[], None]) -> None:
        """Other nodes and the persistent level: the scheduler may take the node when we are gone.
        As long as what is under way gets on, that is: a store that hangs does not keep the job
        from ending; nor longer than `HaltController` grants. Says that it waits, and what is not
        there in the end; `hear` says meanwhile what fails."""
        granted = self._halt.seconds_for_others
        if self._agent.wait(min(NOTICE_SECONDS, granted()), everything=True):
            return
        self._reports.notice(f"waiting until everything is with {self._farther()}", logging.INFO)
        if self._agent.outlast(self._patience_seconds, granted, hear):
            return
        hear()
        if not (behind := self._agent.under_way()):  # it came in the last moment
            return
        if granted() <= 0:
            why = f"the job was told to end, and not everything is with {self._farther()} yet"
        else:
            quiet = f"for {self._patience_seconds:.0f} s"
            why = f"nothing has moved to {self._farther()} {quiet}, and the job ends"
        text = f"{why}. This node's part stays in {self._config.directory}, and {self._heir()}"
        for level, versions in behind.items():
            for id_ in versions:
                self._reports.left_behind(level, id_, text)

    def _farther(self) -> str:
        """Where something is under way to, in words."""
        return " and ".join(place_of(level, self._config) for level in self._agent.behind())

    def _heir(self) -> str:
        """Who goes on with it."""
        if self._config.agent == "inline":
            return "the next run goes on from there"
        return f"the node's agent (process {self._agent.pid}) goes on with it as long as it lives"


__all__ = ["Shutdown", "at_exit", "no_moment", "script_failed"]
