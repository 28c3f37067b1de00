"""Imported versions: the names of another tool's file, mapped to the live state.

A file of `torch.save` says which tensor has which name in `state_dict()`, and which state belongs
to the n-th parameter of an optimizer; only the live job knows buffers, tied weights, and the order
of its param groups. So an imported version is stored under the source's names, with a record
`imported` (FORMAT.md), and each rank maps them here. After that the restore is that of any version.

What the source does not have starts fresh, with a notice. Anything else that does not match is a
difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from tierckpt.format.layout import TensorSpec
from tierckpt.state.extras import EXTRA_STATES, PLAIN_VALUES
from tierckpt.state.training_state import TrainingState

ELEMENTWISE = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg"}
    | {"acc_delta", "sum", "exp_inf", "ax", "prev", "step_size", "master_param"}
)
"""Keys of torch's optimizers with a tensor in the shape of the parameter."""
FROM_SCHEDULERS = frozenset({"initial_lr", "swa_lr", "max_momentum", "base_momentum"})
"""Options of param groups that schedulers add."""
FEW = 8


class ImportedNames:
    """The mapping of one imported version. Training thread; only `copy` changes anything."""

    def __init__(
        self,
        state: TrainingState,
        live: Mapping[str, torch.Tensor],
        specs: Mapping[str, TensorSpec],
        structure: Mapping[str, Any],
        saved: Mapping[str, Any],
    ) -> None:
        """`live`: tensors by entry; the others are those of the version, as stored."""
        self._state, self._live, self._stored = state, live, specs
        self._structure, self._saved = structure, saved
        self._record: Mapping[str, Any] = saved["imported"]
        self.names: dict[str, str] = {}
        """The live entry that each stored one goes to."""
        self._copies: list[tuple[str, str]] = []
        """Live entries that get the values of another one."""
        self.specs: dict[str, TensorSpec] = {}
        """By live entry."""
        self.structure: dict[str, Any] = {}
        """By live optimizer; without those that start fresh."""
        self.saved: dict[str, Any] = {**saved, "groups": {}, "odd": {}, "extra": {}}
        """The rank tree, by live names."""
        self.fresh: set[str] = set()
        """Live optimizers that the source does not have."""
        self.differences: list[str] = []
        self.notices: list[str] = []
        self._map_model()
        self._map_optimizers()
        self._map_extra()

    # --- the model -----------------------------------------------------------------------------

    def _map_model(self) -> None:
        stored = {name.removeprefix("model/") for name in self._stored if name.startswith("model/")}
        tied: Mapping[str, str] = self._record["tied"]
        where = {name: name for name in stored} | {k: v for k, v in tied.items() if v in stored}
        aliases: dict[str, list[str]] = {}
        for other, first in self._state.tied().items():
            aliases.setdefault(first, []).append(other)
        equal = [set(names) for names in self._record["equal"]]
        used: set[str] = set()
        self._first_name: dict[str, str] = {}
        """The live parameter or buffer of each name in the source."""
        for entry in self._live:
            kind, _, name = entry.partition("/")
            if kind not in ("model", "buffer"):
                continue
            names = [each for each in (name, *aliases.get(name, ())) if each in where]
            if not names:
                continue  # reported by the loader
            used |= {*names}
            self._first_name |= dict.fromkeys(names, name)
            sources = [*dict.fromkeys(where[each] for each in names)]
            if len(sources) > 1 and not any({*sources} <= group for group in equal):
                text = " and ".join(sources[:2])
                self.differences.append(
                    f"{text} are one tensor in the model, and differ in the imported file"
                )
            self._give(f"model/{sources[0]}", entry)
        for name in sorted(stored - used):  # reported by the loader, too
            self.specs[f"model/{name}"] = self._stored[f"model/{name}"]

    def _give(self, source: str, entry: str) -> None:
        device = self._live[entry].device.type
        self.specs[entry] = self._stored[source]._replace(name=entry, device=device)
        if source in self.names:
            self._copies.append((self.names[source], entry))
        else:
            self.names[source] = entry

    def copy(self, targets: Mapping[str, torch.Tensor]) -> None:
        """After the load: give live tensors the values of another one that the source stores once
        for both. `targets` are the loaded tensors by entry."""
        for first, other in self._copies:
            if first in targets and other in targets:
                targets[other].copy_(targets[first])

    # --- optimizers ----------------------------------------------------------------------------

    def _map_optimizers(self) -> None:
        live = self._state.structure()
        pairs = {label: label for label in self._structure if label in live}
        rest = [label for label in self._structure if label not in pairs]
        free = [label for label in live if label not in pairs]
        if len(rest) == len(free) == 1:
            pairs[rest[0]] = free[0]
            rest, free = [], []
        self.differences += [
            f"optimizer {label!r} is in the file, not in the job" for label in rest
        ]
        if self._structure:
            self.differences += [
                f"optimizer {label!r} is not in the imported file" for label in free
            ]
        elif free:
            names = ", ".join(map(repr, free))
            self.notices.append(f"optimizer {names} starts fresh: the imported file has none")
        self.fresh = {*free}
        self._owners: dict[str, str] = {}
        for label, own in pairs.items():
            self._map_optimizer(label, own, live[own])
        self._map_states(pairs)

    def _map_optimizer(self, label: str, own: str, live: Mapping[str, Any]) -> None:
        groups: list[list[str]] = self._structure[label]["groups"]
        options: list[Mapping[str, Any]] = self._saved["groups"][label]
        if label in self._record["named"]:
            groups = [[self._first_name.get(name, name) for name in names] for names in groups]
            groups, options = _in_order_of(live["groups"], groups, options)
            owners = {name: name for names in groups for name in names}
            raw = [name for names in self._structure[label]["groups"] for name in names]
            owners |= {name: self._first_name.get(name, name) for name in raw}
            same = [{*names} for names in groups] == [{*names} for names in live["groups"]]
        else:
            numbers = [number for names in groups for number in names]
            flat = [name for names in live["groups"] for name in names]
            same = [*map(len, groups)] == [*map(len, live["groups"])]
            owners = dict(zip(numbers, flat, strict=False))
        if not same:
            self.differences.append(_of_groups(own, groups, live["groups"]))
            return
        self._owners |= {f"{label}/{name}": f"{own}/{owner}" for name, owner in owners.items()}
        self.structure[own] = dict(live)
        self.saved["groups"][own] = options
        self._compare_options(own, options)

    def _compare_options(self, own: str, options: Iterable[Mapping[str, Any]]) -> None:
        """Options of another class are a difference; a release of torch may add or drop some."""
        groups = self._state.optimizers[own].param_groups
        for given, group in zip(options, groups, strict=True):
            theirs = given.keys() - FROM_SCHEDULERS
            ours = group.keys() - FROM_SCHEDULERS - {"params", "param_names"}
            if not (theirs <= ours or ours <= theirs):
                self.differences.append(
                    f"{own} has the options {_some(ours - theirs)}, and the imported one "
                    f"{_some(theirs - ours)}: it is an optimizer of another class"
                )
                return
            decoupled = given.get("decoupled_weight_decay"), group.get("decoupled_weight_decay")
            if None not in decoupled and decoupled[0] != decoupled[1]:
                kinds = ("AdamW", "Adam") if decoupled[0] else ("Adam", "AdamW")
                text = f"{own} is an {kinds[1]}, and the imported one an {kinds[0]}"
                self.differences.append(f"{text} (decoupled_weight_decay)")
                return

    def _map_states(self, pairs: Mapping[str, str]) -> None:
        for source, spec in self._stored.items():
            if source.startswith("model/"):
                continue
            owner, _, key = source.rpartition("/")
            if (live := self._owners.get(owner)) is None:
                continue
            self._take_state(source, spec, live, key)
        for owner, values in self._saved["odd"].items():
            if (live := self._owners.get(owner)) is not None:
                self.saved["odd"][live] = values

    def _take_state(self, source: str, spec: TensorSpec, live: str, key: str) -> None:
        label, _, name = live.partition("/")
        param = self._live.get(f"model/{name}")
        if param is None:
            return
        if key in ELEMENTWISE and spec.numel > 1 and spec.shape != tuple(param.shape):
            self.differences.append(
                f"{label}: {key} of {name} has the shape {list(spec.shape)} in the imported file, "
                f"and the parameter {list(param.shape)}: its parameters were in another order"
            )
        entry = f"{live}/{key}"
        device = "cpu" if self._stays_on_host(label, name, key) else param.device.type
        self.specs[entry] = spec._replace(name=entry, device=device)
        self.names[source] = entry

    def _stays_on_host(self, label: str, name: str, key: str) -> bool:
        """As in torch's `load_state_dict`: step counters are on the host, unless a kernel reads
        them."""
        if key != "step":
            return False
        group = next(
            group
            for group, names in zip(
                self.saved["groups"][label], self.structure[label]["groups"], strict=True
            )
            if name in names
        )
        return not (group.get("capturable") or group.get("fused"))

    # --- other objects -------------------------------------------------------------------------

    def _map_extra(self) -> None:
        """Give each live object the state of its name, or the only one of its form."""
        saved, live = dict(self._saved["extra"]), self._state.extra
        found = self.saved["extra"]
        for name in live:
            if name in saved:
                found[name] = saved.pop(name)
        left = {name: state for name, state in saved.items() if name not in _OWN}
        for name in [name for name in live if name not in found and name not in _OWN]:
            form = _keys_of(live[name])
            alike = [each for each, state in left.items() if form and _form(state) == form]
            if len(alike) == 1:
                found[name] = left.pop(alike[0])
                self.notices.append(f"extra {name!r} was restored from {alike[0]!r}")
        if PLAIN_VALUES in saved:
            found[PLAIN_VALUES] = saved[PLAIN_VALUES]
        fresh = [*(live.keys() - found.keys()), *self._state.extra_per_rank]
        if fresh:
            names = ", ".join(map(repr, sorted(fresh)))
            self.notices.append(f"extra {names} starts fresh: the imported file has none")
        if left:
            names = ", ".join(map(repr, sorted(left)))
            self.notices.append(f"not restored, as the job has no extra object for it: {names}")


_OWN = (EXTRA_STATES, PLAIN_VALUES)


def _in_order_of(
    live: Iterable[list[str]], groups: list[list[str]], options: list[Mapping[str, Any]]
) -> tuple[list[list[str]], list[Mapping[str, Any]]]:
    """The groups in the order of the live ones, where the members say which is which."""
    found = []
    for names in live:
        number = next((n for n, group in enumerate(groups) if {*group} == {*names}), None)
        if number is None:
            return groups, options
        found.append(number)
    return [groups[n] for n in found], [options[n] for n in found]


def _of_groups(label: str, theirs: list[list[str]], ours: list[list[str]]) -> str:
    def text(groups: list[list[str]]) -> str:
        sizes = " + ".join(str(len(names)) for names in groups)
        return f"{len(groups)} param group(s) of {sizes} parameters"

    if [*map(len, theirs)] != [*map(len, ours)]:
        return f"{label} has {text(ours)}, and in the imported file {text(theirs)}"
    pairs = zip(ours, theirs, strict=True)
    mine, other = next((a, b) for a, b in pairs if {*a} != {*b})
    without, instead = _some({*mine} - {*other}), _some({*other} - {*mine})
    return f"{label} has a param group with {without}, and in the imported file with {instead}"


def _keys_of(obj: Any) -> frozenset[Any]:
    try:
        return _form(obj.state_dict())
    except Exception:
        return frozenset()


def _form(state: Any) -> frozenset[Any]:
    return frozenset(state) if isinstance(state, Mapping) else frozenset()


def _some(names: Iterable[Any]) -> str:
    found = sorted(map(str, names))
    return ", ".join(found[:FEW]) + (", ..." if len(found) > FEW else "")


__all__ = ["ImportedNames"]
