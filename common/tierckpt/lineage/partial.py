"""Loading of parts of a version, perhaps under other names: weights of a model trained before.

The parts that are not wanted are taken out of the version before it is compared and loaded, and the
rest gets the live names; after that it is a load like any other (see `restore.loader`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tierckpt._text import some
from tierckpt.errors import StateMismatchError
from tierckpt.format.layout import TensorSpec
from tierckpt.restore.imported import ImportedNames
from tierckpt.restore.loader import Loader, shown
from tierckpt.state.extras import EXTRA_STATES, PLAIN_VALUES, is_place
from tierckpt.state.modules.custom_states import MODULE_STATES
from tierckpt.state.names import FIXED, path_of
from tierckpt.state.optimizers.put_back import Values
from tierckpt.state.routed_files import FILES

from .selection import PartReport, Selection

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
        """Why an optimizer that is on both sides cannot be taken; empty if it can."""
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


__all__ = ["PartLoader"]
