"""Small states between two ranks, over real sockets: exact, or a reason why there is no copy."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
import torch
from msgspec.structs import replace

from tierckpt.errors import PeerError
from tierckpt.format import PAGE_BYTES, ShardKey, VersionFacts, VersionId
from tierckpt.journal import MAX_WAITING, CopiedTree, Image, SegmentName, copies
from tierckpt.journal.copies import Keeper, SmallStateReceiver, SmallStateSender
from tierckpt.journal.writer import CLOSE_SECONDS, Draft, last_frame
from tierckpt.net import PROTOCOL, reach

SECRET = b"of this run"
RANKS, SENDER, KEEPER = 3, 1, 2


def image(fill: int = 0) -> Image:
    data = torch.full((PAGE_BYTES,), fill, dtype=torch.uint8)
    return Image(bytes(PAGE_BYTES), data, (PAGE_BYTES,), CopiedTree(data[:0]))


def draft(version: int, base: int = 0, run_id: str = "run", steps: int = 1) -> Draft:
    """The sender's record of that version."""
    id_ = VersionId(1, version)
    facts = VersionFacts("job", run_id, id_, RANKS, ((1, 0),), version, "calls")
    segment = SegmentName(ShardKey(VersionId(1, base), SENDER, RANKS), 1)
    after = VersionId(1, version - 1)
    return Draft(segment, after, facts, 7, (image(),) * steps, image(version))


def copy_of(sent: Draft) -> Draft:
    """The keeper's record: all but the small state."""
    return replace(sent, segment=replace(sent.segment, keeper=KEEPER), small=None)


class Pair:
    def __init__(self) -> None:
        self.receiver = SmallStateReceiver("127.0.0.1", SENDER, lambda: SECRET)
        self.keeper = Keeper(self.receiver.address, SECRET)
        self.troubles: list[str] = []
        self.sender = SmallStateSender(SENDER, lambda _, error: self.troubles.append(str(error)))

    def send(self, *drafts: Draft) -> None:
        for each in drafts:
            self.sender.send(self.keeper, each)

    def takes(self, sent: Draft) -> bool:
        """Whether the keeper gets exactly the frame that the sender writes."""
        found = b"".join(self.receiver.take(copy_of(sent)))
        whole = b"".join(last_frame(sent))
        return len(found) == len(whole) and found[-PAGE_BYTES:] == whole[-PAGE_BYTES:]

    def why_not(self, wanted: Draft) -> str:
        with pytest.raises(PeerError) as caught:
            self.receiver.take(copy_of(wanted))
        return str(caught.value)


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.receiver.close()
    made.sender.close(CLOSE_SECONDS)
    made.receiver.release()


def test_each_record_arrives_and_those_of_before_are_left_out(pair: Pair) -> None:
    pair.send(draft(1), draft(2), draft(3, base=3), draft(4, base=3))
    assert pair.takes(draft(1))
    assert pair.takes(draft(4, base=3)), "a copy that had stopped"
    pair.send(draft(5, base=3, run_id="another run"), draft(5, base=3))
    assert pair.takes(draft(5, base=3))
    assert pair.troubles == []


def test_another_record_ends_the_copy_until_that_one_is_wanted(pair: Pair) -> None:
    pair.send(draft(1), draft(4, base=3))
    assert pair.takes(draft(1))
    assert pair.why_not(draft(2)) == "rank 1 sent the state of v4, not v2"
    assert pair.takes(draft(4, base=3))
    pair.send(draft(5, base=3, steps=2))
    assert "rank 1 sent the state of v5" in pair.why_not(draft(5, base=3))


def test_a_journal_that_stops_says_so(pair: Pair) -> None:
    pair.send(draft(1))
    pair.sender.stop(pair.keeper, draft(1).segment, "its disk is full")
    assert pair.takes(draft(1))
    assert pair.why_not(draft(2)) == "rank 1 sends no more: its disk is full"
    pair.send(draft(9, base=8))
    assert pair.takes(draft(9, base=8)), "and begins again"


def test_a_connection_that_breaks_is_made_again_for_the_next_file(pair: Pair) -> None:
    pair.send(draft(1))
    assert pair.takes(draft(1))
    pair.receiver._hang_up()
    while not pair.troubles:
        pair.send(draft(2))
    assert "the connection broke" in pair.troubles[0]
    pair.send(draft(9, base=8))
    assert pair.takes(draft(9, base=8))


def test_a_silent_rank_is_named_after_the_limit(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr(copies, "AGAIN_SECONDS", 20.0)
    assert pair.why_not(draft(1)) == "rank 1 did not connect in time"
    pair.send(draft(2))
    assert pair.takes(draft(2))
    assert "rank 1 sent nothing" in pair.why_not(draft(3))


def test_a_keeper_that_takes_nothing_costs_a_bounded_number_of_records(pair: Pair) -> None:
    large = torch.zeros(16 << 20, dtype=torch.uint8)  # more than a connection holds
    small = Image(bytes(PAGE_BYTES), large, (len(large),), CopiedTree(large[:0]))
    pair.send(*(replace(draft(number), small=small) for number in range(1, 50)))
    assert pair.sender._waiting <= MAX_WAITING + 1
    assert "not taken fast enough" in pair.why_not(draft(30))


def test_a_sender_ends_though_the_keeper_takes_nothing(pair: Pair) -> None:
    large = torch.zeros(16 << 20, dtype=torch.uint8)  # more than a connection holds
    small = Image(bytes(PAGE_BYTES), large, (len(large),), CopiedTree(large[:0]))
    pair.send(draft(1))
    assert pair.takes(draft(1))
    pair.send(replace(draft(2), small=small))
    pair.sender.close(0.0)
    pair.sender._thread.join()
    assert pair.why_not(draft(2))


def test_bytes_that_arrive_damaged_end_the_copy_at_once(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(copies, "digest", lambda _: os.urandom(8))
        pair.send(draft(1))
        assert pair.why_not(draft(1)) == "rank 1 sent bytes that arrived damaged"
    pair.send(draft(9, base=8))
    assert pair.takes(draft(9, base=8))


def test_others_do_not_get_in(pair: Pair) -> None:
    link = reach(pair.keeper.address, 5.0)
    pair.send(draft(1))
    link.send({"protocol": PROTOCOL, "hello": {}, "nonce": "n", "proof": "guessed"})
    assert pair.takes(draft(1)), "the right rank comes after the wrong one"
    link.close()


def test_one_that_closes_wakes_the_one_that_waits(pair: Pair) -> None:
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(pair.why_not(draft(1))))
    thread.start()
    pair.receiver.close()
    thread.join()
    assert "did not connect" in found[0]
