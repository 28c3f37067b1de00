"""Replica check, the pure part: slices to hash, comparison of digests, and the ranks that differ.

The replicated state (parameters and optimizer state that are equal on all ranks) is a list of
tensors in an order that depends on structure alone. It is cut into *units*, which are dealt to
*slices*; one round of slices covers all of the state. At each boundary all ranks hash one slice.

A digest of a slice is a positive integer below 2^62; NONE, which is smaller than all digests, means
that a rank has none. All ranks agree if and only if the minimum of the digests is the complement of
the minimum of their complements. A minimum is the only operation that ballots have.

*The inquiry.* All ranks learn of a difference from the same ballot. Each adds its answer to its
next vote: a row of numbers that all ranks read one boundary later. So a rank that comes late, or
not at all, delays the others no more than its vote does. The next question follows from the
answers, which are the same on all ranks. First come the facts, with digests of a few runs of units
of the look; then digests of parts of the first runs that differ, until the parts are single units.
If ranks have different tensors, the list of tensors is searched in the same way, and the first line
that differs is reported.

*The texts* name the difference, its consequences, and what to do.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Hashable, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

import xxhash
from msgspec import Struct

from tierckpt._text import some
from tierckpt.coordination.ballots import OWN_WIDTH, Rows
from tierckpt.format.layout import parameter_of

if TYPE_CHECKING:
    from .replicated_state import Look, ReplicatedState

UNIT_BYTES = 512 * 1024
"""Bytes hashed at once; small enough for a core's own cache."""
UNIT_OVERHEAD_BYTES = 16 * 1024
"""Cost of a unit besides its bytes, as bytes that could be hashed in that time. With it, slices of
many small tensors take no longer than others."""
LOOK_BYTES = 1024 * 1024
"""Least bytes of a look, overhead included, unless the whole state is smaller."""
NONE = 0
"""Used in place of a digest: this rank has none, so no rank's digests are compared."""
BUCKETS = 64
"""Number of digests that ranks exchange about a slice that differs, whatever its size."""
BUCKETS_OPENED = 2
"""Number of differing buckets that are opened to name tensors."""
_BITS = 62


class Unit(NamedTuple):
    """Bytes `[low, high)` of a tensor, by its number, in memory order."""

    tensor: int
    low: int
    high: int


def cut(
    sizes_bytes: Sequence[int], slices: int, units_bytes: Sequence[int] = ()
) -> list[list[Unit]]:
    """Deal tensors of these sizes to `slices` lists, in units of at most `units_bytes` each.

    Each byte is in one list. Some lists are empty where there are fewer units."""
    most = units_bytes or [UNIT_BYTES] * len(sizes_bytes)
    units = [
        Unit(tensor, low, min(low + step, size))
        for tensor, (size, step) in enumerate(zip(sizes_bytes, most, strict=True))
        for low in range(0, size, step)
    ]
    costs = [unit.high - unit.low + UNIT_OVERHEAD_BYTES for unit in units]
    total, before = sum(costs), 0
    dealt: list[list[Unit]] = [[] for _ in range(slices)]
    for unit, cost in zip(units, costs, strict=True):
        # The middle of each unit decides, so the last slice is no longer than the first.
        dealt[min((before + cost // 2) * slices // total, slices - 1)].append(unit)
        before += cost
    return dealt


def stride_of(sizes_bytes: Sequence[int], slices: int) -> int:
    """Return the number of boundaries after which as many slices are hashed together.

    For small slices the start of a look takes longer than the hash. A divisor of `slices`."""
    each = (sum(sizes_bytes) + len(sizes_bytes) * UNIT_OVERHEAD_BYTES) // slices
    wanted = LOOK_BYTES // (each + 1)
    return max(n for n in range(1, slices + 1) if slices % n == 0 and n <= max(wanted, 1))


def fold(head: Sequence[int], digests: Sequence[int]) -> int:
    """Return one digest of a slice's digests; `head` identifies the slice. Never NONE."""
    values = struct.pack(f"<{len(head) + len(digests)}Q", *head, *digests)
    return (xxhash.xxh3_64_intdigest(values) >> (64 - _BITS)) | 1


def as_vote(digest: int) -> tuple[int, int]:
    """Return two integers: their minima show whether all ranks agree."""
    return (digest, ~digest) if digest > NONE else (NONE, NONE)


def agree(least: int, least_complement: int) -> bool | None:
    """Return whether all ranks agree, by the minima of `as_vote`; None if a rank had no digest."""
    return None if least <= NONE else least == ~least_complement


def buckets_of(count: int) -> list[range]:
    """Divide `count` values into at most BUCKETS runs, in order."""
    size = -(-count // BUCKETS) or 1
    return [range(low, min(low + size, count)) for low in range(0, count, size)]


def fold_runs(values: Sequence[int], runs: Sequence[range]) -> list[int]:
    """Return a digest of each run of the values; runs may be longer than this rank's values."""
    return [fold((), values[run.start : run.stop]) for run in runs]


def unlike(rows: Sequence[Sequence[Hashable]]) -> list[int]:
    """Return the positions where the ranks' rows differ; a missing value also differs."""
    longest = max(map(len, rows), default=0)
    padded = [[*row, *[None] * (longest - len(row))] for row in rows]
    return [i for i, column in enumerate(zip(*padded, strict=True)) if len(set(column)) > 1]


def odd_ranks(column: Sequence[Hashable]) -> tuple[int, ...] | None:
    """Return the ranks that differ from more than half of all; None without such a majority."""
    (value, count), *_ = Counter(column).most_common(1)
    if 2 * count <= len(column):
        return None
    return tuple(rank for rank, each in enumerate(column) if each != value)


class Finding(Struct, frozen=True):
    """A difference between replicas. Equal on all ranks."""

    names: tuple[str, ...]
    """Tensors that differ, by their names in a shard; the first of them."""
    odd: tuple[int, ...] | None
    """Ranks that differ from the majority; None where there is no majority."""
    ranks: int
    version: int
    """The boundary where the difference was first seen."""
    clean: int | None = None
    """The newest version known to be equal on all ranks; None if there is none in this run."""
    more: bool = False
    """More tensors may differ; they were not compared."""
    structure: tuple[str, ...] = ()
    """For tensors with another name, type or shape on some ranks: each rank's version."""
    apart: bool = False
    """Ranks made as many steps at different iterations, and cannot be asked what differs."""

    def who(self) -> str:
        """The ranks that differ, as text."""
        if self.odd is None:
            if self.ranks == 2:
                return "rank 0 and rank 1 differ"
            return f"the {self.ranks} ranks differ, and no value is that of more than half of them"
        noun, verb = ("rank", "differs") if len(self.odd) == 1 else ("ranks", "differ")
        return f"{noun} {some(self.odd, 8)} {verb} from the other {self.ranks - len(self.odd)}"

    def what(self) -> str:
        """The tensors and ranks that differ, as text; short enough for a mark."""
        if self.apart:
            return (
                "ranks made the same number of optimizer steps in different iterations (some rank "
                "skipped a step that others made), and their states differ"
            )
        if self.structure:
            return f"ranks have different tensors ({some(self.structure, 4, '; ')})"
        others = " and others" if self.more else ""
        return f"{some(self.names, 4)}{others}: {self.who()}"

    def text(self) -> str:
        """The difference, as text, and since when it is there."""
        since = "" if self.clean is None else f"; at v{self.clean} all ranks were equal"
        return f"{self.what()}. First seen at v{self.version}{since}"


def find(
    names: Sequence[str], columns: Sequence[tuple[str, Sequence[Hashable]]]
) -> tuple[tuple[str, ...], tuple[int, ...] | None]:
    """Return (tensors that differ, ranks that differ from the majority).

    `columns` has a tensor's name and every rank's digest of one of its units. `names` has the order
    of tensors."""
    found: dict[str, tuple[int, ...] | None] = {}
    for name, column in columns:
        if len(set(column)) > 1:
            odd = odd_ranks(column)
            before = found.get(name, ())
            found[name] = None if odd is None or before is None else (*before, *odd)
    order = [name for name in dict.fromkeys(names) if name in found]
    if any(found[name] is None for name in order):
        return tuple(order), None
    return tuple(order), tuple(sorted({rank for name in order for rank in found[name] or ()}))


TEXT_BYTES = 7
"""Bytes of a line's text in each number of a row."""


class Stage(IntEnum):
    """The content of a row: its first number."""

    NOTHING = 0
    """A rank has no answer, because an interrupt came between its boundaries."""
    FACTS = 1
    UNITS = 2
    LINES = 3
    TEXT = 4


class Facts(NamedTuple):
    """The first answer of a rank."""

    turn: int
    version: int
    place: int
    """The rank's iteration at this boundary."""
    slices: int
    """Number of slices in the look."""
    structure: int
    """The structure at the time of the look."""
    now: int
    """The structure at this boundary; NONE if unknown."""
    tensors: int
    """Number of tensors at this boundary."""
    stands: int
    """1 if the state has the same tensors as at the look."""
    fresh: int
    """A digest of the same slices, hashed at this boundary; NONE if there is none."""


class Outcome(Struct, frozen=True):
    """The result of an inquiry; the same on all ranks."""

    nothing: bool = False
    """The looks cannot be compared: everything must be looked at again."""
    turn: int | None = None
    """The turn of the next look, if it must be set."""
    apart: bool = False
    """Ranks reached the boundary at different iterations."""
    names: tuple[str, ...] = ()
    """The first tensors that differ."""
    odd: tuple[int, ...] | None = None
    """The ranks in the minority; None without a majority."""
    more: bool = False
    """Other tensors may differ, too."""
    gone: bool = False
    """At the inquiry's boundary the slices of the look were equal."""
    everything: bool = False
    """The look covered all slices."""
    structure: tuple[str, ...] = ()
    """Each rank's line for the first tensor in which the lists differ."""


class Inquiry:
    """One rank's part. Training thread. Call `row`, then `receive`, until that returns an
    outcome."""

    def __init__(
        self,
        look: Look | None,
        now: ReplicatedState | None,
        stands: bool,
        place: int,
        fresh: int,
        slices: int,
    ) -> None:
        """`look`: the one that differs, None if this rank has none. `now`: the state at this
        boundary. `slices`: their total number. The other arguments are those of `Facts`."""
        self._look, self._now, self._slices = look, now, slices
        self._stage = Stage.FACTS
        self._lists = False
        """True if the list of tensors is searched, not the tensors."""
        self._rounds = 0
        self._gone = self._everything = self._more = False
        self._values: Sequence[int] = look.digests if look is not None else ()
        """The values that are searched for a difference."""
        self._runs = buckets_of(len(self._values))
        """The runs with a digest in the row."""
        self._facts: Facts | None = None
        if look is not None:
            self._facts = Facts(
                look.turn,
                look.version,
                place,
                len(look.which),
                look.replicated.structure,
                NONE if now is None else now.structure,
                0 if now is None else len(now.lines),
                int(stands),
                fresh,
            )

    def row(self) -> list[int]:
        """This rank's answer: OWN_WIDTH numbers."""
        if self._facts is None:
            return [Stage.NOTHING] * OWN_WIDTH
        if self._stage is Stage.TEXT:
            answer = _packed(self._line())
        else:
            answer = fold_runs(self._values, self._runs)
            if self._stage is Stage.FACTS:
                answer = [*self._facts, *answer]
        row = [int(self._stage), *answer]
        return row + [0] * (OWN_WIDTH - len(row))

    def receive(self, rows: Rows) -> Outcome | None:
        """Take all ranks' answers; returns None if another round is needed."""
        self._rounds += 1
        if self._facts is None or any(not row or row[0] != self._stage for row in rows) or not rows:
            return Outcome(nothing=True)
        if self._stage is Stage.TEXT:
            return self._outcome(structure=tuple(_unpacked(row[1:]) for row in rows))
        digests = [row[1:] for row in rows]
        if self._stage is Stage.FACTS:
            size = len(Facts._fields)
            outcome = self._judge([Facts(*row[:size]) for row in digests])
            if outcome is not None or self._lists:
                return outcome
            digests = [row[size:] for row in digests]
        return self._narrow([row[: len(self._runs)] for row in digests])

    def _judge(self, facts: Sequence[Facts]) -> Outcome | None:
        """Decide by the facts: an outcome, or a search of the tensors or of their list."""
        if len({(each.turn, each.version, each.slices) for each in facts}) > 1:
            turn = max(each.turn for each in facts) + 2 + self._rounds
            return Outcome(nothing=True, turn=turn)  # an interrupt came between
        if len({each.place for each in facts}) > 1:
            return Outcome(apart=True)
        if any(each.now == NONE for each in facts):
            return Outcome(nothing=True)  # a rank does not know its tensors
        if len({each.now for each in facts}) > 1:
            assert self._now is not None
            self._lists, self._stage, self._values = True, Stage.LINES, self._now.line_hashes
            self._runs = buckets_of(max(each.tensors for each in facts))
            return None
        if len({each.structure for each in facts}) > 1 or not all(each.stands for each in facts):
            return Outcome(nothing=True)  # the look came before all ranks noticed the change
        fresh = {each.fresh for each in facts}
        self._gone = len(fresh) == 1 and fresh != {NONE}
        self._everything = facts[0].slices == self._slices
        return None

    def _narrow(self, rows: Sequence[Sequence[int]]) -> Outcome | None:
        """Split the runs with different digests."""
        differ = [self._runs[i] for i in unlike(rows)]
        if not differ:  # the runs are equal in 62 bits, the digests made of them are not
            return Outcome(nothing=True)
        single = all(len(run) == 1 for run in self._runs)
        if single and not self._lists:
            return self._tensors(rows)
        opened = differ[: 1 if self._lists else BUCKETS_OPENED]
        self._more |= len(differ) > len(opened)
        if single:
            self._stage, self._runs = Stage.TEXT, opened
            return None
        if self._stage is Stage.FACTS:
            self._stage = Stage.UNITS
        self._runs = [part for run in opened for part in _parts(run, BUCKETS // len(opened))]
        return None

    def _tensors(self, rows: Sequence[Sequence[int]]) -> Outcome:
        assert self._look is not None
        names, units = self._look.replicated.names, self._look.units
        columns: list[tuple[str, Sequence[Hashable]]] = [
            (names[units[run.start].tensor], column)
            for run, column in zip(self._runs, zip(*rows, strict=True), strict=True)
        ]
        found, odd = find(names, columns)
        return self._outcome(names=found, odd=odd)

    def _outcome(
        self,
        names: tuple[str, ...] = (),
        odd: tuple[int, ...] | None = None,
        structure: tuple[str, ...] = (),
    ) -> Outcome:
        return Outcome(
            names=names,
            odd=odd,
            structure=structure,
            more=self._more or bool(structure),
            gone=self._gone,
            everything=self._everything,
        )

    def _line(self) -> str:
        """This rank's line at the position found."""
        assert self._now is not None
        at = self._runs[0].start
        return self._now.lines[at] if at < len(self._now.lines) else "none here"


def _parts(run: range, count: int) -> list[range]:
    """Split a run into at most `count` parts."""
    size = -(-len(run) // count)
    return [run[at : at + size] for at in range(0, len(run), size)]


def _packed(text: str) -> list[int]:
    """As much of a line as a row holds."""
    content = text.encode()[: (OWN_WIDTH - 1) * TEXT_BYTES]
    parts = [content[at : at + TEXT_BYTES] for at in range(0, len(content), TEXT_BYTES)]
    return [int.from_bytes(part.ljust(TEXT_BYTES, b"\0"), "little") for part in parts]


def _unpacked(row: Sequence[int]) -> str:
    content = b"".join(number.to_bytes(TEXT_BYTES, "little") for number in row)
    return content.rstrip(b"\0").decode(errors="replace")


MAX_RANKS = 4
"""Number of ranks that are named with their nodes."""


class Consequences(NamedTuple):
    """The consequences of a finding."""

    marked: str
    """The versions that are suspect now: a sentence."""
    way_back: str
    """How to resume from a version without suspicion: a sentence or two."""
    from_version: bool = False
    """True if this run was started from a version."""
    nodes: Sequence[str] = ()
    """The node of each rank; empty if unknown."""


SPREAD = (
    "the whole state was compared at v{version}, since replicas differ: the difference there is "
    "{difference}"
)
ALIKE_AGAIN = (
    "replicas are alike again, in the whole state, since v{version} at the latest: versions taken "
    "from here on are not suspect. Those taken while replicas differed stay marked"
)
GONE = (
    "replicas differed at v{version}, and were alike again two steps later: {difference}. {then}. "
    "The training continues. Either the last bits of a value differed, and rounding removed the "
    "difference, or the script writes weights between the checkpointer's step() and the "
    "optimizer's next step, in a way that autograd does not count (`.data`)"
)
OFTEN_GONE = (
    ". This was seen twice, so from now on replicas are compared inside the checkpointer's step(). "
    "Weights that are written between it and the optimizer's next step (clipping, averaging) also "
    "get into parts of versions: write them before the checkpointer's step()"
)
OTHER_DEVICES = (
    "replicas are not compared: ranks have their state on devices of different kinds ({devices})"
)
SILENT = (
    "replicas were not compared at the last {boundaries} boundaries: on some rank, weights or "
    "optimizer state change between each boundary and the next optimizer step (are weights "
    "clipped, broadcast, or swapped for averages there?). Do that before the boundary, step() of "
    'the checkpointer; or set replicas="off" to turn the comparison off'
)


def never_alike(finding: Finding, then: Consequences) -> str:
    """The text for ranks that were never equal in this run."""
    back = f"To go back: {then.way_back}. " if then.from_version else ""
    own = ", ".join(dict.fromkeys(parameter_of(name) for name in finding.names[:4])) or "..."
    return (
        f"ranks train apart: {finding.what()}, seen at v{finding.version}, and they were never "
        "alike since this job was started. No further version is taken until they are alike: each "
        "rank stores a part of a version, and a restore would give a mixture, the state of no "
        f"rank. {then.marked}. {back}What to do: wrap the model in DistributedDataParallel (under "
        "Horovod: hvd.DistributedOptimizer), or all_reduce each gradient before the optimizer's "
        "step; and start all ranks with the same weights. If state differs between ranks on "
        f"purpose, name it in the setting forward_changes (here: {own!r}): each rank then stores "
        "its own"
    )


def drifted(finding: Finding, then: Consequences) -> str:
    """The text for ranks that were equal before."""
    stopped = "No further version is taken until they are alike. " if finding.apart else ""
    return (
        f"replicas differ: {finding.text()}. {stopped}{then.marked}: their parts come from ranks "
        f"that differ. To go back: {then.way_back}. To find the cause: "
        f"{_cause(finding, then.nodes)}"
    )


def text_of_divergence(
    finding: Finding, then: Consequences, at: str, missing: Sequence[int]
) -> str:
    """The text for ranks with different numbers of optimizer steps; `at` is this rank's
    position."""
    others = "some rank has"
    if missing:
        others = f"{_ranks(missing)} {'has' if len(missing) == 1 else 'have'}"
    return (
        f"ranks make different numbers of optimizer steps: {at}, and {others} not come to the "
        f"boundary of v{finding.version}. No further version is taken until restore(), and ranks "
        f"can no longer agree on signals and halt requests; the training continues. {then.marked}. "
        f"To go back: {then.way_back}. To find the cause: {_cause(finding, then.nodes)}"
    )


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {some(numbers, MAX_RANKS)}"


def _cause(finding: Finding, nodes: Sequence[str]) -> str:
    if finding.apart:
        return (
            "some rank skips an optimizer step that others make (its loss was not finite?). Make "
            "all ranks decide together: all_reduce the value that decides"
        )
    if finding.structure:
        return (
            "parameters or optimizer state were created or removed on some ranks only: look for "
            "code that only some ranks run"
        )
    many = finding.odd is None and finding.ranks > MAX_RANKS
    ranks = range(finding.ranks) if finding.odd is None else finding.odd
    where = _where(ranks, nodes)
    if finding.odd is not None and where:
        where += ". "
    elif where:
        where = f"no majority shows which rank is wrong{'' if many else f' ({where})'}. "
    return (
        f"{where}If the same node is named again after a restart, test its memory and devices (ECC "
        "errors: nvidia-smi -q -d ECC, edac-util -v), and restart without it. If another one is "
        "named, look for code that changes weights or optimizer state on some ranks only"
    )


def _where(ranks: Sequence[int], nodes: Sequence[str]) -> str:
    with_node = [rank for rank in ranks if rank < len(nodes)]
    # A node's name starts with its host's; the rest distinguishes containers.
    hosts = [nodes[rank].partition("/")[0] for rank in with_node]
    places = [f"rank {rank} runs on {host}" for rank, host in zip(with_node, hosts, strict=True)]
    return some(places, MAX_RANKS)


__all__ = ["Finding", "Unit", "agree", "as_vote", "cut", "find", "fold", "odd_ranks"]
