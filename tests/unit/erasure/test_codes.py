"""Codes and plans: any loss within the promise is restored bit for bit.

The cluster below runs the plans as agents would: a member reads and writes only its own memory, and
knows of other members' memory only the messages that it received.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierckpt.erasure import (
    Code,
    MemberPlan,
    Product,
    Round,
    Segment,
    Stripes,
    Task,
    coefficient,
    find_isal,
    multiply,
    plan_encode,
    plan_member,
    plan_rebuild,
    transfers,
)
from tierckpt.errors import CorruptShardError, RestoreError
from tierckpt.format import DIGEST_BYTES, PAGE_BYTES, check, digests_of, parity_blocks

WINDOW_BYTES = 5000


@dataclass
class Member:
    """One member's storage, and its buffers."""

    number: int
    stripes: Stripes
    shard: bytearray
    parity: bytearray
    buffers: dict[Segment, bytearray] = field(default_factory=dict)
    most_buffers: int = 0

    def window(self, segment: Segment, window: tuple[int, int]) -> memoryview:
        """A window in its own memory, or a buffer for a window of another member."""
        if segment.member == self.number:
            low, high = self.stripes.range_of(segment, window)
            return memoryview(self.parity if segment.parity else self.shard)[low:high]
        return memoryview(self.buffers[segment])

    def room(self, segment: Segment, window: tuple[int, int]) -> None:
        low, high = self.stripes.range_of(segment, window)
        if segment.member != self.number:
            self.buffers[segment] = bytearray(high - low)
            self.most_buffers = max(self.most_buffers, len(self.buffers))


@dataclass
class Cluster:
    """A group of members."""

    stripes: Stripes
    members: list[Member]
    sent: list[int] = field(default_factory=list)
    received: list[int] = field(default_factory=list)

    @staticmethod
    def of(code: Code, shard_bytes: list[int], seed: int = 0) -> Cluster:
        stripes = Stripes(code, tuple(shard_bytes))
        rng = np.random.default_rng(seed)
        members = [
            Member(i, stripes, bytearray(rng.bytes(n)), bytearray(stripes.parity_bytes))
            for i, n in enumerate(shard_bytes)
        ]
        return Cluster(stripes, members)

    def content(self) -> list[tuple[bytes, bytes]]:
        return [(bytes(m.shard), bytes(m.parity)) for m in self.members]

    def encode(self, window_bytes: int = WINDOW_BYTES) -> None:
        self.run(plan_encode(self.stripes.code), window_bytes)

    def lose(self, shards: set[int], parities: set[int]) -> None:
        for i in shards:
            self.members[i].shard[:] = b"\xaa" * len(self.members[i].shard)
        for i in parities:
            self.members[i].parity[:] = bytes(len(self.members[i].parity))

    def run(self, tasks: tuple[Task, ...], window_bytes: int = WINDOW_BYTES) -> None:
        code = self.stripes.code
        plans = [plan_member(code, tasks, m.number) for m in self.members]
        products = {task: Product(task.matrix, find_isal()) for task in tasks}
        self.sent, self.received = [0] * code.n, [0] * code.n
        for window in self.stripes.windows(window_bytes):
            self._exchange([plan.gather for plan in plans], window)
            for member, plan in zip(self.members, plans, strict=True):
                self._compute(member, plan, products, window)
            self._exchange([plan.scatter for plan in plans], window)
            for member in self.members:
                member.buffers.clear()

    def _compute(
        self,
        member: Member,
        plan: MemberPlan,
        products: dict[Task, Product],
        window: tuple[int, int],
    ) -> None:
        for task in plan.tasks:
            for segment in task.outputs:
                member.room(segment, window)
            sources = [member.window(s, window) for s in task.sources]
            products[task].run(sources, [member.window(s, window) for s in task.outputs])

    def _exchange(self, rounds: list[tuple[Round, ...]], window: tuple[int, int]) -> None:
        wire: dict[tuple[int, int, Segment], bytes] = {}
        for member, theirs in zip(self.members, rounds, strict=True):
            for now in theirs:
                for segment in now.sends:
                    message = bytes(member.window(segment, window))
                    assert wire.setdefault((member.number, now.to, segment), message) is message
                    self.sent[member.number] += len(message)
        for member, theirs in zip(self.members, rounds, strict=True):
            for now in theirs:
                for segment in now.receives:
                    member.room(segment, window)
                    message = wire.pop((now.source, member.number, segment))
                    member.window(segment, window)[:] = message
                    self.received[member.number] += len(message)
        assert not wire, "sent, and nobody received it"


@st.composite
def codes(draw: st.DrawFn, most: int = 9) -> Code:
    n = draw(st.integers(2, most))
    m = draw(st.integers(1, min(4, n - 1)))
    return Code(n, draw(st.integers(1, n - m)), m)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Any code, shards of any lengths: empty, a byte, all equal, very different."""
    code = draw(codes())
    longest = draw(st.sampled_from([0, 1, 4096, 4097, 30_000]))
    near = st.integers(max(0, longest - 10), longest)
    lengths = st.lists(st.one_of(near, st.integers(0, longest)), min_size=code.n, max_size=code.n)
    return Cluster.of(code, draw(lengths), draw(st.integers(0, 9)))


windows = st.sampled_from([777, 4096, 5000, 1 << 20])

# --- the bytes -----------------------------------------------------------------------------------


@given(codes(20))
def test_every_segment_is_in_one_row_and_a_row_has_no_member_twice(code: Code) -> None:
    everything = {Segment(i, False, s) for i in range(code.n) for s in range(code.k)}
    everything |= {Segment(i, True, p) for i in range(code.n) for p in range(code.m)}
    seen: list[Segment] = []
    for row in range(code.n):
        word = code.row(row)
        assert all(code.row_of(segment) == row for segment in word)
        assert [s.parity for s in word] == [False] * code.k + [True] * code.m
        assert [s.index for s in word] == [*range(code.k), *range(code.m)]
        assert len({s.member for s in word}) == code.k + code.m
        seen += word
    assert len(seen) == len(everything)
    assert set(seen) == everything


def test_the_example_of_the_documentation() -> None:
    code = Code(4, 2, 2)
    rows = [
        [code.row_of(Segment(i, parity, s)) for parity in (False, True) for s in (0, 1)]
        for i in range(4)
    ]
    assert rows == [[1, 2, 0, 3], [2, 3, 1, 0], [3, 0, 2, 1], [0, 1, 3, 2]]


@pytest.mark.parametrize("numbers", [(4, 0, 1), (4, 1, 0), (4, 3, 2), (300, 250, 7)])
def test_an_invalid_code_is_refused(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="at most"):
        Code(*numbers)


def test_lengths_must_be_of_all_members() -> None:
    for lengths in ((1, 2), (1, 2, 3, 4), (1, -1, 1)):
        with pytest.raises(ValueError, match="takes 3 lengths"):
            Stripes(Code(3, 2, 1), lengths)


@given(clusters(), windows)
def test_extents_and_windows_cover_exactly_the_stored_bytes(
    cluster: Cluster, window_bytes: int
) -> None:
    stripes = cluster.stripes
    assert stripes.segment_bytes % PAGE_BYTES == 0
    for member, nbytes in enumerate(stripes.shard_bytes):
        covered = []
        for s in range(stripes.code.k):
            for window in stripes.windows(window_bytes):
                assert 0 < window[1] - window[0] <= window_bytes
                low, high = stripes.range_of(Segment(member, False, s), window)
                covered += [low, high] if high > low else []
        joined = [0, *covered, nbytes]
        assert joined[::2] == joined[1::2], (
            "ranges follow each other from the first byte to the last"
        )
        for p in range(stripes.code.m):
            parity = Segment(member, True, p)
            assert stripes.extent(parity) <= stripes.segment_bytes
            assert stripes.range_of(parity, (0, 1 << 40))[1] <= stripes.parity_bytes


def test_a_window_has_a_length() -> None:
    with pytest.raises(ValueError, match="window_bytes is 0"):
        next(Stripes(Code(2, 1, 1), (1, 1)).windows(0))


def test_the_stored_parity_is_pinned() -> None:
    """Computed by hand: 3 = 1 ^ 2, 0xD3 = 231 * 2, 231 * 3 = 231 ^ 0xD3 = 0x34, ..."""
    cluster = Cluster.of(Code(4, 2, 2), [8192] * 4)
    for member in cluster.members:
        member.shard[:] = bytes([member.number + 1]) * 8192
    cluster.encode()
    stored = [(m.parity[0], m.parity[4096]) for m in cluster.members]
    # p0 @ row r is shard r-1 ^ shard r-2, and p1, a member further, shard r-1 ^ 231 * shard r-2.
    assert stored == [
        (4 ^ 3, 3 ^ 0xD3),
        (1 ^ 4, 4 ^ 0x34),
        (2 ^ 1, 1 ^ 0xBB),
        (3 ^ 2, 2 ^ 0xE7),
    ]
    assert all(
        m.parity == bytes([a]) * 4096 + bytes([b]) * 4096
        for m, (a, b) in zip(cluster.members, stored, strict=True)
    )


@given(clusters(), windows)
def test_parity_follows_its_definition(cluster: Cluster, window_bytes: int) -> None:
    cluster.encode(window_bytes)
    code, length = cluster.stripes.code, cluster.stripes.segment_bytes
    padded = [bytes(m.shard).ljust(code.k * length, b"\0") for m in cluster.members]
    probes = [0, 1, length // 2, length - 1] if length else []
    for row, p, at in itertools.product(range(code.n), range(code.m), probes):
        value = 0
        for s in range(code.k):
            value ^= multiply(coefficient(p, s), padded[(row - 1 - s) % code.n][s * length + at])
        assert cluster.members[(row + p) % code.n].parity[p * length + at] == value


# --- losing and rebuilding -----------------------------------------------------------------------


@given(clusters(), windows, st.data())
def test_any_m_members_come_back_bit_for_bit(
    cluster: Cluster, window_bytes: int, data: st.DataObject
) -> None:
    cluster.encode()
    before = cluster.content()
    code = cluster.stripes.code
    lost = data.draw(st.sets(st.integers(0, code.n - 1), max_size=code.m))
    cluster.lose(lost, lost)
    cluster.run(plan_rebuild(code, lost, lost), window_bytes)
    assert cluster.content() == before


@given(clusters(), st.data())
def test_shards_first_and_parity_later(cluster: Cluster, data: st.DataObject) -> None:
    """Shards and parity may be lost on different members; a restart asks for shards only."""
    cluster.encode()
    before = cluster.content()
    code = cluster.stripes.code
    lost = data.draw(st.lists(st.integers(0, code.n - 1), max_size=code.m, unique=True))
    cut = data.draw(st.integers(0, len(lost)))
    shards, parities = set(lost[:cut]), set(lost[cut // 2 :])
    cluster.lose(shards, parities)
    cluster.run(plan_rebuild(code, shards, parities, restore_parities=False))
    assert [shard for shard, _ in cluster.content()] == [shard for shard, _ in before]
    cluster.run(plan_rebuild(code, (), parities))
    assert cluster.content() == before


def small_codes(most: int) -> list[Code]:
    numbers = itertools.product(range(2, most + 1), range(1, most), range(1, most))
    return [Code(n, k, m) for n, k, m in numbers if k + m <= n]


@pytest.mark.parametrize("code", small_codes(4), ids=str)
def test_every_loss_in_a_small_group(code: Code) -> None:
    """All losses: those that the equations determine are restored, all others are refused."""
    cluster = Cluster.of(code, [4096 * code.k - 5 * i for i in range(code.n)])
    cluster.encode()
    before = cluster.content()
    everybody = range(code.n)
    for lost in itertools.chain.from_iterable(
        itertools.combinations(everybody, r) for r in range(code.n + 1)
    ):
        cluster.lose(set(lost), set(lost))
        if determined(code, set(lost)):
            cluster.run(plan_rebuild(code, lost, lost), 1 << 20)
            assert cluster.content() == before
        else:
            assert len(lost) > code.m, "the promise"
            with pytest.raises(RestoreError, match="cannot be rebuilt"):
                plan_rebuild(code, lost, lost)
            for member, (shard, parity) in zip(cluster.members, before, strict=True):
                member.shard[:], member.parity[:] = shard, parity


def determined(code: Code, lost: set[int]) -> bool:
    """By brute force: do the surviving equations of the whole group have only one solution?"""
    unknown = [(i, s) for i in lost for s in range(code.k)]
    rows = []
    for row, p in itertools.product(range(code.n), range(code.m)):
        if (row + p) % code.n not in lost:
            terms = {((row - 1 - s) % code.n, s): coefficient(p, s) for s in range(code.k)}
            rows.append([terms.get(u, 0) for u in unknown])
    return rank(rows) == len(unknown)


def rank(rows: list[list[int]]) -> int:
    """Elimination without division: rows are multiplied crosswise."""
    found = 0
    for column in range(len(rows[0]) if rows else 0):
        pivot = next((r for r in rows if r[column]), None)
        if pivot is None:
            continue
        found += 1
        rows = [
            [
                multiply(pivot[column], a) ^ multiply(r[column], b)
                for a, b in zip(r, pivot, strict=True)
            ]
            for r in rows
            if r is not pivot
        ]
    return found


def test_too_many_losses_are_refused_with_the_arithmetic() -> None:
    with pytest.raises(RestoreError) as caught:
        plan_rebuild(Code(6, 4, 2), [1, 4], [1, 3])
    for part in ("6 members 1, 3, 4", "4+2 survives any 2", "takes 4", "only 3", "another level"):
        assert part in str(caught.value)


def test_members_that_are_not_on_the_ring_are_an_error() -> None:
    for shards, parities in (([3], []), ([], [-1])):
        with pytest.raises(ValueError, match="not on a ring of 3"):
            plan_rebuild(Code(3, 2, 1), shards, parities)


# --- costs ---------------------------------------------------------------------------------------


@given(codes(20))
def test_encoding_is_even_and_takes_the_fewest_messages(code: Code) -> None:
    tasks = plan_encode(code)
    assert sorted(task.collector for task in tasks) == list(range(code.n))
    sent, received = messages(code, tasks)
    assert sent == received == [code.k + code.m - 1] * code.n


@given(codes(20), st.data())
def test_rebuilding_takes_the_fewest_messages_and_spreads_them(
    code: Code, data: st.DataObject
) -> None:
    lost = data.draw(st.sets(st.integers(0, code.n - 1), min_size=1, max_size=code.m))
    tasks = plan_rebuild(code, lost, lost)
    sent, received = messages(code, tasks)
    rows_with = [sum(s.member in lost for s in code.row(row)) for row in range(code.n)]
    assert sum(sent) == sum(code.k - 1 + gone for gone in rows_with if gone)
    for member in range(code.n):
        if member in lost:
            assert (sent[member], received[member]) == (0, code.k + code.m)
    if code.n == code.k + code.m:
        share = -(-len(tasks) // (code.n - len(lost)))
        assert max(map(sum, [[t.collector == i for t in tasks] for i in range(code.n)])) <= share


@given(clusters(), windows)
def test_bytes_and_buffers_are_bounded_by_windows(cluster: Cluster, window_bytes: int) -> None:
    cluster.encode(window_bytes)
    code, segment = cluster.stripes.code, cluster.stripes.segment_bytes
    assert max(cluster.received) <= (code.k + code.m - 1) * segment
    assert max(cluster.sent) <= (code.k + code.m - 1) * segment
    assert sum(cluster.sent) == sum(cluster.received)
    # Its own parity from others arrives in place, other buffers are those of its one task.
    assert max(m.most_buffers for m in cluster.members) <= code.k - 1 + code.m


def messages(code: Code, tasks: tuple[Task, ...]) -> tuple[list[int], list[int]]:
    sent, received = [0] * code.n, [0] * code.n
    for task in tasks:
        for _, sender, receiver, segment in transfers(task):
            assert sender != receiver
            assert segment.member in (sender, receiver)
            sent[sender] += 1
            received[receiver] += 1
    return sent, received


@given(codes(12), st.data())
def test_in_a_round_nobody_is_sent_to_by_two(code: Code, data: st.DataObject) -> None:
    lost = data.draw(st.sets(st.integers(0, code.n - 1), max_size=code.m))
    for tasks in (plan_encode(code), plan_rebuild(code, lost, lost)):
        for member in range(code.n):
            plan = plan_member(code, tasks, member)
            for rounds in (plan.gather, plan.scatter):
                steps = [(now.to - member) % code.n for now in rounds]
                assert steps == sorted(set(steps))
                assert all(
                    (member - now.source) % code.n == d
                    for now, d in zip(rounds, steps, strict=True)
                )
                assert all(now.sends or now.receives for now in rounds)


# --- damage --------------------------------------------------------------------------------------


@given(clusters().filter(lambda c: min(c.stripes.shard_bytes) > 0), st.data())
def test_a_flipped_bit_in_any_source_is_found(cluster: Cluster, data: st.DataObject) -> None:
    cluster.encode()
    code, stripes = cluster.stripes.code, cluster.stripes
    shard_blocks = [[min(700, n), n - min(700, n)] for n in stripes.shard_bytes]
    digests = [
        digests_of(memoryview(m.shard), blocks)
        for m, blocks in zip(cluster.members, shard_blocks, strict=True)
    ]
    lost = data.draw(st.integers(0, code.n - 1))
    before = bytes(cluster.members[lost].shard)
    tasks = plan_rebuild(code, [lost], [lost], restore_parities=False)
    task = data.draw(st.sampled_from(tasks))
    # A bit that matters: within the source, and within the result.
    bad = data.draw(st.sampled_from(task.sources))
    reach = min(stripes.extent(bad), stripes.extent(task.outputs[0]))
    cluster.lose({lost}, {lost})
    if reach:
        at = stripes.offset(bad) + data.draw(st.integers(0, reach - 1))
        holder = cluster.members[bad.member]
        (holder.parity if bad.parity else holder.shard)[at] ^= 1 << data.draw(st.integers(0, 7))
    cluster.run(tasks)
    rebuilt = memoryview(cluster.members[lost].shard)
    if reach:
        with pytest.raises(CorruptShardError, match=r"shard 3: bytes \d+ to \d+ differ"):
            check(rebuilt, shard_blocks[lost], digests[lost], "shard 3")
    else:
        check(rebuilt, shard_blocks[lost], digests[lost], "shard 3")
        assert rebuilt == before


def test_damaged_parity_is_found_before_it_is_used() -> None:
    parity = bytearray(np.random.default_rng(0).bytes(1_200_000))
    blocks = parity_blocks(len(parity))
    assert blocks == [524288, 524288, 151424]
    digests = digests_of(memoryview(parity), blocks)
    assert len(digests) == 3 * DIGEST_BYTES
    check(memoryview(parity), blocks, digests, "parity of shard 1")
    parity[-1] ^= 1
    with pytest.raises(CorruptShardError, match="parity of shard 1: bytes 1048576 to 1200000"):
        check(memoryview(parity), blocks, digests, "parity of shard 1")
    with pytest.raises(CorruptShardError, match="1199999 bytes long and has 3 digests"):
        check(memoryview(parity)[:-1], blocks, digests, "it")
    with pytest.raises(CorruptShardError, match="has 2 digests"):
        check(memoryview(parity), blocks, digests[:-DIGEST_BYTES], "it")
    with pytest.raises(ValueError, match="blocks of 1200000 bytes"):
        digests_of(memoryview(parity)[:-1], blocks)
    assert parity_blocks(0) == []
