"""The fork of a job: it starts from another job's version, and continues by itself.

| step | where | what a kill after it leaves |
|---|---|---|
| hold | at the source: its retention keeps the version | a hold; the next start uses it again |
| load | memory of this process | the same |
| record | beside the fork's own versions, on every node | the order to start there, exactly |
| own version | on all ranks' disks | a job like any other; its next start ends the hold |
| note | the hold becomes a note at the source | - |

So the source's version stays until the fork needs it no more, and a fork killed before it has a
version of its own starts from the same version again. A version in the memory of a running job
cannot be held; then the record follows only after the own version, as a job with a record of a lost
version could not start.

A fork, or a restore, may also take parts of a version, perhaps under other names: weights of a
model trained before. A pattern is a name with at most one `*`, which stands for any text, dots
included; the text is carried over to the `*` of the other side: `backbone.*` to `encoder.*`. The
parts that are not wanted are taken out of the version before it is compared and loaded, and the
rest gets the live names; after that it is a load like any other (see `restore.loader`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import shlex
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Self

import torch
from msgspec import Struct, field
from msgspec.structs import replace

from tierckpt import _faults as faults
from tierckpt._text import some
from tierckpt.config import Config
from tierckpt.coordination.error_barrier import ErrorBarrier
from tierckpt.coordination.versions import Reports
from tierckpt.core.branches import FORK_SETTING, ForkSource, Origin, source_of
from tierckpt.core.parts import Boundary, Part
from tierckpt.errors import RestoreError, StateMismatchError, StateTornError
from tierckpt.format.ids import VersionId
from tierckpt.format.layout import TensorSpec
from tierckpt.group import Group, Node
from tierckpt.restore.imported import ImportedNames
from tierckpt.restore.loader import Loader, TensorPreallocator, shown
from tierckpt.restore.progress import Progress
from tierckpt.restore.session import LoadedVersion, load
from tierckpt.restore.verification import VerifiedVersion, all_finished
from tierckpt.restored import Restored
from tierckpt.state.extras import EXTRA_STATES, PLAIN_VALUES, is_place
from tierckpt.state.module_states import MODULE_STATES
from tierckpt.state.names import FIXED, path_of
from tierckpt.state.optimizer_restore import Values
from tierckpt.state.training_state import FILES, TrainingState

from .source import IN_MEMORY, OwnMarks, SourceLook, SourceReader, Wanted, new_origin

if TYPE_CHECKING:
    from tierckpt.checkpointer.loop import TrainingJob
    from tierckpt.coordination.agreement import Agreement

__all__ = [
    "PARTS",
    "ForkOrder",
    "Forked",
    "Forks",
    "PartLoader",
    "PartReport",
    "Selection",
    "matched",
]


PARTS = ("model", "optimizer", "extra")
"""`model`: parameters, buffers and own states of modules. `optimizer`: state and options. `extra`:
the objects in `extra` and `extra_per_rank`, without those that are the job's own place: loaders,
samplers, counts of a loop."""


class Selection(Struct, frozen=True):
    """A choice of parts, and new names for tensors of the model."""

    parts: tuple[str, ...] = PARTS
    renamed: tuple[tuple[str, str], ...] = ()
    """Patterns of the source's names with those of the live model; the first that fits counts. A
    name that fits none stays."""

    @staticmethod
    def of(only: str | Iterable[str] | None, map: Mapping[str, str] | None) -> Selection | None:
        """The selection that a script's arguments describe; None for a whole version. Raises
        ValueError, with the argument's name, for parts and patterns that do not exist."""
        if only is None and not map:
            return None
        given = PARTS if only is None else (only,) if isinstance(only, str) else tuple(only)
        unknown = [each for each in given if each not in PARTS]
        if unknown or not given:
            what = repr(unknown[0]) if unknown else "empty"
            there = ", ".join(repr(each) for each in PARTS)
            raise ValueError(f"only= is {what}; the parts are {there}")
        pairs = tuple((map or {}).items())
        for source, target in pairs:
            for text in (source, target):
                if not text or text.count("*") > 1:
                    raise ValueError(f"map= has {text!r}; give a name with at most one *")
            if "*" in target and "*" not in source:
                raise ValueError(
                    f"map= leads {source!r} to {target!r}: a * in the new name needs one in the old"
                )
        if pairs and "model" not in given:
            raise ValueError(f'map= names tensors of the model; add "model" to only={only!r}')
        return Selection(tuple(each for each in PARTS if each in given), pairs)

    def target(self, name: str) -> str:
        """The name in the live model of a tensor of the source."""
        for source, target in self.renamed:
            if (text := matched(source, name)) is not None:
                return target.replace("*", text)
        return name

    def idle(self, names: Iterable[str]) -> list[str]:
        """Patterns that fit none of the source's names."""
        there = list(names)
        return [s for s, _ in self.renamed if all(matched(s, each) is None for each in there)]


def matched(pattern: str, name: str) -> str | None:
    """The text that the `*` of a pattern stands for (empty without one); None if the name does not
    fit."""
    before, star, after = pattern.partition("*")
    if not star:
        return "" if pattern == name else None
    long_enough = len(name) >= len(before) + len(after)
    if long_enough and name.startswith(before) and name.endswith(after):
        return name[len(before) : len(name) - len(after)]
    return None


class PartReport(Struct):
    """What became of each tensor of a version of which parts were loaded, and of the live state.
    Names are those of the model, without `model/` or `buffer/`; other entries have their prefix."""

    source: str = ""
    """The version, `PATH@v40`."""
    parts: tuple[str, ...] = ()
    loaded: list[str] = field(default_factory=list)
    """Live names that have the source's values now."""
    skipped: list[str] = field(default_factory=list)
    """Names in the source that the live state does not have."""
    missing: list[str] = field(default_factory=list)
    """Live names that the source does not have: they keep their values."""
    other_shape: list[str] = field(default_factory=list)
    """Sentences about tensors of another shape or type, which keep their values; each has both."""
    kept: list[str] = field(default_factory=list)
    """Live objects of `extra` that keep their values, and no difference: the job's own place in its
    data and in its loop."""
    other: list[str] = field(default_factory=list)
    """Sentences about anything else that could not be taken: an optimizer of another class, a
    pattern that fits nothing."""

    @property
    def of_parts(self) -> str:
        """The parts, as text."""
        return " and ".join(self.parts)

    @property
    def differences(self) -> list[str]:
        """A sentence for everything that does not match; empty if all does."""
        found = [f"{name} is in the source, not here" for name in self.skipped]
        found += [f"{name} is here, not in the source" for name in self.missing]
        return [*self.other_shape, *found, *self.other]

    def __str__(self) -> str:
        counts = (
            (len(self.loaded), "loaded"),
            (len(self.skipped), "skipped"),
            (len(self.missing), "missing"),
            (len(self.other_shape), "of another shape or type"),
        )
        text = ", ".join(f"{number} {what}" for number, what in counts)
        kept = [f"this job's own place stays: {', '.join(self.kept)}"] if self.kept else []
        return "; ".join([f"{self.source}: {text}", *self.other_shape, *self.other, *kept])


OF_MODULES = (MODULE_STATES, EXTRA_STATES)
"""Entries of `extra` that belong to the model."""

OTHER_NAMES = (
    'Give names that differ with map={"there.*": "here.*"}, or pass strict=False to load the parts '
    "that fit and leave the rest unchanged."
)


class PartLoader(Loader):
    """A `Loader` of parts. It fills `report` when it is made."""

    way_out = OTHER_NAMES

    def __init__(self, *arguments: Any, selection: Selection, report: PartReport) -> None:
        """`arguments`: those of `Loader`."""
        self._selection, self.report = selection, report
        super().__init__(*arguments)

    def _map_imported(self) -> ImportedNames | None:
        chosen = _ChosenParts(self, self._live, self._live_specs, self._selection, self.report)
        self.specs, self.own_specs = chosen.specs, chosen.own_specs
        self.structure, self.saved = chosen.structure, chosen.saved
        self._trained = {}  # this job decides what it trains
        self._names, self._params = chosen.names, chosen.params
        return None

    def live_name(self, stored: str) -> str:
        """See `Loader`."""
        return self._names.get(stored, "")

    def _finish_files(self) -> None:
        """Leave this job's own routed files."""

    def _saved_param(self, parameter: str) -> TensorSpec | None:
        return self._params.get(parameter)  # also if only its optimizer's state is wanted

    def _param_fits(self, parameter: str) -> bool:
        """See `Loader`; here a parameter without a counterpart in the source has no state there."""
        return parameter in self._params

    def _values_of(self, label: str) -> Values:
        """See `Loader`; parameters that do not fit keep their live state."""
        values, optimizer = super()._values_of(label), self.state.optimizers[label]
        for name, param in self.state.params_by_name().items():
            if name not in self._params and param in optimizer.state:
                values[name] = dict(optimizer.state[param])
        return values

    def differences(self) -> list[str]:
        """What does not match: with `strict`, everything; without, nothing, as it is in the report.
        Raises StateMismatchError if nothing fits at all, on all ranks."""
        self._differs = "optimizer" not in self._selection.parts or bool(self.report.other)
        found = [*self._missing, *self.report.differences]
        if not self.report.loaded:
            nothing = f"the source has nothing of {self.report.of_parts} that fits here"
            if self.report.kept:
                nothing += f"; this job keeps its own place: {some(self.report.kept)}"
            raise StateMismatchError(self.report.source, [nothing, *found], OTHER_NAMES)
        return found if self.strict else []


class _ChosenParts:
    """The chosen parts of a version under live names."""

    def __init__(
        self,
        loader: PartLoader,
        live: Mapping[str, torch.Tensor],
        live_specs: Mapping[str, TensorSpec],
        selection: Selection,
        report: PartReport,
    ) -> None:
        self._loader, self._selection, self._report = loader, selection, report
        self._live, self._live_specs = live, live_specs
        self.names: dict[str, str] = {}
        """Live entries by stored ones."""
        self.specs: dict[str, TensorSpec] = {}
        self.own_specs: dict[str, TensorSpec] = {}
        self.structure: dict[str, Any] = {}
        self.params: dict[str, TensorSpec] = {}
        """By live parameter, those of the source that fit it, wanted or not."""
        saved = loader.saved
        gone = {"rng", "imported", "began", "adapter", "options", "switches", FILES}
        kept = {key: value for key, value in saved.items() if key not in gone}
        emptied = ("groups", "odd", "remainders", "extra", "extra_per_rank")
        self.saved = {**kept, **{key: {} for key in emptied}, "shared": []}
        self._leads: dict[str, str] = {}
        """Live names of the model by stored ones, of tensors that are on both sides."""
        self._owners: dict[str, str] = {}
        """Those of the same form."""
        self._map_model()
        self._map_optimizers()
        self._choose_objects()
        report.parts = selection.parts

    # --- the model -----------------------------------------------------------------------------

    def _map_model(self) -> None:
        wanted, report = "model" in self._selection.parts, self._report
        aliases = self._loader.state.tied()
        stored = {**self._loader.specs, **self._loader.own_specs}
        names = {n: n.partition("/")[2] for n in stored if n.startswith(FIXED)}
        if wanted:
            unused = self._selection.idle(names.values())
            report.other += [f"map= has {each!r}, which fits no name there" for each in unused]
        taken: dict[str, str] = {}
        for entry, name in names.items():
            target = self._selection.target(name)
            live = self._live_entry(aliases.get(target, target))
            if live is None:
                report.skipped += [name] if wanted else []
                continue
            if live in taken and taken[live] != name:
                text = f"{taken[live]} and {name} both lead to {target}"
                report.other += [text] if wanted else []
                continue
            taken[live] = name
            self._leads[name] = live.partition("/")[2]
            now = self._live_specs[live]
            spec = stored[entry]._replace(name=live, device=self._live[live].device.type)
            if (spec.shape, spec.dtype) != (now.shape, now.dtype):
                text = f"{name} is {shown(spec)} in the source, {live.partition('/')[2]} is "
                report.other_shape += [f"{text}{shown(now)} here"] if wanted else []
                continue
            self._owners[name] = self._leads[name]
            self.params[self._owners[name]] = spec._replace(device=stored[entry].device)
            if wanted:
                self._take(entry, live, spec)
                report.loaded.append(live.partition("/")[2])
        if wanted:
            missing = (n for n in self._live if n.startswith(FIXED) and n not in taken)
            report.missing += [name.partition("/")[2] for name in missing]

    def _live_entry(self, name: str) -> str | None:
        return next((e for kind in FIXED if (e := f"{kind}{name}") in self._live), None)

    def _take(self, entry: str, live: str, spec: TensorSpec) -> None:
        self.names[entry] = live
        if entry in self._loader.own_specs:
            self.own_specs[live] = spec
        if entry in self._loader.specs:
            self.specs[live] = spec

    # --- optimizers ----------------------------------------------------------------------------

    def _map_optimizers(self) -> None:
        if "optimizer" not in self._selection.parts:
            return
        live, report = self._loader.state.structure(), self._report
        for label in sorted(live.keys() | self._loader.structure.keys()):
            theirs, ours = self._loader.structure.get(label), live.get(label)
            if theirs is None or ours is None:
                where = "here" if theirs is None else "in the source"
                report.other.append(f"optimizer {label!r} is only {where}")
                continue
            if why := self._reason_to_leave(label, theirs, ours):
                report.other.append(f"optimizer {label!r} {why}")
            else:
                self._take_optimizer(label, ours)

    def _reason_to_leave(
        self, label: str, theirs: Mapping[str, Any], ours: Mapping[str, Any]
    ) -> str:
        """Why an optimizer of both sides cannot be taken; empty if it can."""
        if "imported" in self._loader.saved:
            return "was imported, and is taken only with a whole version"
        if theirs["class"] != ours["class"]:
            return f"is a {theirs['class']} in the source, a {ours['class']} here"
        groups = [[self._leads.get(n, f"{n} (source)") for n in g] for g in theirs["groups"]]
        if groups != ours["groups"]:
            then, now = ({n for group in each for n in group} for each in (groups, ours["groups"]))
            only_there = some(sorted(n.removesuffix(" (source)") for n in then - now))
            texts = [f"only there: {only_there}"] if then - now else []
            texts += [f"only here: {some(sorted(now - then))}"] if now - then else []
            text = "; ".join(texts) or "they are in other groups, or in another order"
            return f"has other parameters in the source ({text})"
        renamed = any(name != owner for name, owner in self._owners.items())
        if renamed and label in self._loader.saved.get("remainders", {}):
            return "has values of its own under the source's names, and is taken only without map="
        return ""

    def _take_optimizer(self, label: str, ours: Mapping[str, Any]) -> None:
        saved = self._loader.saved
        self.structure[label] = ours
        self.saved["groups"][label] = saved["groups"][label]
        if label in saved.get("remainders", {}):
            self.saved["remainders"][label] = saved["remainders"][label]
        left: dict[str, None] = {}
        for entry, spec in {**self._loader.specs, **self._loader.own_specs}.items():
            if entry.startswith(FIXED) or not entry.startswith(f"{label}/"):
                continue
            name, key = path_of(entry)
            if name not in self._owners:
                left[name] = None
                continue
            live = f"{label}/{self._owners[name]}/{key}"
            self._take(entry, live, spec._replace(name=live))
            self._report.loaded.append(live)
        for full, values in saved["odd"].items():
            name = full.partition("/")[2]
            if full.startswith(f"{label}/") and name in self._owners:
                self.saved["odd"][f"{label}/{self._owners[name]}"] = values
        for _, key, names in [each for each in saved.get("shared", ()) if each[0] == label]:
            known = names and [self._owners[name] for name in names if name in self._owners]
            self.saved["shared"].append([label, key, known])
        text = f"optimizer {label!r}: the state of {{}} was left out, as its parameter does not fit"
        self._report.other += [text.format(name) for name in left]

    # --- objects -------------------------------------------------------------------------------

    def _choose_objects(self) -> None:
        saved, report = self._loader.saved, self._report
        if "model" in self._selection.parts:
            self._choose_states_of_modules(saved["extra"])
        if "extra" not in self._selection.parts:
            return
        for which in ("extra", "extra_per_rank"):
            live = getattr(self._loader.state, which)
            own = {name for name, each in live.items() if is_place(each)}
            report.kept += [f"{which}[{name!r}]" for name in live if name in own]
            for name, value in saved[which].items():
                if name in OF_MODULES or name in own:
                    continue
                if name in live:
                    self.saved[which][name] = value
                    report.loaded.append(f"{which}[{name!r}]")
                else:
                    report.skipped.append(f"{which}[{name!r}]")
            known = {*saved[which], *OF_MODULES, *own}
            others = (name for name in live if name not in known)
            report.missing += [f"{which}[{name!r}]" for name in others if name != PLAIN_VALUES]

    def _choose_states_of_modules(self, saved: Mapping[str, Any]) -> None:
        for name in OF_MODULES:
            if name not in saved:
                continue
            if not self._selection.renamed and name in self._loader.state.extra:
                self.saved["extra"][name] = saved[name]
            elif saved[name]:
                self._report.other.append(f"{name} are under the source's names, and were left out")


class ForkOrder(Struct, frozen=True):
    """What a call of `restore()` says about a fork. The same on all ranks."""

    source: str = ""
    """The source, as text; empty: what the setting or the record says."""
    selection: Selection | None = None
    """The parts to take; None: a whole version."""
    strict: bool = True


class Forked(Struct):
    """A version of another job in the live state."""

    found: VerifiedVersion
    loaded: LoadedVersion
    result: Restored
    """The result for the script."""

    @property
    def start(self) -> Restored:
        """The state that the run starts with, which has no version of this job."""
        start = Restored(int(self.result))
        start.version = self.result.version
        start.iteration_counts = self.result.iteration_counts
        return start


class Forks(Part):
    """The fork of this job, if it is one, and loads from other jobs. Training thread; methods are
    collective unless they say otherwise."""

    @classmethod
    def of(cls, job: TrainingJob) -> Self:
        """Of every job."""
        host = job.topology.hosts[job.group.rank]
        return cls(job.config, job.group, job.node, host, job.state, job.reports, job.agreement)

    def __init__(
        self,
        config: Config,
        group: Group,
        node: Node,
        host: str,
        state: TrainingState,
        reports: Reports,
        agreement: Agreement,
    ) -> None:
        """`host`: the id of this rank's node."""
        self._agreement = agreement
        self._config, self._group, self._state, self._reports = config, group, state, reports
        self._reader = SourceReader(config, group, host, reports)
        self.marks = OwnMarks(config, group, node, self._reader, reports)

    idle = frozenset(("boundary_ends",))

    def restored(self, result: Restored) -> None:
        """The source may hold a version for this job from now on."""
        if self.marks.needs is not None:
            self.wake("boundary_ends")

    def boundary_ends(self, at: Boundary) -> None:
        """End what the source holds for this job, once this job has a version of its own."""
        self._settle()
        if self.marks.needs is None:
            self.sleep("boundary_ends")

    def end(self, remove: bool) -> None:
        """The same, and close the places."""
        self._settle()
        self.marks.close()

    def _settle(self) -> None:
        self.marks.settle(self._agreement.local.safe, self._agreement.memory.safe)

    # --- a job starts --------------------------------------------------------------------------

    def found_versions(self) -> None:
        """An earlier start may have left a hold at the source."""
        self.marks.has_versions()

    def start_elsewhere(
        self,
        order: ForkOrder | None,
        strict: bool,
        bar: Progress,
        load_adapter: Callable[[Any], None],
    ) -> Forked | None:
        """Load the version that this job is to start from; None if there is no such order. For a
        job without any version of its own. `order`: None if the call of `restore()` says nothing.

        Raises RestoreError on all ranks if the orders contradict each other or the version is not
        there, and StateMismatchError if it does not fit; nothing was changed then.
        """
        order = order or ForkOrder(strict=strict)
        record, text = self.marks.orders(order.source or self._config.fork_from)
        if record is None and not text:
            return None
        wanted = self._wanted(record, text)
        barrier = ErrorBarrier(self._group)
        with contextlib.ExitStack() as undo:
            with barrier:
                look = self._reader.look(wanted, barrier)
                id_ = look.choose(wanted, self._config.stops_on_drift)
                origin = record or self._origin(wanted, id_, look, order.selection, barrier)
                origin = replace(origin, held=True)
                if record is None:
                    undo.callback(self.marks.end_hold, origin)
                trouble = self.marks.hold(origin, look, barrier)
                found = self._reader.read(wanted, look, id_, bar, barrier)
            forked = self._load(found, wanted, order, load_adapter)
            undo.pop_all()
        faults.point("fork", op="loaded")
        fixed = record is not None or trouble != IN_MEMORY
        self.marks.note(origin, now=fixed)
        faults.point("fork", op="record")
        self._report(forked, origin, trouble, fixed)
        return forked

    def _wanted(self, record: Origin | None, text: str) -> Wanted:
        """The version to start from. A record fixes it: a source that continues has newer ones."""
        given = source_of(text) if text else None
        if record is None:
            assert given is not None
            return Wanted(given.path, given.version)
        cancel, path = self.marks.cancel_commands, given.path if given else record.source
        if given is not None:
            other = self._reader.template(given.path) != record.source
            if other or given.version not in (None, record.id.version):
                places = " and ".join(self.marks.recorded)
                raise RestoreError(
                    f"this job is to start from {record}, as an earlier start or `tierckpt fork` "
                    f"noted in {places}, and {FORK_SETTING} is {text!r}. Nothing was changed",
                    f"To take the first one back: {cancel}",
                )
        kept = self.marks.kept(record)
        return Wanted(path, record.id.version, record.id, record.run_id, cancel, kept)

    def _origin(
        self,
        wanted: Wanted,
        id_: VersionId,
        look: SourceLook,
        selection: Selection | None,
        barrier: ErrorBarrier,
    ) -> Origin:
        place, own = map(self._reader.template, (wanted.path, self._config.path))
        parts = selection.parts if selection else ()
        origins: list[Origin] = barrier.all_gather_object(
            new_origin(place, look.facts[id_], own, parts)
        )
        return origins[0]

    # --- loading -------------------------------------------------------------------------------

    def _load(
        self,
        found: VerifiedVersion,
        wanted: Wanted,
        order: ForkOrder,
        load_adapter: Callable[[Any], None],
    ) -> Forked:
        make: Callable[..., Loader] = Loader
        id_ = found.plan.id
        named = str(ForkSource(wanted.path, id_.version))
        report = PartReport(named)
        if order.selection is not None:
            make = functools.partial(PartLoader, selection=order.selection, report=report)
        try:
            barrier, new = ErrorBarrier(self._group), TensorPreallocator(self._state)
            loaded = load(self._state, found, barrier, order.strict, new, make, named)
            if order.selection is None:
                try:
                    load_adapter(loaded.adapter)
                except Exception as error:
                    found.fail(error)
                    self._state.torn = True
        except BaseException:
            found.close()
            raise
        for text in loaded.notices:
            self._reports.notice(text, logging.WARNING)
        result = loaded.result if order.selection is None else Restored(0)
        result.forked_from = named
        result.partial = report if order.selection is not None else None
        return Forked(found, loaded, result)

    def load_parts(
        self, text: str, selection: Selection, strict: bool, bar: Progress
    ) -> PartReport:
        """Load parts of another job's version into the live state, and continue."""
        given = source_of(text)
        wanted, barrier = Wanted(given.path, given.version), ErrorBarrier(self._group)
        with barrier:
            look = self._reader.look(wanted, barrier)
            id_ = look.choose(wanted, self._config.stops_on_drift)
            found = self._reader.read(wanted, look, id_, bar, barrier)
        order = ForkOrder(text, selection, strict)
        forked = self._load(found, wanted, order, lambda adapter: None)
        try:
            with contextlib.closing(found):
                all_finished(found, ErrorBarrier(self._group, found.incomplete))
        except StateTornError:
            self._state.torn = True
            raise
        assert forked.result.partial is not None
        return forked.result.partial

    def _report(self, forked: Forked, origin: Origin, trouble: str, fixed: bool) -> None:
        report = forked.result.partial
        what = f"{report.of_parts} of {report}" if report else str(origin)
        self._reports.notice_of_all(
            f"this job has no version of its own, and starts from {what}"
            + ("" if trouble else f". {origin} is held there until it has one on disk"),
            logging.INFO,
        )
        if trouble:
            then = "the restart fails"
            remedy = f"To keep it: tierckpt pin {shlex.quote(origin.source)} {origin.id.version}"
            if trouble == IN_MEMORY:
                then = then if fixed else "the restart starts from the newest version then"
                remedy = (
                    "To start from one that stays, choose one on disk (tierckpt list), or have "
                    "that job write one (save(now=True), local_every_steps)"
                )
            self._reports.notice_of_all(
                f"{origin} cannot be held there: {trouble}. If it goes, and this job is restarted "
                f"before it has a version of its own on disk, {then}. {remedy}"
            )
