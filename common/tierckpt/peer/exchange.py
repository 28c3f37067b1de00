"""Exchange: the members of a redundancy group make the parity of one version, each at its agent.

No coordinator, no collective: every member does the same, and none of it touches a trainer.

1. *Meet.* Each connects to all others and tells its shard's manifest; the other answers with its
   own once it has begun the same version. So the wait for a trainer that seals later is here.
2. *Go round* the windows (`course`). A member that is slow slows its neighbours, through TCP.
3. *End.* Each tells all others that it has sent everything from a shard that was sealed until then.
   Only who has heard that of all others commits: parity of bytes that changed meanwhile is none.
4. *Commit*, alone: parity is valid by itself (`parity`), so nobody waits for anybody's commit.

Whatever goes wrong in 1 to 3, at one member, ends the exchange at all of them within their limits,
and nothing of it stays but earlier versions. It is not tried again: who joins later is told why.
A device that fails takes its own parity only: that member goes on to serve the others. After 3,
members commit or not, each by itself.

A member begins the versions of a group in their order. That is how one that skipped a version is
found out: asked for it when it is at a newer one, it refuses. Several may be under way at once.

A message is tagged by its connection, which serves one exchange at a time, as `join` names it:
version, group and purpose. Another run has another secret. A member that was killed and joins
again has another `attempt`, which ends the others' exchange: they have to begin anew as well.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tierckpt import _faults
from tierckpt.erasure.codes import Stripes
from tierckpt.erasure.exchange_plan import plan_member, plan_rebuild
from tierckpt.erasure.groups import RedundancyGroup
from tierckpt.erasure.parity_manifest import ParityManifest
from tierckpt.errors import (
    CorruptShardError,
    ExchangeCancelledError,
    FormatError,
    PeerError,
    RefusedError,
)
from tierckpt.format.ids import ParityKey, ShardKey, VersionId
from tierckpt.format.manifest import Manifest, digest
from tierckpt.storage.local.store import LocalStore

from .address import Address
from .inbox import Inbox
from .parity_file import ParityWriter
from .transport import Transport
from .window_loop import WindowLoop
from .wire import MOST_TEXT, Link, no_excuse

ASK_SECONDS = 2.0
"""So long a silent peer has to say what it waits for, or to have its last words heard; less where
the limit is small: who waits for the one that hangs must give up before all others do."""
SHOWN_NAMES = 8
RETRY_SECONDS = 0.2
"""Between tries to reach a peer whose agent is not there yet."""


@dataclass(frozen=True)
class Party:
    """A group, and where its members are."""

    group: RedundancyGroup
    addresses: tuple[Address, ...]
    """Of the members' agents, in the order of the ring."""
    member: int
    """Who we are on the ring."""

    def name(self, member: int) -> str:
        """How errors call a member."""
        return f"rank {self.group.ranks[member]} ({self.addresses[member]})"

    @property
    def others(self) -> list[int]:
        """All other members, the next on the ring first, so that not all turn to one."""
        n = self.group.code.n
        return [(self.member + i) % n for i in range(1, n)]


@dataclass(frozen=True)
class Shard:
    """What a member brings: a sealed slot's image, or a mapped file. Never written to."""

    image: memoryview
    """Exactly the shard, as long as the manifest says; the caller's, until `run` has returned."""
    manifest: bytes
    still_sealed: Callable[[], bool] = lambda: True
    """Asked after the last byte was read; False: the image was refilled meanwhile."""


@dataclass
class Report:
    """What an exchange did, and where its time went."""

    parity_bytes: int = 0
    """Written and committed here; 0 when this member's parity was not to be made."""
    sent_bytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    """By phase: `meet`, `course`, `end`, `commit`."""


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
        """`make`: the members whose parity is to be made, the same list at all; None: of all.

        With some, what a restart lost is restored beside what is there, at the cost of the lost.
        Raises CorruptShardError, FormatError or ValueError when the shard is not this member's.
        """
        code = party.group.code
        self._transport, self._party, self._shard, self._store = transport, party, shard, store
        self._make = sorted(set(range(code.n) if make is None else make))
        self._own = Manifest.decode(shard.manifest)
        if self._own.shard != party.group.ranks[party.member]:
            raise ValueError(f"{self._own.key} is not of {party.name(party.member)}")
        if len(shard.image) != self._own.image_bytes:
            raise ValueError(f"{self._own.key}: {len(shard.image)} bytes are no shard")
        self.id: VersionId = self._own.id
        self.member = party.member
        purpose = f"{party.group.ranks} {code} {self._make} of {self._own.facts.shards}"
        self.series = hashlib.sha256(purpose.encode()).hexdigest()[:16]
        self.tag = f"{self.id.generation}.{self.id.version}.{self.series}"
        names = {member: party.name(member) for member in party.others}
        self._inbox = Inbox(names, transport.limits.stall_seconds, self._excuse)
        self._ask_seconds = min(ASK_SECONDS, transport.limits.stall_seconds / 4)
        self._heard: dict[int, str] = {}
        self._attempt = secrets.token_hex(8)
        self._links: dict[int, Link] = {}
        self._engaged: int | None = None
        self._write_error: OSError | None = None
        self._report = Report()

    def run(self) -> Report:
        """Make and commit this member's parity; see the module's text for what others see.

        Raises PeerError, naming the member, when one is gone, hangs or gave up. Raises
        ExchangeCancelledError after `cancel`. Raises OSError when this node's device failed, the
        slot was refilled, or the store cannot be reached. Nothing is visible of this version's
        parity after an error; older ones are untouched, and the next version may be tried at once.
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
        """Have `run` end soon: by ExchangeCancelledError, unless it is over already."""
        self._fail(ExchangeCancelledError(f"{self._what} was given up: {why}"))

    # --- meeting -------------------------------------------------------------------------------

    def _meet(self) -> list[Manifest]:
        """Everybody's manifests, on the ring."""
        self._fault("meet")
        deadline = time.monotonic() + self._transport.limits.join_seconds
        found = {self.member: self._own}
        for member in self._party.others:
            found[member] = self._join(member, deadline)
        return [found[member] for member in range(len(found))]

    def _join(self, member: int, deadline: float) -> Manifest:
        """Enter the member's exchange; again and again while it cannot be reached. That is not for
        as long where the exchange before could not reach it either."""
        transport, address = self._transport, self._party.addresses[member]
        limits, begin, doubted = transport.limits, time.monotonic(), transport.doubts(address)
        while True:
            reach_before = min(deadline, begin + limits.again_seconds) if doubted else deadline
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
                        f"{self._party.name(member)} did not begin {self.id} within {limit:g} s: "
                        f"{error}",
                        member,
                    ) from error
            self._inbox.pause(RETRY_SECONDS)

    def _try_to_join(self, member: int, reach_before: float, deadline: float) -> Manifest:
        """The member's agent is to be reached before one time, and to have begun before the
        other."""
        seconds = max(reach_before - time.monotonic(), 0.0)
        link = self._transport.connect(self._party.addresses[member], seconds)
        link.peer = self._party.name(member)
        link.excuse = partial(self._excuse, member)
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
        """Check that a member brings its shard of our version, of our run."""
        name, own = self._party.name(member), self._own
        try:
            manifest = Manifest.decode(record)
        except (CorruptShardError, FormatError) as error:
            raise RefusedError(f"{name} sent a manifest that cannot be used: {error}") from error
        expected = ShardKey(self.id, self._party.group.ranks[member], own.facts.shards)
        if (manifest.key, manifest.facts.run_id) != (expected, own.facts.run_id):
            raise RefusedError(
                f"{name} brings {manifest.key} of run {manifest.facts.run_id}; "
                f"this is {expected} of life "
                f"{own.facts.run_id}, and shards of two runs make no parity",
                member,
            )
        return manifest

    def attend(self, link: Link, head: dict[str, Any], record: bytes) -> None:
        """Serve a member that joins, in its connection's thread, until it has ended."""
        source = int(head["member"])
        if source not in self._party.others:
            raise PeerError(f"{link.peer} says that it is member {source}")
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
            known = isinstance(error, PeerError)
            text = (
                str(error) if known else f"{link.peer} sent what is no message of ours: {error!r}"
            )
            self._fail(PeerError(text, source))
            link.send_now({"op": "failed", "why": text[:MOST_TEXT]})
            raise PeerError(text, source) from error
        finally:
            self._inbox.detach(source, link)

    # --- going round ---------------------------------------------------------------------------

    def _exchange(self, manifests: list[Manifest]) -> int:
        """Returns how many bytes of parity were committed here."""
        code = self._party.group.code
        stripes = Stripes(code, tuple(manifest.image_bytes for manifest in manifests))
        plan = plan_member(code, plan_rebuild(code, (), self._make), self.member)
        with contextlib.ExitStack() as stack:
            writer = None
            if self.member in self._make:
                writer = _Writer(stack, self._store, self._own.key, stripes.parity_bytes)

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
        """Begin what may block in the member's connection: a failure that comes later shuts that,
        and one that came before is noticed here."""
        self._engaged = member
        try:
            self._inbox.pause(0)
        except PeerError:
            self._engaged = None  # nothing was begun there: it can take our last words
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
        """Names of the members that the exchange waits for now: what it tells whoever asks."""
        members = {*self._inbox.waiting_for, self._engaged} - {None}
        names = [self._party.name(member) for member in members if member is not None]
        return names[:SHOWN_NAMES]

    def _fail(self, error: PeerError) -> None:
        """Have `run` raise this, in whatever it waits. From any thread."""
        self._inbox.fail(error)
        # It may wait in a connection, for an answer or for room. The others take our last words.
        engaged = self._engaged
        if engaged is not None and (link := self._links.get(engaged)):
            link.shut()

    def _explain(self, error: BaseException) -> BaseException:
        """The cause, where `error` is only what it did to a neighbour of ours."""
        failure = self._inbox.failure()
        if isinstance(failure, ExchangeCancelledError):
            return failure
        if failure is not None and isinstance(error, PeerError):
            error = failure  # which shut the connection that broke
        if not isinstance(error, PeerError) or error.member is None:
            return error
        text = f"{self._what} is not protected: {error}"
        link = self._links.get(error.member)
        if isinstance(error, RefusedError):  # which are the last words
            return type(error)(text, error.member)
        if link is not None and (words := _last_words(link, self._ask_seconds)):
            text += f"; it gave up: {words}"
        elif error.member in self._heard:
            text += f"; {self._heard[error.member]}"
        return type(error)(text, error.member)

    def _excuse(self, member: int, silent_seconds: float) -> bool:
        """Ask a silent member before it is blamed. One that waits for a third has as long again.

        All members fall silent together when one hangs. Only those who wait for that very one are
        to give up by themselves; their last words tell the others whose fault it is. A member may
        still be joining the one that hangs, which takes `join_seconds`; nobody is excused longer.
        One that waits for nobody is at work, on a slow disk say, and has as long again, once.
        """
        limits = self._transport.limits
        if silent_seconds > limits.join_seconds + limits.stall_seconds:
            return False
        address = self._party.addresses[member]
        answer = self._transport.why(address, self, member, self._ask_seconds)
        if answer is None:
            self._heard[member] = "it does not answer"
            return False
        waits, gave_up = answer
        if gave_up:
            self._heard[member] = f"it gave up: {gave_up}"
            return False
        if not waits:
            self._heard[member] = "it answers, waits for nobody, and does not get on"
            return silent_seconds < 1.5 * limits.stall_seconds
        self._heard[member] = f"it waits for {', '.join(waits)}"
        return waits != [self._party.name(self.member)]

    def _give_up(self, why: str) -> None:
        """Last words to all others, wherever they listen, and then no more."""
        self._transport.gave_up(self, why[:MOST_TEXT])
        self._inbox.close(why)
        for member, link in self._links.items():
            if member != self._engaged:  # to that one, this would be within a message
                link.send_now({"op": "failed", "why": why[:MOST_TEXT]})
            self._transport.drop(link)
        self._links.clear()

    def _keep_links(self) -> None:
        for member, link in self._links.items():
            link.excuse = no_excuse
            self._transport.keep(self._party.addresses[member], link)
        self._links.clear()

    # --- small things --------------------------------------------------------------------------

    @property
    def _what(self) -> str:
        return f"{self.id} of the group of ranks {', '.join(map(str, self._party.group.ranks))}"

    def _phase(self, name: str, work: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        done = work()
        self._report.seconds[name] = time.perf_counter() - begin
        return done

    def _fault(self, operation: str) -> None:
        _faults.point("peer", op=operation, version=self.id.version, member=self.member)


class _Writer:
    """This member's parity. An error of the device is kept for later: the others need us now."""

    def __init__(
        self, stack: contextlib.ExitStack, store: LocalStore, shard: ShardKey, nbytes: int
    ) -> None:
        self.error: OSError | None = None
        try:
            store.create()
            key = ParityKey(shard.id, shard.shard, shard.shards)
            self._draft = stack.enter_context(store.draft(key, nbytes))
            self._parity = ParityWriter(self._draft, nbytes)
        except OSError as error:
            self.error = error

    def write(self, data: memoryview, offset: int) -> None:
        """As `ParityWriter.write`, but never raises."""
        try:
            if self.error is None:
                self._parity.write(data, offset)
        except OSError as error:
            self.error = error

    def commit(self, manifest: Callable[[bytes], ParityManifest]) -> None:
        """Make the parity exist with the manifest that goes with its digests; never raises."""
        try:
            if self.error is None:
                self._draft.sync()
                self._draft.commit(manifest(self._parity.digests()).encode())
        except OSError as error:
            self.error = error


def _last_words(link: Link, seconds: float) -> str:
    """Why the other side gave up, if it managed to say so."""
    try:
        return str(link.receive(seconds).get("why", ""))
    except PeerError:
        return ""
