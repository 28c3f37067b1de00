"""Loading: compare a verified version with the live state, then copy it into the live state.

New tensors: memory is allocated, and filled, while shards are still being read. A new optimizer
has no state yet, so most of the data is loaded into new memory. The kernel clears each new page
when it is first touched, which takes longer than the copy. The tensors are known as soon as this
rank's own headers are read, and the training thread is idle until the rest is read. Shards are
striped: almost every large tensor is named in each of them.

If the shards are in memory there is no wait to use: copying touches each page, which passes over
the memory once, and touching first would make it twice.

New tensors are unused until the whole version is verified, so they may be filled before that, and
dropped if the version proves damaged. Live tensors must wait for the verification.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import increment_version

from tierckpt._text import error_text
from tierckpt.errors import SAME_STATE, StateTornError
from tierckpt.format.layout import PER_RANK, REPLICATED, Piece, TensorSpec
from tierckpt.format.manifest import Manifest
from tierckpt.format.shard_file import ShardHeader, VersionSummary, decode_header
from tierckpt.state import process_state, tree_codec
from tierckpt.state.extras import PLAIN_VALUES, PlainValues, load_extra, load_of_other_ranks
from tierckpt.state.module_attributes import ChangedBuffers
from tierckpt.state.module_states import MODULE_STATES
from tierckpt.state.names import FIXED, parameter_of, path_of
from tierckpt.state.optimizer_restore import OptimizerRestore, Values
from tierckpt.state.training_state import (
    FILES,
    NAMELESS,
    FileWindows,
    TrainingState,
    optimizer_class,
)
from tierckpt.state.tree_codec import foreign_values
from tierckpt.storage.durable import populate

from .shards import Part

if TYPE_CHECKING:
    from .imported import ImportedNames

SMALL_BYTES = 64 * 1024
"""torch takes longer to prepare the copy of so few bytes than to copy them."""

LARGE_BYTES = 256 * 1024
"""Smaller tensors come from the allocator's heap, most of which was touched before."""


class TensorPreallocator:
    """Makes optimizer state missing in the live optimizer. One thread makes all calls but
    `fill`."""

    def __init__(self, state: TrainingState) -> None:
        self._state = state
        self._made: dict[str, tuple[TensorSpec, torch.Tensor]] = {}
        self._before: dict[str, tuple[TensorSpec, torch.Tensor]] = {}
        """Tensors of the previous attempt."""
        self._live: dict[str, torch.Tensor] | None = {}
        """Live tensors by name, None until they are needed; empty if preallocation is not
        wanted."""
        self._untouched: list[torch.Tensor] = []
        self._given: dict[str, TensorSpec] = {}
        """Specs of the tensors that were handed to the caller."""
        self._filled: dict[int, int] = {}
        """By shard: offset in its data up to which its pieces were copied."""

    def start(self, wanted: bool) -> None:
        """Start another version, or another attempt; tensors made for the previous one are reused.
        If not `wanted`, nothing is preallocated for this one."""
        self._live = None if wanted else {}
        self._before, self._made = self._made, {}
        self._given, self._filled, self._untouched = {}, {}, []

    def foresee(self, header: ShardHeader) -> None:
        """Allocate the large host tensors that this shard has pieces of. Call it before threads
        read pages of the shard: mapping memory waits for all page faults of the process, and for
        their disk.

        This is a guess: tensors that are not asked for later are freed with this object. Never
        raises, as only this rank would fail: loading meets the same problem again, and reports it.
        """
        with contextlib.suppress(Exception):
            for spec in (piece.spec for piece in header.pieces):
                if not self._wanted(spec):
                    continue
                made, tensor = self._before.pop(spec.name, (None, None))
                if tensor is None or made != spec:
                    tensor = tree_codec.empty(spec, "cpu")
                    self._untouched.append(tensor)
                self._made[spec.name] = spec, tensor

    def foreseen(self, touch: bool) -> None:
        """End the preallocation: tensors of the previous attempt that these shards do not have are
        freed. `touch` the new ones if there is time to use, because shards are still being read.
        Never raises, like `foresee`."""
        new, self._untouched, self._before = self._untouched, [], {}
        with contextlib.suppress(Exception):
            for tensor in new if touch else ():
                touch_memory(tree_codec.as_bytes(tree_codec.flat(tensor)))

    def fill(self, parts: Iterable[Part]) -> None:
        """Copy the pieces of new tensors in `parts` into place, although this version may still
        prove damaged. The parts of a shard come in order, the whole header first. Never raises,
        like `foresee`. Any thread; each shard belongs to one thread."""
        if not self._made:
            return
        filler = PieceWriter(self._place_of)
        with contextlib.suppress(Exception):
            for shard, offset, window in parts:
                filler.take(shard, offset, window)
                assert filler.header is not None
                self._filled[shard] = offset + len(window) - filler.header.header_bytes

    def _place_of(self, shard: int, piece: Piece) -> torch.Tensor | None:
        spec, tensor = self._made.get(piece.spec.name, (None, None))
        return tensor if spec == piece.spec and piece.placement is REPLICATED else None

    def has(self, shard: int, piece: Piece) -> bool:
        """True if the tensor that `make` returned already has that piece."""
        if shard not in self._filled:
            return False
        within = piece.offset + piece.nbytes <= self._filled[shard]
        return (
            within
            and piece.placement is REPLICATED
            and self._given.get(piece.spec.name) == piece.spec
        )

    def _wanted(self, spec: TensorSpec) -> bool:
        if spec.nbytes < LARGE_BYTES or spec.name.startswith(FIXED):
            return False
        live = self._live_tensors()
        param = live.get(f"model/{path_of(spec.name)[0]}")
        return (
            spec.name not in live
            and param is not None
            and param.device.type == spec.device == "cpu"
            and self._made.get(spec.name, (None,))[0] != spec
        )

    def _live_tensors(self) -> dict[str, torch.Tensor]:
        if self._live is None:
            self._live = {}  # also if this raises
            self._live = {n: tensor for n, tensor, _ in self._state.entries(self._state.walk())}
        return self._live

    def make(self, spec: TensorSpec, device: torch.device | str) -> torch.Tensor:
        """A tensor for the caller; it contains only the pieces for which `has` is True."""
        self._given.pop(spec.name, None)
        if not self._made:
            return tree_codec.empty(spec, device)
        foreseen, tensor = self._made.pop(spec.name, (None, None))
        if tensor is not None and foreseen == spec and tensor.device == torch.device(device):
            self._given[spec.name] = spec
            return tensor
        return tree_codec.empty(spec, device)


def touch_memory(tensor: torch.Tensor) -> None:
    """Have the kernel allocate all pages of a byte tensor; its contents are lost."""
    if not populate(tensor.data_ptr(), tensor.nbytes):
        tensor[:: mmap.PAGESIZE].zero_()


class PieceWriter:
    """Copies pieces of shards into tensors. Shards come one after the other, each in windows; the
    caller keeps ownership of all arguments."""

    header: ShardHeader | None = None
    """Header of the latest shard."""

    def __init__(self, place_of: Callable[[int, Piece], torch.Tensor | None]) -> None:
        """`place_of(shard, piece)` returns the tensor for the piece, in the memory order of its
        spec; None to skip the piece."""
        self._place_of = place_of
        self._ends: list[int] = []
        """Ends of the header's pieces in the data."""

    def take(self, shard: int, offset: int, window: memoryview) -> None:
        """Copy the pieces in this part of a shard, from byte `offset` on, into place. Parts come in
        order, and the first has the whole header."""
        if offset == 0:
            self.header = decode_header(window)
            self._ends = [piece.offset + piece.nbytes for piece in self.header.pieces]
        header = self.header
        assert header is not None
        low = offset - header.header_bytes
        data = torch.frombuffer(window, dtype=torch.uint8)
        source = data.data_ptr() - low
        for piece, target, start, end in self._going(shard, low, low + len(window)):
            count, size = end - start, piece.spec.itemsize_bytes
            first = piece.start * size + start - piece.offset
            inside = first >= 0 and first + count <= target.nbytes
            if count < SMALL_BYTES and target.is_cpu and inside:
                ctypes.memmove(target.data_ptr() + first, source + start, count)
            else:  # torch refuses a range not inside
                part = slice(start - piece.offset, end - piece.offset)
                _bytes_of(target, piece)[part].copy_(data[start - low : end - low])

    def wants(self, shard: int, low: int, high: int) -> bool:
        """Whether `take` needs these bytes, which follow the header of the current shard."""
        assert self.header is not None
        start = self.header.header_bytes
        return any(True for _ in self._going(shard, low - start, high - start))

    def _going(
        self, shard: int, low: int, high: int
    ) -> Iterator[tuple[Piece, torch.Tensor, int, int]]:
        """The pieces to copy in this range of the data: piece, target, and its start and end in the
        data."""
        assert self.header is not None
        pieces, ends = self.header.pieces, self._ends
        for number in range(bisect_left(ends, low), len(pieces)):
            piece, stop = pieces[number], ends[number]
            start = piece.offset
            if start + (stop > start) > high:  # an empty one may lie at the end
                break
            target = self._place_of(shard, piece)
            start, end = max(start, low), min(stop, high)
            if target is not None and start < end:
                yield piece, target, start, end


def _bytes_of(target: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The piece's bytes in its tensor; both have the same memory order."""
    return tree_codec.as_bytes(tree_codec.flat(target)[piece.start : piece.stop])


class Loader:
    """Loads a verified version into the live state: compare, load every shard, finish."""

    way_out = SAME_STATE
    """What to do about differences."""

    def __init__(
        self,
        state: TrainingState,
        contents: VersionSummary,
        rank: int,
        size: int,
        new: TensorPreallocator,
        strict: bool = True,
    ) -> None:
        """If `strict`, state that a module does not accept is an error. Raises the errors of
        decoding this rank's small state."""
        self.strict = strict
        self.manifest = Manifest.decode(contents.own.manifest)
        """This rank's manifest."""
        self.saved: dict[str, Any] = tree_codec.decode(contents.own.tree, cut=True)
        """This rank's small state. Its files are not filled yet: see `_files`."""
        self.state = state
        self._new = new
        self.rank, self.size = rank, size
        self.shards = len(contents.outlines)
        self.structure = contents.structure
        self.specs = contents.specs
        self.own_specs = {spec.name: spec for spec in contents.own.specs}
        self._missing = contents.missing
        self._trained = contents.trained
        self._filler = PieceWriter(self._place_of)
        self._shard_of: dict[str, int] = {}
        """The shard from which each per-rank value is loaded."""
        self._own: dict[str, None] = {}
        """Names of the per-rank values that were loaded."""
        state.refresh_names()  # layers may have been replaced since the last lookup
        self._live = self._find_live()
        self._live_specs = {s.name: s for s in tree_codec.specs_of([*self._live.items()])}
        self._imported = self._map_imported()
        files = (self.saved.get(FILES) or {}) if self.shards == size else {}
        self._files = FileWindows(contents.own.files, files.get("contents", {}))
        self._added: dict[str, list[list[str]]] = {}
        """See `_added_to`."""
        self._fitting: dict[str, bool] = {}
        """See `_param_fits`."""
        self._devices: dict[tuple[str, str], torch.device] = {}
        """See `_device_of`."""
        self._changed = ChangedBuffers(
            state.model,
            state.first_buffers,
            {
                n.removeprefix("buffer/"): s
                for n, s in {**self.specs, **self.own_specs}.items()
                if is_buffer(n)
            },
            self.saved.get("began", {}),
        )
        self._targets: dict[str, torch.Tensor] = {}
        self._reordered: list[tuple[torch.Tensor, torch.Tensor]] = []
        """(saved spec, live spec) of tensors with another live memory order."""
        self.notices: list[str] = []
        self._differs = False
        """Tensors of the live structure, by name."""

    def _map_imported(self) -> ImportedNames | None:
        """Use the live names for what an imported version has; None for any other version."""
        if "imported" not in self.saved:
            return None
        from .imported import ImportedNames

        found = ImportedNames(self.state, self._live, self.specs, self.structure, self.saved)
        self.specs, self.structure, self.saved = found.specs, found.structure, found.saved
        return found

    # --- comparing -----------------------------------------------------------------------------

    def _find_live(self) -> dict[str, torch.Tensor]:
        walk = self.state.walk()
        live = {name: tensor for name, tensor, _ in self.state.entries(walk)}
        live.update(dict(self.state.buffer_entries(walk)))
        return live

    def differences(self) -> list[str]:
        """Differences between the live structure and the checkpoint's; empty if they match."""
        found = list(self._missing)
        if self._imported is not None:
            found += self._imported.differences
        saved = {**self.specs, **self.own_specs}
        for name in sorted(saved.keys() | self._live.keys()):
            spec, live = saved.get(name), self._live.get(name)
            if not name.startswith(FIXED):
                continue  # optimizer state is created and dropped to match the checkpoint
            if is_buffer(name) and name.removeprefix("buffer/") in self._changed.taken:
                continue
            if live is None and spec is not None:
                found.append(f"{name} {shown(spec)} is in the checkpoint, not in the model")
            elif spec is None:
                found.append(f"{name} is in the model, not in the checkpoint")
            elif live is not None and not self._same(spec):
                now = self._live_specs[name]
                found.append(f"{name} is {shown(spec)} in the checkpoint, {shown(now)} live")
        found += self._optimizer_differences()
        self._differs = bool(found)
        return found + self._extra_differences()

    def _optimizer_differences(self) -> list[str]:
        found = []
        live = self.state.structure()
        if self._imported is not None:  # it has compared the others
            live = {label: live[label] for label in self.structure}
        for label in sorted(self.structure.keys() | live.keys()):
            if label not in live or label not in self.structure:
                where = "checkpoint" if label in self.structure else "live state"
                found.append(f"optimizer {label!r} is only in the {where}")
                continue
            old, new = self.structure[label], live[label]
            if (added := self._added_to(label, old, new)) is not None:
                self._added[label] = added
                continue
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

    def _added_to(
        self, label: str, old: dict[str, Any], new: dict[str, Any]
    ) -> list[list[str]] | None:
        """Parameters of the model that the training added to an optimizer's groups, or as new
        groups, after its start: the same is done here. None if there are other differences."""
        then, now = old["groups"], new["groups"]
        now = [*now, *[[]] * (len(then) - len(now))]
        added = [a[len(b) :] for a, b in zip(then, now, strict=False)]
        grown = len(then) == len(now) and all(
            a[: len(b)] == b for a, b in zip(then, now, strict=True)
        )
        names = [name for each in added for name in each]
        if not names or not grown or old["class"] != new["class"] or self._imported is not None:
            return None
        if not isinstance(self.state.optimizers[label], torch.optim.Optimizer):
            return None
        return added if all(f"model/{name}" in self._live for name in names) else None

    def _extra_differences(self) -> list[str]:
        """Differences of the user's objects. Plain values may exist on one side only: otherwise a
        checkpoint of an elastic job could not be restored in another job, or the reverse."""
        saved = self.saved
        have, want = set(saved["extra"]), set(self.state.extra)
        if self._imported is not None:
            want &= have  # the others start fresh
        if MODULE_STATES not in want:
            have.discard(MODULE_STATES)
        if self._has_plain_values():
            have, want = have - {PLAIN_VALUES}, want - {PLAIN_VALUES}
        if self._imported is None:
            have |= set(saved["extra_per_rank"])
            want |= set(self.state.extra_per_rank)
        found = [f"extra {n!r} is in the checkpoint, not given now" for n in sorted(have - want)]
        found += [f"extra {n!r} is given, not in the checkpoint" for n in sorted(want - have)]
        parts = ("groups", "odd", "remainders", "extra", "extra_per_rank")
        every = {k: saved[k] for k in parts if k in saved}
        found += [
            f"{path} is a {kind.replace(':', '.')}, and that class is not imported here"
            for path, kind in foreign_values(every)
        ]
        return found + self.state.module_states.differences(saved["extra"].get(MODULE_STATES))

    def _has_plain_values(self) -> bool:
        """False if the entry named for plain values holds something else, on either side."""
        live = self.state.extra.get(PLAIN_VALUES)
        saved = self.saved["extra"].get(PLAIN_VALUES)
        return isinstance(live, PlainValues | None) and isinstance(saved, dict | None)

    def _left_values(self) -> list[str]:
        """Report plain values that exist on one side only. They are the same on all ranks, so rank
        0 reports."""
        if self.rank or not self._has_plain_values():
            return []
        live, saved = self.state.extra.get(PLAIN_VALUES), self.saved["extra"].get(PLAIN_VALUES)
        given, had = live.names if live else (), saved or {}
        it = f"the checkpoint, of iteration {self.manifest.facts.iteration},"
        found = []
        if kept := ", ".join(name for name in given if name not in had):
            why = "was not written by an elastic job" if saved is None else "was made without them"
            found.append(f"plain values stay as they are ({kept}): {it} {why}")
        if gone := ", ".join(str(name) for name in had if name not in given):
            why = "this job is not elastic" if live is None else "TorchState was not given them"
            found.append(f"plain values of {it} are not loaded ({gone}): {why}")
        return found

    # --- loading -------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Find or allocate memory for every tensor, new optimizer state included."""
        for name, spec in {**self.specs, **self.own_specs}.items():
            live, parameter = self._live.get(name), ""
            if not name.startswith(FIXED):
                parameter, _ = path_of(name)
                if not self._param_fits(parameter):
                    continue
            if live is not None and self._same(spec):
                if self._live_specs[name].stride != spec.stride or not tree_codec.is_dense(live):
                    self._reordered.append((tree_codec.empty(spec, "cpu"), live))
                    live = self._reordered[-1][0]
                self._targets[name] = live
            elif not name.startswith(FIXED):
                device = self._device_of(parameter, spec.device)
                self._targets[name] = self._new.make(spec, device)
            elif is_buffer(name) and name.removeprefix("buffer/") in self._changed.taken:
                self._targets[name] = self._changed.make(name.removeprefix("buffer/"), spec)

    def choose_shards(self) -> None:
        """Choose the shard for per-rank values: this rank's own shard. Parameters (and their state)
        that are now the same on all ranks come from shard 0: ranks that differed before must not
        differ at the start. This is the first change, and it changes only the record of per-rank
        values."""
        if not self.own_specs:
            return
        own, placements = {parameter_of(name) for name in self.own_specs}, self.state.placements
        assumed = placements.assumed_replicated(self.state.walk().params)
        placements.keep_apart(p for p in assumed if self.state.name_of(p) in own)
        alike = {self.state.name_of(p) for p in self.state.walk().replicated_params}
        own_shard = self.rank % self.shards
        self._shard_of = {
            name: 0 if parameter_of(name) in alike else own_shard for name in self.own_specs
        }

    def _param_fits(self, parameter: str) -> bool:
        """False if the saved optimizer state of the parameter can no longer be used."""
        fits = self._fitting.get(parameter)
        if fits is None:
            saved, there = self._saved_param(parameter), f"model/{parameter}" in self._live
            fits = there and (saved is None or self._same(saved))
            self._fitting[parameter] = fits
        return fits

    def _same(self, spec: TensorSpec) -> bool:
        """True if the live tensor of that name has its shape and type."""
        now = self._live_specs[spec.name]
        return (spec.shape, spec.dtype) == (now.shape, now.dtype)

    def _saved_param(self, parameter: str) -> TensorSpec | None:
        name = f"model/{parameter}"
        return self.specs.get(name) or self.own_specs.get(name)

    def _device_of(self, parameter: str, device: str) -> torch.device:
        """The device of optimizer state: that of its parameter, or the host if it was saved from
        there (from `device`)."""
        found = self._devices.get((parameter, device))
        if found is None:
            saved, found = self._saved_param(parameter), self._live[f"model/{parameter}"].device
            if device == "cpu" and saved is not None and saved.device != "cpu":
                found = torch.device("cpu")
            self._devices[parameter, device] = found
        return found

    def load_window(self, shard: int, offset: int, window: memoryview) -> None:
        """Copy the pieces in this part of a shard into place: see `PieceWriter.take`."""
        self._filler.take(shard, offset, window)
        if shard == self.rank:
            self._files.take(offset, window)

    def wants(self, shard: int, low: int, high: int) -> bool:
        """Whether `load_window` needs these bytes: see `PieceWriter.wants`."""
        of_file = shard == self.rank and self._files.wants(low, high)
        return of_file or self._filler.wants(shard, low, high)

    def _place_of(self, shard: int, piece: Piece) -> torch.Tensor | None:
        name = self.live_name(piece.spec.name)
        target = self._targets.get(name)
        if target is None or (piece.placement is PER_RANK and shard != self._shard_of[name]):
            return None
        if piece.placement is PER_RANK:
            self._own[name] = None
        return None if self._new.has(shard, piece) else target

    def live_name(self, stored: str) -> str:
        """The live entry that a stored one goes to; empty if there is none."""
        return stored if self._imported is None else self._imported.names.get(stored, "")

    def finish(self) -> None:
        """Load the rest: changed buffers, optimizer structure, options, the user's objects."""
        saved = self.saved
        for name in self._live.keys() & self._targets.keys():
            if not (live := self._live[name]).is_inference():
                increment_version(live)  # a graph that was made before the restore is void
        self._set_trained()
        self._add_to_groups()
        if self._imported is not None:
            self._imported.copy(self._targets)
            self.notices += [] if self.rank else self._imported.notices
        for temp, live in self._reordered:
            live.copy_(temp)
        taken = {f"buffer/{name}": name for name in self._changed.taken}
        self._changed.finish({n: self._targets[f] for f, n in taken.items() if f in self._targets})
        values: dict[str, Values] = {}
        for label, optimizer in self.state.optimizers.items():
            if label not in self.structure:
                continue
            if other := self._of_another_kind(label, optimizer):
                self.notices += [] if self.rank else [other]
            else:
                values[label] = self._values_of(label)
        putback = OptimizerRestore(self.state, saved, values, whole=not self._differs)
        putback.put()
        self.notices += putback.notices
        kinds = ("extra", "extra_per_rank") if self.shards == self.size else ("extra",)
        for which in kinds:
            for name, obj in getattr(self.state, which).items():
                if name in saved[which]:
                    with _naming(obj, f"{which}[{name!r}]"):
                        load_extra(obj, saved[which][name])
        self._finish_modules(saved["extra"].get(MODULE_STATES))
        found = self.state.options.load(saved.get("options", {}))
        cuda = self.state.cuda_device() is not None
        found += process_state.differing_switches(saved.get("switches", {}), cuda)
        self.notices += [] if self.rank else found
        self.notices += self._left_values()
        self._finish_files()
        if self.shards != self.size:
            self._finish_per_rank(saved["extra_per_rank"], FILES in saved)

    def _set_trained(self) -> None:
        """Freeze and thaw parameters, as the training had done since its start. For the others,
        the script decides."""
        for name, flags in self._trained.items():
            if (live := self._live.get(name)) is None:
                continue
            then, at_start = bool(flags & 1), bool(flags & 2)
            wanted = then if then != at_start else self.state.trained_first.get(name, then)
            if live.requires_grad != wanted:
                live.requires_grad_(wanted)

    def _add_to_groups(self) -> None:
        for label, added in self._added.items():
            optimizer = self.state.optimizers[label]
            named = any("param_names" in group for group in optimizer.param_groups)
            for number, names in enumerate(added):
                params = [self._live[f"model/{name}"] for name in names]
                if number >= len(optimizer.param_groups):
                    pairs = [*zip(names, params, strict=True)]
                    optimizer.add_param_group({"params": pairs if named else params})
                    continue
                group = optimizer.param_groups[number]
                if (
                    params and group["params"][-1] is not params[-1]
                ):  # else a list of two optimizers
                    group["params"] += params
                    if named:
                        group["param_names"] += names

    def _finish_files(self) -> None:
        """Take the checkpoint's routed files in place of all earlier ones."""
        self.state.routed.load(self.saved.get(FILES) if self.shards == self.size else None)

    def _finish_per_rank(self, saved: dict[str, Any], files: bool) -> None:
        """Load per-rank objects of another number of ranks, if they can take them. `files`: the
        checkpoint has routed files, which belong to its own ranks."""
        left = sorted(saved)
        for name, obj in self.state.extra_per_rank.items():
            if name in saved:
                with _naming(obj, f"extra_per_rank[{name!r}]"):
                    if load_of_other_ranks(obj, saved[name], self.shards):
                        left.remove(name)
        if files:
            self.notices.append(
                f"the checkpoint is of {self.shards} rank(s), this job has {self.size}: "
                "restored_files is empty, as each file belongs to the rank that wrote it"
            )
        if left:
            self.notices.append(
                f"the checkpoint is of {self.shards} rank(s), this job has {self.size}: per-rank "
                f"objects were left as they are: {', '.join(left)}"
            )

    def _finish_modules(self, record: dict[str, Any] | None) -> None:
        wrong, repeated_errors = self.state.module_states.load(record)
        if wrong and self.strict:
            raise StateTornError("; ".join([*wrong, *repeated_errors]))
        self.notices += [f"accepted (strict=False): {text}" for text in wrong] + repeated_errors

    def _of_another_kind(self, label: str, optimizer: torch.optim.Optimizer) -> str:
        """Why the saved state of an optimizer is left out because it could not step with it; else
        empty. (AdamW can use Adam's state: both have the same options.)"""
        was, now = self.structure[label]["class"], optimizer_class(optimizer)
        theirs = {name for options in self.saved["groups"][label] for name in options}
        ours = {name for group in optimizer.param_groups for name in group}
        if was == now or theirs == ours - {"params", "param_names"}:
            return ""
        return (
            f"optimizer {label!r} is a {now}, and the checkpoint's a {was}: its state and options "
            "were left out"
        )

    def _values_of(self, label: str) -> Values:
        wanted: Values = {}
        live_of = {id(temp): live for temp, live in self._reordered}
        for name in (*self.specs, *self._own):
            if name.startswith(f"{label}/") and name in self._targets:
                path, key = path_of(name)
                target = self._targets[name]
                wanted.setdefault(path, {})[key] = live_of.get(id(target), target)
        for full, values in self.saved["odd"].items():
            path = full.split("/", 1)[1]
            if full.startswith(f"{label}/") and self._param_fits(path):
                found = wanted.setdefault(path, {})
                found.update({k: tree_codec.with_entries(v, found) for k, v in values.items()})
                found.update(found.pop(NAMELESS, {}))
        return wanted


def is_buffer(name: str) -> bool:
    """True if the entry is a buffer."""
    return name.startswith("buffer/")


@contextlib.contextmanager
def _naming(obj: Any, name: str) -> Iterator[None]:
    """Name the object of the user's that does not take its state."""
    try:
        yield
    except Exception as error:
        kind, why = type(obj).__name__, error_text(error)
        raise StateTornError(f"{name}, a {kind}, did not take its state ({why})") from error


def shown(spec: TensorSpec) -> str:
    """A tensor's type and shape, for messages."""
    return f"{spec.dtype}{list(spec.shape)}"
