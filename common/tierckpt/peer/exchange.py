"""Exchange: the members of a redundancy group compute the parity of one version, each at its
agent.

There is no coordinator and no collective: every member runs the same steps, and no trainer waits.
A `Party` is a redundancy group, and the addresses of its members' agents.

1. *Meet.* Each member connects to all others and sends its shard's manifest. Another member
answers with its own manifest once it has started the same version, so this step waits for trainers
that seal later.

2. *Process* the windows (`windows`). A slow member slows its neighbours, through TCP.

3. *End.* Each member reports to all others that it has sent everything, from a shard that stayed
sealed. A member commits only after this report from all others: parity of bytes that changed on
the way is worthless.

4. *Commit*, alone: parity is valid by itself (`parity_file`), so members do not wait for each
other's commit.

A failure in steps 1 to 3 at one member ends the exchange at all members within their limits, and
leaves no trace of the version; earlier versions stay. The exchange is not repeated: a member that
joins later receives the reason. A failed device costs its own member's parity only: that member
continues to serve the others. In step 4 each member commits or fails by itself.

A member starts the versions of a group in order. So when it is asked to join an older version than
its latest, it knows that it has skipped that version, and refuses. Several versions may be in
progress at once.

The connection identifies a message: it serves one exchange at a time, and `join` gives version,
group and purpose. Another run has another secret. A member that was killed and joins again has
another `attempt`, which ends the exchange at the others: they have to start again as well.

`Blame` finds the member at fault, when one waits for another for too long. All members
become silent together when one hangs. So a silent member is asked, before it is blamed, which
members it waits for itself. Only the members that wait for the hanging one give up by themselves;
their last message names it to the others.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from msgspec import Struct, field

from tierckpt import _faults
from tierckpt._text import error_text
from tierckpt.erasure.codes import Stripes, plan_member, plan_rebuild
from tierckpt.erasure.groups import RedundancyGroup
from tierckpt.erasure.parity_manifest import ParityManifest
from tierckpt.errors import (
    CorruptShardError,
    ExchangeCancelledError,
    FormatError,
    PeerError,
    RefusedError,
)
from tierckpt.format.ids import ShardKey, VersionId
from tierckpt.format.manifest import Manifest, digest
from tierckpt.net.addresses import Address
from tierckpt.net.limits import MAX_TEXT
from tierckpt.net.link import Link, no_excuse
from tierckpt.storage.local import LocalStore

from .parity_file import ParityDraft
from .transport import Host, Transport
from .windows import Inbox, WindowLoop

__all__ = ["SHOWN_NAMES", "Blame", "Party"]


class Party(Struct, frozen=True):
    """A group, and the addresses of its members."""

    group: RedundancyGroup
    addresses: tuple[Address, ...]
    """Addresses of the members' agents, in the order of the ring."""
    member: int
    """This agent's number on the ring."""

    def name(self, member: int) -> str:
        """The member's name in errors."""
        return f"rank {self.group.ranks[member]} ({self.addresses[member]})"

    @property
    def others(self) -> list[int]:
        """All other members, starting with the next on the ring, so that connections spread
        evenly."""
        n = self.group.code.n
        return [(self.member + i) % n for i in range(1, n)]


LAST_WORDS_SECONDS = 2.0
"""Limit for the last message of a member that gave up to arrive."""
SHOWN_NAMES = 8
NO_ANSWER = "it does not answer"


class Blame:
    """The questions of one member in one exchange. Any thread."""

    def __init__(self, transport: Transport, host: Host, party: Party) -> None:
        """`host`: this member's exchange."""
        self._transport, self._host, self._party = transport, host, party
        self._replies: dict[int, str] = {}
        """The last answers, as text, by member."""

    def excuse(self, member: int, silent_seconds: float) -> bool:
        """Ask a silent member before it is blamed; True if it gets `stall_seconds` more.

        It gets them if it waits for a third one. It may still be joining the one that hangs, which
        takes `join_seconds`: no silence is excused longer. A member that waits for no other is
        working, perhaps on a slow disk, and gets `stall_seconds` more, once.
        """
        limits = self._transport.limits
        if silent_seconds > limits.join_seconds + limits.stall_seconds:
            return False
        answer = self._ask(member)
        if answer is None:
            self._replies[member] = NO_ANSWER
            return False
        waits, gave_up = answer
        if gave_up:
            self._replies[member] = f"it gave up: {gave_up}"
            return False
        if not waits:
            self._replies[member] = "it answers and waits for no member, but makes no progress"
            return silent_seconds < 1.5 * limits.stall_seconds
        self._replies[member] = f"it waits for {', '.join(waits)}"
        return waits != [self._party.name(self._party.member)]

    def explain(self, error: PeerError, member: int, label: str, link: Link | None) -> PeerError:
        """The error of the exchange `label`, from an `error` that blames a member: with the reason
        that this member gave, in its last message on `link` or when it was asked."""
        text = f"{label} is not protected: {error}"
        if isinstance(error, RefusedError):  # carries the peer's reason already
            return type(error)(text, member)
        if link is not None and (words := _last_words(link)):
            text += f"; it gave up: {words}"
        elif member in self._replies:
            text += f"; {self._replies[member]}"
            if self._replies[member] != NO_ANSWER and (silent := self._silent(member)):
                text += f"; no answer from {', '.join(silent)}"
        elif (answer := self._ask(member)) and answer[1]:
            # Its last message went to the connection that broke.
            text += f"; it gave up: {answer[1]}"
        return type(error)(text, member)

    def _silent(self, blamed: int) -> list[str]:
        """Names of the other members that do not answer.

        The blamed member answers, so it may be only slow, with its disk for example, and one of
        these be the cause.
        """
        others = (member for member in self._party.others if member != blamed)
        return [self._party.name(m) for m in others if self._ask(m) is None][:SHOWN_NAMES]

    def _ask(self, member: int) -> tuple[list[str], str] | None:
        """Which members it waits for, and why it gave up; None when it does not answer."""
        transport, address = self._transport, self._party.addresses[member]
        return transport.why(address, self._host, member, transport.limits.ask_seconds)


def _last_words(link: Link) -> str:
    """The reason that the other side sent before it closed; empty if it sent none."""
    try:
        return str(link.receive(LAST_WORDS_SECONDS).get("why", ""))
    except PeerError:
        return ""


RETRY_SECONDS = 0.2
"""Interval between attempts to reach a missing agent."""


class Shard(Struct, frozen=True):
    """A member's contribution: the image of a sealed slot, or a mapped file. Never written to."""

    image: memoryview
    """Exactly the shard, as long as the manifest says; the caller's, until `run` has returned."""
    manifest: bytes
    still_sealed: Callable[[], bool] = lambda: True
    """Called after the last byte was read; False: the image was refilled in between."""


class Report(Struct):
    """Results of an exchange: bytes, and the seconds of each phase."""

    parity_bytes: int = 0
    """Bytes written and committed here; 0 when this member's parity was not requested."""
    sent_bytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds by phase: `meet`, `course`, `end`, `commit`."""


class Exchange:
    """One version of one group, at one member. `run` it once, in any thread; `cancel` from any."""

    def __init__(
        self,
        transport: Transport,
        party: Party,
        shard: Shard,
        store: LocalStore,
        make: Iterable[int] | None = None,
    ) -> None:
        """`make`: the members that need new parity, the same list at all members; None: all of
        them.

        A partial list restores parity that a restart lost, at a cost in proportion to the loss.
        Raises CorruptShardError, FormatError or ValueError when the shard is not this member's.
        """
        code = party.group.code
        self._transport, self._party, self._shard, self._store = transport, party, shard, store
        self._make = sorted(set(range(code.n) if make is None else make))
        self._own = Manifest.decode(shard.manifest)
        if self._own.shard != party.group.ranks[party.member]:
            raise ValueError(f"{self._own.key} is not the shard of {party.name(party.member)}")
        if len(shard.image) != self._own.image_bytes:
            raise ValueError(f"{self._own.key}: the image has {len(shard.image)} bytes")
        self.id: VersionId = self._own.id
        self.member = party.member
        purpose = f"{party.group.ranks} {code} {self._make} of {self._own.facts.shards}"
        self.series = hashlib.sha256(purpose.encode()).hexdigest()[:16]
        self.tag = f"{self.id.generation}.{self.id.version}.{self.series}"
        self._blame = Blame(transport, self, party)
        names = {member: party.name(member) for member in party.others}
        self._inbox = Inbox(names, transport.limits.stall_seconds, self._blame.excuse)
        self._attempt = secrets.token_hex(8)
        self._links: dict[int, Link] = {}
        self._engaged: int | None = None
        self._write_error: OSError | None = None
        self._report = Report()

    def run(self) -> Report:
        """Make and commit this member's parity; the module's text says how other members are
        affected.

        Raises PeerError, naming the member, when one is gone, hangs or has failed. Raises
        ExchangeCancelledError after `cancel`. Raises OSError when this node's device failed, the
        slot was refilled, or the store cannot be reached. After an error no parity of this version
        is visible; older parity is untouched, and the next version may be tried at once.
        """
        try:
            with self._transport.hosting(self):
                manifests = self._phase("meet", self._meet)
                made = self._exchange(manifests)
        except BaseException as error:
            why = self._explain(error)
            self._give_up(str(why))
            if why is error:
                raise
            raise why from error
        self._inbox.close("it is over")
        self._keep_links()
        if self._write_error is not None:
            raise self._write_error
        self._report.parity_bytes = made
        return self._report

    def cancel(self, why: str) -> None:
        """Make `run` raise ExchangeCancelledError soon, unless it has already ended."""
        self._fail(ExchangeCancelledError(f"{self._label} was cancelled: {why}"))

    # --- meeting -------------------------------------------------------------------------------

    def _meet(self) -> list[Manifest]:
        """Manifests of all members, in the order of the ring."""
        self._fault("meet")
        deadline = time.monotonic() + self._transport.limits.join_seconds
        found = {self.member: self._own}
        for member in self._party.others:
            found[member] = self._join(member, deadline)
        return [found[member] for member in range(len(found))]

    def _join(self, member: int, deadline: float) -> Manifest:
        """Enter the member's exchange, with retries while it cannot be reached. The limit is
        shorter when the previous exchange could not reach it either."""
        transport, address = self._transport, self._party.addresses[member]
        limits, start, doubted = transport.limits, time.monotonic(), transport.doubts(address)
        while True:
            reach_before = min(deadline, start + limits.again_seconds) if doubted else deadline
            try:
                return self._try_to_join(member, reach_before, deadline)
            except (RefusedError, ExchangeCancelledError):
                raise
            except PeerError as error:
                if link := self._links.pop(member, None):
                    transport.drop(link)
                doubted = doubted and transport.doubts(address)
                if time.monotonic() + RETRY_SECONDS > (reach_before if doubted else deadline):
                    transport.doubt(address)
                    limit = limits.again_seconds if doubted else limits.join_seconds
                    raise PeerError(
                        f"{self._party.name(member)} did not start {self.id} within {limit:g} s: "
                        f"{error}",
                        member,
                    ) from error
            self._inbox.pause(RETRY_SECONDS)

    def _try_to_join(self, member: int, reach_before: float, deadline: float) -> Manifest:
        """Join once: reach the member's agent before `reach_before`, get its manifest before
        `deadline`."""
        seconds = max(reach_before - time.monotonic(), 0.0)
        link = self._transport.connect(self._party.addresses[member], seconds)
        link.peer = self._party.name(member)
        link.excuse = partial(self._blame.excuse, member)
        self._links[member] = link
        self._engage(member)
        head = {"op": "join", "tag": self.tag, "series": self.series, "to": member}
        where = {"version": self.id.version, "generation": self.id.generation}
        link.send(
            {**head, **where, "member": self.member, "attempt": self._attempt},
            self._shard.manifest,
        )
        answer = link.receive(max(deadline - time.monotonic(), 0.0))
        if answer.get("op") != "joined":
            raise RefusedError(f"{link.peer} gave up: {answer.get('why', answer)}", member)
        record = link.receive_record(answer)
        self._engaged = None
        self._inbox.know(member, str(answer["attempt"]))
        return self._manifest_of(member, record)

    def _manifest_of(self, member: int, record: bytes) -> Manifest:
        """Check that a member sent the manifest of its own shard, of our version and run."""
        name, own = self._party.name(member), self._own
        try:
            manifest = Manifest.decode(record)
        except (CorruptShardError, FormatError) as error:
            raise RefusedError(f"{name} sent a manifest that cannot be used: {error}") from error
        expected = ShardKey(self.id, self._party.group.ranks[member], own.facts.shards)
        if (manifest.key, manifest.facts.run_id) != (expected, own.facts.run_id):
            raise RefusedError(
                f"{name} sent {manifest.key} of run {manifest.facts.run_id}; "
                f"this is {expected} of run "
                f"{own.facts.run_id}, and shards of two runs make no parity",
                member,
            )
        return manifest

    def attend(self, link: Link, head: dict[str, Any], record: bytes) -> None:
        """Serve a member that joins, in its connection's thread, until it has ended."""
        source = int(head["member"])
        if source not in self._party.others:
            raise PeerError(f"{link.peer} claims to be member {source}")
        link.peer = self._party.name(source)
        try:
            self._inbox.know(source, str(head["attempt"]))
            self._inbox.attach(source, link)
            self._manifest_of(source, record)
            link.send({"op": "joined", "attempt": self._attempt}, self._shard.manifest)
            while (frame := link.receive(None)).get("op") == "data":
                self._inbox.deliver(source, frame, link)
            if frame.get("op") != "end":
                raise PeerError(f"{link.peer} gave up: {frame.get('why', frame)}", source)
            self._inbox.end(source)
        except (PeerError, KeyError, TypeError, ValueError) as error:
            text = f"{link.peer} sent an invalid message: {error_text(error)}"
            text = str(error) if isinstance(error, PeerError) else text
            self._fail(PeerError(text, source))
            link.send_now({"op": "failed", "why": text[:MAX_TEXT]})
            raise PeerError(text, source) from error
        finally:
            self._inbox.detach(source, link)

    # --- processing the windows ----------------------------------------------------------------

    def _exchange(self, manifests: list[Manifest]) -> int:
        """Make the parity; returns the number of bytes committed here."""
        code = self._party.group.code
        stripes = Stripes(code, tuple(manifest.image_bytes for manifest in manifests))
        plan = plan_member(code, plan_rebuild(code, (), self._make), self.member)
        with contextlib.ExitStack() as stack:
            writer = None
            if self.member in self._make:
                writer = ParityDraft(stack, self._store, self._own.key, stripes.parity_bytes)

            def keep(offset: int, data: memoryview) -> None:
                self._fault("write")
                if writer is not None:
                    writer.write(data, offset)

            course = WindowLoop(
                self.member, plan, stripes, self._shard.image, self._inbox, self._send, keep
            )
            self._phase("course", course.run)
            self._phase("end", self._end)
            if writer is None:
                return 0

            def commit() -> None:
                self._fault("commit")
                writer.commit(
                    lambda digests: ParityManifest.of(manifests, code, self.member, digests)
                )

            self._phase("commit", commit)
            self._write_error = writer.error
            return stripes.parity_bytes

    def _send(self, to: int, at: tuple[int, int, int, int], view: memoryview) -> None:
        self._fault("send")
        self._engage(to)
        try:
            self._links[to].send({"op": "data", "at": at, "digest": digest(view).hex()}, view)
        except PeerError as error:
            raise PeerError(str(error), to) from error
        self._engaged = None
        self._report.sent_bytes += len(view)

    def _engage(self, member: int) -> None:
        """Mark the member's connection as possibly blocked: a later failure shuts it, and an
        earlier one is raised here."""
        self._engaged = member
        try:
            self._inbox.pause(0)
        except PeerError:
            self._engaged = None  # nothing was sent yet: the link can take the last message
            raise

    def _end(self) -> None:
        self._fault("end")
        if not self._shard.still_sealed():
            raise FileNotFoundError(f"the slot of {self._own.key} was refilled while it was read")
        for member, link in self._links.items():
            self._engage(member)
            try:
                link.send({"op": "end"})
            except PeerError as error:
                raise PeerError(str(error), member) from error
        self._engaged = None
        self._inbox.wait_ends(self._party.others)

    # --- when it fails -------------------------------------------------------------------------

    def waits_for(self) -> list[str]:
        """Names of the members that the exchange waits for now, for members that ask `why`."""
        members = {*self._inbox.waiting_for, self._engaged} - {None}
        names = [self._party.name(member) for member in members if member is not None]
        return names[:SHOWN_NAMES]

    def why_failed(self) -> str:
        """The first failure of the exchange, for members that ask `why`; empty without one."""
        return str(self._inbox.failure() or "")

    def _fail(self, error: PeerError) -> None:
        """Make `run` raise `error`, wherever it waits. From any thread."""
        self._inbox.fail(error)
        # `run` may be blocked in one connection: shut that. The others take a last message.
        engaged = self._engaged
        if engaged is not None and (link := self._links.get(engaged)):
            link.shut()

    def _explain(self, error: BaseException) -> BaseException:
        """The original cause, where `error` is only its effect on a neighbour."""
        failure = self._inbox.failure()
        if isinstance(failure, ExchangeCancelledError):
            return failure
        if failure is not None and isinstance(error, PeerError):
            error = failure  # the failure that shut the broken connection
        if not isinstance(error, PeerError) or error.member is None:
            return error
        return self._blame.explain(error, error.member, self._label, self._links.get(error.member))

    def _give_up(self, why: str) -> None:
        """Send a last message to all other members, then close everything."""
        self._transport.gave_up(self, why[:MAX_TEXT])
        self._inbox.close(why)
        for member, link in self._links.items():
            if member != self._engaged:  # this link may be in the middle of a message
                link.send_now({"op": "failed", "why": why[:MAX_TEXT]})
            self._transport.drop(link)
        self._links.clear()

    def _keep_links(self) -> None:
        for member, link in self._links.items():
            link.excuse = no_excuse
            self._transport.keep(self._party.addresses[member], link)
        self._links.clear()

    # --- small things --------------------------------------------------------------------------

    @property
    def _label(self) -> str:
        return f"{self.id} of the group of ranks {', '.join(map(str, self._party.group.ranks))}"

    def _phase(self, name: str, work: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        done = work()
        self._report.seconds[name] = time.perf_counter() - start
        return done

    def _fault(self, operation: str) -> None:
        _faults.point("peer", op=operation, version=self.id.version, member=self.member)
