"""What becomes of versions in flight: the way of their slots to the agent, and their outcomes.

`SlotHandoff` brings a version through one snapshot, from the choice of a slot to the agent's
commit. Every outcome is told to the `Version`, also after errors.

`Reports` emits outcomes as events and tells them to the versions. Reports have three sources: the
training thread itself, other threads (kept until the training thread emits them), and the agent's
messages.
"""

from __future__ import annotations

import logging
import re
from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tierckpt._text import error_text
from tierckpt.agent.client import AgentClient
from tierckpt.agent.protocol import (
    AgentMessage,
    Cleaned,
    Flushed,
    ListenFailed,
    NotStored,
    Problem,
    Staged,
    StageFailed,
    Stored,
)
from tierckpt.callbacks import CallbackList
from tierckpt.config import Config
from tierckpt.core.levels import (
    BROKEN,
    DONE,
    LEDGERS,
    LOCAL,
    MEMORY,
    PEER,
    PERSISTENT,
    Level,
    place_of,
)
from tierckpt.core.version import Version
from tierckpt.events import EventLog, JobEnd
from tierckpt.format.ids import ShardKey, VersionId
from tierckpt.format.manifest import Manifest
from tierckpt.format.records import VersionFacts
from tierckpt.group import Group
from tierckpt.storage.slot_pool import NoSlotError, SlotPool
from tierckpt.storage.slots import Slot, seal_area_bytes

from .agreement import Agreement

if TYPE_CHECKING:
    from tierckpt.core.tuning import Change
    from tierckpt.snapshot.at_boundary import Copied
    from tierckpt.snapshot.snapshot import ChooseSlot, Snapshot

__all__ = ["Reports", "SlotHandoff"]


class Reports:
    """Reports of one rank. Training thread, except methods named "later": any thread."""

    def __init__(
        self,
        config: Config,
        log: EventLog,
        callbacks: CallbackList,
        agreement: Agreement,
        version: Callable[[], int],
    ) -> None:
        """`version` returns the present version, for reports that name no other."""
        self._config, self._log, self._callbacks = config, log, callbacks
        self._agreement = agreement
        self._version = version
        self.later: deque[tuple[str, dict[str, Any]]] = deque()
        self._repeats = _Repeats()
        self._persistent: VersionId | None = None
        """The newest version that this node's agent saw complete on the persistent level."""

    # --- the training thread's own -------------------------------------------------------------

    def emit(self, name: str, **values: Any) -> None:
        """Emit an event, and call the callback of its name if there is one. Failures of one cause
        are shown at a decreasing rate."""
        if name == "failed" or (name == "notice" and values["severity"] >= logging.WARNING):
            values = self._repeats.failed(values)
        elif name in ("sealed", "committed"):
            self._succeeded(values["level"])
        event = self._log.emit(name, **{"version": self._version(), **values})
        if name in ("sealed", "committed"):
            self._callbacks.call(f"on_{name}", event)

    def notice(self, text: str, severity: int) -> None:
        """Emit a notice."""
        self.emit("notice", message=text, severity=severity)

    def notice_of_all(self, text: str, severity: int = logging.WARNING) -> None:
        """Emit one notice of all ranks: rank 0 at `severity`, others at DEBUG."""
        self.notice(text, logging.DEBUG if self._log.rank else severity)

    def ended(self, end: JobEnd, halted: bool) -> None:
        """Report what the end of the job has left, which all ranks know. Of a job that was
        `halted`, less is expected."""
        shown = logging.INFO
        if end.missing:
            shown = logging.WARNING if halted else logging.ERROR
        text = _describe_end(end, self._config)
        self.emit("ended", message=text, severity=logging.DEBUG if self._log.rank else shown)

    def failed_after(self, version: int) -> None:
        """Report what an error that ends the training has left, as far as this rank knows."""
        there = []
        for level, newest in self.newest_by_level().items():
            has = "no version" if newest is None else f"v{newest}"
            there.append(f"{place_of(Level[level.upper()], self._config)} has {has}")
        known = f"as far as this rank knows by now, {', '.join(there)}"
        text = f"an error ends the training after v{version}; {known}"
        self.emit("ended", message=text, severity=logging.INFO)

    def waiting(self, text: str, severity: int = logging.INFO) -> None:
        """Report that the end of the job, or a call of `wait`, takes long."""
        self.emit("waiting", message=text, severity=severity)

    def sealed(self, snapshot: Snapshot | Copied) -> None:
        """Report that a version is complete in this rank's memory."""
        assert snapshot.manifest is not None
        if self._log.count_unwanted("sealed/memory"):  # at every step, perhaps
            if self._repeats.has_failed:
                self._succeeded(MEMORY)
            return
        self.emit(
            "sealed",
            version=snapshot.facts.id.version,
            level=MEMORY,
            nbytes=snapshot.manifest.image_bytes,
            seconds=snapshot.clock.as_dict(),
        )

    def interval(self, change: Change) -> None:
        """Report that an automatic interval changes, on all ranks."""
        self.emit(
            "interval",
            level=change.level,
            seconds={"step": change.step_seconds, "cost": change.cost_seconds},
            message=change.text(),
            severity=logging.INFO if self._log.rank == 0 else logging.DEBUG,
        )

    def skipped(self, level: Level, why: str, again: bool) -> None:
        """Report that a due version is skipped; `again`: also at the previous boundary."""
        loud = level == LOCAL and self._log.rank == 0  # all ranks skip alike
        first = logging.WARNING if loud else logging.INFO
        self.emit(
            "skipped",
            level=level,
            message=why,
            reason="busy",
            behind_since=self.newest(level),
            severity=logging.DEBUG if again else first,
        )

    def passed_over(self, version: int, why: str) -> None:
        """Report that a version does not go to the persistent level, since a newer one waits."""
        self._pass_over(PERSISTENT, version, why)

    def _pass_over(self, level: str, version: int, why: str) -> None:
        newest = self.newest(level)
        what = {"version": version, "level": level, "message": why, "behind_since": newest}
        self.emit("skipped", **what, reason="superseded", severity=logging.INFO)

    def lost(self, version: int, why: str, shown_elsewhere: bool = False) -> None:
        """Report that a version is lost in memory, and therefore on all levels. `shown_elsewhere`:
        another report shows the same."""
        failure = self._failure(MEMORY, version, why)
        self.emit("failed", **failure | ({"severity": logging.DEBUG} if shown_elsewhere else {}))

    def lose(self, version: Version, why: str) -> None:
        """Report the loss of a version in flight. Of several reports the first is shown: a rank
        that failed knows the cause, and learns later that the version is void on all."""
        self.lost(version.id.version, why, shown_elsewhere=version.is_shown)
        version.is_shown = True

    def left_behind(self, level: str, id_: VersionId, why: str) -> None:
        """Report that the peer or persistent level probably does not get this node's part of a
        version."""
        self.emit("failed", **self._failure(level, id_.version, why))

    # --- other threads' ------------------------------------------------------------------------

    def notice_later(self, text: str, severity: int) -> None:
        """Emit a notice later. Any thread."""
        self.later.append(("notice", {"message": text, "severity": severity}))

    def not_committed_later(self, id_: VersionId, error: str) -> None:
        """Report later that the local level does not get this rank's shard. Any thread."""
        self.later.append(("failed", self._not_there(LOCAL, id_, error)))

    def say(self) -> None:
        """Emit the reports that other threads left."""
        while self.later:
            name, values = self.later.popleft()
            self.emit(name, **values)

    # --- the agent's ---------------------------------------------------------------------------

    def on_agent_message(self, message: AgentMessage) -> None:
        """Record an agent's message, and emit it as an event."""
        match message:
            case Stored():
                self._stored(message)
            case NotStored():
                self._not_stored(message)
            case Staged(id=id_):
                what = {"version": id_.version, "level": message.level, "nbytes": message.nbytes}
                self.emit(
                    "committed",
                    **what,
                    seconds=message.times_seconds,
                    message=message.stage,
                    severity=logging.INFO,
                )
            case StageFailed(id=id_, error=error, superseded=True):
                self._pass_over(message.level, id_.version, error)
            case StageFailed(id=id_, stage=stage, error=error):
                text = f"{stage}: {error}; training continues, without this version there"
                self.emit("failed", **self._failure(message.level, id_.version, text))
            case ListenFailed(error=error):  # from an agent that replaced a dead one
                self.notice(f"peer level: {error}", logging.ERROR)
            case Cleaned(names=names):
                text = f"removed files that a killed writer left half-written: {', '.join(names)}"
                self.notice(text, logging.INFO)
            case Problem(error=error, level=level, severity=severity):
                self.notice(f"{level} level: {error}", severity)
            case _:  # a late answer
                pass

    def _stored(self, message: Stored) -> None:
        level, id_, text, severity = message.level, message.id, "", logging.INFO
        self._agreement.tell(level, id_, DONE)
        if isinstance(message, Flushed):  # the version is complete when the last node's part is
            text, severity = "this node's part of it", logging.DEBUG
            if message.complete:
                text, severity = "complete", logging.INFO
                self._persistent = max(id_, self._persistent or id_)
        what = {"version": id_.version, "level": level, "nbytes": message.nbytes}
        seconds = message.times_seconds
        self.emit("committed", **what, seconds=seconds, message=text, severity=severity)

    def _not_stored(self, message: NotStored) -> None:
        level, id_ = message.level, message.id
        self._agreement.tell(level, id_, level.facts.failed_state)
        if message.superseded:
            self._pass_over(level, id_.version, message.error)
        else:
            self.emit("failed", **self._not_there(level, id_, message.error))

    def _not_there(self, level: Level, id_: VersionId, error: str) -> dict[str, Any]:
        without = f"without this version in {place_of(level, self._config)}"
        if level == PEER:
            without = "other nodes cannot rebuild this version"
        return self._failure(level, id_.version, f"{error}; training continues, {without}")

    def _failure(self, level: str, version: int, why: str) -> dict[str, Any]:
        """Return the values of an event: a level does not have the version."""
        return {
            "version": version,
            "level": level,
            "message": why,
            "behind_since": self.newest(level),
            "severity": logging.ERROR,
        }

    def _succeeded(self, level: str) -> None:
        if failures := self._repeats.succeeded(level):
            self.notice(f"{level} level: it has versions again, after {failures}", logging.WARNING)

    def restart(self, persistent: VersionId | None) -> None:
        """A run starts; `persistent` is that level's newest version."""
        self._persistent = persistent

    def newest(self, level: str) -> int | None:
        """Return the number of the newest version that a level is known to have on all ranks; None
        for a stage of the setting, as ranks do not vote about it."""
        ledger = {str(each): each for each in LEDGERS}.get(level)
        if ledger is None:
            return None
        safe = self._agreement.ledgers[ledger].safe
        id_ = self._persistent if level == PERSISTENT else safe
        return id_.version if id_ is not None else None

    def newest_by_level(self) -> dict[str, int | None]:
        """Return `newest` of each level of the job, by its name."""
        return {level.value: self.newest(level) for level in LEDGERS if self._config.uses(level)}


class _Repeats:
    """Failures and warnings that repeat: the first of a cause are shown, then the 10th, the 100th,
    ..."""

    def __init__(self) -> None:
        self._counts: dict[str | None, Counter[str]] = {}
        """By level; None: notices."""
        self.has_failed = False
        """There was a failure or a warning."""
        self._successes: Counter[str] = Counter()
        """The number since the last failure."""

    def failed(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return the values of the event, at DEBUG if they need not be shown again."""
        self.has_failed = True
        level, text = values.get("level"), values["message"]
        if level is not None:
            self._successes[level] = 0
        if values["severity"] == logging.DEBUG:
            return values
        counts = self._counts.setdefault(level, Counter())
        cause = DIGITS.sub("", text)
        counts[cause] += 1
        count = counts[cause]
        if count < FIRST_SHOWN:
            return values
        if count > FIRST_SHOWN and str(count).strip("0") != "1":
            return values | {"severity": logging.DEBUG}
        what = "warning" if level is None else "failure"
        return values | {"message": f"{text} ({REPEATED.format(what=what, count=count)})"}

    def succeeded(self, level: str) -> str:
        """Count a success. Returns the number of failures, as text, if this success ends a row of
        which some were not shown: as many successes as failures."""
        if not (counts := self._counts.get(level)):  # nearly always
            return ""
        self._successes[level] += 1
        most = max(counts.values())
        if self._successes[level] < max(most, LONGEST_PERIOD if level == MEMORY else 1):
            return ""
        self._counts.pop(level)
        return f"{counts.total()} failures" if most > FIRST_SHOWN else ""


def _describe_end(end: JobEnd, config: Config) -> str:
    if not end.newest:
        return f"v{end.version} is stored nowhere: the job uses memory alone, which its end frees"
    places = {level: place_of(Level[level.upper()], config) for level in end.newest}
    there = [place for level, place in places.items() if level not in end.missing]
    if not end.missing:
        return f"the job ends: v{end.version} is stored in {' and '.join(there)}"
    lacking = []
    for level in end.missing:
        newest = end.newest[level]
        has = "no version" if newest is None else f"only v{newest}"
        lacking.append(f"{places[level]} has {has}")
    there = [places[at] for at, newest in end.newest.items() if (newest or 0) >= end.version]
    text = f"the job ends, and v{end.version} is missing: {', and '.join(lacking)}"
    kept = f"It is stored in {' and '.join(there)}: keep that for the next run"
    return f"{text}. {kept if there else 'It is stored nowhere'}"


DIGITS = re.compile(r"\d+")
"""Numbers differ between failures of one cause: a version, a temporary file, a process."""
FIRST_SHOWN = 3
"""The number of failures of one cause that are all shown."""
REPEATED = "{what} {count} of this kind; from now on only the 10th, the 100th, ... are shown"
LONGEST_PERIOD = 100
"""Failures in memory with a longer period are new ones: a script that breaks each tenth version."""


PATIENCE_SECONDS = 30.0
"""Longest wait, with `when_busy="wait"`, for a copy that no optimizer waits for any more."""
CUT_SHORT = "an interrupt came before the copy was complete"


class SlotHandoff:
    """The way of a version's slot through one snapshot, from its choice to the agent's commit, on
    one rank. Owns none of its arguments. Each method names the thread that calls it."""

    def __init__(
        self,
        group: Group,
        pool: SlotPool,
        agent: AgentClient,
        agreement: Agreement,
        reports: Reports,
    ) -> None:
        self._group, self._pool, self._agent = group, pool, agent
        self._agreement, self._reports = agreement, reports
        self.finished: deque[tuple[Version, Snapshot | Copied]] = deque()
        """Copies with an end that the training thread has not processed."""

    def at_boundary(
        self, facts: VersionFacts, blocks: int, image_bytes: int, usual: Slot | None
    ) -> Slot:
        """A slot that is free as the votes are known now, see `Slots`. Training thread."""
        safe, pinned = self._agreement.memory.safe, self._agent.pinned()
        if (
            usual is not None
            and safe is not None
            and not pinned
            and self._pool.take_again(usual, safe)
        ):
            return usual
        protected = self._agreement.protected(facts.id)
        sizes = seal_area_bytes(blocks, len(facts.lineage)), image_bytes
        return self._pool.choose(protected, pinned, *sizes)

    def chooser(self, facts: VersionFacts) -> ChooseSlot:
        """Return the function that finds a slot for this boundary's version. On the copier thread
        it waits, if necessary, for the proof that an older version is superseded."""
        protected, runs = self._agreement.protected(facts.id), len(facts.lineage)

        def choose(blocks: int, image_bytes: int, at_once: bool = False) -> Slot:
            seal_bytes, pool = seal_area_bytes(blocks, runs), self._pool
            if at_once:
                proven = self._agreement.last_word_now(protected)
                if proven is None:
                    raise NoSlotError("the ranks have not voted yet")
                return pool.choose(proven, self._agent.pinned(), seal_bytes, image_bytes, True)
            try:
                known = self._agreement.last_word(protected, waits=False)
                return pool.choose(known, self._agent.pinned(), seal_bytes, image_bytes)
            except NoSlotError:
                proven = self._agreement.last_word(protected)
            return pool.choose(proven, self._agent.pinned(), seal_bytes, image_bytes)

        return choose

    def started(self, version: Version, snapshot: Snapshot) -> None:
        """Record that a version is being copied; training thread."""
        snapshot.bind_patience_seconds = self._agreement.patience_seconds
        snapshot.hopeless = self._agreement.hopeless
        version.snapshot = snapshot

    def starved(self) -> None:
        """Record that the training thread waited for a slot, hence a vote, and got none."""
        self._agreement.lose_patience()

    def done(self, version: Version, snapshot: Snapshot | Copied) -> None:
        """Record that a copy is sealed or failed; on the thread that ended it."""
        sealed = self._filled(version, snapshot)
        if LOCAL in snapshot.levels:
            if sealed:
                assert snapshot.slot is not None
                assert snapshot.manifest is not None
                self._commit(version, snapshot.slot, snapshot.manifest)
            else:
                version.tell(LOCAL, BROKEN)
        self.finished.append((version, snapshot))
        version.snapshot = None  # last: an interrupt may cut the steps above short

    def _filled(self, version: Version, snapshot: Snapshot | Copied) -> bool:
        sealed = snapshot.sealed
        self._pool.filled(snapshot.slot, version.id if sealed else None)
        version.tell(MEMORY, DONE if sealed else BROKEN)
        return sealed

    def wait(self) -> None:
        """Return when all copies have ended, or made no progress for too long; training thread."""
        for snapshot in [each.snapshot for each in self._agreement.versions.flying]:
            if snapshot is not None:
                snapshot.wait_done(PATIENCE_SECONDS)

    def take_stock(self) -> None:
        """Break versions that no thread works on any more, at a boundary. A BaseException but no
        Exception (a KeyboardInterrupt) cut the work short; they would stay open for ever."""
        for version in self._agreement.versions.flying:
            if (snapshot := version.snapshot) is not None:
                if not snapshot.wait_done(0.0):
                    continue
                # `done` was cut short. Whether the agent knows, the next boundary shows.
                self._filled(version, snapshot)
                version.snapshot = None
            elif undecided := version.undecided():
                self._give_up(version, undecided)

    def _give_up(self, version: Version, undecided: set[Level]) -> None:
        """Break a version, on the levels where nobody works on it any more."""
        if MEMORY in undecided:
            self.broken(version)
            self._reports.lose(version, CUT_SHORT)
        elif not self._agent.concerns(version.id):
            for level in undecided:
                version.tell(level, level.facts.failed_state)
                if level == LOCAL:  # on others no event reports it as lost: it may be complete
                    self._reports.not_committed_later(version.id, CUT_SHORT)

    def broken(self, version: Version) -> None:
        """Break a version that has no snapshot; training thread."""
        version.tell(MEMORY, BROKEN)
        version.tell(LOCAL, BROKEN)

    def commit_sealed(self, version: Version, slot: Slot) -> None:
        """Commit a version that was sealed before; training thread."""
        manifest = slot.manifest()
        assert manifest is not None
        self._commit(version, slot, manifest)

    def _commit(self, version: Version, slot: Slot, manifest: Manifest) -> None:
        version.nbytes, version.metric = manifest.image_bytes, manifest.facts.metric
        key = ShardKey(version.id, self._group.rank, self._group.size)
        try:
            error = self._agent.commit(key, slot)
        except Exception as problem:  # on the thread that sealed: only this version is lost
            error = error_text(problem)
        if error:
            version.tell(LOCAL, BROKEN)
            self._reports.not_committed_later(version.id, error)
