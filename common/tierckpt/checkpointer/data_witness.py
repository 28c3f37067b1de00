"""The data witness: whether the data after a restart are those of the version, on all ranks.

Each resumed loader compares its newest batch, loaded once more, with the fingerprint in the version
(`state.witness`). It begins its pass on one rank alone, so it raises nothing. The first optimizer
step after the restore, which all ranks make, gathers what was found.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, Sampler

from tierckpt._text import some
from tierckpt.coordination.error_barrier import raise_any
from tierckpt.coordination.reports import Reports
from tierckpt.errors import RestoreError
from tierckpt.group import Group
from tierckpt.hooks.stateful_objects import first_values
from tierckpt.resumable_loader import ResumableLoader
from tierckpt.sampler import Position
from tierckpt.state.extras import is_generator
from tierckpt.state.training_state import TrainingState
from tierckpt.state.witness import Comparison

PLACES = (Position, DataLoader, Sampler)
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
    "weights since, so the run does not go on from v{version}. Load and initialise weights before "
    "restore()"
)
SAMPLED = 64
"""Limit of parameters that are compared."""
UNWITNESSED = (
    "{names} cannot give a batch again, so nothing shows that the data after this restart are "
    "those of the job before. tierckpt.ResumableLoader around the loader compares them"
)


class DataWitness:
    """The comparisons of one checkpointer's loaders. Training thread."""

    due = False
    """A version was restored, and no step made since. Equal on all ranks."""

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
        self.attached()

    def attached(self) -> None:
        """Let the loaders know whether their batches need fingerprints, and which generators the
        version has: their data may draw from these, too."""
        drawn = {name: each for name, each in self._objects() if is_generator(each)}
        for _, each in self._objects():
            if hasattr(each, "witnesses"):
                each.witnesses = self.mode != "off"
                each.draws_from(drawn)

    def restored(self, version: int) -> None:
        """A version was restored; 0: there was none. All ranks call it."""
        self.attached()
        self._version, self.due = version, version > 0 and self.mode != "off"
        self._weights = self._sampled() if self.due else {}

    def settle(self) -> None:
        """Compare, before the first step after a restore. Collective. Raises RestoreError, on all
        ranks, if the data of one rank differ, unless that is to be a warning."""
        self.due = False
        self._compare_weights()
        for _, each in self._objects():
            if isinstance(each, ResumableLoader):
                each.step_begins()
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

    def _sampled(self) -> dict[str, list[Any]]:
        """A few values of each of the first parameters. None where an optimizer has a `train()`: it
        changes the weights between its modes (ScheduleFree)."""
        optimizers = self._state.optimizers.values()
        if any(hasattr(getattr(each, "outside", each), "train") for each in optimizers):
            return {}
        first = islice(self._state.model.named_parameters(), SAMPLED)
        return {name: first_values(param) for name, param in first}

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
        """A loader began its resumed pass after the first step: this rank alone knows."""
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
        for name, each in self._objects():
            found = getattr(each, "comparison", None)
            if isinstance(found, Comparison):
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


__all__ = ["DataWitness"]
