"""Exchanges of whole groups over loopback: a thread for each member, all with their own stores.

The resulting parity must equal that of the arithmetic, which has its own tests. From the files on
disk, every loss within the scheme's promise is rebuilt to the bit.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.support.peer_shards import Members, wait_until
from tests.unit.erasure.test_codes import Cluster
from tierckpt.erasure import Code
from tierckpt.errors import RestoreError
from tierckpt.format import VersionId
from tierckpt.peer import AHEAD, window_bytes_of

MIB = 1 << 20
SCHEMES = {
    "partner 1": Code(3, 1, 1),
    "partner 2": Code(4, 1, 2),
    "xor 4": Code(4, 3, 1),
    "rs 2+1": Code(3, 2, 1),
    "rs 4+2": Code(6, 4, 2),
    "rs 2+2 on a ring of 5": Code(5, 2, 2),
}


def uneven(code: Code, longest: int) -> list[int]:
    """Lengths of full pages and of odd bytes; one is zero."""
    lengths = [longest - 4096 * i - 5 * (i % 2) for i in range(code.n)]
    lengths[-1] = 0
    return lengths


def expected(members: Members, version: int = 1) -> list[bytes]:
    """Every member's parity, by the executor of the arithmetic's own tests."""
    cluster = Cluster.of(members.code, list(members.lengths))
    for member in cluster.members:
        member.shard[:] = members.image(member.number, version)
    cluster.encode()
    return [bytes(member.parity) for member in cluster.members]


SIZES = [*((name, 40 * 1024) for name in SCHEMES), ("xor 4", 0), ("rs 2+1", 5 * MIB)]
"""Schemes, and the length of the longest shard."""


@pytest.mark.parametrize(("scheme", "longest"), SIZES)
def test_every_member_has_its_parity_and_every_promised_loss_comes_back(
    scheme: str, longest: int, tmp_path: Path
) -> None:
    code = SCHEMES[scheme]
    lengths = uneven(code, longest) if longest else [0] * code.n
    with Members(tmp_path, code, lengths) as members:
        members.protect()
        assert list(members.parities().values()) == expected(members)
        for lost in itertools.combinations(range(code.n), code.m):
            came_back = members.rebuilt(set(lost))
            assert came_back == {member: members.image(member) for member in lost}


def test_more_losses_than_promised_are_refused_with_the_arithmetic(tmp_path: Path) -> None:
    with Members(tmp_path, Code(4, 3, 1), [8192] * 4) as members:
        members.protect()
        with pytest.raises(RestoreError, match=r"members 1, 2 lost data, and 3\+1 survives any 1"):
            members.rebuilt({1, 2})


def test_the_bytes_sent_are_those_of_the_plan(tmp_path: Path) -> None:
    """(k + m - 1) / k shards a member: nothing is sent twice, and padding never."""
    code = Code(6, 4, 2)
    with Members(tmp_path, code, [4 * MIB] * 6) as members:
        members.protect()
        assert {r.sent_bytes for r in members.reports.values()} == {5 * MIB}
        assert {r.parity_bytes for r in members.reports.values()} == {2 * MIB}


def test_version_after_version_over_the_same_connections(tmp_path: Path) -> None:
    code = Code(3, 2, 1)
    with Members(tmp_path, code, [MIB, 2 * MIB, MIB + 1]) as members:
        members.protect(1)
        first = [len(t._links) + len(t._listener._links) for t in members.transports]
        for version in (2, 3):
            members.protect(version)
            assert list(members.parities(version).values()) == expected(members, version)
        assert (
            [len(t._links) + len(t._listener._links) for t in members.transports]
            == first
            == [4, 4, 4]
        )


def test_exchanges_of_several_versions_at_once_are_not_confused(tmp_path: Path) -> None:
    code = Code(3, 1, 1)
    with Members(tmp_path, code, [2 * MIB, MIB, 3 * MIB]) as members:
        threads = []
        for version in (1, 2, 3):  # members start versions in their order, as trainers seal them
            for member in (0, 1):
                threads.append(members.start(members.exchange(member, version)))
                wait_until(lambda m=member, v=version: len(members.transports[m]._hosts) == v)
        # All three are in progress at two members before the third starts any.
        for version in (1, 2, 3):
            threads.append(members.start(members.exchange(2, version)))
            wait_until(lambda v=version: VersionId(1, v) in members.transports[2]._latest.values())
        for thread in threads:
            thread.join()
        assert members.errors == {}
        for version in (1, 2, 3):
            assert list(members.parities(version).values()) == expected(members, version)


def test_several_groups_and_ranks_go_through_one_agent(tmp_path: Path) -> None:
    """Two groups of three on three nodes: each agent has a member of both."""
    code = Code(3, 2, 1)
    with (
        Members(tmp_path / "a", code, [MIB] * 3) as one,
        Members(tmp_path / "b", code, [2 * MIB] * 3) as other,
    ):
        for transport in other.transports:
            transport.close()
        other.transports = one.transports
        # Members of the second group sit on the nodes in another order.
        other.transports = [one.transports[(m + 1) % 3] for m in range(3)]
        other.addresses = tuple(t.address for t in other.transports)
        threads = [g.start(g.exchange(m)) for m in range(3) for g in (one, other)]
        for thread in threads:
            thread.join()
        assert (one.errors, other.errors) == ({}, {})
        for group in (one, other):
            assert list(group.parities().values()) == expected(group)


def test_one_agent_may_be_several_members(tmp_path: Path) -> None:
    with Members(tmp_path, Code(3, 2, 1), [MIB] * 3) as members:
        for transport in members.transports[1:]:
            transport.close()
        members.transports = members.transports[:1] * 3
        members.addresses = members.addresses[:1] * 3
        members.protect()
        assert list(members.parities().values()) == expected(members)


def test_lost_parities_are_made_again_beside_those_that_are_there(tmp_path: Path) -> None:
    code = Code(6, 4, 2)
    with Members(tmp_path, code, uneven(code, 2 * MIB)) as members:
        members.protect()
        before = members.parities()
        inodes = {m: next((tmp_path / f"node{m}").glob("*.parity")).stat().st_ino for m in range(6)}
        for lost in (1, 4):
            for file in (tmp_path / f"node{lost}").iterdir():
                file.unlink()
        members.run([members.exchange(m, make=[1, 4]) for m in range(6)])
        assert members.errors == {}
        assert members.parities() == before
        assert members.reports[0].parity_bytes == 0 < members.reports[1].parity_bytes
        for member in (0, 2, 3, 5):
            (file,) = (tmp_path / f"node{member}").glob("*.parity")
            assert file.stat().st_ino == inodes[member], "those that were there are not touched"


def test_a_shard_of_another_member_is_an_error_at_once(tmp_path: Path) -> None:
    with Members(tmp_path, Code(3, 2, 1), [8192] * 3) as members:
        right = members.exchange(0)
        party, shard = right._party, right._shard
        for image, member in ((shard.image, 1), (shard.image[:-1], 0)):
            with pytest.raises(ValueError, match="shard"):
                type(right)(
                    members.transports[0],
                    type(party)(party.group, party.addresses, member),
                    type(shard)(image, shard.manifest),
                    members.store(0),
                )


def test_windows_get_smaller_before_buffers_get_many() -> None:
    for code in (*SCHEMES.values(), Code(128, 127, 1), Code(256, 200, 56)):
        nbytes = window_bytes_of(code)
        assert nbytes % 4096 == 0
        assert 4096 <= nbytes <= MIB
        assert (AHEAD + 1) * (code.k + code.m) * nbytes <= 64 * MIB
