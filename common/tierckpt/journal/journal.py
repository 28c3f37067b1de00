"""Journal: the interface of a journal, and `NoJournal` for a job that keeps none.

So nobody else asks whether there is a journal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from tierckpt.config import Config
from tierckpt.coordination.error_barrier import ErrorBarrier
from tierckpt.coordination.peer_setup import PeerSetup
from tierckpt.coordination.reports import Reports
from tierckpt.core.levels import Level
from tierckpt.format.facts import VersionFacts
from tierckpt.format.ids import VersionId
from tierckpt.group import Group
from tierckpt.snapshot.copier import Work
from tierckpt.snapshot.staging import Staging
from tierckpt.state.training_state import TrainingState

from .recorder import JournalRecorder
from .replay import Replay
from .support import StepClass
from .unused import NOT_SET, unused_journal


class Journal(Protocol):
    """One rank's journal. Training thread; see `JournalRecorder` for the methods."""

    begins_with: frozenset[Level]
    """After state was loaded that no steps lead to: the levels that a version must go to, so that
    the journal begins again."""

    def pause(self) -> None:
        """Make no further record before `begin_at` or the next version on local."""
        ...

    def begin_at(self, id_: VersionId, writer: int) -> None:
        """Begin with the live state."""
        ...

    def before_step(self, label: str, reads_gradients: Callable[[str], bool]) -> None:
        """Copy the gradients of a step, if it reads them."""
        ...

    def settle(self) -> None:
        """Return when the state may change."""
        ...

    def boundary(
        self,
        id_: VersionId,
        facts_of: Callable[[VersionId], VersionFacts],
        adapter: Callable[[], Any],
        sound: bool,
        local: bool,
        safe: VersionId | None,
        protected: VersionId | None,
    ) -> None:
        """Record a boundary."""
        ...

    def records_after(
        self,
        base: VersionId,
        began: tuple[int, int],
        barrier: ErrorBarrier,
        step_class: StepClass,
        most: int | None,
    ) -> Replay | None:
        """Find the records that follow the version `base`, at most so many; None if there are none.
        Collective."""
        ...

    def unused_after(self, base: VersionId, began: tuple[int, int], strict: bool) -> str:
        """Describe a journal on this node that leads on from the version `base`, if this restart
        (`strict` or not) makes none of its steps again; empty without one. Never raises."""
        ...

    def drain(self, timeout_seconds: float) -> bool:
        """Wait until all records are durable or have failed; False if that takes longer."""
        ...

    def close(self, remove: bool = False) -> None:
        """End; with `remove` also remove the files."""
        ...


class NoJournal:
    """The journal of a job without the setting `local_journal_steps`: it records nothing, and only
    describes what an earlier run has left."""

    begins_with: frozenset[Level] = frozenset()

    def __init__(self, directory: str, size: int) -> None:
        """`directory`: the local directory; `size`: number of ranks of this job."""
        self._directory, self._size = directory, size

    def pause(self) -> None:
        """Nothing."""

    def begin_at(self, id_: VersionId, writer: int) -> None:
        """Nothing."""

    def before_step(self, label: str, reads_gradients: Callable[[str], bool]) -> None:
        """Nothing."""

    def settle(self) -> None:
        """Nothing."""

    def boundary(
        self,
        id_: VersionId,
        facts_of: Callable[[VersionId], VersionFacts],
        adapter: Callable[[], Any],
        sound: bool,
        local: bool,
        safe: VersionId | None,
        protected: VersionId | None,
    ) -> None:
        """Nothing."""

    def records_after(
        self,
        base: VersionId,
        began: tuple[int, int],
        barrier: ErrorBarrier,
        step_class: StepClass,
        most: int | None,
    ) -> None:
        """None."""

    def unused_after(self, base: VersionId, began: tuple[int, int], strict: bool) -> str:
        """Any journal is unused, because the setting is missing."""
        return unused_journal(self._directory, base, began, NOT_SET, self._size)

    def drain(self, timeout_seconds: float) -> bool:
        """True."""
        return True

    def close(self, remove: bool = False) -> None:
        """Nothing."""


def journal_of(
    config: Config,
    group: Group,
    peers: PeerSetup,
    state: TrainingState,
    capture: Staging,
    reports: Reports,
    submit: Callable[[Work], None],
) -> Journal:
    """The journal that the settings ask for. Arguments as for `JournalRecorder`."""
    if not config.local.journal_steps:
        return NoJournal(config.directory, group.size)
    return JournalRecorder(config, group, peers, state, capture, reports, submit)


__all__ = ["Journal", "NoJournal", "journal_of"]
