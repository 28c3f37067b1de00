"""Who sends what to whom: to encode, and to rebuild what was lost. Pure: plans are plain values.

A *task* makes segments of one row out of k others. They come together at the task's *collector*, a
member that has one of the k anyway: it receives the other k - 1, multiplies, and sends every
segment it made to the member that stores it. Encoding is the case that all parity is missing.

What that costs. All k + m members of a row must be connected by what is sent, so a row takes at
least k + m - 1 messages as long as bytes at different offsets are not mixed; this is that minimum.
(Without a collector all data would go to each of m parities, in k * m messages.) Encoding has n
rows, and every member collects one. So each sends, and receives, k + m - 1 segments, which are
(k + m - 1) / k shards. For XOR that is exactly one shard, as in SCR's pipelined reduction, but with
no chain of n - 1 steps. The work is even as well: each member multiplies a shard's worth of data.

To rebuild, survivors collect, again in the fewest messages. A member that was lost then receives
nothing but its own k + m segments. The survivors share the rows about evenly, and receive k - 1
segments for each that they collect.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tierckpt.errors import RestoreError

from .codes import Code, Segment
from .gf256 import Matrix, decoding


@dataclass(frozen=True)
class Task:
    """Make `outputs` as `matrix` times `sources`, at the member `collector`."""

    row: int
    collector: int
    sources: tuple[Segment, ...]
    outputs: tuple[Segment, ...]
    matrix: Matrix


@dataclass(frozen=True)
class Round:
    """What a member sends and receives at the same time.

    In a round every member sends to the one that lies a fixed distance ahead, and receives from
    the one as far behind: nobody is sent to by two at a time.
    """

    to: int
    sends: tuple[Segment, ...]
    source: int
    receives: tuple[Segment, ...]


@dataclass(frozen=True)
class MemberPlan:
    """What one member does with every window: `gather`, then `tasks`, then `scatter`, in order.

    A member owns what it stores; a window of a segment that it receives in `gather` is needed until
    the task is done, one that a task makes for another member until it was sent. So a member needs
    at most k - 1 + m buffers of one window for every task it collects, and holds no more. With a
    second set of them the next window can be gathered meanwhile.

    A message is told by its segment and window, and has the length of `Stripes.range_of`; an empty
    one need not be sent, since its receiver knows. All members go through all windows.
    """

    gather: tuple[Round, ...]
    tasks: tuple[Task, ...]
    scatter: tuple[Round, ...]


def plan_encode(code: Code) -> tuple[Task, ...]:
    """The tasks that make all parity."""
    return plan_rebuild(code, (), range(code.n))


def plan_rebuild(
    code: Code,
    lost_shards: Iterable[int],
    lost_parities: Iterable[int],
    restore_parities: bool = True,
) -> tuple[Task, ...]:
    """The tasks that bring back what is lost: any `m` members, and as many as the rows allow.

    A lost node is in both lists, a damaged file in one. With `restore_parities` False only the
    shards come back, at less cost: what a restart waits for. The rest can follow, with the shards
    no longer lost. A lost member's number stands for whoever takes its place, spare or survivor.
    Every member makes the same plan from the same lists.

    Raises RestoreError when a shard (or parity, if asked for) cannot be brought back; then nothing
    is planned at all. ValueError when a member is not on the ring.
    """
    lost = {False: frozenset(lost_shards), True: frozenset(lost_parities)}
    if strangers := sorted((lost[False] | lost[True]) - set(range(code.n))):
        raise ValueError(f"members {strangers} are not on a ring of {code.n}")
    loads = [0] * code.n
    tasks = []
    for row in range(code.n):
        word = code.row(row)
        known = [i for i, segment in enumerate(word) if segment.member not in lost[segment.parity]]
        wanted = [
            i
            for i, segment in enumerate(word)
            if i not in known and (restore_parities or not segment.parity)
        ]
        if not wanted:
            continue
        if len(known) < code.k:
            raise RestoreError(_too_many(code, word, known, lost))
        # Data first, then low parities: a single loss is then brought back by XOR alone.
        known = known[: code.k]
        sources = tuple(word[i] for i in known)
        collector = min((s.member for s in sources), key=lambda member: loads[member])
        loads[collector] += 1
        outputs = tuple(word[i] for i in wanted)
        tasks.append(Task(row, collector, sources, outputs, decoding(code.k, known, wanted)))
    return tuple(tasks)


def _too_many(
    code: Code, word: tuple[Segment, ...], known: list[int], lost: dict[bool, frozenset[int]]
) -> str:
    gone = ", ".join(str(segment) for i, segment in enumerate(word) if i not in known)
    members = ", ".join(str(m) for m in sorted(lost[False] | lost[True]))
    return (
        f"the group cannot be rebuilt from its peers: of its {code.n} members {members} lost data, "
        f"and {code.k}+{code.m} survives any {code.m}. It takes {code.k} segments of a row, and of "
        f"these {code.k + code.m} only {len(known)} are left; lost are {gone}. Use another level, "
        "or an older version"
    )


def transfers(task: Task) -> Iterator[tuple[bool, int, int, Segment]]:
    """Every message of a task: (is it of a result, sender, receiver, what)."""
    for segment in task.sources:
        if segment.member != task.collector:
            yield False, segment.member, task.collector, segment
    for segment in task.outputs:
        if segment.member != task.collector:
            yield True, task.collector, segment.member, segment


def plan_member(code: Code, tasks: Iterable[Task], member: int) -> MemberPlan:
    """The share that `member` has in `tasks`."""
    tasks = tuple(tasks)
    sends: dict[tuple[bool, int], list[Segment]] = {}
    receives: dict[tuple[bool, int], list[Segment]] = {}
    for task in tasks:
        for after, sender, receiver, segment in transfers(task):
            slot = (after, (receiver - sender) % code.n)
            if sender == member:
                sends.setdefault(slot, []).append(segment)
            elif receiver == member:
                receives.setdefault(slot, []).append(segment)

    def rounds(after: bool) -> tuple[Round, ...]:
        return tuple(
            Round(
                to=(member + slot[1]) % code.n,
                sends=tuple(sends.get(slot, ())),
                source=(member - slot[1]) % code.n,
                receives=tuple(receives.get(slot, ())),
            )
            for slot in sorted(sends.keys() | receives.keys())
            if slot[0] == after
        )

    own = tuple(task for task in tasks if task.collector == member)
    return MemberPlan(rounds(False), own, rounds(True))
