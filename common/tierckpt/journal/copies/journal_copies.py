"""Copies: this rank keeps a copy of the journal of one rank on another node, its ward.

After the reduction all ranks have the same gradients, so this rank has its ward's stripe of them,
too. The ward sends its small state (see `small_state_link`), and this rank's goes to the rank that
keeps its copy. Ranks that protect each other at the peer level make a ring: the next one is the
keeper. A copy that cannot go on stops until the next version on local, and nothing else does.

Partner copies on another node are those of SCR (Moody et al., 2010); here only what cannot be
computed on the other node travels there.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from tierckpt._text import in_words
from tierckpt.config import Config
from tierckpt.coordination.peer_setup import Groups, PeerSetup
from tierckpt.coordination.reports import Reports
from tierckpt.errors import ConfigError, PeerError, TierckptError
from tierckpt.format.ids import ShardKey, VersionId
from tierckpt.journal.frames import SegmentName
from tierckpt.journal.images import GradientImages, Image, Tree
from tierckpt.journal.writer import Draft, FrameBytes, JournalWriter
from tierckpt.peer.address import own_host

from .small_state_link import AGAIN_SECONDS, Keeper, SmallStateReceiver, SmallStateSender

STOPPED = (
    "the copy of rank {ward}'s journal ends at v{last}: {why}. If that rank's node is lost, so are "
    "later steps, until the next version is on local; then the copy begins again"
)
BEHIND = (
    "{folder} does not keep up with the journal and the copy, or rank {ward} sends its small state "
    "too late. Use a faster disk or network, or set local_journal_copy=False"
)
DEAF = (
    "this rank cannot keep a copy of rank {ward}'s journal: {why}. The journal is lost with that "
    "rank's node"
)
UNSENT = "rank {keeper} at {address} does not receive what the copy of the journal needs: {why}"


def neighbours(groups: Groups, rank: int) -> tuple[int, int] | None:
    """Return the rank that keeps the copy of this rank's journal, and the rank whose copy this rank
    keeps; None without redundancy groups. Pure."""
    for ranks in (group.ranks for group in groups if rank in group.ranks):
        place = ranks.index(rank)
        return ranks[(place + 1) % len(ranks)], ranks[place - 1]
    return None


class JournalCopies:
    """One rank's part: its ward's copy, and what its keeper needs. Training thread; without
    neighbours it does nothing."""

    def __init__(
        self,
        config: Config,
        rank: int,
        ranks: int,
        peers: PeerSetup,
        folder: Path,
        reports: Reports,
    ) -> None:
        """Listen for the ward: `peers` gives all ranks the address. All arguments stay their
        owners'."""
        self._config, self._rank, self._ranks = config, rank, ranks
        self._peers, self._folder, self._reports = peers, folder, reports
        self._segment: SegmentName | None = None
        """The file of the copy; None while there is none."""
        self._last = VersionId(0, 0)
        """The last record, or the version before the first one."""
        self._own: SegmentName | None = None
        """The file whose small states this rank sends; None while it sends none."""
        self._steps: list[Image] = []
        self._gradients: dict[str, GradientImages] = {}
        self._writer: JournalWriter | None = None
        self._closing = False
        found = neighbours(peers.groups, rank) if config.local.journal_copy else None
        if found is None or found[0] == rank:
            return
        self._keeper, self._ward = found
        try:
            host = own_host(config.peer.interface, peers.towards)
            self._receiver = SmallStateReceiver(host, self._ward, self._secret)
        except (ConfigError, OSError) as error:
            reports.notice(DEAF.format(ward=self._ward, why=error), logging.WARNING)
            return
        peers.own_address = self._receiver.address
        self._sender = SmallStateSender(rank, self._unsent)
        self._writer = JournalWriter(folder, self._failed, self._last_frame)

    @property
    def on(self) -> bool:
        """True if this rank keeps a copy at times."""
        return self._writer is not None

    # --- the run --------------------------------------------------------------------------------

    def begin(self, own: SegmentName, anew: bool) -> None:
        """Begin a new file, as this rank's journal does with the file `own`. `anew`: the run is
        another one than before, and files of a run of its number do not count."""
        if self._writer is None:
            return
        self._segment = self._own = None
        self._steps = []
        if anew:
            writer = own.writer
            self._writer.remove(lambda n: n.keeper == self._rank and n.writer >= writer)
        if not self._peers.ready:
            return
        self._own, self._last = own, own.base.id
        if self._peers.addresses[self._ward] is not None:
            key = ShardKey(own.base.id, self._ward, self._ranks)
            self._segment = SegmentName(key, own.writer, self._rank)

    def stop(self, why: str) -> None:
        """This rank's journal has stopped."""
        if self._own is not None and (keeper := self._where()) is not None:
            self._sender.stop(keeper, self._own, why)
        self._segment = self._own = None
        self._steps = []

    def drain(self, timeout_seconds: float) -> bool:
        """As `JournalWriter.drain`."""
        return self._writer is None or self._writer.drain(timeout_seconds)

    def close(self, remove: bool = False) -> None:
        """End all threads. They wait AGAIN_SECONDS for the other nodes, which may have vanished;
        with `remove` not at all, as nobody needs the copies."""
        if self._writer is None:
            return
        self._closing = True
        end = time.monotonic() + (0.0 if remove else AGAIN_SECONDS)
        self._sender.close(end - time.monotonic())
        self._writer.close(end - time.monotonic())
        self._receiver.close()
        self._writer.close()  # the thread may have waited for the ward
        self._receiver.release()
        self._writer = None

    # --- a step and a boundary ------------------------------------------------------------------

    def add(
        self,
        label: str,
        named: Sequence[tuple[str, torch.Tensor]],
        tree: Tree,
        may_wait: bool,
    ) -> None:
        """Copy the ward's stripes of an optimizer's gradients."""
        if self._writer is None or self._segment is None:
            return
        try:
            if not (self._steps or self._writer.keeps_up(may_wait)):
                raise PeerError(BEHIND.format(folder=self._folder, ward=self._ward))
            if label not in self._gradients:
                self._gradients[label] = GradientImages(self._ward, self._ranks)
            self._steps.append(self._gradients[label].make(named, tree, self._writer.room))
        except Exception as error:
            self._give_up(error)

    def record(self, draft: Draft) -> Keeper | None:
        """Write the copy of the ward's record at the boundary of this rank's `draft`. Returns where
        the small state of that is to be sent."""
        self._record(draft)
        return self._where() if draft.segment == self._own else None

    def _record(self, draft: Draft) -> None:
        if self._writer is None or self._segment is None:
            return
        steps, self._steps = tuple(self._steps), []
        if self._writer.failed == self._segment:  # already reported
            self._segment = None
        else:
            self._writer.submit(replace(draft, segment=self._segment, steps=steps, small=None))
            self._last = draft.facts.id

    def send(self, keeper: Keeper, draft: Draft) -> None:
        """Send the small state of this rank's record. Any thread."""
        self._sender.send(keeper, draft)

    def _where(self) -> Keeper | None:
        """Where the copy of this rank's journal is made."""
        address = self._peers.addresses[self._keeper] if self._peers.ready else None
        return None if address is None else Keeper(address, self._secret())

    # --- what fails -----------------------------------------------------------------------------

    def _give_up(self, error: Exception) -> None:
        segment, self._segment, self._steps = self._segment, None, []
        if segment is not None and self._writer is not None:
            # After the records that wait: if one of them fails, the copy ends before it.
            self._writer.after_all(
                partial(self._end, segment, self._last, in_words(error, TierckptError))
            )

    def _end(self, segment: SegmentName, last: VersionId, why: str) -> None:
        """The writer's thread, after the last record of a copy."""
        if self._writer is not None and self._writer.failed != segment:
            self._warn(last, why)

    def _failed(self, last: VersionId, error: Exception) -> None:
        """The record after `last` could not be written; the writer's thread."""
        if not self._closing:
            known = isinstance(error, PeerError)
            self._warn(last, str(error) if known else f"{self._folder}: {error}")

    def _warn(self, last: VersionId, why: str) -> None:
        text = STOPPED.format(ward=self._ward, last=last.version, why=why)
        self._reports.notice_later(text, logging.WARNING)

    def _unsent(self, keeper: Keeper, error: Exception) -> None:
        """The sender's thread. The keeper warns, as its copy ends."""
        text = UNSENT.format(keeper=self._keeper, address=keeper.address, why=error)
        self._reports.notice_later(text, logging.INFO)

    def _last_frame(self, draft: Draft) -> FrameBytes:
        """The writer's thread."""
        return self._receiver.take(draft)

    def _secret(self) -> bytes:
        """The secret of the run; any thread."""
        return self._peers.secret.encode()


__all__ = ["JournalCopies", "neighbours"]
