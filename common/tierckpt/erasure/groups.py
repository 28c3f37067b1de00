"""Redundancy groups: which ranks protect each other, across failure domains.

Pure, and the same on every rank that has the same list, so no rank needs to communicate. A failure
domain is a set of ranks that fail together, named by a string: a node's name unless rack, switch or
power is configured. No two members of a group are in one domain, so the loss of a domain costs each
group at most one member.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from msgspec import Struct

from tierckpt._process import host_name
from tierckpt._text import some
from tierckpt.errors import ConfigError

from .codes import MAX_SYMBOLS, Code

GROUP_SIZE = 8
"""Members of a group unless configured: XOR then costs 1/7 of a shard."""

MAX_MEMBERS = 128
"""Largest group size for partner and xor; left-over ranks may make a group half as large again."""

_OF = r"(?:\s+of\s+(\d{1,6}))?"
"""Part of a scheme's text."""

FORMS = (
    "none, partner, partner <copies>, xor, rs <k>+<m>; for groups of n members: partner of <n>, "
    "partner <copies> of <n>, xor of <n>"
)


class TooFewDomainsError(ConfigError):
    """The scheme is valid, but the job has too few ranks for it, or too many in one domain."""


class Scheme(Struct, frozen=True):
    """How a group's members protect each other. `str()` gives the form that `parse` takes.

    `none`: no protection. `partner`: `m` whole copies on other members; survives any m losses in a
    group, more if not adjacent, at m shards extra. `xor`: survives 1 at 1/(n-1), for a group of n.
    `rs`: survives any m at m/k.
    """

    name: str
    k: int = 0
    """Data segments of a row; 0 for xor, where it is the group's size less one."""
    m: int = 0
    """Number of lost members that any group survives, whichever they are."""
    size: int = GROUP_SIZE
    """Wanted members of a group; for rs they are k + m."""

    @staticmethod
    def parse(text: str) -> Scheme:
        """The scheme that a user asked for. Raises ConfigError with the valid forms."""
        words = text.strip().lower()
        if words == "none":
            return Scheme("none")
        if match := re.fullmatch(rf"xor{_OF}", words):
            scheme = Scheme("xor", 0, 1, int(match[1] or GROUP_SIZE))
        elif match := re.fullmatch(rf"partner(?:\s+([1-9]\d*))?{_OF}", words):
            scheme = Scheme("partner", 1, int(match[1] or 1), int(match[2] or GROUP_SIZE))
        elif match := re.fullmatch(r"rs\s+([1-9]\d*)\s*\+\s*([1-9]\d*)", words):
            scheme = Scheme("rs", int(match[1]), int(match[2]))
        else:
            raise ConfigError(f"the redundancy {text!r} is unknown; valid: {FORMS}")
        if scheme.least > MAX_SYMBOLS:
            raise ConfigError(
                f"the redundancy {text!r} has {scheme.least} segments a row; at most "
                f"{MAX_SYMBOLS} are possible, so use smaller numbers"
            )
        scheme.check_size(scheme.size)
        return scheme

    def check_size(self, members: int) -> None:
        """Raises ConfigError for groups that the scheme does not allow."""
        if self.name != "rs" and not self.least <= members <= MAX_MEMBERS:
            raise ConfigError(
                f"the group size is {members}; {self} takes {self.least} to {MAX_MEMBERS}; set one "
                "in this range"
            )

    def __str__(self) -> str:
        if self.name == "rs":
            return f"rs {self.k}+{self.m}"
        return f"partner {self.m}" if self.name == "partner" else self.name

    @property
    def least(self) -> int:
        """The smallest size of a group."""
        return max(self.k, 1) + self.m

    def code(self, members: int) -> Code:
        """The code of a group of `members`, at least `least`. Not for `none`."""
        return Code(members, self.k or members - 1, self.m)


class RedundancyGroup(Struct, frozen=True):
    """Ranks that protect one another; `ranks[i]` is the code's member i."""

    ranks: tuple[int, ...]
    code: Code


def plan_groups(
    domains: Sequence[str], scheme: Scheme, group_size: int = 0
) -> tuple[RedundancyGroup, ...]:
    """Put every rank in exactly one group; `domains[r]` is the failure domain of rank r.

    Domain after domain, ranks are dealt to the groups in turn, like cards. As there are at least as
    many groups as the fullest domain has ranks, a domain's ranks get to different groups, and two
    groups differ by one member at most. A group's members come from domains far from each other in
    the order of ranks, where launchers put neighbours in a rack next to each other.

    The number of groups brings their size nearest to the requested one, which is k + m for rs and
    `group_size` (0: the scheme's) for the others. Left-over ranks are spread over all groups: none
    is more than a half larger, and none more than a third smaller unless the job is small or its
    ranks crowd in one domain. A group of rs is never smaller than k + m, so that its code, its
    cost, and the promise to survive any m losses are exactly the requested ones (`codes` explains a
    ring longer than k + m); in a job of less than 2 (k + m) ranks the one group takes them all.

    Every rank of a group stores the same amount; a node, in proportion to its ranks. O(n).

    Raises TooFewDomainsError, with the arithmetic and alternatives, when the ranks cannot be
    grouped; ConfigError for a `group_size` that the scheme does not allow.
    """
    if scheme.name == "none" or not domains:
        return ()
    size = group_size or scheme.size
    scheme.check_size(size)
    wanted = scheme.least if scheme.name == "rs" else size
    members = _by_domain(domains)
    fullest = max(len(ranks) for ranks in members.values())
    most = len(domains) // scheme.least
    if fullest > most:
        raise TooFewDomainsError(_cannot(scheme, members, len(domains), fullest))
    nearest = (2 * len(domains) + wanted) // (2 * wanted)
    count = max(fullest, min(nearest, most))
    dealt = [rank for ranks in members.values() for rank in ranks]
    hands = [tuple(dealt[first::count]) for first in range(count)]
    return tuple(RedundancyGroup(ranks, scheme.code(len(ranks))) for ranks in hands)


def _by_domain(domains: Sequence[str]) -> dict[str, list[int]]:
    """Ranks of every domain; domains in the order of their first ranks."""
    members: dict[str, list[int]] = {}
    for rank, domain in enumerate(domains):
        members.setdefault(domain, []).append(rank)
    return members


def _cannot(scheme: Scheme, members: dict[str, list[int]], ranks: int, fullest: int) -> str:
    """The message of TooFewDomainsError: the arithmetic, and the alternatives."""
    least = scheme.least
    if len(members) < least:
        names = some([repr(host_name(name)) for name in members], 4)
        why = (
            f"the job has {len(members)} ({names}), and no two members of a group may die together"
        )
    else:
        crowded = next(
            host_name(name) for name, theirs in members.items() if len(theirs) == fullest
        )
        why = (
            f"the job has {len(members)}, but {crowded!r} holds {fullest} of its {ranks} ranks; no "
            f"two of them may share a group, so there must be {fullest} groups, and {ranks} ranks "
            f"give each only {ranks // fullest} of them"
        )
    return (
        f"{scheme} needs {least} failure domains per group: {why}. Use "
        f"{', or '.join(_instead(scheme, ranks // fullest))}, or spread the ranks evenly over "
        f"{least} domains or more"
    )


def _instead(scheme: Scheme, size: int) -> Iterable[str]:
    """Schemes for groups of `size` members, nearest to `scheme` first."""
    if size > scheme.m >= 1 and scheme.name == "rs":
        yield str(Scheme("rs", size - scheme.m, scheme.m))
    if size > 1 and scheme.name != "xor":
        yield f"partner {min(size - 1, scheme.m)}"
        yield "xor"
    if size < 2:
        yield "none"
