"""Plans of messages: which member sends which segment to which, to encode and to rebuild.

Pure: plans are plain values.

A *task* computes segments of one row from k others. They are collected at the task's *collector*, a
member that already has one of the k: it receives the other k - 1, multiplies, and sends every
result to the member that stores it. Encoding is the case in which all parity is missing.

The cost. Messages must connect all k + m members of a row, so a row takes at least k + m - 1
messages as long as bytes at different offsets are not mixed; this plan reaches that minimum.
(Without a collector all data would go to each of m parities, in k * m messages.) Encoding has n
rows, and every member collects one. So each member sends, and receives, k + m - 1 segments, which
are (k + m - 1) / k shards. For XOR this is exactly one shard, as in SCR's pipelined reduction, but
without a chain of n - 1 steps. The work is even as well: each member multiplies one shard of data.

To rebuild, survivors collect, again with the fewest messages. A lost member then receives only its
own k + m segments. The survivors share the rows about evenly, and receive k - 1 segments for each
row that they collect.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tierckpt.errors import RestoreError

from .codes import Code, Segment
from .gf256 import Matrix, decoding


@dataclass(frozen=True)
class Task:
    """Compute `outputs` as `matrix` times `sources`, at the member `collector`."""

    row: int
    collector: int
    sources: tuple[Segment, ...]
    outputs: tuple[Segment, ...]
    matrix: Matrix


@dataclass(frozen=True)
class Round:
    """Segments that a member sends and receives at the same time.

    In a round every member sends to the one at a fixed distance after it on the ring, and receives
    from the one at the same distance before it: no member receives from two at a time.
    """

    to: int
    sends: tuple[Segment, ...]
    source: int
    receives: tuple[Segment, ...]


@dataclass(frozen=True)
class MemberPlan:
    """Work of one member in every window: `gather`, then `tasks`, then `scatter`, in order.

    A member owns the segments that it stores. It needs a window of a segment received in `gather`
    until the task is done, and a window made for another member until it was sent. So it needs at
    most k - 1 + m buffers of one window for every task it collects, and holds no more. A second set
    of buffers allows the next window to be gathered at the same time.

    Segment and window identify a message, and `Stripes.range_of` gives its length. An empty message
    is not sent: its receiver knows its length. All members go through all windows.
    """

    gather: tuple[Round, ...]
    tasks: tuple[Task, ...]
    scatter: tuple[Round, ...]


def plan_encode(code: Code) -> tuple[Task, ...]:
    """The tasks that compute all parity."""
    return plan_rebuild(code, (), range(code.n))


def plan_rebuild(
    code: Code,
    lost_shards: Iterable[int],
    lost_parities: Iterable[int],
    restore_parities: bool = True,
) -> tuple[Task, ...]:
    """The tasks that restore the losses: any `m` members, and more where the rows allow it.

    A lost node is in both lists, a damaged file in one. With `restore_parities` False only the
    shards are restored, at less cost: a restart waits for these. The rest can follow, with the
    shards no longer lost. The number of a lost member stands for its replacement, spare or
    survivor. Every member computes the same plan from the same lists.

    Raises RestoreError when a shard (or parity, if asked for) cannot be restored; nothing is
    planned then. Raises ValueError when a member is not on the ring.
    """
    lost = {False: frozenset(lost_shards), True: frozenset(lost_parities)}
    if unknown := sorted((lost[False] | lost[True]) - set(range(code.n))):
        raise ValueError(f"members {unknown} are not on a ring of {code.n}")
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
        # Data first, then low parities: XOR alone then restores a single loss.
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
        f"and {code.k}+{code.m} survives any {code.m}. A row takes {code.k} segments, and of "
        f"these {code.k + code.m} only {len(known)} are left; lost are {gone}. Use another level, "
        "or an older version"
    )


def transfers(task: Task) -> Iterator[tuple[bool, int, int, Segment]]:
    """Every message of a task: (is it a result, sender, receiver, segment)."""
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
