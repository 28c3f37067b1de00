"""Restore: from bytes on some level back into the live model, optimizer and generators.

Order matters: find and plan, verify every byte, compare the structure, and only then change
anything. A damaged copy goes back into the plan as lost; a structural difference is an error on
all ranks, with nothing changed on any.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from . import state as state_module
from . import tree
from .errors import RestoreError, StateMismatchError
from .group import Group
from .images import LOST, Image, open_image, verify
from .inventory import Found, FoundParity, Place, RestorePlan, Source, plan_restore
from .layout import Piece, TensorSpec
from .manifest import Manifest
from .naming import ShardKey
from .rebuilding import Parities
from .shardfile import ShardHeader, decode_header
from .snapshot import as_bytes
from .state import TrainingState

BROADCAST_BYTES = 64 * 1024 * 1024

FIXED = ("model/", "buffer/")
"""Names whose tensors must be in the live state; optimizer state is created and dropped."""


class Restored(int):
    """What `restore()` did; as a number, the iteration to go on from (0: nothing was there)."""

    version: int = 0
    """Completed optimizer steps."""
    generation: int = 0
    levels: dict[str, int]
    """How many shards came from which level."""
    nbytes: int = 0
    """Bytes of all shards."""
    seconds: dict[str, float]
    """By phase: `inventory`, `verify`, `load`, `total`."""
    rejected: tuple[str, ...] = ()
    """Copies that were there and could not be used, and why."""

    def __new__(cls, iteration: int = 0) -> Restored:
        """See the class."""
        made = super().__new__(cls, iteration)
        made.levels, made.seconds = {}, {}
        return made

    def __repr__(self) -> str:
        return f"Restored({int(self)}, version={self.version}, levels={self.levels})"


@dataclass
class Attempt:
    """A verified version, ready to be loaded."""

    plan: RestorePlan
    headers: list[ShardHeader] = field(default_factory=list)
    """Of every shard."""
    own: tuple[Manifest, bytes] | None = None
    """Manifest and encoded rank tree of the shard that this rank takes its small state from."""
    images: dict[int, Image] = field(default_factory=dict)
    """What this rank maps, and what was rebuilt."""

    def close(self) -> None:
        """Unmap everything."""
        for image in self.images.values():
            image.close()
        self.images.clear()


class Restorer:
    """Finds a version that is complete and sound. Every rank runs the same one."""

    def __init__(
        self,
        group: Group,
        inventories: Sequence[Sequence[Found]],
        on_reject: Callable[[str], None],
        parities: Sequence[Sequence[FoundParity]] = (),
    ) -> None:
        self.group = group
        self.inventories = inventories
        self.parities = parities
        self.rejected: list[str] = []
        self.seconds = 0.0
        self._bad: set[tuple[ShardKey, Place]] = set()
        self._on_reject = on_reject

    def find(self, version: int | None = None) -> Attempt | None:
        """The newest version that proves sound on all ranks; None when there is none."""
        begin = time.perf_counter()
        try:
            while True:
                plan = plan_restore(self.inventories, frozenset(self._bad), version, self.parities)
                if plan is None:
                    return None
                attempt = self._try(plan)
                if attempt is not None:
                    return attempt
        finally:
            self.seconds += time.perf_counter() - begin

    def _try(self, plan: RestorePlan) -> Attempt | None:
        """Read and verify this rank's share; None, with more known as bad, when any was bad."""
        attempt = Attempt(plan)
        headers: dict[int, ShardHeader] = {}
        failures: list[tuple[ShardKey, Place, str]] = []
        for source in plan.sources:
            if source.reader == self.group.rank:
                key = ShardKey(plan.id, source.shard, len(plan.sources))
                try:
                    image = open_image(key, source.place, plan.life)
                    attempt.images[source.shard] = image
                    headers[source.shard] = verify(image)
                except LOST as error:
                    failures.append((key, source.place, str(error)))
        parities = Parities(plan, self.group)
        failures += parities.open()
        # What the others cannot map themselves: headers and small state, before the data.
        indirect = {s.shard for s in plan.sources if not s.direct}
        told = {
            shard: _summary(attempt.images[shard], header)
            for shard, header in headers.items()
            if shard in indirect
        }
        summaries: dict[int, tuple[bytes, bytes, bytes]] = {}
        failed: list[tuple[ShardKey, Place, str]] = []
        everyone = self.group.all_gather_object((failures, told, parities.records()))
        for theirs, said, _ in everyone:
            failed += theirs
            summaries.update(said)
        with contextlib.closing(parities):
            if not failed:
                failed = parities.rebuild(
                    [r for *_, records in everyone for r in records], attempt.images
                )
        if failed:
            attempt.close()
            self._reject(failed)
            return None
        for rebuilt in plan.rebuilds:
            headers.update({s: decode_header(attempt.images[s].view) for s in rebuilt.lost})
        if not self._map_all(plan, attempt, headers):
            return None
        headers.update({s: decode_header(h) for s, (h, _, _) in summaries.items()})
        attempt.headers = [headers[s.shard] for s in plan.sources]
        mine = self.group.rank % len(plan.sources)
        if mine in attempt.images:
            image = attempt.images[mine]
            attempt.own = (image.manifest, _tree_of(image, headers[mine]))
        else:
            _, record, encoded = summaries[mine]
            attempt.own = (Manifest.decode(record), encoded)
        return attempt

    def _map_all(
        self, plan: RestorePlan, attempt: Attempt, headers: dict[int, ShardHeader]
    ) -> bool:
        """Map what the other readers verified and this rank sees too; False if any rank cannot."""
        failures: list[tuple[ShardKey, Place, str]] = []
        for source in plan.sources:
            if source.direct and source.shard not in attempt.images:
                key = ShardKey(plan.id, source.shard, len(plan.sources))
                try:
                    attempt.images[source.shard] = image = open_image(key, source.place, plan.life)
                    headers[source.shard] = decode_header(image.view)
                except LOST as error:
                    failures.append((key, source.place, str(error)))
        failed = [f for theirs in self.group.all_gather_object(failures) for f in theirs]
        if failed:
            attempt.close()
            self._reject(failed)
        return not failed

    def _reject(self, failed: list[tuple[ShardKey, Place, str]]) -> None:
        for key, place, why in failed:
            if (key, place) not in self._bad:
                self._bad.add((key, place))
                self.rejected.append(f"{key} on level {place.level} ({place.where}): {why}")
                self._on_reject(self.rejected[-1])


def _tree_of(image: Image, header: ShardHeader) -> bytes:
    low = header.tree_offset
    return bytes(image.view[low : low + image.manifest.rank_state_bytes])


def _summary(image: Image, header: ShardHeader) -> tuple[bytes, bytes, bytes]:
    head = bytes(image.view[: header.header_bytes])
    return head, image.manifest.encode(), _tree_of(image, header)


def visit_images(attempt: Attempt, group: Group, visit: Callable[[int, memoryview], None]) -> None:
    """Show every rank every shard, one after the other: mapped, or broadcast by its reader."""
    for source in attempt.plan.sources:
        image = attempt.images.get(source.shard)
        if source.direct:
            assert image is not None
            visit(source.shard, image.view)
        else:
            header = attempt.headers[source.shard]
            nbytes = header.header_bytes + header.data_bytes
            visit(source.shard, _broadcast(image, nbytes, source, group))


def _broadcast(image: Image | None, nbytes: int, source: Source, group: Group) -> memoryview:
    """Bring the shard to all ranks; each holds one at a time."""
    buffer = torch.empty(nbytes, dtype=torch.uint8)
    if image is not None:
        buffer.copy_(torch.frombuffer(image.view, dtype=torch.uint8)[:nbytes])
    for low in range(0, nbytes, BROADCAST_BYTES):
        group.broadcast(buffer[low : low + BROADCAST_BYTES], source.reader)
    return memoryview(buffer.numpy().data)


class Loader:
    """Puts a verified version into the live state: compare, load every shard, finish."""

    def __init__(
        self, state: TrainingState, headers: Sequence[ShardHeader], rank: int, size: int
    ) -> None:
        self.state = state
        self.rank, self.size = rank, size
        self.shards = len(headers)
        self.structure = headers[0].structure
        self.specs: dict[str, TensorSpec] = {}
        self.own_specs: dict[str, TensorSpec] = {}
        self._covered: dict[str, int] = {}
        for header in headers:
            for piece in header.pieces:
                specs = self.own_specs if piece.own else self.specs
                specs[piece.spec.name] = piece.spec
                if not piece.own:
                    count = self._covered.get(piece.spec.name, 0) + piece.stop - piece.start
                    self._covered[piece.spec.name] = count
        self._headers = headers
        self._live = self._find_live()
        self._targets: dict[str, torch.Tensor] = {}
        self._reordered: list[tuple[torch.Tensor, torch.Tensor]] = []
        """(as it was saved, live) of tensors whose live memory order is another one."""
        self.notices: list[str] = []

    # --- comparing -----------------------------------------------------------------------------

    def _find_live(self) -> dict[str, torch.Tensor]:
        walk = self.state.walk()
        live = {name: tensor for name, tensor, _ in self.state.entries(walk)}
        live.update(dict(self.state.buffer_entries(walk)))
        return live

    def differences(self) -> list[str]:
        """How the live state's structure differs from the checkpoint's; empty when it fits."""
        found = [
            f"{name}: only {self._covered[name]} of {spec.numel} elements are in the shards"
            for name, spec in self.specs.items()
            if self._covered[name] != spec.numel
        ]
        saved = {**self.specs, **self.own_specs}
        for name in sorted(saved.keys() | self._live.keys()):
            spec, live = saved.get(name), self._live.get(name)
            if not name.startswith(FIXED):
                continue  # optimizer state is created and dropped as the checkpoint has it
            if live is None and spec is not None:
                found.append(f"{name} {_shown(spec)} is in the checkpoint, not in the model")
            elif spec is None:
                found.append(f"{name} is in the model, not in the checkpoint")
            elif live is not None and not _same(spec, live):
                now = tree.spec_of(live, name)
                found.append(f"{name} is {_shown(spec)} in the checkpoint, {_shown(now)} live")
        return found + self._optimizer_differences()

    def _optimizer_differences(self) -> list[str]:
        found = []
        live = self.state.structure()
        for label in sorted(self.structure.keys() | live.keys()):
            if label not in live or label not in self.structure:
                where = "checkpoint" if label in self.structure else "live state"
                found.append(f"optimizer {label!r} is only in the {where}")
                continue
            old, new = self.structure[label], live[label]
            if old["class"] != new["class"]:
                found.append(f"{label} was a {old['class']}, now it is a {new['class']}")
            if len(old["groups"]) != len(new["groups"]):
                found.append(
                    f"{label} had {len(old['groups'])} param group(s), now {len(new['groups'])}"
                )
            for i, (a, b) in enumerate(zip(old["groups"], new["groups"], strict=False)):
                if a != b:
                    gone, come = sorted(set(a) - set(b)), sorted(set(b) - set(a))
                    found.append(
                        f"{label} group {i}: "
                        + (f"without {', '.join(gone)} " if gone else "")
                        + (f"with new {', '.join(come)}" if come else "")
                        + ("parameters in another order" if not gone and not come else "")
                    )
        return found

    def extra_differences(self, saved: Mapping[str, Any]) -> list[str]:
        """The same for the user's objects."""
        have = set(saved["extra"]) | set(saved["extra_per_rank"])
        want = set(self.state.extra) | set(self.state.extra_per_rank)
        found = [f"extra {n!r} is in the checkpoint, not given now" for n in sorted(have - want)]
        return found + [f"extra {n!r} is given, not in the checkpoint" for n in sorted(want - have)]

    # --- loading -------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Find or make a place for every tensor; memory for new optimizer state is taken here."""
        for name, spec in {**self.specs, **self.own_specs}.items():
            live = self._live.get(name)
            if not name.startswith(FIXED) and not self._param_fits(_path(name)[0]):
                continue
            if live is not None and _same(spec, live):
                if tree.spec_of(live, name).stride != spec.stride or not tree.is_dense(live):
                    self._reordered.append((tree.empty(spec, "cpu"), live))
                    live = self._reordered[-1][0]
                self._targets[name] = live
            elif not name.startswith(FIXED):
                self._targets[name] = self._make(name, spec)

    def _param_fits(self, parameter: str) -> bool:
        """False when the state that an optimizer kept for the parameter is no use to it now."""
        saved, live = self.specs.get(f"model/{parameter}"), self._live.get(f"model/{parameter}")
        return live is not None and (saved is None or _same(saved, live))

    def _param_of(self, name: str) -> torch.Tensor | None:
        return self._live.get(f"model/{_path(name)[0]}")

    def _make(self, name: str, spec: TensorSpec) -> torch.Tensor:
        """Optimizer state lives with its parameter, unless it was on the host already then."""
        param = self._param_of(name)
        saved_param = self.specs.get(f"model/{_path(name)[0]}")
        assert param is not None
        on_host = spec.device == "cpu" and saved_param is not None and saved_param.device != "cpu"
        return tree.empty(spec, "cpu" if on_host else param.device)

    def load_shard(self, shard: int, view: memoryview) -> None:
        """Copy one shard's pieces into place."""
        header = self._headers[shard]
        data = torch.frombuffer(view, dtype=torch.uint8)[header.header_bytes :]
        own = shard == self.rank % self.shards
        for piece in header.pieces:
            target = self._targets.get(piece.spec.name)
            if target is None or (piece.own and not own):
                continue
            _put(target, piece, data[piece.offset : piece.offset + piece.nbytes])

    def finish(self, saved: dict[str, Any]) -> None:
        """Optimizer structure, options, the user's objects; the generators last."""
        for temp, live in self._reordered:
            live.copy_(temp)
        for label, optimizer in self.state.optimizers.items():
            if label in self.structure:
                self._finish_optimizer(label, optimizer, saved)
        per_rank = saved["extra_per_rank"] if self.shards == self.size else {}
        for name, obj in self.state.extra.items():
            if name in saved["extra"]:
                state_module.load_extra(obj, saved["extra"][name])
        for name, obj in self.state.extra_per_rank.items():
            if name in per_rank:
                state_module.load_extra(obj, per_rank[name])
        if self.shards != self.size and saved["extra_per_rank"]:
            names = ", ".join(sorted(saved["extra_per_rank"]))
            self.notices.append(
                f"the checkpoint is of {self.shards} rank(s), this job has {self.size}: per-rank "
                f"objects were left as they are: {names}"
            )
        self.notices += state_module.load_rng(saved["rng"])
        if self.rank >= self.shards:
            state_module.derive_rng(self.rank)

    def _finish_optimizer(
        self, label: str, optimizer: torch.optim.Optimizer, saved: dict[str, Any]
    ) -> None:
        wanted: dict[str, dict[str, Any]] = {}
        live_of = {id(temp): live for temp, live in self._reordered}
        for name in self.specs:
            if name.startswith(f"{label}/") and name in self._targets:
                path, key = _path(name)
                target = self._targets[name]
                wanted.setdefault(path, {})[key] = live_of.get(id(target), target)
        for full, values in saved["odd"].items():
            path = full.split("/", 1)[1]
            if full.startswith(f"{label}/") and self._param_fits(path):
                found = wanted.setdefault(path, {})
                found.update({k: _with_entries(v, found) for k, v in values.items()})
        for group in optimizer.param_groups:
            for param in group["params"]:
                _replace_state(optimizer, param, wanted.get(self.state.name_of(param), {}))
        for group, options in zip(optimizer.param_groups, saved["groups"][label], strict=False):
            for key, value in options.items():
                live = group.get(key)
                if isinstance(live, torch.Tensor) and isinstance(value, torch.Tensor):
                    live.copy_(value)
                else:
                    group[key] = value


def _path(name: str) -> tuple[str, str]:
    """(parameter, key) of optimizer state called `label/parameter/key`."""
    parameter, key = name.split("/", 1)[1].rsplit("/", 1)
    return parameter, key


def _replace_state(
    optimizer: torch.optim.Optimizer, param: torch.Tensor, values: dict[str, Any]
) -> None:
    """Make `values` all of the parameter's state."""
    if not values:
        optimizer.state.pop(param, None)
        return
    kept = optimizer.state[param]
    for key in set(kept) - set(values):
        del kept[key]
    kept.update({k: _on_device(v, param) for k, v in values.items()})


def _with_entries(value: Any, tensors: dict[str, Any]) -> Any:
    """`value` with tensors, taken out of `tensors`, in place of `Entry`s."""
    if isinstance(value, tree.Entry):
        return tensors.pop(value.key)
    if isinstance(value, dict):
        return type(value)((k, _with_entries(v, tensors)) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return type(value)(_with_entries(v, tensors) for v in value)
    return value


def _on_device(value: Any, param: torch.Tensor) -> Any:
    """Tensors in lists go to the parameter's device; plain ones are where they should be."""
    if isinstance(value, (list, tuple)):
        return type(value)(
            v.to(param.device) if isinstance(v, torch.Tensor) else _on_device(v, param)
            for v in value
        )
    return value


def load(
    state: TrainingState, attempt: Attempt, group: Group, strict: bool
) -> tuple[Manifest, list[str], Any]:
    """Load a verified version; returns this rank's manifest, notices, and the adapter's own.

    Raises StateMismatchError on all ranks, with nothing changed on any, if the structure of any
    rank's live state differs and `strict` is True; RestoreError on all if any rank has no memory
    for what it would have to create, or fails in some other way before the first change.
    """
    assert attempt.own is not None
    manifest, encoded = attempt.own
    differences: list[str] = []
    trouble = ""
    try:
        saved = tree.decode(encoded)
        loader = Loader(state, attempt.headers, group.rank, group.size)
        differences = loader.differences() + loader.extra_differences(saved)
        loader.prepare()
    except Exception as error:  # a rank that raised alone would leave the others waiting for it
        trouble = f"rank {group.rank}: {type(error).__name__}: {error}"
    everyone = group.all_gather_object((differences, trouble))
    failed = [theirs for _, theirs in everyone if theirs]
    if failed:
        raise RestoreError(f"{attempt.plan.id} cannot be loaded; nothing was changed: {failed[0]}")
    found: list[str] = next((d for d, _ in everyone if d), [])
    if found and strict:
        raise StateMismatchError(f"Version {attempt.plan.id}", found)
    with torch.no_grad():
        visit_images(attempt, group, loader.load_shard)
        loader.finish(saved)
    notices = loader.notices + [f"accepted (strict=False): {d}" for d in differences]
    return manifest, notices, saved.get("adapter")


def _put(target: torch.Tensor, piece: Piece, data: torch.Tensor) -> None:
    """Copy a piece's bytes into the tensor it belongs to; both are in the same memory order."""
    if piece.nbytes:
        as_bytes(tree.flat(target)[piece.start : piece.stop]).copy_(data)


def _same(spec: TensorSpec, live: torch.Tensor) -> bool:
    now = tree.spec_of(live, spec.name)
    return (spec.shape, spec.dtype) == (now.shape, now.dtype)


def _shown(spec: TensorSpec) -> str:
    return f"{spec.dtype}{list(spec.shape)}"
