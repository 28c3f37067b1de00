"""The verdict: compares the records of two runs, and names the usual cause of a difference.

Pure, except that records are read where digests differ.

Coverage is the behaviour that the compared steps did not exercise, so that "exact" does not
promise too much.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise

from msgspec import Struct, field
from msgspec.structs import replace

from tierckpt._text import counted, some
from tierckpt.offline.entry_names import in_order, part_of
from tierckpt.state.extras import EXTRA_STATES

from .records import RankRun, State

__all__ = [
    "Departure",
    "IncomparableError",
    "Request",
    "cause",
    "common_versions",
    "count_of",
    "coverage_gaps",
    "departure",
    "description",
    "journal_problem",
    "object_of",
    "over_epochs",
    "witness_of",
]


MAX_NAMES = 6
_RANGE = re.compile(r"\[\d+:\d+\]$")


class Departure(Struct, frozen=True):
    """The first version at which two runs differ."""

    version: int
    names: tuple[str, ...]
    """The values that differ, in order."""
    ranks: tuple[int, ...]
    """The ranks with a difference; for shared values, the ranks that store them."""
    values: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Both values, if they are short."""
    of: int = 0
    """Number of all names."""
    objects: frozenset[str] = frozenset()
    """All objects in `extra` and `extra_per_rank`, whether they differ or not."""
    has_loader: bool = False
    """A `ResumableLoader` is among them."""


class IncomparableError(Exception):
    """The records cannot be compared; the text gives the reason and the remedy."""


def departure(
    one: Mapping[int, RankRun], other: Mapping[int, RankRun], versions: Iterable[int]
) -> Departure | None:
    """The first of these versions that differs, by rank; None if all are equal.

    Raises IncomparableError if a version was not recorded on all ranks of both runs.
    """
    if one.keys() != other.keys():
        raise IncomparableError(
            f"the runs have different numbers of ranks: {len(one)} and {len(other)}. A run that "
            "resumes on another number of ranks is not comparable; restart the job with the same "
            "number"
        )
    for version in sorted(versions):
        found = _at(
            version,
            {rank: _state(run, version) for rank, run in one.items()},
            {rank: _state(run, version) for rank, run in other.items()},
        )
        if found is not None:
            return found
    return None


def _state(run: RankRun, version: int) -> State:
    if version not in run.states:
        raise IncomparableError(
            f"rank {run.rank} recorded no version {version}, as its checkpoint failed; the logs "
            "give the reason"
        )
    return run.states[version]


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
    objects = {object_of(name) for name in count if part_of(name) in ("extra", "extra_per_rank")}
    return Departure(
        version,
        tuple(in_order(names)),
        tuple(sorted(ranks)),
        values,
        len(count),
        frozenset(objects),
        any(name.endswith(LOADER_PLACE) for name in count),
    )


def common_versions(runs: Mapping[int, RankRun], above: int, upto: int) -> list[int]:
    """The versions in a range that all of these ranks have."""
    found = [set(run.states) for run in runs.values()]
    return sorted(v for v in set.intersection(*found) if above < v <= upto)


def count_of(run_by_rank: Mapping[int, RankRun], version: int) -> tuple[int, int]:
    """Numbers of tensors of model and optimizer, and of other values, in a version."""
    names = set[str]()
    for run in run_by_rank.values():
        names |= {_RANGE.sub("", name) for name in run.states[version].load()}
    tensors = sum(part_of(name) in ("model", "buffer", "") for name in names)
    return tensors, len(names) - tensors


# --- usual causes --------------------------------------------------------------------------------


def description(found: Departure) -> str:
    """The difference, as text."""
    shown = list(found.names)
    if len(shown) > MAX_NAMES:  # an option beside many weights shows the cause
        shown.sort(key=lambda name: part_of(name) != "options")
    names = [
        f"{name} ({' and '.join(_short(v) for v in found.values[name])})"
        if name in found.values
        else name
        for name in shown
    ]
    where = f" on ranks {some(found.ranks, 8)}" if len(found.ranks) > 1 else ""
    where = where or (f" on rank {found.ranks[0]}" if found.ranks[0] else "")
    return f"{len(found.names)} of {found.of} names{where}: {some(names, MAX_NAMES)}"


def _short(fingerprint: str) -> str:
    """The fingerprint of a plain value without its type."""
    kind, _, value = fingerprint.partition(" ")
    return value if kind in ("int", "float", "str", "bool", "NoneType") else fingerprint


def cause(found: Departure) -> str:
    """The usual cause of a resumed run's first difference, and what to do about it."""
    parts = {part_of(name) for name in found.names}
    trained = parts & {"model", "buffer", ""}
    uses_accelerate = "extra/accelerator" in found.objects
    if uses_accelerate and LOADER not in found.objects and (trained or "rng" in parts):
        return NOT_RESUMED_LOADER
    if streams := [name.removeprefix("rng/") for name in found.names if part_of(name) == "rng"]:
        return _of_streams(streams)
    if "options" in parts and not parts & {"model", "buffer"}:
        return (
            "Only options of an optimizer (a learning rate) differ: a scheduler starts again from "
            "zero. "
            'Give it: extra={"scheduler": scheduler} (wrap: after the scheduler\'s own line). '
            f"If it is given, {COUNTS}"
        )
    if "options" in parts:
        return (
            "Options of an optimizer (a learning rate) differ, and the random streams do not: "
            "a scheduler that steps at the end of an epoch starts again from zero. Give it: "
            'extra={"scheduler": scheduler} (wrap: after the scheduler\'s own line). If it is '
            "given, the step used other data: put tierckpt.ResumableLoader around the loader, and "
            f"give it as extra_per_rank. Or {COUNTS}"
        )
    if trained and found.has_loader:
        return (
            "All random streams are equal, and the loader was resumed: the step drew from a "
            "generator of the script's own (random.Random(), numpy.random.default_rng(), "
            "torch.Generator()), which is in no checkpoint, or averages, scales or counts with an "
            "object that was not given. docs/loops.md (What else has a state) has the line for "
            "each. Or the loop does not start at data.epoch, takes its batches from another loader "
            "than data, or computes with a count of its own (data.start)"
        )
    if trained:
        return (
            "All random streams are equal, and yet the step differs: it used other data. The loop "
            "starts its epoch again, or at another place. Wrap the loader, data = "
            'tierckpt.ResumableLoader(loader), give it: extra_per_rank={"data": data}, and start '
            "the loop at data.epoch; or give an object that knows the place (the position of a "
            "ResumableSampler). A loop that counts iterations starts at the "
            "one that restore() returns, one that counts batches at data.start. Or the step drew "
            "from a generator of the script's own, or averages, scales or counts with an object "
            "that was not given: docs/loops.md lists other objects with a state"
        )
    objects = [name for name in found.names if part_of(name) in ("extra", "extra_per_rank")]
    if objects:
        which = some(list(dict.fromkeys(object_of(name) for name in objects)))
        return (
            f"Only {which} differ: load_state_dict() does not restore everything that state_dict() "
            "returned, or something changes it between restore() and the loop. Or "
            f"{COUNTS}"
        )
    if parts == {"metric"}:
        return (
            "The state is equal, but the metric given to step() is not: it was measured on other "
            "data, or with its own random numbers"
        )
    return (
        "The cause is none of the usual ones; `tierckpt diff` shows how large the differences are"
    )


def journal_problem(runs: Collection[RankRun]) -> str:
    """The reason why the journal did not lead to the state of the kill, from the last run of each
    rank; empty if it did, or the job has none."""
    if all(run.repeated is None for run in runs):
        return ""
    if why := next((run.unrepeated for run in runs if run.unrepeated), ""):
        return NOT_REPEATED.format(why=why)
    return "" if all(run.repeated for run in runs) else NO_RECORDS


def witness_of(runs: Collection[RankRun]) -> tuple[str, str]:
    """What the witness of the data found after the restarts of these runs: a sentence, and the
    difference, empty if there is none."""
    told = [run.witness for run in runs if run.witness is not None and run.restored]
    batches = sum(batches for batches, _ in told)
    if other := next((text for _, text in told if text), ""):
        return f"witness: {other}", other
    if not batches:
        return UNWITNESSED, ""
    which = f"{counted(batches, 'newest batch', 'newest batches')}"
    restarts = counted(sum(batches > 0 for batches, _ in told), "restart")
    return f"witness: after {restarts}, {which} came once more, and did not differ", ""


def _of_streams(streams: Collection[str]) -> str:
    texts = {
        "torch": "a DataLoader draws from torch's as its epoch starts (with "
        "persistent_workers=True, as its first epoch in a process starts), and so does a model "
        "when its parameters are initialized",
        "python": "Python's random shuffles or augments",
        "numpy": "numpy.random shuffles or augments",
    }
    why = [texts[each] for each in streams if each in texts]
    because = f" ({'; '.join(why)})" if why else ""
    return (
        f"The random stream of {' and '.join(streams)} is at another place: restore() sets it, and "
        f"then the script draws from it before the loop{because}. Draw before restore(), or from a "
        "generator of the script's own, given as extra. For a DataLoader use "
        "tierckpt.ResumableLoader, given as extra_per_rank: it restores the streams and the place "
        "in the data"
    )


def object_of(name: str) -> str:
    """The object in `extra` or `extra_per_rank` that a value belongs to."""
    return "/".join(name.split("/")[:2])


LOADER_PLACE = "/place/batches"
"""The end of the name of a value that each `ResumableLoader` stores."""
LOADER = "extra_per_rank/loader0"
"""The first loader that `tierckpt.accelerate` resumes."""
NOT_RESUMED_LOADER = (
    "The loop used other data: its loader was not resumed. In place of restore(): data = "
    "ckpt.resume(loader), with all loaders that the training takes batches from. Iterate over "
    "data, and start at data.epoch"
)
COUNTS = (
    "the loop counts batches, from 0 after a restart in the middle of an epoch, and computes with "
    "the count (a rate, the decay of an average): for i, batch in enumerate(data, data.start), "
    "with data = tierckpt.ResumableLoader(loader)"
)
UNWITNESSED = (
    "not witnessed: no loader gave its newest batch once more after a restart, to be compared "
    "with the batch before it (tierckpt.ResumableLoader does)"
)
NOT_DETERMINISTIC = (
    "The script itself is not deterministic: two runs without a kill differ, so a resumed run "
    "cannot be equal. Usual causes: seeds that are not set, or are taken from the time or "
    "os.urandom; data from threads or processes in order of arrival; GPU operations "
    "(torch.use_deterministic_algorithms(True), CUBLAS_WORKSPACE_CONFIG=:4096:8)"
)
NOT_RESUMED = (
    "The restarted job started from scratch: its script does not restore. Call restore() before "
    "the loop, and start the loop at the iteration that it returns (`wrap` does both)"
)
NOT_REPEATED = (
    "the steps in the journal could not be made again exactly: {why}. A step must depend on "
    "nothing but gradients, options and state (docs/journal.md); leave local_journal_steps out, "
    "and versions are exact without it"
)
NO_RECORDS = (
    "no step was made again from the journal, which ended before the kill. The log gives the reason"
)


NO_LOADER = (
    "unknown: whether an epoch ended in these steps, as no DataLoader was in use. Work at the end "
    "of an epoch (a scheduler's step, a new shuffle, an evaluation) is compared only if --steps or "
    "--from make the test pass one"
)
NO_END = (
    "not compared: no epoch ended in these steps. Work at the end of an epoch (a scheduler's step, "
    "a new shuffle, an evaluation) was not tested: give {how}"
)
NO_END_BEFORE = (
    "not compared: no epoch ended before the kill, so the kill could not lose a change made there "
    "(a scheduler's count): give {how}"
)
MORE = "more --kill-after and --steps, so that one ends before the kill and one after it"
SURE = 2
"""Steps between the restored version and the kill, with one to spare."""
NO_RATE = "not compared: no learning rate changed in these steps, and there is a scheduler"
NO_CHANGE = "not compared: {names} did not change in these steps"
NO_SKIP = "not compared: the scale of {names} did not change, so no step was skipped in these steps"


class Request(Struct, frozen=True):
    """The numbers given on the command line."""

    start: int
    """The version that runs start from; 0: from scratch."""
    kill_after: int
    steps: int


def coverage_gaps(run: RankRun, versions: Sequence[int], request: Request) -> list[str]:
    """Sentences about untested behaviour. `run` is one rank's part of the undisturbed run.
    `versions` were compared; the last restored version is the one before them."""
    found = [_of_epochs(run, versions, request)]
    before = max((v for v in run.states if v < versions[0]), default=versions[0])
    first = run.states[before].load()
    changed = set[str]()
    for version in versions:
        now = run.states[version].load()
        changed |= {n for n in now.keys() | first.keys() if now.get(n) != first.get(n)}
    rates = [n for n in first if part_of(n) == "options" and n.endswith("/lr")]
    if run.schedulers and rates and changed.isdisjoint(rates):
        found.append(NO_RATE)
    objects = {
        object_of(name)
        for name in first
        if part_of(name) in ("extra", "extra_per_rank") and "/" in name
    } - {f"extra/{EXTRA_STATES}"}
    if still := sorted(objects - {object_of(name) for name in changed}):
        found.append(NO_CHANGE.format(names=some(still, 6)))
    scales = {object_of(n) for n in first if n.endswith("/_growth_tracker")}
    scales -= {object_of(n) for n in changed if n.endswith("/scale")}
    if scaled := sorted(scales - set(still)):
        found.append(NO_SKIP.format(names=some(scaled)))
    return [text for text in found if text]


def over_epochs(run: RankRun, request: Request) -> Request | None:
    """The request that makes an epoch end before the kill and another one after it, at the pace of
    this run; `request` itself if it does; None if it cannot be computed."""
    kill_at = request.start + request.kill_after
    epochs = _Epochs.of(run, kill_at + request.steps)
    return epochs.needed(kill_at - SURE, kill_at, request)


def _of_epochs(run: RankRun, versions: Sequence[int], request: Request) -> str:
    """A sentence; empty if an epoch ended before the kill and another one after it."""
    epochs = _Epochs.of(run, versions[-1])
    if not epochs.any_seen:
        return NO_LOADER
    needed = epochs.needed(versions[0] - 1, versions[0], request)
    if needed == request:
        return ""
    text = NO_END_BEFORE if any(v >= versions[0] for v in epochs.ends) else NO_END
    if needed is None:
        return text.format(how=MORE)
    if needed.kill_after == request.kill_after:
        return text.format(how=f"--steps {needed.steps}, or --from a version shortly before one")
    how = f"--epochs, or --kill-after {needed.kill_after} --steps {needed.steps}"
    return text.format(how=how)


class _Epochs(Struct, frozen=True):
    """Passes over loaders that are in progress at boundaries: those of the training."""

    seen: Sequence[tuple[int, Mapping[int, tuple[int, int]]]]
    """By version, as `RankRun.passes`."""
    ends: Sequence[int]
    """Versions of boundaries where a pass had ended."""

    @classmethod
    def of(cls, run: RankRun, last: int) -> _Epochs:
        """The passes up to a version."""
        seen = [(v, run.passes[v]) for v in sorted(run.passes) if v <= last]
        pairs = pairwise(seen)
        return cls(seen, [v for (_, one), (v, other) in pairs if one.keys() - other.keys()])

    @property
    def any_seen(self) -> bool:
        """False if no loader was seen."""
        return any(passes for _, passes in self.seen)

    def needed(self, resumed: int, compared: int, request: Request) -> Request | None:
        """As `over_epochs`: one epoch must end by `resumed`, and one from `compared` on."""
        before = [version for version in self.ends if version <= resumed]
        after = [version for version in self.ends if version >= compared]
        if before and after:
            return request
        # A short script has ended: the newest pass is over.
        last, passes = next((each for each in reversed(self.seen) if each[1]), (0, {}))
        number = max(passes, key=lambda each: passes[each][::-1], default=0)
        length, yielded = passes.get(number, (0, 0))
        if not length:
            return None
        first, start = next((v, p[number][1]) for v, p in self.seen if number in p)
        pacer = (yielded - start) / (last - first) if last > first and yielded > start else 1.0
        period, more = math.ceil(length / pacer), math.ceil((length - yielded) / pacer)
        if before:
            return replace(request, steps=request.steps + more + SURE)
        end = self.ends[0] if self.ends else last + more + 1
        steps = max(request.steps, period + SURE)
        return replace(request, kill_after=end - request.start + SURE, steps=steps)
