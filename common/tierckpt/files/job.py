"""A job without a training state: the levels of a program with ranks that store files.

It has what a checkpointer has below the snapshot. Ranks do not vote while they compute; they
exchange what they know in collectives of the calls that the program makes anyway.

All ranks make the same calls. The levels where a version is due are one rank's; rank 0's decides.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from tierckpt.callbacks import CallbackList, Callbacks
from tierckpt.checkpointer.levels import JobBase
from tierckpt.config import AUTO, AUTOMATIC, Config
from tierckpt.coordination.ballots import Cast
from tierckpt.coordination.peers import redundancy_groups
from tierckpt.coordination.settings_check import agree_on_settings
from tierckpt.core.decisions import NO_HALT, HaltVote, Reason
from tierckpt.core.levels import INTERVALS, MEMORY, Level
from tierckpt.errors import ConfigError, TierckptError
from tierckpt.events import Callback, check_receiver
from tierckpt.group import Group, Pending, SingleGroup
from tierckpt.halt.controller import HaltController
from tierckpt.storage.routed import FileFolders

if TYPE_CHECKING:
    import torch

__all__ = ["FilesJob", "Intervals", "SameCalls", "group_of"]


SAME = {"__exit__": "close"}
"""Calls that do the same as others."""


class SameCalls:
    """A group with gathers that find out that ranks make different calls, as with `if rank == 0:`
    around one of them. Otherwise each rank would take the others' values for something else. Is a
    `Group`; the methods are those of the group inside."""

    def __init__(self, inner: Group) -> None:
        """Takes ownership of `inner`."""
        self._inner = inner
        self.rank, self.size = inner.rank, inner.size

    def all_gather_object(self, value: Any) -> list[Any]:
        """As in Group. Raises TierckptError, on these ranks, if they come from different calls."""
        seen: list[tuple[str, Any]] = self._inner.all_gather_object((_call(), value))
        ranks: dict[str, int] = {}
        for rank, (call, _) in enumerate(seen):
            ranks.setdefault(call, rank)
        if len(ranks) > 1:
            calls = ", ".join(f"{call} on rank {rank}" for call, rank in ranks.items())
            raise TierckptError(
                f"the ranks make different calls: {calls}. All ranks must make the same calls, in "
                "the same order: none of them alone in `if rank == 0:`"
            )
        return [theirs for _, theirs in seen]

    def broadcast(self, buffer: torch.Tensor, source: int) -> None:
        """As in Group."""
        self._inner.broadcast(buffer, source)

    def all_reduce_min(self, values: list[int]) -> Pending:
        """As in Group."""
        return self._inner.all_reduce_min(values)

    def barrier(self) -> None:
        """As in Group."""
        self._inner.barrier()

    def meet(self, timeout_seconds: float) -> bool:
        """As in Group."""
        return self._inner.meet(timeout_seconds)

    def close(self) -> None:
        """As in Group."""
        self._inner.close()


def _call() -> str:
    """The call of the program that this thread is in: the outermost function of this package."""
    frame: FrameType | None = sys._getframe(1)
    name = ""
    while frame is not None and frame.f_globals.get("__name__", "").startswith("tierckpt."):
        name, frame = frame.f_code.co_name, frame.f_back
    return f"{SAME.get(name, name)}()"


def group_of(given: Any) -> Group:
    """The group for the argument `group` of `Files`. Raises ConfigError for another object."""
    if given is None:
        return SingleGroup()
    if isinstance(given, Group):
        return given if isinstance(given, SameCalls) else SameCalls(given)
    if hasattr(given, "Get_rank") and hasattr(given, "Dup"):
        from tierckpt.mpi import MPIGroup

        return SameCalls(MPIGroup(given))
    raise ConfigError(
        f"group is a {type(given).__name__}; give a communicator of mpi4py (MPI.COMM_WORLD), a "
        "tierckpt.Group (ddp_ckpt.TorchGroup() in a job of torch), or None for one process"
    )


class _NoBallots:
    """No votes: see the module's text."""

    problem = ""

    def all_reduce_min(self, values: list[int], own: Sequence[int] = ()) -> Cast:
        raise NotImplementedError("a job of files does not vote")

    def repeat(self, place: int) -> Cast | None:
        raise NotImplementedError("a job of files does not vote")

    def even_out(self) -> None:
        """Do nothing: there are no votes."""

    def recover(self) -> bool:
        """No vote can be lost."""
        return False

    def passed(self, iterations: int) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class FilesJob(JobBase):
    """One rank's part of a job of files. Owns it; one thread; the constructor is collective.

    Raises the errors of `Checkpointer` at attach: ConfigError and JobBusyError, on all ranks.
    """

    version = 0
    """Number of the newest version, for events."""
    unattended = False
    """The job is to end early, and the program never asks for that."""

    def __init__(
        self,
        group: Group,
        settings: Mapping[str, Any],
        config_file: str | os.PathLike[str] | None,
        files_dir: str | os.PathLike[str] | None,
        on_event: Callback | None,
        callbacks: Iterable[Callbacks],
    ) -> None:
        check_receiver(on_event)
        registered = CallbackList(callbacks)
        config, topology = agree_on_settings(settings, config_file, group)
        _refuse_automatic(config)
        groups, unprotected = redundancy_groups(config, topology, group)
        with contextlib.ExitStack() as undo:
            undo.callback(group.close)
            super().__init__(config, group, topology, registered, on_event, undo)
            self.enter(_NoBallots(), config.slots or 2, lambda: self.version)
            folder = os.fspath(files_dir or config.shm_dir)
            self.folders = FileFolders(folder, self.resources.job, group.rank)
            undo.callback(self.folders.close)
            if unprotected:
                self.warn(unprotected)
            self.connect(groups)
            self.halt = HaltController(config, group.rank, self.node, self.reports.notice)
            undo.pop_all()

    def turn(self) -> None:
        """Learn the news of agents and of all ranks, and let them act. Collective."""
        self.collect()
        self.levels.slot_handoff.take_stock()
        self.agreement.settle(final=False)
        votes = self.group.all_gather_object(self.halt.wish(self.version))
        self.unattended = self.halt.receive(_agreed(votes))
        self.levels.promotion.backlog.advance()

    def collect(self) -> None:
        """Process the agent's messages. Not collective."""
        self.levels.collect()
        self.reports.say()

    def warn(self, text: str) -> None:
        """Emit one warning of all ranks."""
        self.reports.notice_of_all(text)

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until the node's agent has committed all versions, or given them up. Not
        collective."""
        done = self.agent.wait(timeout_seconds)
        self.collect()
        return done

    def shut_down(self, remove: bool, abandoned: bool = False) -> None:
        """Release everything; `remove` also frees the versions in memory. Not collective."""
        self.levels.run_notes.end(self.halt.reason.text(), abandoned, self.version)
        if self.version and not abandoned and self.halt.reason is Reason.NONE:
            self.resources.finished = self.version
        self.halt.close()
        self.folders.close()
        self.agent.close(abandoned=abandoned)
        self.leave(remove)
        self.close_log()


def _refuse_automatic(config: Config) -> None:
    """Raise ConfigError, on all ranks, for settings that only a training loop can have."""
    for name in AUTOMATIC:
        table, _, rest = name.partition("_")
        if getattr(getattr(config, table), rest) == AUTO:
            raise ConfigError(  # on all ranks: settings are equal
                f"{name} is 'auto', which measures the steps of a training: for files give a "
                f"number, or {table}_every_seconds"
            )


def _agreed(votes: Sequence[HaltVote]) -> HaltVote:
    """The ranks' agreement on an early end, as a reduction of votes would give it."""
    first = min((vote for vote in votes), key=lambda vote: vote.reason, default=NO_HALT)
    left = min(vote.seconds_left for vote in votes)
    return HaltVote(first.reason, all(vote.silent for vote in votes), left)


class Intervals:
    """Steps and times since each level took a version. One thread."""

    def __init__(self, config: Config) -> None:
        """Start with no version on any level: the first one is due on all."""
        self._config = config
        self._steps = 0
        self._counted = False
        """The program has called `step` since the last version."""
        self._last_steps: dict[Level, int] = dict.fromkeys(INTERVALS, 0)
        self._last_seconds: dict[Level, float] = dict.fromkeys(INTERVALS, -math.inf)

    def continue_from(self, job: FilesJob) -> None:
        """Start from a restored version: nothing is due before an interval has passed on levels
        that have it."""
        now = time.monotonic()
        for level in INTERVALS:
            if job.agreement.ledgers[level].safe is not None or level == MEMORY:
                self._last_seconds[level] = now

    def step(self) -> None:
        """Count a step."""
        self._steps += 1
        self._counted = True

    def due(self, uses: Callable[[str], bool]) -> set[Level]:
        """The levels in use where a version is due now."""
        now = time.monotonic()
        return {level for level in INTERVALS if uses(level) and self._is_due(level, now)}

    def _is_due(self, level: Level, now_seconds: float) -> bool:
        table = getattr(self._config, level)
        every, passed = table.every_steps, now_seconds - self._last_seconds[level]
        by_steps = every > 0 and self._steps // every > self._last_steps[level] // every
        return bool(by_steps or 0 < table.every_seconds <= passed)

    def completes(self) -> None:
        """A version ends: it counts as a step if the program counts none itself."""
        if not self._counted:
            self._steps += 1
        self._counted = False

    def taken(self, levels: Collection[Level]) -> None:
        """Record that these levels take the version."""
        now = time.monotonic()
        for level in levels:
            self._last_steps[level], self._last_seconds[level] = self._steps, now
