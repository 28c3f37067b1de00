"""Loading a version's tensors without the job that made it: `tierckpt.load`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch

from tierckpt.coordination.error_barrier import ErrorBarrier
from tierckpt.core.copies import Problem
from tierckpt.errors import RestoreError
from tierckpt.format.layout import PER_RANK, Piece
from tierckpt.format.manifest import Manifest
from tierckpt.group import SingleGroup
from tierckpt.restore.candidates import Candidates
from tierckpt.restore.progress import Progress
from tierckpt.restore.shard_image import ShardImage
from tierckpt.restore.tensor_fill import PieceWriter
from tierckpt.restore.verification import RestoreContext, find
from tierckpt.restore.verified_version import VerifiedVersion
from tierckpt.state import tree_codec
from tierckpt.state.extras import EXTRA_STATES
from tierckpt.state.modules.custom_states import MODULE_STATES, into_model
from tierckpt.state.names import FIXED, path_of
from tierckpt.state.optimizers.extra_state import put_together
from tierckpt.state.training_state import NAMELESS

from .catalog import manifest_at
from .jobs import hints_of, refuse_several_jobs
from .survey import Survey, Where, job_of, survey, why_elsewhere
from .unknown_classes import refuse_unknown

TRIES = 5
"""A running job may retire a version while it is read; then there is a newer one."""


@dataclass
class Saved:
    """One version in host memory. Everything belongs to the caller."""

    version: int
    """Completed optimizer steps."""
    iteration: int
    """The number that `restore()` would return."""
    metric: float | None
    """The metric of this version, see `Checkpointer.step`."""
    model: dict[str, Any]
    """For `model.load_state_dict`: the result of `model.state_dict()`, also for modules with a save
    format of their own; names have no wrapper (DDP, `torch.compile`). Buffers are rank 0's. Tied
    weights are one tensor under all their names."""
    optimizers: dict[str, dict[str, Any]]
    """For each optimizer's `load_state_dict`; a single one is called `optimizer`. An inner one (its
    attribute `base_optimizer`) is called `optimizer.base_optimizer`, unless the outer
    `state_dict()` contains its state. Empty with `model_only`."""
    extra: dict[str, Any]
    """The states of the `extra` objects, as `state_dict()` returned them."""
    extra_per_rank: dict[str, Any]
    """The states of rank 0's own objects."""
    parameters: dict[str, list[str]]
    """For each optimizer, the names of its parameters, in the order of their numbers."""
    levels: dict[str, int]
    """Number of shards by level."""
    rejected: tuple[str, ...]
    """Copies that were damaged, unreadable or left out, with the reasons."""
    suspect: str = ""
    """The known or possible difference of replicas when it was taken: it may be the state of no
    rank."""
    unseen: bool = False
    """True if some places could not be read: there may be a newer version."""


def load(
    path: Where | Sequence[Where],
    version: int | None = None,
    *,
    model_only: bool = False,
    as_parts: bool = False,
    progress: bool | None = None,
) -> Saved:
    """Read a checkpoint without a job: to evaluate it, to start from its weights, to inspect it.

    The default is the version that a restart takes: the newest one that is complete and sound.
    Nothing is changed, and no pickle is read. One process; any number of ranks may have made it.

    Args:
        path: a job's `path`, its `persistent_path` (or URL), or several of them: for a job on
            several nodes with a disk each, all of those that can be seen from here. Files that a
            killed job left in this machine's memory are found, too.
        version: read this version, and no other.
        model_only: leave out the optimizers' state, and save its memory.
        as_parts: if the class of a value (a member of an Enum, a named tuple, a tensor made of
            tensors) is not imported here, put a `tierckpt.state.custom_values.ForeignValue` in its
            place, with the name of the class and the parts of the value.
        progress: show a bar on standard error; None: if that is a terminal.

    Raises RestoreError if there is no such version, complete and sound, or, without `as_parts`, if
    it has values of classes that are not imported here; ConfigError for an invalid path.
    """
    saved, _ = load_and_survey(path, version, model_only, as_parts, progress)
    return saved


def load_and_survey(
    path: Where | Sequence[Where],
    version: int | None,
    model_only: bool = False,
    as_parts: bool = False,
    progress: bool | None = None,
) -> tuple[Saved, Survey]:
    """Read a version as `load` does, with the same errors. Returns with it the survey in which it
    was found, without memory that cannot be read from here."""
    with closing(Progress(Progress.wanted(0, progress))) as bar:
        for _ in range(TRIES):
            if (found := _load(path, version, model_only, bar)) is not None:
                saved, _ = found
                if not as_parts:
                    names = ("model", "optimizers", "extra", "extra_per_rank")
                    parts = {name: getattr(saved, name) for name in names}
                    refuse_unknown(parts, f"{text_of(path)}: v{saved.version}")
                return found
    raise RestoreError(
        f"{text_of(path)}: a running job retired the version that was being read, {TRIES} times",
        "Pin a version (tierckpt pin), and read that one",
    )


def _load(
    path: Where | Sequence[Where], version: int | None, model_only: bool, bar: Progress
) -> tuple[Saved, Survey] | None:
    """Load a version; returns None if its files changed while they were read."""
    there = survey(path)
    refuse_several_jobs(there, text_of(path))
    unseen = bool(there.unseen)
    version = version_to_read(there, version)
    candidates = candidates_of(there)
    context = RestoreContext(ErrorBarrier(SingleGroup()), bar, there.open_far)
    attempt = find(context, candidates, version)
    if attempt is None:
        raise RestoreError(nothing(path, version, there, candidates.rejected))
    with closing(attempt):
        mapped = {s: image for s, image in attempt.images.items() if _is_mapped(attempt, s)}
        saved = _Reading(attempt, model_only).saved()
        saved.rejected = (*there.troubles, *candidates.rejected)
        saved.suspect = there.suspicion(attempt.plan.id)
        saved.unseen = unseen
        return (saved, there) if _unchanged(attempt, mapped) else None


def version_to_read(there: Survey, version: int | None) -> int | None:
    """Leave out what cannot be read from here. Return the version that is asked for, by `version`
    or else by a request to go back; None for the newest. Raises RestoreError as `refuse_newer`."""
    leave_out_memory(there)
    if version is not None:
        return version
    refuse_newer(there)
    return there.request.version if there.request else None


def candidates_of(there: Survey) -> Candidates:
    """Return the copies of a survey, for `find`. A version that was given up counts, too."""
    return Candidates([there.found], [there.parities], began=there.began_last, abandoned=True)


def refuse_newer(there: Survey) -> None:
    """Raise RestoreError if the newest version may be one that this release cannot read."""
    newer = [each for each in there.problems if each.newer]
    if newer:
        raise RestoreError(
            f"a newer release of tierckpt wrote {newer[0].place.where}: {newer[0].why}"
        )


def leave_out_memory(there: Survey) -> None:
    """Remove memory that a restart would not take, or that a running job changes; and record
    that."""
    for job in sorted(there.living | there.elsewhere):
        of_job = [each for each in there.found if job_of(each.place) == job]
        if not of_job:
            continue
        there.found = [each for each in there.found if each not in of_job]
        newest = max(of_job, key=lambda each: each.key.id)
        running = "its job is running, and changes its memory at any moment"
        why = running if job in there.living else why_elsewhere(job)
        there.unseen.append(Problem(newest.place, f"{newest.key.id} is left out: {why}"))


def _is_mapped(attempt: VerifiedVersion, shard: int) -> bool:
    source = attempt.plan.sources[shard]
    return source.place.mappable and not source.rebuilt


def _unchanged(attempt: VerifiedVersion, mapped: Mapping[int, ShardImage]) -> bool:
    """Whether the manifests of mapped shards are unchanged. A writer removes a manifest before it
    changes the first byte (FORMAT.md), so the copied bytes are the verified ones."""
    return all(
        manifest_at(image.manifest.key, attempt.plan.sources[shard].place) == image.manifest
        for shard, image in mapped.items()
    )


def nothing(
    path: Where | Sequence[Where], version: int | None, there: Survey, rejected: Iterable[str]
) -> str:
    """The reason why there is no such version."""
    wanted = "no version" if version is None else f"no v{version}"
    versions = sorted({each.key.id.version for each in there.found})
    shards = ", ".join(f"v{v}" for v in versions[-8:])
    seen = f"; there are shards of {shards}" if versions else ""
    why = "; ".join([*there.troubles, *rejected][:4])
    text = f"{text_of(path)}: {wanted} is complete and sound{seen}{'. ' if why else ''}{why}"
    hint = hints_of(path, there)
    return f"{text}; {hint}" if hint else text


def text_of(path: Where | Sequence[Where]) -> str:
    """The places in words."""
    if isinstance(path, str) or not isinstance(path, Sequence):
        return str(path)
    return ", ".join(map(str, path))


class _Reading:
    """One verified version, being loaded into new tensors."""

    def __init__(self, attempt: VerifiedVersion, model_only: bool) -> None:
        self._attempt, self._model_only = attempt, model_only
        self._contents = contents = attempt.contents
        self._manifest = Manifest.decode(contents.own.manifest)
        self._tree = tree_codec.decode(contents.own.tree, cut=True)
        own = {spec.name: spec for spec in contents.own.specs}
        specs = {n: s for n, s in {**contents.specs, **own}.items() if self._wanted(n)}
        self._tensors = {name: tree_codec.empty(spec, "cpu") for name, spec in specs.items()}
        self._filler = PieceWriter(self._place_of)
        self._tied: dict[str, str] = {}

    def saved(self) -> Saved:
        """Read the version."""
        attempt, contents = self._attempt, self._contents
        if contents.missing:
            raise RestoreError(
                f"{attempt.plan.id} is incomplete: {'; '.join(contents.missing[:4])}"
            )
        attempt.broadcaster.make_room(contents.outlines)
        attempt.progress.begin(f"loading v{attempt.plan.id.version}", attempt.nbytes)
        attempt.visit(self._take, self._filler.wants)
        if attempt.trouble:
            raise RestoreError(f"{attempt.plan.id} could not be read completely: {attempt.trouble}")
        if "name" in (self._tree.get("files") or {}):
            raise RestoreError(
                f"v{attempt.plan.id.version} is a version of files, not the state of a training. "
                "`tierckpt export PATH FOLDER --format files` writes them"
            )
        structure = {} if self._model_only else contents.structure
        extra = dict(self._tree["extra"])
        return Saved(
            version=attempt.plan.id.version,
            iteration=self._manifest.facts.iteration,
            metric=self._manifest.facts.metric,
            model=self._model(extra),
            optimizers=_Optimizers(self._tensors, self._tree, structure).all(),
            extra=extra,
            extra_per_rank=dict(self._tree["extra_per_rank"]),
            parameters={
                label: [name for names in each["groups"] for name in names]
                for label, each in structure.items()
            },
            levels=attempt.plan.levels,
            rejected=(),
        )

    def _wanted(self, name: str) -> bool:
        return name.startswith(FIXED) or not self._model_only

    def _take(self, shard: int, offset: int, window: memoryview) -> None:
        self._filler.take(shard, offset, window)
        if offset == 0 and self._filler.header is not None:
            self._tied |= self._filler.header.tied

    def _place_of(self, shard: int, piece: Piece) -> torch.Tensor | None:
        if piece.placement is PER_RANK and shard != 0:
            return None
        return self._tensors.get(piece.spec.name)

    def _model(self, extra: dict[str, Any]) -> dict[str, Any]:
        """The model's entries, with its modules' extra states (`get_extra_state`), taken from
        `extra`."""
        found: dict[str, Any] = {
            name.split("/", 1)[1]: tensor
            for name, tensor in self._tensors.items()
            if name.startswith(FIXED)
        }
        found |= {name: found[first] for name, first in self._tied.items() if first in found}
        suffix = torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX
        for module, state in dict(extra.pop(EXTRA_STATES, {})).items():
            found[f"{module}.{suffix}" if module else suffix] = state
        record = extra.pop(MODULE_STATES, None)
        return into_model(record, found, self._tensors) if record else found


class _Optimizers:
    """The result of each optimizer's `state_dict()`."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        tree: Mapping[str, Any],
        structure: Mapping[str, Any],
    ) -> None:
        self._tensors, self._tree, self._structure = tensors, tree, structure
        self._kept = {label: self._kept_by(label) for label in structure}

    def all(self) -> dict[str, Any]:
        """The state dicts by label, without optimizers that are inside another one."""
        nodes = self._tree.get("remainders", {})
        parts = [(label, part) for label, node in nodes.items() for part in node["parts"]]
        within = {part["of"] for label, part in parts if part["of"] != label}
        return {
            label: put_together(nodes[label], self) if label in nodes else self._plain(label)
            for label in self._structure
            if label not in within
        }

    def _kept_by(self, label: str) -> dict[str, dict[str, Any]]:
        """Optimizer state by parameter."""
        kept: dict[str, dict[str, Any]] = {}
        for name, tensor in self._tensors.items():
            if name.startswith(f"{label}/") and not name.startswith(FIXED):
                path, key = path_of(name)
                kept.setdefault(path, {})[key] = tensor
        for full, values in self._tree["odd"].items():
            if full.startswith(f"{label}/"):
                entries = kept.setdefault(full.split("/", 1)[1], {})
                entries.update({k: tree_codec.with_entries(v, entries) for k, v in values.items()})
                entries.update(entries.pop(NAMELESS, {}))
        return kept

    def _plain(self, label: str) -> dict[str, Any]:
        return {"state": self.states(label), "param_groups": self.groups(label)}

    def _numbered(self, label: str) -> list[list[tuple[int, str]]]:
        """Parameters in torch's form: numbers, in the order of the groups."""
        found, numbered = [], 0
        for names in self._structure[label]["groups"]:
            found.append([*enumerate(names, numbered)])
            numbered += len(names)
        return found

    def states(self, label: str) -> dict[int, dict[str, Any]]:
        """As in `Stored`."""
        kept = self._kept[label]
        pairs = (pair for group in self._numbered(label) for pair in group)
        return {number: dict(kept[name]) for number, name in pairs if name in kept}

    def groups(self, label: str) -> list[dict[str, Any]]:
        """As in `Stored`."""
        both = zip(self._numbered(label), self._tree["groups"][label], strict=True)
        return [{**options, "params": [n for n, _ in group]} for group, options in both]

    def value(self, label: str, name: str, key: str) -> Any:
        """As in `Stored`."""
        return self._kept[label][name][key]

    def param(self, name: str) -> Any:
        """As in `Stored`."""
        return self._tensors[f"model/{name}"]


__all__ = ["Saved", "load", "load_and_survey"]
