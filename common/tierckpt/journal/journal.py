"""The journal of a job that keeps none, and the interface to that of a job that does.

So nobody else asks whether there is a journal, and a job without one loads no more than this.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tierckpt.config import Config
from tierckpt.core.levels import Level
from tierckpt.format.ids import VersionId
from tierckpt.format.records import VersionFacts
from tierckpt.group import Group, Node

from .segments import FOLDER, NOT_SET, FileOwner, names_in, remove_all, unused_journal

if TYPE_CHECKING:
    from tierckpt.coordination.error_barrier import ErrorBarrier

    from .replay import Replay
    from .steps import StepClass

CLOSE_SECONDS = 10.0
"""How long `close` waits for a disk."""


class Journal:
    """The journal of a job without the setting `local_journal_steps`: it records nothing, describes
    what an earlier run has left, and removes that when no restart takes it any more. Training
    thread. `JournalRecorder` does what the methods say."""

    begins_with: frozenset[Level] = frozenset()
    """After state was loaded that no steps lead to: the levels that a version must go to, so that
    the journal begins again."""
    unused = NOT_SET
    """The reason why a restart makes no steps again, and the remedy."""

    def __init__(self, config: Config, group: Group, node: Node) -> None:
        """All arguments stay their owners'. `node`: that of this rank."""
        self._config, self._group = config, group
        self.folder = Path(config.directory) / FOLDER
        self._owner = FileOwner(group.rank, group.size, node)
        self._left = bool(names_in(self.folder))
        """An earlier run may have left files."""
        self._complete: deque[VersionId] = deque(maxlen=config.local.keep_last)
        """The newest versions that became complete on all local disks in this run."""

    def pause(self) -> None:
        """Make no further record before `begin_at` or the next version on local, because state is
        loaded that no steps lead to."""

    def begin_at(self, id_: VersionId, writer: int) -> None:
        """Begin with the live state, which equals a version or record of an earlier run; `writer`
        is the generation of this run."""

    def before_step(self, label: str, reads_gradients: Callable[[str], bool]) -> None:
        """Copy the gradients of the optimizer of that label, which is about to make its step, if
        this step reads them (see `Adapter`)."""

    def settle(self) -> None:
        """Return when the state may change: nothing of it is read any more."""

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
        """Record the boundary of the version `id_`, before that is taken.

        Args:
            id_: its version, whether one is taken or not.
            facts_of: returns the facts of a version.
            adapter: returns the adapter's values; may raise.
            sound: the live state could be a version.
            local: a version goes to local, and the journal goes on from it.
            safe: the newest version that is complete on all local disks.
            protected: the newest one that the peer level can rebuild.
        """
        if not self._left or safe is None or (self._complete and self._complete[-1] >= safe):
            return
        self._complete.append(safe)
        if len(self._complete) == self._complete.maxlen:
            self._retire(self._complete[0])

    def _retire(self, oldest: VersionId | None) -> threading.Thread:
        """Remove the files that lead on from versions older than this one, the oldest that a
        restart takes; None: all files. Returns the thread that does it."""

        def retire() -> None:
            there = [*filter(self._owner.tidies, names_in(self.folder))]
            old = [name for name in there if oldest is None or name.base.id < oldest]
            with contextlib.suppress(OSError):  # the next time tries again
                remove_all(self.folder, old)
                self._left = len(there) > len(old)

        thread = threading.Thread(target=retire, name="tierckpt-old-journal", daemon=True)
        thread.start()
        return thread

    def records_after(
        self,
        base: VersionId,
        began: tuple[int, int],
        barrier: ErrorBarrier,
        step_class: StepClass,
        most: int | None,
    ) -> Replay | None:
        """Find the records that follow the version `base`; None if there are none. Arguments as for
        `Replay`; the caller closes it. Collective."""
        return None

    def unused_after(self, base: VersionId, began: tuple[int, int], strict: bool) -> str:
        """Describe a journal on this node that leads on from the version `base`, if this restart
        (`strict` or not) makes none of its steps again; empty without one. Never raises."""
        return unused_journal(self._config.directory, base, began, self.unused, self._group.size)

    def drain(self, timeout_seconds: float) -> bool:
        """Wait until all records are durable or have failed; False if that takes longer."""
        return True

    def close(self, remove: bool = False) -> None:
        """End; with `remove` the last version is durable, and the files are removed."""
        if remove and self._left:
            self._retire(None).join(CLOSE_SECONDS)


__all__ = ["CLOSE_SECONDS", "Journal"]
