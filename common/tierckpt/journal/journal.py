"""The journal of a job that keeps none, and has files of an earlier run."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from tierckpt.config import Config
from tierckpt.core.parts import Boundary, Part
from tierckpt.format.ids import VersionId
from tierckpt.group import Group, Node

from . import FOLDER
from .segments import NOT_SET, FileOwner, names_in, remove_all, unused_journal

if TYPE_CHECKING:
    from tierckpt.coordination.agreement import Agreement

CLOSE_SECONDS = 10.0
"""How long `close` waits for a disk."""


class Journal(Part):
    """The journal of a job without the setting `local_journal_steps`: it records nothing, describes
    what an earlier run has left, and removes that when no restart takes it any more. Training
    thread."""

    unused = NOT_SET
    """The reason why a restart makes no steps again, and the remedy."""

    def __init__(self, config: Config, group: Group, node: Node, agreement: Agreement) -> None:
        """All arguments stay their owners'. `node`: that of this rank."""
        self._config, self._group, self._agreement = config, group, agreement
        self.folder = Path(config.directory) / FOLDER
        self._owner = FileOwner(group.rank, group.size, node)
        self._left = bool(names_in(self.folder))
        """An earlier run may have left files."""
        if not (self._left or self.starts_with):
            self.sleep("decided")
        self._complete: deque[VersionId] = deque(maxlen=config.local.retention.keep_last)
        """The newest versions that became complete on all local disks in this run."""

    def decided(self, at: Boundary) -> None:
        """Remove what an earlier run has left, when no restart takes it any more."""
        safe = self._agreement.local.safe
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

    def unused_after(self, base: VersionId, rollback: tuple[int, int], strict: bool) -> str:
        """Describe a journal on this node that leads on from the version `base`, if this restart
        (`strict` or not) makes none of its steps again; empty without one. Never raises."""
        return unused_journal(self._config.directory, base, rollback, self.unused, self._group.size)

    def end(self, remove: bool) -> None:
        """Remove the files, where the last version is durable."""
        if remove and self._left:
            self._retire(None).join(CLOSE_SECONDS)


__all__ = ["CLOSE_SECONDS", "Journal"]
