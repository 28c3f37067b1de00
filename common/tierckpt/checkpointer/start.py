"""The start of a run: checks while a user can still correct the cause, a restore, the data.

| step of a restart | method |
|---|---|
| end what is in progress, look for a version | `_find` |
| load it, and make the steps of the journal after it again | `_load` |
| start the run from it | `_start_from` |
| without a version: from one of another job, or from nothing | `_start_elsewhere` |
| every counter and every level continues from there | `_continue_from` |

`restore.session` has the steps from the inventory to the loaded version.

The data witness: whether the data after a restart are those of the version, on all ranks. Each
resumed loader compares its newest batch, loaded once more, with the fingerprint in the version
(`state.witness`). It starts its pass on one rank alone, so it raises nothing. The first optimizer
step after the restore, which all ranks make, gathers what was found.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.utils.data import DataLoader, Sampler

from tierckpt import _process
from tierckpt._text import some
from tierckpt.config import Config
from tierckpt.coordination.error_barrier import ErrorBarrier, raise_any
from tierckpt.coordination.job_history import keep_rollback_record
from tierckpt.coordination.settings_check import JobTopology, agree_on_settings, refused
from tierckpt.coordination.versions import Reports
from tierckpt.core.decisions import Schedule
from tierckpt.core.levels import LOCAL, MEMORY
from tierckpt.core.parts import Part, Parts, call
from tierckpt.errors import RestoreError, TierckptError
from tierckpt.format.ids import Lineage, VersionId
from tierckpt.group import Group
from tierckpt.hooks.iterations import Accumulation
from tierckpt.restore.progress import Progress
from tierckpt.restored import Restored
from tierckpt.state import tree_codec
from tierckpt.state.counters import is_metric
from tierckpt.state.extras import DataPlace, LoaderPlace, first_values, is_generator
from tierckpt.state.names import named_modules
from tierckpt.state.optimizers import refuse_model
from tierckpt.state.training_state import TrainingState, label_optimizers

from .adapter import Adapter
from .levels import Tiers, repair
from .live_state import LiveState
from .shutdown import Finished

if TYPE_CHECKING:
    from tierckpt.journal.replay import Replay
    from tierckpt.lineage.fork import Forked, ForkOrder, PartReport, Selection
    from tierckpt.restore.search import VersionSearch
    from tierckpt.restore.session import LoadedVersion
    from tierckpt.restore.verification import VerifiedVersion
    from tierckpt.state.witness import Comparison

    from .loop import TrainingJob

__all__ = ["DataWitness", "Restart"]


Optimizers = (
    torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Mapping[str, torch.optim.Optimizer]
)


def agree(
    group: Group,
    table: Sequence[type[Part]],
    adapter: Adapter,
    model: torch.nn.Module,
    optimizer: Optimizers,
    extra: Mapping[str, Any] | None,
    extra_per_rank: Mapping[str, Any] | None,
    settings: Mapping[str, Any],
    config_file: str | os.PathLike[str] | None,
) -> tuple[TrainingState, Config, JobTopology]:
    """Check this rank's arguments and settings, and compare the settings with the other ranks'.
    Collective; `table`: the kinds of parts; other arguments as for `Checkpointer`.

    Raises ConfigError or UnsupportedStateError on all ranks, naming those with a problem.
    """
    with _on_all_ranks(group), _process.collector_paused():
        refuse_model(model)
        given = label_optimizers(optimizer)
        shared = adapter.reduced_parameters(), adapter.untrained_parameters()
        state = TrainingState(model, given, extra, extra_per_rank, *shared)
        check_state(state)
    config, topology = agree_on_settings(settings, config_file, group)
    with _on_all_ranks(group):
        for part in table:
            part.check(config, state, adapter)
    state.forward_changes(config.forward_changes)
    return state, config, topology


@contextlib.contextmanager
def _on_all_ranks(group: Group) -> Iterator[None]:
    """Context with an error that all ranks raise: those without it, in `agree_on_settings`."""
    try:
        yield
    except TierckptError as error:
        raise refused(error, group) from error.__cause__


def report_problems(
    config: Config, group: Group, state: TrainingState, reports: Reports, unprotected: str
) -> None:
    """Report ranks without the redundancy that was asked for, settings without effect, and state
    not stored, or stored in a way of its own."""
    if unprotected and group.rank == 0:
        reports.notice(unprotected, logging.ERROR)
    if idle := config.idle:
        reports.notice_of_all(f"without persistent_path there is no effect of {some(idle)}")
    if omitted := left_out(state):
        reports.notice_of_all(omitted, logging.INFO)
    for text in (*state.module_states.notes, *state.notes):
        reports.notice_of_all(text)


def check_state(state: TrainingState) -> None:
    """Raise UnsupportedStateError for state that a version could not store."""
    state.refuse_odd_keys()
    walk = state.walk()
    state.entries(walk)
    state.buffer_entries(walk)
    arena = tree_codec.Arena()
    state.optimizer_tree.pack_groups(arena.keep)
    state.optimizer_tree.pack_remainders(arena)
    # state_dict() of a loader starts its iterator, and a restore may move the loader elsewhere.
    state.module_states.check()
    objects = {**state.extra, **state.extra_per_rank}.items()
    found = state.pack_extra({n: o for n, o in objects if not isinstance(o, DataLoader)}, arena)
    state.notes += [
        without_state(name, obj)
        for name, obj in objects
        if tree_codec.is_empty(found.get(name, name)) and not _is_idle(obj)
    ]


def _is_idle(obj: Any) -> bool:
    """Whether an object has no state: a disabled scaler, a loss."""
    return type(obj).__module__.partition(".")[0] == "torch"


def without_state(name: str, obj: Any) -> str:
    """The warning about an object of `extra` with an empty `state_dict()`."""
    cure = "If it has a state, let state_dict() return it, and load_state_dict() load it"
    if is_metric(obj):
        cure = f"Call {name}.persistent(True) before, with the name of the variable"
    elif isinstance(obj, torch.nn.Module):
        cure = "If it has a state, make it a buffer, or return it from get_extra_state()"
    return (
        f"extra[{name!r}], a {type(obj).__name__}: its state_dict() is empty, so nothing of it is "
        f"in a checkpoint, and a resumed run starts with a new one. {cure}"
    )


def left_out(state: TrainingState) -> str:
    """The buffers that no `state_dict()` contains, as text; empty if there are none."""
    names = [
        f"{prefix}.{name}".lstrip(".")
        for prefix, module in named_modules(state.model)
        for name in sorted(module._non_persistent_buffers_set)
        if module._buffers.get(name) is not None
    ]
    if not names:
        return ""
    return (
        f"not persistent, hence in no checkpoint: {some(names)}. Register buffers with "
        "persistent=True if a resumed run cannot compute them again"
    )


def usual_slots(state: TrainingState) -> int:
    """The number of slots if the setting leaves it open: a third one on a GPU."""
    return 3 if any(p.is_cuda for p in state.walk().params) else 2


def shard_bytes(state: TrainingState, ranks: int) -> int:
    """Estimated bytes of one rank's shard."""
    walk = state.walk()
    striped, own = walk.nbytes()
    if not walk.state:
        values = 1 + max(map(_values_to_come, state.optimizers.values()), default=0)
        striped, own = values * striped, values * own
    return striped // ranks + own + sum(b.nbytes for b in walk.buffers)


def _values_to_come(optimizer: torch.optim.Optimizer) -> int:
    """Number of values that the optimizer keeps for each value of a parameter: mostly two."""
    options = optimizer.defaults
    if isinstance(optimizer, torch.optim.SGD):
        return int(bool(options.get("momentum")))
    return 2 + int(bool(options.get("amsgrad")))


PLACES = (DataPlace, DataLoader, Sampler)
"""Objects that know a place in the data, and cannot give a batch again."""
OTHER_DATA = (
    "{name} on {ranks}: its data after the restore of v{version} are not those that the job had. "
    "{why}"
)
REFUSED = (
    ". No step was made with them, and all versions stay. If they are as you want them: "
    'data_witness="warn"'
)
OVERWRITTEN = (
    "{names} had other values before the first step than restore() had set: something has written "
    "weights since, so the run does not continue from v{version}. Load and initialise weights "
    "before restore()"
)
SAMPLED = 64
"""Limit of parameters that are compared."""
UNWITNESSED = (
    "{names} cannot give a batch again, so nothing shows that the data after this restart are "
    "those of the job before. tierckpt.ResumableLoader around the loader compares them"
)


class DataWitness(Part):
    """The comparisons of one checkpointer's loaders. Training thread."""

    @classmethod
    def of(cls, job: TrainingJob) -> Self:
        """Of every job."""
        return cls(job.config.data_witness, job.group, job.state, job.reports)

    idle = frozenset(("step_starts", "iteration_ends"))
    result: tuple[int, str] | None = None
    """Of the last restart: the newest batches that were compared, on all ranks, and what differs;
    None before that."""

    def __init__(self, mode: str, group: Group, state: TrainingState, reports: Reports) -> None:
        """`mode`: the setting `data_witness`. Does not own the others."""
        self.mode = mode
        self._group, self._state, self._reports = group, state, reports
        self._version = 0
        self._unwitnessed_is_said = False
        self._weights: dict[str, list[Any]] = {}
        """Values of parameters after the restore."""
        self._tell()

    def _tell(self) -> None:
        """Let the loaders know whether their batches need fingerprints, and which generators the
        version has: their data may draw from these, too."""
        drawn = {name: each for name, each in self._objects() if is_generator(each)}
        for _, each in self._objects():
            if hasattr(each, "witnesses"):
                each.witnesses = self.mode != "off"
                each.draws_from(drawn)

    def restored(self, result: Restored) -> None:
        """Prepare the comparison."""
        self._tell()
        self._version = result.version
        due = result.version > 0 and self.mode != "off"
        self._weights = self._sampled() if due else {}
        if due:  # on all ranks
            self.wake("step_starts", "iteration_ends")

    def step_starts(self) -> None:
        """Compare, before the first step after a restore. Collective. Raises RestoreError, on all
        ranks, if the data of one rank differ, unless the setting asks for a warning."""
        self.sleep("step_starts", "iteration_ends")
        self._compare_weights()
        for _, each in self._objects():
            if isinstance(each, LoaderPlace):
                each.step_starts()
        found = dict(self._comparisons())
        why = [f"{name}: {each.text()}" for name, each in found.items() if each.differences]
        batches = sum(each.batches for each in found.values())
        gathered = self._group.all_gather_object(("; ".join(why), batches))
        for name, each in found.items():
            each.collects, each.late = False, partial(self._late, name)
        self._say_unwitnessed({*found})
        troubles = [theirs for theirs, _ in gathered]
        text = ""
        if any(troubles):
            if self.mode == "error":
                raise_any(troubles, self._error, self._group.rank)
            first = next(filter(None, troubles))
            ranks = [rank for rank, theirs in enumerate(troubles) if theirs == first]
            text = self._text(ranks, first)
            self._reports.notice_of_all(text, logging.WARNING)
        self.result = sum(batches for _, batches in gathered), text

    iteration_ends = step_starts
    """All ranks get here, also one that skipped its first step."""

    def _sampled(self) -> dict[str, list[Any]]:
        """A few values of each of the first parameters, without those that the forward pass
        changes. None where an optimizer has a `train()`: it changes the weights between its modes
        (ScheduleFree)."""
        optimizers = self._state.optimizers.values()
        if any(hasattr(getattr(each, "outside", each), "train") for each in optimizers):
            return {}
        first = islice(self._state.model.named_parameters(), SAMPLED)
        changed = self._state.changed_by_forward()
        return {name: first_values(param) for name, param in first if id(param) not in changed}

    def _compare_weights(self) -> None:
        """Nearly equal is equal: a forward pass may normalise weights."""
        now, names = self._sampled(), []
        for name, had in self._weights.items():
            pairs = zip(had, now.get(name, had), strict=False)
            other = [(a, b) for a, b in pairs if str(a) != str(b)]  # NaN is like NaN
            if not all(math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-6) for a, b in other):
                names.append(name)
        self._weights = {}
        if names:
            text = OVERWRITTEN.format(names=some(names), version=self._version)
            self._reports.notice_of_all(text, logging.WARNING)

    def _late(self, name: str, why: str) -> None:
        """A loader started its resumed pass after the first step: this rank alone knows."""
        ranks, why = [self._group.rank], f"{name}: {why}"
        if self.mode == "error":
            raise self._error(ranks, why)
        self._reports.notice(self._text(ranks, why), logging.WARNING)

    def _error(self, ranks: list[int], why: str) -> RestoreError:
        return RestoreError(self._text(ranks, why) + REFUSED)

    def _text(self, ranks: list[int], why: str) -> str:
        name, _, why = why.partition(": ")
        where = f"rank{'s' * (len(ranks) > 1)} {some(ranks, 8)} of {self._group.size}"
        return OTHER_DATA.format(name=name, ranks=where, version=self._version, why=why)

    def _objects(self) -> Iterator[tuple[str, Any]]:
        for objects in (self._state.extra, self._state.extra_per_rank):
            yield from objects.items()

    def _comparisons(self) -> Iterator[tuple[str, Comparison]]:
        """Those of all objects that have one: loaders, and the states of frameworks' loops."""
        witness = sys.modules.get("tierckpt.state.witness")  # what makes one has imported it
        if witness is None:
            return
        for name, each in self._objects():
            found = getattr(each, "comparison", None)
            if isinstance(found, witness.Comparison):
                yield name, found

    def _say_unwitnessed(self, witnessed: set[str]) -> None:
        names = [
            name
            for name, each in self._objects()
            if isinstance(each, PLACES) and name not in witnessed
        ]
        if names and not self._unwitnessed_is_said:
            self._unwitnessed_is_said = True
            self._reports.notice_of_all(UNWITNESSED.format(names=some(names)), logging.INFO)


class Restart:
    """One rank's part of every restore. Training thread, between two steps; collective."""

    went_back = False
    """The last restore chose an older version than the newest one."""

    def __init__(
        self,
        config: Config,
        group: Group,
        live: LiveState,
        levels: Tiers,
        parts: Parts,
        schedule: Schedule,
        accumulation: Accumulation,
        complete: Callable[[], None],
        finished: Finished,
    ) -> None:
        """All arguments stay their owners'. `complete`: `Checkpointer.complete`."""
        self._config, self._group, self._live, self._levels = config, group, live, levels
        self._parts, self._schedule = parts, schedule
        self._accumulation, self._complete = accumulation, complete
        self._finished = finished

    # --- a restore ------------------------------------------------------------------------------

    def restore(
        self, version: int | None, strict: bool, bar: Progress, fork: ForkOrder | None
    ) -> Restored:
        """Restore the newest sound version, or this one, and the journal's steps after it; without
        a version as `fork` orders. Raises the errors of `Checkpointer.restore`."""
        search, attempt = self._find(version, bar)
        most, unrepeated = (None if strict else 0), ""
        if attempt is not None and search.version is None and not search.passed_over:
            self._say_unused(attempt.plan.id, strict)
        while attempt is not None:
            most = most if (search.version is None and not search.passed_over) else 0
            with contextlib.closing(attempt), self._records_after(attempt, most) as replay:
                loaded = self._load(search, attempt, strict, replay)
                if loaded is not None:
                    loaded.result.unrepeated = unrepeated
                    return self._start_from(search, attempt, loaded)
            # Steps could not be made again exactly: the version again, and the steps before them.
            assert replay is not None
            most, unrepeated = replay.exact, replay.unrepeated
            search, attempt = self._find(version, bar)
        return self._start_elsewhere(search, fork, strict, bar)

    def _find(
        self, version: int | None, bar: Progress
    ) -> tuple[VersionSearch, VerifiedVersion | None]:
        """Look for the version, read and verify it; None if there is no version at all."""
        start = time.perf_counter()
        levels = self._levels
        # The version in progress is valid: no step has changed the state yet.
        levels.agreement.even_out()  # the copier may wait for a vote
        error_barrier = ErrorBarrier(self._group)
        with error_barrier:
            from tierckpt.restore.loader import TensorPreallocator
            from tierckpt.restore.search import VersionSearch
            from tierckpt.restore.session import live_bytes

            self._complete()
            call(self._parts.pause)
            levels.agreement.void()
            levels.agent.wait(None, hopeless=lambda: True)
            levels.collect()
            search = VersionSearch(
                self._config,
                error_barrier,
                levels.history,
                levels.reports,
                bar,
                start,
                levels.resources.left_elsewhere,
                TensorPreallocator(self._live.state),
                live_bytes(self._live.state),
            )
        found = search.find(version, self._live.position.version)
        if found is not None and search.version is None and not self._finished.asked:
            with contextlib.ExitStack() as on_refusal:
                on_refusal.callback(found.close)
                with error_barrier:
                    self._finished.refuse(found.plan.id)
                on_refusal.pop_all()
        return search, found

    def _load(
        self,
        search: VersionSearch,
        attempt: VerifiedVersion,
        strict: bool,
        replay: Replay | None,
    ) -> LoadedVersion | None:
        """Load the version, and make the journal's steps after it again. None, on all ranks, if
        they could not be made exactly: the live state is torn then."""
        from tierckpt.restore.session import load_found

        state, load_adapter = self._live.state, self._live.adapter.load
        with _process.collector_paused():
            if replay is None:
                return load_found(search, state, attempt, strict, load_adapter)
            loaded = load_found(search, state, attempt, strict, _load_later)
            return replay.run(loaded, attempt.trouble, load_adapter)

    @contextlib.contextmanager
    def _records_after(self, attempt: VerifiedVersion, most: int | None) -> Iterator[Replay | None]:
        """The records of the journal that follow a version, at most so many; None if there are
        none."""
        live, replay = self._live, None
        for records_after in self._parts.records_after if most != 0 else ():
            base, rollback = attempt.plan.id, self._levels.history.rollback_run
            barrier, step_class = ErrorBarrier(self._group), live.adapter.step_class
            replay = records_after(base, rollback, barrier, step_class, most)
        if replay is None:
            yield None
            return
        with contextlib.closing(replay):
            live.iterations.repeating = True
            try:
                yield replay
            finally:
                live.iterations.repeating = False

    def _say_unused(self, base: VersionId, strict: bool) -> None:
        """Warn of a journal that this restart does not use."""
        if self._group.rank:
            return
        for unused_after in self._parts.unused_after:
            if text := unused_after(base, self._levels.history.rollback_run, strict):
                self._levels.reports.notice(text, logging.WARNING)

    def load_from(
        self, source: str, selection: Selection, strict: bool, bar: Progress
    ) -> PartReport:
        """Load parts of another job's version. Raises the errors of `Checkpointer.load_from`."""
        with ErrorBarrier(self._group, _refused):
            self._accumulation.refuse()
        self._complete()
        call(self._parts.pause)
        (load_parts,) = self._parts.load_parts
        report: PartReport = load_parts(source, selection, strict, bar)
        self._live.forget()
        self._schedule.requested |= self._parts.starts_with
        return report

    # --- a run starts ---------------------------------------------------------------------------

    def _start_from(
        self, search: VersionSearch, attempt: VerifiedVersion, loaded: LoadedVersion
    ) -> Restored:
        """Start a run with a loaded version. Raises StateTornError on all ranks if one of them
        cannot."""
        from tierckpt.restore.verification import all_finished

        error_barrier = ErrorBarrier(self._group, attempt.incomplete)
        with error_barrier:
            self._continue_from(loaded.manifest.facts.lineage, loaded.result, error_barrier)
            all_finished(attempt, error_barrier)
            self.went_back = search.went_back(attempt)
            facts = loaded.manifest.facts
            self._finished.started_with(facts.run_id, facts.id.version)
            search.settle_rollback(attempt)
            self._live.state.drop_gradients()  # left by an interrupted iteration
            mended = not self._config.uses(LOCAL) or repair(attempt, self._group, self._levels)
            if not mended:
                self._schedule.requested = frozenset((MEMORY, LOCAL))
            # The journal leads to no version that was in memory alone, and its records do not give
            # up newer versions of an earlier run, or the journal of another number of ranks.
            self._schedule.requested |= self._parts.starts_with
            call(self._parts.found_versions)
            return search.report(loaded.result)

    def _start_elsewhere(
        self, search: VersionSearch, order: ForkOrder | None, strict: bool, bar: Progress
    ) -> Restored:
        """Start this job, which has no version of its own, from a version of another job, if one
        was ordered; else from nothing. Raises as `_start_from`."""
        forked: Forked | None = None
        for start_elsewhere in self._parts.start_elsewhere:
            forked = start_elsewhere(order, strict, bar, self._live.adapter.load)
        if forked is None:
            with ErrorBarrier(self._group) as error_barrier:
                self._levels.meet(error_barrier)
                return search.report(Restored(0))
        from tierckpt.restore.verification import all_finished

        self._levels.run_notes.fork = forked.result.forked_from
        error_barrier = ErrorBarrier(self._group, forked.found.incomplete)
        with contextlib.closing(forked.found), error_barrier:
            self._continue_from((), forked.start, error_barrier)
            all_finished(forked.found, error_barrier)
            self._live.state.drop_gradients()
            if self._config.uses(LOCAL):  # the source's version is held until then
                self._schedule.requested = frozenset((MEMORY, LOCAL))
            return search.report(forked.result)

    def carry_on(self, version: int, iteration: int, lineage: Lineage) -> None:
        """Start a run with the live state as it is, see `Handle.carry_on`."""
        history = self._levels.history
        history.look()
        result = Restored(iteration)
        result.version, result.generation = version, lineage[-1][0] if lineage else 0
        result.iteration_counts = self._live.iterations.counts
        self._continue_from(lineage, result)
        # On a new node.
        keep_rollback_record(self._config, self._group.rank, history, self._levels.reports)
        history.forget()

    def _continue_from(
        self, lineage: Lineage, result: Restored, error_barrier: ErrorBarrier | None = None
    ) -> None:
        """Set all counters to those of `result`, which the live state equals now. Inside a block of
        `error_barrier`, if given."""
        live = self._live
        live.continue_from(result)
        self._schedule.start_at(result.version)
        self._levels.continue_from(lineage, result, error_barrier)
        base = VersionId(result.generation, result.version) if lineage else None
        call(self._parts.continues_from, result, base, self._levels.history.generation)
        live.adapter.resumed(live.position.iteration)


def _refused(ranks: list[int], why: str) -> RestoreError:
    return RestoreError(f"rank {ranks[0]}: {why}")


def _load_later(value: Any) -> None:
    """Load no values of the adapter: those of a later record follow."""
