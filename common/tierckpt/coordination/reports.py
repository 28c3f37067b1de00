"""Reports: what becomes of versions, said as events, and entered into the agreement's books.

Reports have three sources: the training thread itself, other threads (kept until the training
thread emits them), and the agent, in messages.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from tierckpt.agent.protocol import (
    AgentMessage,
    Cleaned,
    CommitFailed,
    Committed,
    Flushed,
    FlushFailed,
    ListenFailed,
    Problem,
    Protected,
    ProtectFailed,
)
from tierckpt.callbacks import CallbackList
from tierckpt.config import Config
from tierckpt.core.ledger import BROKEN, DONE
from tierckpt.core.tuning.autotune import Change
from tierckpt.events import EventLog
from tierckpt.format.ids import VersionId
from tierckpt.snapshot.snapshot import Snapshot

from .agreement import Agreement


class Reports:
    """Training thread, but for the methods that say "later", which any thread may call."""

    def __init__(
        self,
        config: Config,
        log: EventLog,
        callbacks: CallbackList,
        agreement: Agreement,
        version: Callable[[], int],
    ) -> None:
        """`version` tells the present one, for what is about no other."""
        self._config, self._log, self._callbacks = config, log, callbacks
        self._agreement = agreement
        self._version = version
        self._later: deque[tuple[str, dict[str, Any]]] = deque()
        self._persistent: VersionId | None = None
        """The newest version that is complete there, as far as this node's agent saw it."""

    # --- the training thread's own -------------------------------------------------------------

    def emit(self, name: str, **values: Any) -> None:
        """An event, and the callback of its name if there is one."""
        event = self._log.emit(name, **{"version": self._version(), **values})
        if name in ("sealed", "committed"):
            self._callbacks.call(f"on_{name}", event)

    def notice(self, text: str, severity: int) -> None:
        """Something worth a line."""
        self.emit("notice", message=text, severity=severity)

    def sealed(self, snapshot: Snapshot) -> None:
        """A version is complete in this rank's memory."""
        assert snapshot.manifest is not None
        self.emit(
            "sealed",
            version=snapshot.facts.id.version,
            level="memory",
            nbytes=snapshot.manifest.image_bytes,
            seconds=snapshot.clock.as_dict(),
        )

    def interval(self, change: Change) -> None:
        """An automatic interval is another one from now on, on all ranks."""
        self.emit(
            "interval",
            level=change.level,
            seconds={"step": change.step_seconds, "cost": change.cost_seconds},
            message=change.text(),
            severity=logging.INFO if self._log.rank == 0 else logging.DEBUG,
        )

    def skipped(self, level: str, why: str, again: bool) -> None:
        """A version is due and cannot be taken; `again`: so it was at the boundary before."""
        ledger = {"memory": self._agreement.memory, "local": self._agreement.local}.get(level)
        loud = level == "local" and self._log.rank == 0  # all ranks skip alike
        first = logging.WARNING if loud else logging.INFO
        self.emit(
            "skipped",
            level=level,
            message=why,
            behind_since=_number(ledger.safe if ledger is not None else None),
            severity=logging.DEBUG if again else first,
        )

    def passed_over(self, version: int, why: str) -> None:
        """A version does not go to the persistent level, as a newer one waits for that."""
        self._pass_over("persistent", version, why, self._persistent)

    def _pass_over(self, level: str, version: int, why: str, safe: VersionId | None) -> None:
        what = {"version": version, "level": level, "message": why, "behind_since": _number(safe)}
        self.emit("skipped", **what, severity=logging.INFO)

    def lost(self, version: int, why: str) -> None:
        """A version is lost in memory, and therefore everywhere."""
        self._fail("memory", version, why, self._agreement.memory.safe)

    def _fail(self, level: str, version: int, why: str, safe: VersionId | None = None) -> None:
        self.emit("failed", **_failure(level, version, why, safe))

    def left_behind(self, level: str, id_: VersionId, why: str) -> None:
        """The peer or persistent level does not get this node's part of a version, as far as is
        known."""
        safe = self._persistent if level == "persistent" else self._agreement.peer.safe
        self._fail(level, id_.version, why, safe)

    # --- other threads' ------------------------------------------------------------------------

    def notice_later(self, text: str, severity: int) -> None:
        """As `notice`, from another thread."""
        self._later.append(("notice", {"message": text, "severity": severity}))

    def not_committed_later(self, id_: VersionId, error: str) -> None:
        """The local level does not get this rank's shard."""
        self._later.append(("failed", self._local_failure(id_, error)))

    def say(self) -> None:
        """Emit what was kept."""
        while self._later:
            name, values = self._later.popleft()
            self.emit(name, **values)

    # --- the agent's ---------------------------------------------------------------------------

    def on_agent_message(self, message: AgentMessage) -> None:
        """Enter an agent's message into the books, and emit it as an event."""
        match message:
            case Committed():
                self._committed(message)
            case CommitFailed(id=id_, error=error):
                self._agreement.tell("local", id_, BROKEN)
                self.emit("failed", **self._local_failure(id_, error))
            case Protected(id=id_, seconds=seconds):
                self._agreement.tell("peer", id_, DONE)
                self._emit_committed("peer", message, {"write": seconds})
            case ProtectFailed():
                self._not_protected(message)
            case Flushed():
                self._flushed(message)
            case FlushFailed():
                self._not_flushed(message)
            case ListenFailed(error=error):  # of an agent that took the place of a dead one
                self.notice(f"peer level: {error}", logging.ERROR)
            case Cleaned(names=names):
                text = f"removed what a killed writer left half-done: {', '.join(names)}"
                self.notice(text, logging.INFO)
            case Problem(error=error, level=level, severity=severity):
                self.notice(f"{level} level: {error}", severity)
            case _:  # the answer to a question whose time is over
                pass

    def _committed(self, message: Committed) -> None:
        self._agreement.tell("local", message.id, DONE)
        seconds = {"write": message.write_seconds, "commit": message.commit_seconds}
        self._emit_committed("local", message, seconds)

    def _emit_committed(
        self,
        level: str,
        message: Committed | Protected | Flushed,
        seconds: dict[str, float],
        text: str = "",
        severity: int = logging.INFO,
    ) -> None:
        version, nbytes = message.id.version, message.nbytes
        what = {"version": version, "level": level, "nbytes": nbytes, "seconds": seconds}
        self.emit("committed", **what, message=text, severity=severity)

    def _local_failure(self, id_: VersionId, error: str) -> dict[str, Any]:
        why = f"{error}; training goes on, without this version in {self._config.directory}"
        return _failure("local", id_.version, why, self._agreement.local.safe)

    def _not_protected(self, message: ProtectFailed) -> None:
        self._agreement.tell("peer", message.id, BROKEN)
        version, safe = message.id.version, self._agreement.peer.safe
        if message.superseded:
            self._pass_over("peer", version, message.error, safe)
            return
        why = "training goes on, other nodes cannot rebuild this version"
        self._fail("peer", version, f"{message.error}; {why}", safe)

    def _flushed(self, message: Flushed) -> None:
        """This node's part is there; the version, when the last node's is."""
        self._agreement.tell("persistent", message.id, DONE)
        whole, severity = "complete", logging.INFO
        if message.complete:
            self._persistent = max(message.id, self._persistent or message.id)
        else:
            whole, severity = "this node's part of it", logging.DEBUG
        self._emit_committed("persistent", message, {"write": message.seconds}, whole, severity)

    def _not_flushed(self, message: FlushFailed) -> None:
        self._agreement.tell("persistent", message.id, DONE)
        version = message.id.version
        if message.superseded:
            self.passed_over(version, message.error)
            return
        behind = f"training goes on, without this version in {self._config.persistent.path}"
        self._fail("persistent", version, f"{message.error}; {behind}", self._persistent)


def _number(safe: VersionId | None) -> int | None:
    return safe.version if safe else None


def _failure(level: str, version: int, why: str, safe: VersionId | None) -> dict[str, Any]:
    """An event's values: a level does not have the version, and `safe` is what it does have."""
    return {
        "version": version,
        "level": level,
        "message": why,
        "behind_since": _number(safe),
        "severity": logging.ERROR,
    }


__all__ = ["Reports"]
