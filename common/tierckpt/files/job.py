"""A job without a training state: the levels of a program whose ranks store files.

It has the parts of a checkpointer below the snapshot. Ranks do not vote while they compute; they
exchange what they know in collectives of the calls that the program makes anyway.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tierckpt.callbacks import CallbackList, Callbacks
from tierckpt.checkpointer.levels.job_parts import JobParts
from tierckpt.config import AUTO, AUTOMATIC, Config
from tierckpt.coordination.ballots.vote_exchange import Cast
from tierckpt.coordination.peer_setup import redundancy_groups
from tierckpt.coordination.settings_check import agree_on_settings
from tierckpt.core.halt_conditions import NO_HALT, HaltVote, Reason
from tierckpt.core.votes import Vote
from tierckpt.errors import ConfigError
from tierckpt.events import Callback, check_receiver
from tierckpt.group import Group
from tierckpt.halt.controller import HaltController
from tierckpt.storage.routed.folders import FileFolders


class _NoBallots:
    """No votes: see the module's text."""

    problem = ""

    def all_reduce_min(self, values: list[int], own: Sequence[int] = ()) -> Cast:
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


class FilesJob(JobParts):
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
        votes = self.group.all_gather_object(self.halt.vote(self.version))
        self.unattended = self.halt.receive(_agreed(votes))
        self.levels.promotion.backlog.go_on()

    def collect(self) -> None:
        """Process the agent's messages. Not collective."""
        self.levels.collect()
        self.reports.say()

    def warn(self, text: str) -> None:
        """Emit a warning that is the same on all ranks."""
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
        self.levels.drift.wait()
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


def _agreed(votes: Sequence[HaltVote]) -> Vote:
    """The ranks' agreement on an early end, as a reduction of votes would give it."""
    first = min((vote for vote in votes), key=lambda vote: vote.reason, default=NO_HALT)
    left = min(vote.seconds_left for vote in votes)
    silent = all(vote.silent for vote in votes)
    return Vote(halt=first.reason, unattended=int(silent), halt_seconds=left)


__all__ = ["FilesJob"]
