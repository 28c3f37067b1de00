"""The verdict: what ranks recorded of two runs, compared; and what usually makes them differ.

Pure, but that records are read where they differ.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from tierckpt._text import some
from tierckpt.offline.entry_names import in_order, part_of

from .records import Life, State

MOST_NAMES = 6
_RANGE = re.compile(r"\[\d+:\d+\]$")


@dataclass(frozen=True)
class Departure:
    """The first version at which two runs are not the same."""

    version: int
    names: tuple[str, ...]
    """What differs there, in order."""
    ranks: tuple[int, ...]
    """On which ranks; of what ranks share, those that store it."""
    values: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Both, of what can be said shortly."""
    of: int = 0
    """So many names there are."""


class IncomparableError(Exception):
    """What was recorded cannot be compared; why, in words, and what to do."""


def departure(
    one: Mapping[int, Life], other: Mapping[int, Life], versions: Iterable[int]
) -> Departure | None:
    """The first of these versions that differs; None where all are equal. By rank.

    Raises IncomparableError where a version was not recorded on all ranks of both.
    """
    if one.keys() != other.keys():
        raise IncomparableError(
            f"the runs have other ranks: {len(one)} and {len(other)}. A run that goes on with "
            "another number of ranks is another one; have the job restart with as many"
        )
    for version in sorted(versions):
        found = _at(
            version,
            {rank: _state(life, version) for rank, life in one.items()},
            {rank: _state(life, version) for rank, life in other.items()},
        )
        if found is not None:
            return found
    return None


def _state(life: Life, version: int) -> State:
    if version not in life.states:
        raise IncomparableError(
            f"rank {life.rank} recorded no version {version}, as its checkpoint failed; the logs "
            "say why"
        )
    return life.states[version]


def _at(version: int, one: Mapping[int, State], other: Mapping[int, State]) -> Departure | None:
    if all(state.digest == other[rank].digest for rank, state in one.items()):
        return None
    names, ranks, count = set[str](), set[int](), set[str]()
    values: dict[str, tuple[str, str]] = {}
    for rank, recorded in one.items():
        state, theirs = recorded.load(), other[rank].load()
        count |= {_RANGE.sub("", name) for name in state}
        for name in state.keys() | theirs.keys():
            pair = (state.get(name, "not there"), theirs.get(name, "not there"))
            if pair[0] == pair[1]:
                continue
            whole = _RANGE.sub("", name)
            names.add(whole)
            ranks.add(rank)
            if not any("#" in each for each in pair):
                values.setdefault(whole, pair)
    if not names:
        return None
    return Departure(version, tuple(in_order(names)), tuple(sorted(ranks)), values, len(count))


def common_versions(lives: Mapping[int, Life], above: int, upto: int) -> list[int]:
    """Those in a range that all of these have."""
    found = [set(life.states) for life in lives.values()]
    return sorted(v for v in set.intersection(*found) if above < v <= upto)


def count_of(run_id_by_rank: Mapping[int, Life], version: int) -> tuple[int, int]:
    """How many tensors of model and optimizer one version has, and how many other values."""
    names = set[str]()
    for life in run_id_by_rank.values():
        names |= {_RANGE.sub("", name) for name in life.states[version].load()}
    tensors = sum(part_of(name) in ("model", "buffer", "") for name in names)
    return tensors, len(names) - tensors


# --- what usually causes it ----------------------------------------------------------------------


def description(found: Departure) -> str:
    """What differs, in a sentence."""
    shown = list(found.names)
    if len(shown) > MOST_NAMES:  # an option beside many weights is what tells the cause
        shown.sort(key=lambda name: part_of(name) != "options")
    names = [
        f"{name} ({' and '.join(_short(v) for v in found.values[name])})"
        if name in found.values
        else name
        for name in shown
    ]
    where = f" on ranks {some(found.ranks, 8)}" if len(found.ranks) > 1 else ""
    where = where or (f" on rank {found.ranks[0]}" if found.ranks[0] else "")
    return f"{len(found.names)} of {found.of} names{where}: {some(names, MOST_NAMES)}"


def _short(fingerprint: str) -> str:
    """Without the kind that goes before a plain value."""
    kind, _, value = fingerprint.partition(" ")
    return value if kind in ("int", "float", "str", "bool", "NoneType") else fingerprint


def cause(found: Departure) -> str:
    """What usually makes a resumed run differ like that at its first such step, and what to do."""
    parts = {part_of(name) for name in found.names}
    trained = parts & {"model", "buffer", ""}
    if streams := [name.removeprefix("rng/") for name in found.names if part_of(name) == "rng"]:
        return _of_streams(streams)
    if "options" in parts and not parts & {"model", "buffer"}:
        return (
            "Only options of an optimizer (a learning rate) differ: a scheduler begins anew. "
            'Give it: extra={"scheduler": scheduler} (wrap: after the scheduler\'s own line)'
        )
    if "options" in parts:
        return (
            "Options of an optimizer (a learning rate) differ, and the random streams do not: "
            "a scheduler that steps at the end of an epoch begins anew. Give it: "
            'extra={"scheduler": scheduler} (wrap: after the scheduler\'s own line). Where it is '
            "given, the step was on other data: tierckpt.ResumableLoader around the loader, given "
            "as extra_per_rank"
        )
    if trained:
        return (
            "All random streams are the same, and yet the step was another one: it was on other "
            "data. The loop begins its epoch anew, or at another place. Wrap the loader, data = "
            'tierckpt.ResumableLoader(loader), give it: extra_per_rank={"data": data}, and begin '
            "the loop at data.epoch; or give what knows the place (the position of a "
            "ResumableSampler, a StatefulDataLoader). A loop that counts iterations begins at the "
            "one that restore() returns. Or it drew from a generator of the script's own, or "
            "averages, scales or counts with an object that was not given: docs/loops.md, what "
            "else has a state"
        )
    objects = [name for name in found.names if part_of(name) in ("extra", "extra_per_rank")]
    if objects:
        which = some(list(dict.fromkeys(object_of(name) for name in objects)))
        return (
            f"Only {which} differ: its load_state_dict() does not bring back all that its "
            "state_dict() returned, or something changes it between restore() and the loop"
        )
    if parts == {"metric"}:
        return (
            "The state is the same, and what was measured of it and given to step() is not: it was "
            "measured on other data, or with random numbers of its own"
        )
    return "It is none of the usual causes; `tierckpt diff` shows how large the differences are"


def _of_streams(streams: Collection[str]) -> str:
    texts = {
        "torch": "a DataLoader draws from torch's as its epoch begins, and a model's parameters do "
        "as it is made",
        "python": "Python's random shuffles, or augments",
        "numpy": "numpy.random shuffles, or augments",
    }
    why = [texts[each] for each in streams if each in texts]
    because = f" ({'; '.join(why)})" if why else ""
    return (
        f"The random stream of {' and '.join(streams)} is at another place: after restore(), which "
        f"puts it where it was, the script draws from it as it starts{because}. Draw before "
        "restore(), or from a generator of its own that is given as extra. Around a DataLoader "
        "tierckpt.ResumableLoader, given as extra_per_rank, puts the streams back and goes on at "
        "the place in the data"
    )


def object_of(name: str) -> str:
    """Of a value in `extra` or `extra_per_rank`: which object it is of."""
    return "/".join(name.split("/")[:2])


NOT_DETERMINISTIC = (
    "The script is not deterministic by itself: two runs that nobody killed differ, so a resumed "
    "one cannot be the same. Usual causes: seeds that are not set, or are taken from the time or "
    "os.urandom; data from threads or processes in the order in which they come; operations of the "
    "GPU (torch.use_deterministic_algorithms(True), CUBLAS_WORKSPACE_CONFIG=:4096:8)"
)
NOT_RESUMED = (
    "The job that was started again began afresh: its script does not restore. Call restore() "
    "before the loop, and begin the loop at the iteration that it returns (`wrap` does it by "
    "itself)"
)

__all__ = [
    "Departure",
    "IncomparableError",
    "cause",
    "common_versions",
    "count_of",
    "departure",
    "description",
    "object_of",
]
