"""`tierckpt import`: a foreign state becomes a version that a job's restart takes.

A foreign state has the parts of a version: named tensors, the rank tree, the structure. The names
are the source's. A restore finds the live parameter or buffer of each, see `restore.imported`: a
file does not say which of its tensors are buffers, or, in most formats, which parameter is the
first of an optimizer.

The version is one shard, made window by window from the source's tensors. Nothing is held twice: a
tensor of a mapped file is read when its window is made.
"""

from __future__ import annotations

import mmap
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Any

import torch
import xxhash
from msgspec import Struct

from tierckpt._text import is_url, some
from tierckpt.config import Config, load_config
from tierckpt.errors import ConfigError, CorruptShardError, LeaseHeldError, UnsupportedStateError
from tierckpt.format.ids import VersionId
from tierckpt.format.layout import Block, plan_layout
from tierckpt.format.manifest import Manifest, digest
from tierckpt.format.records import ShardRecord, VersionFacts
from tierckpt.format.shard_file import encode_header, rank_state_blocks
from tierckpt.offline.survey import MissingPathError, Survey, survey
from tierckpt.offline.verify import verify
from tierckpt.restore.progress import Progress
from tierckpt.state import tree_codec
from tierckpt.state.extras import EXTRA_STATES, PLAIN_VALUES
from tierckpt.state.training_state import NAMELESS
from tierckpt.storage.claims import DirectoryClaim
from tierckpt.storage.job_directory import job_directory
from tierckpt.storage.local import LocalStore
from tierckpt.storage.persistent import PersistentStore, VersionName
from tierckpt.storage.persistent.lease import Lease

from .foreign_state import EXTRA_STATE, ForeignState, without_wrappers

__all__ = ["ForeignVersion", "Imported", "VersionImage", "import_state"]


class ForeignVersion:
    """The parts of a version with the state of `foreign`; shares its tensors. What cannot be stored
    is added to `foreign.not_taken`. Raises ConfigError for a model or an optimizer that cannot be
    stored."""

    def __init__(self, foreign: ForeignState) -> None:
        self._foreign = foreign
        self.tensors: dict[str, torch.Tensor] = {}
        """By the names of their entries."""
        self.tied: dict[str, str] = {}
        self.structure: dict[str, Any] = {}
        self._arena = tree_codec.Arena()
        self._extra: dict[str, Any] = {}
        self._groups: dict[str, list[Any]] = {}
        self._odd: dict[str, dict[str, Any]] = {}
        self._named: list[str] = []
        """Optimizers with names of parameters, not numbers."""
        try:
            self._take_model()
            for label, state in foreign.optimizers.items():
                self._take_optimizer(label, state)
        except UnsupportedStateError as error:
            raise ConfigError(f"a version cannot store it: {error}") from error
        self._take_objects()

    def _take_model(self) -> None:
        first: dict[tuple[Any, ...], str] = {}
        own_states = {}
        for name, value in self._foreign.model.items():
            if name.rpartition(".")[2] == EXTRA_STATE:
                own_states[name.rpartition(".")[0]] = value
                continue
            tree_codec.refuse_tensor(value, name)
            value = value.resolve_conj().resolve_neg()
            place = (value.data_ptr(), value.shape, value.stride(), value.dtype)
            known = first.setdefault(place, name) if value.numel() else name
            if known != name:
                self.tied[name] = known
            else:
                self.tensors[f"model/{name}"] = value
        if own_states:
            self._extra[EXTRA_STATES] = tree_codec.pack(own_states, "model", self._arena.keep)

    def equal(self) -> list[list[str]]:
        """Names of tensors of the model with equal bytes, in groups: they may be one tensor in the
        live model."""
        of_kind: dict[tuple[Any, ...], list[str]] = {}
        for entry, tensor in self.tensors.items():
            if entry.startswith("model/"):
                of_kind.setdefault((tensor.shape, tensor.dtype), []).append(entry)
        found: dict[tuple[Any, ...], list[str]] = {}
        for kind, entries in of_kind.items():
            for entry in entries if len(entries) > 1 else ():
                raw = tree_codec.as_bytes(self.tensors[entry].reshape(-1))
                key = (*kind, xxhash.xxh3_128_digest(raw.numpy().data))
                found.setdefault(key, []).append(entry.removeprefix("model/"))
        return [names for names in found.values() if len(names) > 1]

    def _take_optimizer(self, label: str, state: Mapping[str, Any]) -> None:
        groups = _groups_of(label, state)
        self._foreign.not_taken += [
            f"{label}[{key!r}]" for key in state if key not in ("state", "param_groups")
        ]
        names, are_names = _names_of(groups, self._foreign.prefix)
        if are_names:
            self._named.append(label)
        members = [[names[str(each)] for each in group["params"]] for group in groups]
        self.structure[label] = {"class": "", "groups": members}
        self._groups[label] = [
            {
                key: tree_codec.pack(value, f"{label}.{key}", self._arena.keep)
                for key, value in group.items()
                if key not in ("params", "param_names")
            }
            for group in groups
        ]
        for param, values in state["state"].items():
            if not isinstance(values, Mapping) or str(param) not in names:
                text = f"{label}: state of {param!r}, which is no parameter"
                self._foreign.not_taken.append(text)
                continue
            self._take_values(f"{label}/{names[str(param)]}", values)

    def _take_values(self, owner: str, values: Mapping[Any, Any]) -> None:
        """One parameter's state."""
        named = {k: v for k, v in values.items() if isinstance(k, str) and "/" not in k}
        if len(named) < len(values):
            named[NAMELESS] = {k: v for k, v in values.items() if k not in named}
        for key, value in named.items():
            if isinstance(value, torch.Tensor) and tree_codec.is_plain(value):
                tree_codec.refuse_tensor(value, f"{owner}/{key}")
                self.tensors[f"{owner}/{key}"] = value
                continue
            entries = tree_codec.Entries()
            node = tree_codec.pack(value, key, entries)
            self.tensors |= {f"{owner}/{path}": tensor for path, tensor in entries.found}
            self._odd.setdefault(owner, {})[key] = node

    def _take_objects(self) -> None:
        """Take extra states, and plain values, as far as they can be stored."""
        foreign, kept = self._foreign, {}
        for name, state in foreign.extra.items():
            packed = self._packed(name, state)
            if packed is not None:
                self._extra[name] = packed
        for name, value in foreign.values.items():
            packed = self._packed(name, value)
            if packed is not None or value is None:
                kept[name] = packed
        if kept:
            self._extra[PLAIN_VALUES] = kept

    def _packed(self, name: str, value: Any) -> Any:
        """The value as a node; None, and a line in the report, if it cannot be stored."""
        before = len(self._arena.tensors)
        try:
            return tree_codec.pack(value, name, self._arena.keep)
        except UnsupportedStateError as error:
            del self._arena.tensors[before:]
            self._foreign.not_taken.append(f"{name} ({str(error).partition(', which')[0]})")
            return None

    def tree(self) -> bytes:
        """The encoded rank tree. Takes the tensors of the arena: call it once."""
        node = {
            "groups": self._groups,
            "odd": self._odd,
            "extra": self._extra,
            "extra_per_rank": {},
            "remainders": {},
            "imported": {
                "from": self._foreign.kind,
                "named": self._named,
                "equal": self.equal(),
                "tied": self.tied,
            },
        }
        encoded = tree_codec.EncodedTree(node, self._arena)
        room = torch.empty(encoded.nbytes, dtype=torch.uint8)
        encoded.copy(0, room)
        return bytes(room.numpy().data)


def _groups_of(label: str, state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    given = state["param_groups"]
    groups = [*given.values()] if isinstance(given, Mapping) else [*given]
    for number, group in enumerate(groups):
        if not isinstance(group, Mapping) or not isinstance(group.get("params"), list | tuple):
            raise ConfigError(f"{label}: its param_groups[{number}] names no params")
    return groups


def _names_of(groups: Sequence[Mapping[str, Any]], prefix: str) -> tuple[dict[str, str], bool]:
    """The names of parameters by their keys in the state, and whether they are names in the model:
    keys are such names themselves, or groups have `param_names`; else they are numbers. Names are
    without wrappers' name parts, and without `prefix`."""
    keys = [each for group in groups for each in group["params"]]
    names = [each for group in groups for each in group.get("param_names") or ()]
    if len(names) != len(keys):
        names = [each for each in keys if isinstance(each, str) and not each.isdigit()]
    if len(names) != len(keys) or not keys:
        return {str(key): str(key) for key in keys}, False
    own = [name.removeprefix(prefix) for name in without_wrappers(dict.fromkeys(names))]
    return dict(zip(map(str, keys), own, strict=True)), True


WINDOW_BYTES = 4 << 20


class VersionImage:
    """A source for the stores. The tensors must not change while it is in use. One thread."""

    def __init__(
        self,
        facts: VersionFacts,
        tensors: Mapping[str, torch.Tensor],
        tree: bytes,
        structure: Mapping[str, Any],
        tied: Mapping[str, str],
    ) -> None:
        """`tensors` by the names of their entries; `tree` is the encoded rank tree."""
        self._facts, self._tensors, self._tree = facts, tensors, tree
        specs = tree_codec.specs_of([*tensors.items()])
        self._layout = plan_layout(specs, [], 0, 1)
        self._header, self._data_bytes = encode_header(self._layout, len(tree), structure, tied)
        self._digests: list[bytes] = []
        self._flat: tuple[str, torch.Tensor] | None = None

    @property
    def shard(self) -> int:
        """See `Source`."""
        return 0

    @property
    def most_bytes(self) -> int:
        """Length of the shard."""
        return len(self._header) + self._data_bytes

    @property
    def base(self) -> VersionName | None:
        """See `Source`."""
        return None

    @property
    def still_sealed(self) -> Callable[[], bool]:
        """See `Source`."""
        return lambda: True

    def is_stored_as(self, record: ShardRecord) -> bool:
        """See `Source`."""
        return False

    @property
    def manifest(self) -> bytes:
        """See `Source`."""
        assert self._digests, "no window was read"
        return Manifest(
            facts=self._facts,
            shard=0,
            image_bytes=self.most_bytes,
            header_bytes=len(self._header),
            rank_state_bytes=len(self._tree),
            digests=b"".join(self._digests),
            created_seconds=time.time(),
        ).encode()

    def windows(self) -> Iterator[memoryview]:
        """See `Source`. A window is valid until the next one is requested."""
        self._digests = []
        # Freed with its last view: the error of a store may have some.
        window, filled = memoryview(mmap.mmap(-1, WINDOW_BYTES)), 0
        for part in self._parts():
            self._digests.append(digest(part))
            while part:
                count = min(len(part), WINDOW_BYTES - filled)
                window[filled : filled + count] = part[:count]
                filled, part = filled + count, part[count:]
                if filled == WINDOW_BYTES:
                    yield window
                    filled = 0
        if filled:
            yield window[:filled]

    def _parts(self) -> Iterator[memoryview]:
        """The header, and all blocks."""
        yield memoryview(self._header)
        for block in self._layout.blocks:
            yield self._block(block)
        room = bytearray(self._data_bytes - self._layout.nbytes)
        room[: len(self._tree)] = self._tree
        start = 0
        for count in rank_state_blocks(len(room)):
            yield memoryview(room)[start : start + count]
            start += count

    def _block(self, block: Block) -> memoryview:
        if len(block.parts) == 1:
            return self._part(*block.parts[0])
        return memoryview(b"".join(self._part(*part) for part in block.parts))

    def _part(self, piece: int, low: int, high: int) -> memoryview:
        name = self._layout.pieces[piece].spec.name
        if self._flat is None or self._flat[0] != name:
            self._flat = name, tree_codec.flat(self._tensors[name])
        found: memoryview = tree_codec.as_bytes(self._flat[1][low:high]).numpy().data
        return found


class Imported(Struct, frozen=True):
    """A version that was written and verified."""

    facts: VersionFacts
    level: str
    nbytes: int
    foreign: ForeignState
    iteration_known: bool
    """False if the iteration is a guess: the number of optimizer steps."""


def import_state(
    foreign: ForeignState,
    path: str,
    *,
    persistent: bool = False,
    iteration: int | None = None,
    force: bool = False,
) -> Imported:
    """Write the state as a version of the job with this `path`, and verify it.

    Args:
        foreign: the state; it gets lines in `not_taken` for what a version cannot store.
        path: a job's `path` (a directory on this node) or its `persistent_path`.
        persistent: `path`, a directory, is a persistent_path; a URL always is one.
        iteration: the number that `restore()` returns; default: as in the source, else the number
            of steps.
        force: write it although there are versions; a restart takes the new one then.

    The version appears when it is complete: after an error, or if the process is killed, there is
    none. Raises ConfigError if there are versions already, or a running job, or `path` cannot be
    written; CorruptShardError if the written bytes are not those that were read.
    """
    persistent = persistent or is_url(path)
    config = load_config({"persistent_path" if persistent else "path": path})
    there = _survey(path)
    _refuse_used(path, there, persistent, force)
    parts = ForeignVersion(foreign)
    job = config.job_id if persistent else job_directory(config).job
    facts = _facts(foreign, job, there, iteration)
    image = VersionImage(facts, parts.tensors, parts.tree(), parts.structure, parts.tied)
    if persistent:
        _flush(config, facts, image)
    else:
        try:
            with _claimed(config, facts):
                _commit(config, facts, image)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error}") from error
    _verify(path, facts)
    known = iteration is not None or foreign.iteration is not None
    level = "persistent" if persistent else "local"
    return Imported(facts, level, image.most_bytes, foreign, known)


def _survey(path: str) -> Survey:
    with suppress(MissingPathError):
        return survey(path)
    return Survey()


def _refuse_used(path: str, there: Survey, persistent: bool, force: bool) -> None:
    if there.living:
        raise ConfigError(f"{path} is in use by a running job; end it, or give another path")
    if there.troubles:
        raise ConfigError(f"{path} cannot be read completely: {some(there.troubles)}")
    levels = {copy.place.level for copy in there.copies}
    if persistent and levels and "persistent" not in levels:
        raise ConfigError(f"{path} is the path of a job, and no persistent_path; omit --persistent")
    if not persistent and levels == {"persistent"}:
        raise ConfigError(f"{path} is a persistent_path; give --persistent, too")
    if there.copies and not force:
        names = some([f"v{n}" for n in sorted({copy.key.id.version for copy in there.copies})])
        raise ConfigError(
            f"{path} has checkpoints already ({names}). Give another path, or --force: then a "
            "restart takes the imported version, and the others stay until retention removes them"
        )


def _facts(
    foreign: ForeignState,
    job: str,
    there: Survey,
    iteration: int | None,
) -> VersionFacts:
    generation = 1 + there.generation
    steps = foreign.count_steps()
    at = foreign.iteration if iteration is None else iteration
    at = (steps or 0) if at is None else at
    number = max(1, at if steps is None else steps)
    return VersionFacts(
        job=job,
        run_id=uuid.uuid4().hex,
        id=VersionId(generation, number),
        shards=1,
        lineage=((generation, 0),),
        iteration=at,
        iteration_counts="calls",
    )


@contextmanager
def _claimed(config: Config, facts: VersionFacts) -> Iterator[None]:
    """Keep jobs out of the directory. Raises ConfigError if one is there."""
    claim = DirectoryClaim(config.directory, facts.run_id, 0, lambda text, severity: None)
    try:
        if refusal := claim.stake():
            raise ConfigError(refusal)
        yield
    finally:
        claim.release()


def _commit(config: Config, facts: VersionFacts, image: VersionImage) -> None:
    store = LocalStore(config.directory)
    store.create()
    with store.draft(facts.key(0), image.most_bytes) as draft:
        offset = 0
        for window in image.windows():
            draft.write(window, offset)
            offset += len(window)
        draft.sync()
        draft.commit(image.manifest)


def _flush(config: Config, facts: VersionFacts, image: VersionImage) -> None:
    place = config.persistent
    with closing(PersistentStore(place.path, **place.options())) as store:
        store.create()
        with _leased(store, facts) as lease:
            store.flush(facts, image.most_bytes, [image], lambda nbytes: lease.keep())


@contextmanager
def _leased(store: PersistentStore, facts: VersionFacts) -> Iterator[Lease]:
    """Keep jobs from flushing there. Raises ConfigError if one does."""
    lease = store.lease(facts.run_id, f"tierckpt import {facts.run_id[:8]}")
    url = store.backend.url
    try:
        lease.ensure()
    except LeaseHeldError as error:
        raise ConfigError(
            f"{url} is in use by {error.owner}; end it, or give another path. If it was killed, "
            f"its lease is still there: tierckpt takeover {url} removes it"
        ) from error
    try:
        yield lease
    finally:
        lease.release()


def _verify(path: str, facts: VersionFacts) -> None:
    there = survey(path)
    there.found = [each for each in there.found if each.facts.run_id == facts.run_id]
    there.parities = []
    with closing(Progress(False)) as bar:
        wrong = [each.why for each in verify(there, bar) if each.why]
    if wrong or not there.found:
        raise CorruptShardError(
            f"{path}: the written version is damaged: {some(wrong) or 'it is not there'}. Remove "
            f"{facts.key(0).stem}.* from it, and check the disk"
        )
