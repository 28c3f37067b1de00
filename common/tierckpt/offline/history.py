"""Chosen tensors of many versions, one version after the other: `tierckpt.history`."""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from tierckpt._text import some
from tierckpt.errors import ConfigError, RestoreError
from tierckpt.format.ids import VersionId
from tierckpt.state import tree_codec
from tierckpt.state.names import FIXED

from .catalog import rows_of
from .entry_names import in_order
from .load import leave_out_memory, text_of
from .stored_version import LostShardError, OnRead, StoredTensor, StoredVersion, open_version
from .survey import Survey, Where, survey
from .verify import is_there

THREADS = 8
"""Blocks that come from a store at the same time."""
Names = str | Sequence[str]


def history(
    path: Where | Sequence[Where],
    *,
    names: Names = "*",
    every: int | None = None,
    first: int | None = None,
    last: int | None = None,
) -> History:
    """The stored versions of a job, oldest first, for studies of how its weights evolve::

        for saved in tierckpt.history("s3://bucket/run7", every=1000, names="layer4.*"):
            print(saved.version, saved.tensors["layer4.0.conv1.weight"].norm())

    A tensor is read when it is looked up, and nothing else is: of each shard the header, and the
    blocks that contain the tensor, each compared with its checksum before use. This holds for every
    level, a store included, and needs neither the job nor a GPU. The versions are those of the
    lineage that a restart goes on with, and that are complete; `Checkpointer.pin` and the settings
    `local_keep_every` and `persistent_keep_every` decide which exist.

    Args:
        path: as for `tierckpt.load`.
        names: one pattern or several, as in a shell: `"layer4.*"` for parameters and buffers by
            their names in `model.state_dict()`, and with a slash for tensors of an optimizer,
            `"optimizer/layer4.*/exp_avg"`.
        every: only versions that are multiples of this.
        first, last: only versions from `first` to `last`, both included.

    Raises ConfigError for an invalid path or argument; RestoreError if versions exist that this
    release cannot read.
    """
    return History(path, names, every, first, last)


class History:
    """The versions that `tierckpt.history` found. `len` is their number.

    Each iteration begins at the oldest one. It closes a version before it opens the next one, so
    memory holds the tensors of one version, if the caller keeps no others. A version that the job
    retires in the meantime is skipped. One thread.
    """

    def __init__(
        self,
        path: Where | Sequence[Where],
        names: Names,
        every: int | None,
        first: int | None,
        last: int | None,
        on_read: OnRead = lambda nbytes: None,
    ) -> None:
        self._path, self._there, self._on_read = path, survey(path), on_read
        leave_out_memory(self._there)
        self._names = names
        self._ids = listed(self._there, every, first, last)

    @property
    def versions(self) -> list[int]:
        """Numbers of the versions, oldest first."""
        return [id_.version for id_ in self._ids]

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[SavedVersion]:
        for id_ in self._ids:
            saved = SavedVersion(self._path, id_, self._names, self._there, self._on_read)
            try:
                saved.open()
            except RestoreError:
                if saved.is_retired():
                    continue
                raise
            try:
                yield saved
            finally:
                saved.close()

    def __repr__(self) -> str:
        return f"History({text_of(self._path)}: {some([f'v{v}' for v in self.versions], 6)})"


def listed(
    there: Survey, every: int | None = None, first: int | None = None, last: int | None = None
) -> list[VersionId]:
    """The versions that can be read from here and are on the newest lineage, oldest first. Raises
    ConfigError for an `every` of no steps."""
    if every is not None and every < 1:
        raise ConfigError(f"every={every}: give a number of steps, 1 or more")
    rows = [row for row in rows_of(there) if row.restartable and row.is_past]
    found = {VersionId(row.generation, row.version) for row in rows}
    return sorted(
        (
            id_
            for id_ in found
            if (first is None or id_.version >= first)
            and (last is None or id_.version <= last)
            and (every is None or id_.version % every == 0)
        ),
        key=lambda id_: id_.version,
    )


class SavedVersion:
    """One version of a `History`. It may be used after the iteration as well: it is opened again
    when a tensor is looked up, until `close`."""

    version: int
    """Completed optimizer steps."""
    iteration: int
    """The number that `restore()` would return."""
    metric: float | None
    """The metric of this version, see `Checkpointer.step`."""
    created_seconds: float
    """Unix time of the seal."""
    ranks: int
    """Number of ranks that took it."""
    levels: dict[str, int]
    """Number of shards by the level that they are read from."""
    suspect: str
    """The known or possible difference of replicas when it was taken; empty if none is known."""
    tensors: Mapping[str, torch.Tensor]
    """The tensors that were asked for, by name. Each is read when it is looked up, and belongs to
    the caller; a second look reads it again. Buffers are rank 0's. Raises RestoreError, with the
    names of version and tensor, if no sound copy is left."""

    def __init__(
        self,
        path: Where | Sequence[Where],
        id_: VersionId,
        names: Names,
        there: Survey,
        on_read: OnRead,
    ) -> None:
        self._id, self.version = id_, id_.version
        self._path, self._names, self._on_read = path, names, on_read
        self._there = self._left = there
        """What there is, and what is left of it without copies that proved damaged."""
        self._why: list[str] = []
        self._opened: StoredVersion | None = None
        self._pool: ThreadPoolExecutor | None = None

    def open(self) -> StoredVersion:
        """Open the shards and read their headers. Raises RestoreError."""
        if self._opened is None:
            found = open_version(self._path, self.version, self._on_read, self._left)
            if found.manifest.id != self._id:
                found.close()
                raise RestoreError(f"{text_of(self._path)}: {self._id} is not complete and sound")
            self._opened = found
            self._pool = ThreadPoolExecutor(THREADS, "tierckpt-history")
            facts = found.manifest.facts
            self.iteration, self.metric = facts.iteration, facts.metric
            self.created_seconds = found.manifest.created_seconds
            self.ranks, self.levels = len(found.shards), dict(found.levels)
            self.suspect = found.suspect
            entries = chosen(found, self._names)
            self.tensors = _Tensors(self, entries)
            if not entries:
                there = some([*chosen(found, ("*", "*/*"))], 6)
                text = f"v{self.version} has no tensor named {self._names!r}, but {there}"
                warnings.warn(text, stacklevel=3)
        return self._opened

    def close(self) -> None:
        """Unmap the shards; tensors that were read stay."""
        if self._opened is not None and self._pool is not None:
            self._pool.shutdown()
            self._opened.close()
            self._opened = self._pool = None

    def is_retired(self) -> bool:
        """Whether the job has removed the version, or a part, since it was listed."""
        rest = [e for e in self._there.found if e.key.id != self._id or is_there(e, self._there)]
        plan = replace(self._there, found=rest).plan(self.version)
        return plan is None or plan.id != self._id

    def read(self, name: str, entry: str) -> torch.Tensor:
        """Read a tensor. If a copy of a shard is damaged, another one is used."""
        try:
            while True:
                stored = self.open().tensor(entry, 0)
                if stored is None or self._pool is None:
                    raise KeyError(name)
                try:
                    return _read(stored, self._pool)
                except LostShardError as error:
                    self._leave_out(error)
        except RestoreError as error:
            raise self._lost(name, error) from error

    def _leave_out(self, error: LostShardError) -> None:
        if error.place is None:
            raise RestoreError(f"the rebuilt {error.key} is lost: {error}") from error
        self._why.append(f"{error.place.where}: {error}")
        self._left = error.others(self._left)
        self.close()

    def _lost(self, name: str, error: Exception) -> RestoreError:
        why = "; ".join(dict.fromkeys([*self._why[-4:], str(error)]))
        where = f"{text_of(self._path)}: v{self.version}, {name}"
        if self.is_retired():
            return RestoreError(
                f"{where}: the job retired the version while it was read: {why}",
                "Pin versions before you read them (tierckpt pin), or let the job keep them: "
                "persistent_keep_every",
            )
        return RestoreError(f"{where}: no sound copy of the tensor is left: {why}")

    def __repr__(self) -> str:
        return f"SavedVersion(v{self.version}, {len(self.tensors)} tensors)"


class _Tensors(Mapping[str, torch.Tensor]):
    """The tensors of a version; reads on each look."""

    def __init__(self, saved: SavedVersion, entries: Mapping[str, str]) -> None:
        self._saved, self._entries = saved, entries

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._entries:
            here = some([*self._entries], 4) if self._entries else "none: no name matches"
            raise KeyError(f"{name!r} is not among the tensors of v{self._saved.version} ({here})")
        return self._saved.read(name, self._entries[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __repr__(self) -> str:
        return f"<{len(self)} tensors of v{self._saved.version}: {some([*self._entries], 4)}>"


def chosen(version: StoredVersion, names: Names) -> dict[str, str]:
    """The entries that `names` select, by their shown names: those in the shards, without the
    `model/` and `buffer/` of a model's. Tied weights are there under all their names. State of
    other ranks than rank 0 alone is left out."""
    here = (name for name in version.names() if version.tensor(name, 0) is not None)
    entries = {_shown(name): name for name in in_order(here)}
    for shard in version.shards[:1]:
        for more, entry in shard.header.tied.items():
            if entry in entries.values():
                entries[_shown(more)] = entry
    patterns = [names] if isinstance(names, str) else [*names]
    return {
        name: entry
        for name, entry in entries.items()
        if any(
            ("/" in name) == ("/" in each) and fnmatch.fnmatchcase(name, each) for each in patterns
        )
    }


def _shown(entry: str) -> str:
    return entry.split("/", 1)[1] if entry.startswith(FIXED) else entry


def _read(stored: StoredTensor, pool: ThreadPoolExecutor) -> torch.Tensor:
    target = tree_codec.empty(stored.spec, "cpu")
    stored.read_all(tree_codec.as_bytes(tree_codec.flat(target)).numpy(), pool)
    return target


__all__ = ["History", "SavedVersion", "chosen", "history", "listed"]
