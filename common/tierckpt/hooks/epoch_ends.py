"""Epoch ends: where in the data a version is that is taken between two boundaries.

A loader, or a sampler, knows which batches the loop took; what the loop does when an epoch has no
more of them (a scheduler's step, an evaluation) it does not see. A version of a boundary comes
before that, so a restart does it. One that is taken on demand, or at the end, may come behind it:
then a restart begins with the next epoch. Which of both it is, is told by what the loop has changed
since its last boundary: an object in `extra`, an option of an optimizer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from tierckpt.resumable_loader import ResumableLoader
from tierckpt.sampler import Position
from tierckpt.state import tree_codec
from tierckpt.state.extras import Generator
from tierckpt.state.training_state import TrainingState

Place = ResumableLoader[Any] | Position
"""What knows where in the data the loop is."""
KINDS = (ResumableLoader, Position)


class EpochEnds:
    """Of one checkpointer's places. Training thread."""

    def __init__(self, state: TrainingState) -> None:
        """`state` stays its owner's."""
        self._state = state
        self._at_end: dict[int, tuple[int, Any]] = {}
        """By `id()` of a place, at the last boundary of an epoch: its number, and `_mark`."""

    def passed(self) -> None:
        """An iteration is over: its batch was trained on."""
        for place in self._places():
            place.passed()
            if place.at_end and self._at_end.get(id(place), (-1,))[0] != place.epoch:
                self._at_end[id(place)] = place.epoch, self._mark()

    @contextlib.contextmanager
    def between(self, trained: bool) -> Iterator[None]:
        """A version is taken that is of no boundary. `trained`: a step was made since the last
        one."""
        places = [*self._places()]
        try:
            for place in places:
                if trained:
                    place.passed()
                place.between = True
                place.end_is_done = place.at_end and self._is_done(place)
            yield
        finally:
            for place in places:
                place.between = place.end_is_done = False

    def _is_done(self, place: Place) -> bool:
        """Whether what the loop does at the end of the epoch was done; where no boundary came at
        the last batch, there is nothing to compare with, and it was."""
        epoch, mark = self._at_end.get(id(place), (-1, None))
        return epoch != place.epoch or mark != self._mark()

    def _places(self) -> Iterator[Place]:
        for objects in (self._state.extra, self._state.extra_per_rank):
            yield from (each for each in objects.values() if isinstance(each, KINDS))

    def _mark(self) -> Any:
        """Another one when an object, or an option, has changed. Of tensors, of which there may be
        many, only whether they were written to. None where that cannot be told."""
        try:
            options = [
                {k: v for k, v in group.items() if k != "params"}
                for optimizer in self._state.optimizers.values()
                for group in optimizer.param_groups
            ]
            objects = [
                (name, each.state_dict())
                for extra in (self._state.extra, self._state.extra_per_rank)
                for name, each in extra.items()
                if not isinstance(each, (*KINDS, Generator))
            ]
            return tree_codec.pack([options, objects], "extra", _written)
        except Exception:  # who takes the version will meet it, and says so
            return None


def _written(tensor: torch.Tensor, path: str) -> Any:
    counter = None if tensor.is_inference() else tensor._version
    return [tensor.data_ptr(), counter, list(tensor.shape)]


__all__ = ["EpochEnds"]
