"""Groups: no two members of one failure domain, equal on every rank, of even sizes."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tierckpt._process import boot_id, host_id
from tierckpt.erasure import RedundancyGroup, Scheme, TooFewDomainsError, plan_groups
from tierckpt.errors import ConfigError

# (form, group size): several of each kind, with the smallest and with large ones.
ASKED = [
    ("partner", 2),
    ("partner", 8),
    ("partner 3", 4),
    ("xor", 2),
    ("xor", 8),
    ("rs 1+1", 8),
    ("rs 4+2", 8),
    ("rs 6+2", 8),
]
asked = st.sampled_from(ASKED)


@st.composite
def jobs(draw: st.DrawFn) -> list[str]:
    """Nodes with differing numbers of ranks, placed in blocks, one by one, or anyhow."""
    counts = draw(st.lists(st.integers(1, 5), min_size=1, max_size=25))
    if draw(st.booleans()):
        counts = [counts[0]] * len(counts)
    blocks = [f"node{i}" for i, count in enumerate(counts) for _ in range(count)]
    placement = draw(st.sampled_from(["blocks", "in turn", "anyhow"]))
    if placement == "in turn":
        return [f"node{i}" for turn in range(5) for i, c in enumerate(counts) if c > turn]
    return blocks if placement == "blocks" else draw(st.permutations(blocks))


def groups_or_none(
    domains: list[str], scheme: Scheme, size: int
) -> tuple[RedundancyGroup, ...] | None:
    try:
        return plan_groups(domains, scheme, size)
    except ConfigError:
        return None


def planned(domains: list[str], ask: tuple[str, int]) -> tuple[Scheme, tuple[RedundancyGroup, ...]]:
    """Plans of jobs that can be protected as requested."""
    scheme = Scheme.parse(ask[0])
    groups = groups_or_none(domains, scheme, ask[1])
    assume(groups is not None)
    assert groups is not None
    return scheme, groups


@given(jobs(), asked)
def test_every_rank_is_in_one_group_and_no_domain_twice(
    domains: list[str], ask: tuple[str, int]
) -> None:
    scheme, groups = planned(domains, ask)
    assert sorted(rank for group in groups for rank in group.ranks) == list(range(len(domains)))
    for group in groups:
        assert len({domains[rank] for rank in group.ranks}) == len(group.ranks)
        assert (group.code.n, group.code.m) == (len(group.ranks), scheme.m)
        assert group.code.k == {"partner": 1, "xor": group.code.n - 1}.get(scheme.name, scheme.k)


@given(jobs(), asked)
def test_it_is_an_error_exactly_when_there_is_no_way(
    domains: list[str], ask: tuple[str, int]
) -> None:
    """Groups of `least` members or more, at least one for each rank of the fullest domain: if they
    do not fit into the job there is no solution, and if they do there is one."""
    scheme = Scheme.parse(ask[0])
    fullest = max(Counter(domains).values())
    possible = fullest * scheme.least <= len(domains)
    assert (groups_or_none(domains, scheme, ask[1]) is not None) == possible


@given(jobs(), asked)
def test_sizes_are_even_and_near_the_requested_one(
    domains: list[str], ask: tuple[str, int]
) -> None:
    scheme, groups = planned(domains, ask)
    wanted = scheme.least if scheme.name == "rs" else ask[1]
    sizes = [len(group.ranks) for group in groups]
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= scheme.least
    # Below two groups' worth of ranks there is no choice but one group, or two small ones.
    assert max(sizes) < 2 * wanted if scheme.name == "rs" else max(sizes) <= 1.5 * wanted + 1
    crowded = len(groups) == max(Counter(domains).values())
    assert crowded or min(sizes) >= min(0.75 * wanted - 1, len(domains))


@given(jobs(), asked)
def test_a_lost_domain_costs_a_group_one_member_and_stores_by_its_ranks(
    domains: list[str], ask: tuple[str, int]
) -> None:
    scheme, groups = planned(domains, ask)
    stored: Counter[str] = Counter()
    for group in groups:
        for rank in group.ranks:
            stored[domains[rank]] += group.code.m / group.code.k  # in shards
    for domain, count in Counter(domains).items():
        low = min(g.code.m / g.code.k for g in groups)
        high = max(g.code.m / g.code.k for g in groups)
        assert count * low - 1e-9 <= stored[domain] <= count * high + 1e-9
        assert high == low or scheme.name == "xor"


def test_the_same_list_gives_the_same_groups() -> None:
    domains = [f"n{rank // 3}" for rank in range(40)]
    first = plan_groups(domains, Scheme.parse("xor"))
    assert first == plan_groups(tuple(domains), Scheme.parse("xor"), 8)
    program = (
        "from tierckpt.erasure.groups import Scheme, plan_groups\n"
        "domains = [f'n{rank // 3}' for rank in range(40)]\n"
        "print([group.ranks for group in plan_groups(domains, Scheme.parse('xor'))])"
    )  # in another process, with other hashes
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == str([group.ranks for group in first]), done.stderr


def test_two_ranks_a_node_make_two_rings_over_all_nodes() -> None:
    domains = [f"node{rank // 2}" for rank in range(12)]
    groups = plan_groups(domains, Scheme.parse("rs 4+2"))
    assert [group.ranks for group in groups] == [(0, 2, 4, 6, 8, 10), (1, 3, 5, 7, 9, 11)]


@pytest.mark.parametrize(
    ("ranks", "form", "size", "expected"),
    [
        (9, "xor", 8, [9]),
        (11, "xor", 8, [11]),
        (12, "xor", 8, [6, 6]),
        (15, "xor", 8, [8, 7]),
        (3, "xor", 8, [3]),
        (11, "rs 4+2", 8, [11]),
        (12, "rs 4+2", 8, [6, 6]),
        (20, "rs 4+2", 8, [7, 7, 6]),
        (5, "partner 2", 3, [5]),
    ],
)
def test_left_overs(ranks: int, form: str, size: int, expected: list[int]) -> None:
    groups = plan_groups([str(rank) for rank in range(ranks)], Scheme.parse(form), size)
    assert [len(group.ranks) for group in groups] == expected


def test_none_protects_nobody() -> None:
    assert plan_groups(["a", "b"], Scheme.parse("none")) == ()
    assert plan_groups([], Scheme.parse("xor")) == ()


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("domains", "form", "parts"),
    [
        (
            list("aabbcc"),
            "rs 4+2",
            [
                "rs 4+2 needs 6 failure domains per group",
                "the job has 3 ('a', 'b', 'c')",
                "Use rs 1+2, or partner 2, or xor,",
                "over 6 domains",
            ],
        ),
        (
            list("aaa") + list("bcdefg") * 2,
            "rs 4+2",
            [
                "'a' holds 3 of its 15 ranks",
                "there must be 3 groups",
                "only 5 of them",
                "Use rs 3+2, or partner 2, or xor,",
            ],
        ),
        (list("ab"), "partner 3", ["needs 4", "the job has 2", "Use partner 1, or xor,"]),
        (list("aaa"), "xor", ["xor needs 2", "the job has 1 ('a')", "Use none, or spread"]),
        (list("aaab"), "partner", ["'a' holds 3 of its 4 ranks", "only 1 of them", "Use none"]),
        (
            list("abcdefg"),
            "rs 6+2",
            ["the job has 7 ('a', 'b', 'c', 'd' and 3 more)", "Use rs 5+2"],
        ),
    ],
)
def test_groups_that_cannot_be_protected_are_refused_with_the_arithmetic(
    domains: list[str], form: str, parts: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_groups(domains, Scheme.parse(form))
    for part in parts:
        assert part in str(caught.value)


@given(jobs(), asked)
def test_the_alternative_that_the_refusal_offers_works(
    domains: list[str], ask: tuple[str, int]
) -> None:
    try:
        plan_groups(domains, Scheme.parse(ask[0]), ask[1])
    except ConfigError as error:
        offers = str(error).split("Use ")[1].split(", or ")[:-1]
        assert offers
        for offer in offers:
            plan_groups(domains, Scheme.parse(offer))


@pytest.mark.parametrize(("form", "size"), [("xor", 1), ("partner 2", 2), ("xor", 129)])
def test_a_group_size_that_cannot_be_is_refused(form: str, size: int) -> None:
    with pytest.raises(ConfigError, match=f"group size is {size}; {form} takes . to 128"):
        plan_groups(["a", "b", "c"], Scheme.parse(form), size)


@pytest.mark.parametrize("size", [2, 8, 128])
def test_the_largest_groups_still_have_a_code(size: int) -> None:
    for ranks in range(size, 3 * size):
        for group in plan_groups([str(r) for r in range(ranks)], Scheme.parse("xor"), size):
            assert group.code.k + group.code.m <= 256


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("none", "none"),
        ("partner", "partner 1"),
        (" Partner 2 ", "partner 2"),
        ("XOR", "xor"),
        ("rs 4+2", "rs 4+2"),
        ("rs  10 + 4", "rs 10+4"),
    ],
)
def test_forms_of_schemes(text: str, shown: str) -> None:
    assert str(Scheme.parse(text)) == shown
    assert Scheme.parse(shown) == Scheme.parse(text)


@pytest.mark.parametrize(
    "text", ["", "raid5", "partner 0", "rs", "rs 4", "rs 0+2", "rs 4+0", "xor 3", "rs 4+2 x"]
)
def test_other_forms_are_refused_with_the_valid_ones(text: str) -> None:
    with pytest.raises(ConfigError, match=r"valid: none, partner, .*rs <k>\+<m>"):
        Scheme.parse(text)


def test_a_code_larger_than_the_field_is_refused() -> None:
    Scheme.parse("rs 252+4")
    with pytest.raises(ConfigError, match="257 segments a row; at most 256"):
        Scheme.parse("rs 253+4")


def test_a_node_is_called_by_its_name_not_by_its_boot() -> None:
    for domains in ([host_id("here")] * 2, [host_id("here"), *[host_id("here")] * 4, "rack/7"]):
        with pytest.raises(TooFewDomainsError, match="'here'") as caught:
            plan_groups(domains, Scheme.parse("xor"), 8)
        assert not boot_id() or boot_id() not in str(caught.value)
    with pytest.raises(TooFewDomainsError, match="'rack/7'"):
        plan_groups(["rack/7"] * 2, Scheme.parse("xor"), 8)


def test_a_scheme_may_say_how_large_its_groups_are() -> None:
    domains = [str(rank) for rank in range(12)]
    for form, sizes in {
        "xor of 4": [4, 4, 4],
        "partner of 6": [6, 6],
        "partner 2 of 3": [3, 3, 3, 3],
        "XOR  of  12": [12],
    }.items():
        groups = plan_groups(domains, Scheme.parse(form))
        assert [len(group.ranks) for group in groups] == sizes
    for form in ("xor of", "xor of 1", "partner 2 of 2", "rs 4+2 of 8", "none of 4", "xor of 129"):
        with pytest.raises(ConfigError, match=r"group size is|valid: none"):
            Scheme.parse(form)
