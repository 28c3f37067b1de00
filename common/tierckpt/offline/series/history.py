"""Chosen tensors of many versions, one version after the other: `tierckpt.history`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from tierckpt._text import some
from tierckpt.errors import RestoreError
from tierckpt.format.ids import VersionId
from tierckpt.state import tree_codec

from ..entry_names import Names, fits, in_order, patterns_of, shown, without_entry
from ..load import text_of
from ..stored_version import LostShardError, OnRead, StoredTensor, StoredVersion, open_version
from ..survey import Survey, Where
from ..verify import is_there
from .choice import Choice, choose

THREADS = 8
"""Blocks that come from a store at the same time."""


def history(
    path: Where | Sequence[Where],
    *,
    names: Names = "*",
    every: int | None = None,
    first: int | None = None,
    last: int | None = None,
    run: int | None = None,
) -> History:
    """The stored versions of a job, oldest first, for studies of how its weights evolve::

        for saved in tierckpt.history("s3://bucket/run7", every=1000, names="layer4.*"):
            print(saved.version, saved.tensors["layer4.0.conv1.weight"].norm())

    A tensor is read when it is looked up, and nothing else is: of each shard the header, and the
    blocks that contain the tensor, each compared with its checksum before use. This holds for every
    level, a store included, and needs neither the job nor a GPU. The versions are those of the
    lineage that a restart goes on with, and that are complete; `Checkpointer.pin` and the settings
    `local_keep_every` and `persistent_keep_every` decide which exist.

    A warning names what was asked for and is not there: versions that exist and cannot be read,
    patterns without a tensor in the first version, and the versions that there are if none is
    chosen.

    Args:
        path: as for `tierckpt.load`; of one job.
        names: one pattern or several, as in a shell: `"layer4.*"` for parameters and buffers by
            their names in `model.state_dict()`, and with a slash for tensors of an optimizer,
            `"optimizer/layer4.*/exp_avg"`.
        every: only multiples of this; where one is missing, the next version before the following
            multiple, which is what `local_keep_every` and `persistent_keep_every` keep.
        first, last: only versions from `first` to `last`, both included.
        run: a run's number in `tierckpt log`: its versions and those that it came from, also if the
            job went back to an older version since.

    Raises ConfigError for an invalid path or argument, and for places of two jobs; RestoreError if
    there are versions, or places, and none can be read.
    """
    return History(path, names, Choice(every, first, last, run))


class History:
    """The versions that `tierckpt.history` found. `len` is their number.

    Each iteration begins at the oldest one. It closes a version before it opens the next one, so
    memory holds the tensors of one version, if the caller keeps no others. A version that the job
    retires in the meantime is skipped. One thread.
    """

    def __init__(
        self,
        path: Where | Sequence[Where],
        names: Names = "*",
        choice: Choice | None = None,
        on_read: OnRead = lambda nbytes: None,
    ) -> None:
        choice = choice or Choice()
        self._path, self._on_read = path, on_read
        self._patterns = patterns_of(names)
        found = choose(path, choice)
        self._parts = found.parts
        for text in found.texts(choice):
            warnings.warn(f"{text_of(path)}: {text}", stacklevel=3)

    @property
    def versions(self) -> list[int]:
        """Numbers of the versions, oldest first."""
        return [id_.version for id_ in self._parts]

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[SavedVersion]:
        told = False
        for id_, part in self._parts.items():
            saved = SavedVersion(self._path, id_, self._patterns, part, self._on_read)
            try:
                found = saved.open()
            except RestoreError:
                if saved.is_retired():
                    continue
                raise
            try:
                if not told and (missed := without_entry(self._patterns, saved.tensors)):
                    here = some([*chosen(found, ("*", "*/*"))], 6)
                    text = f"{id_} has no tensor named {some(missed)}, but {here}"
                    warnings.warn(text, stacklevel=2)
                told = True
                yield saved
            finally:
                saved.close()

    def __repr__(self) -> str:
        return f"History({text_of(self._path)}: {some([f'v{v}' for v in self.versions], 6)})"


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
        patterns: Sequence[str],
        part: Survey,
        on_read: OnRead,
    ) -> None:
        self._id, self.version = id_, id_.version
        self._path, self._patterns, self._on_read = path, patterns, on_read
        self._there = self._left = part
        """The copies of this version, and those of them that did not prove damaged."""
        self._why: list[str] = []
        self._opened: StoredVersion | None = None
        self._pool: ThreadPoolExecutor | None = None

    def open(self) -> StoredVersion:
        """Open the shards and read their headers. Raises RestoreError."""
        if self._opened is None:
            found = open_version(self._path, self.version, self._on_read, self._left)
            self._opened = found
            self._pool = ThreadPoolExecutor(THREADS, "tierckpt-history")
            facts = found.manifest.facts
            self.iteration, self.metric = facts.iteration, facts.metric
            self.created_seconds = found.manifest.created_seconds
            self.ranks, self.levels = len(found.shards), dict(found.levels)
            self.suspect = found.suspect
            self.tensors = _Tensors(self, chosen(found, self._patterns))
        return self._opened

    def close(self) -> None:
        """Unmap the shards; tensors that were read stay."""
        if self._opened is not None and self._pool is not None:
            self._pool.shutdown()
            self._opened.close()
            self._opened = self._pool = None

    def is_retired(self) -> bool:
        """Whether the job has removed the version, or a part, since it was listed."""
        rest = [each for each in self._there.found if is_there(each, self._there)]
        return replace(self._there, found=rest).plan(self.version, abandoned=True) is None

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
                f"{where}: the job retired the version while it was read",
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


def chosen(version: StoredVersion, patterns: Sequence[str]) -> dict[str, str]:
    """The entries that the patterns select, by their shown names: those in the shards, without the
    `model/` and `buffer/` of a model's. Tied weights are there under all their names. State of
    other ranks than rank 0 alone is left out."""
    here = (name for name in version.names() if version.tensor(name, 0) is not None)
    entries = {shown(name): name for name in in_order(here)}
    for shard in version.shards[:1]:
        for more, entry in shard.header.tied.items():
            if entry in entries.values():
                entries[shown(more)] = entry
    return {
        name: entry for name, entry in entries.items() if any(fits(name, each) for each in patterns)
    }


def _read(stored: StoredTensor, pool: ThreadPoolExecutor) -> torch.Tensor:
    target = tree_codec.empty(stored.spec, "cpu")
    stored.read_all(tree_codec.as_bytes(tree_codec.flat(target)).numpy(), pool)
    return target


__all__ = ["History", "SavedVersion", "chosen", "history"]
