"""Epoch ends: the position in the data of a version taken between two boundaries.

A loader or sampler knows which batches the loop took. It does not see the work of the loop after an
epoch's last batch (a scheduler's step, an evaluation). A version of a boundary comes before that
work, so a restart does it. A version on demand, or at the end, may come after it: then a restart
starts with the next epoch. The changes since the last boundary decide between the two: an object in
`extra`, or an option of an optimizer.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Self, cast

import torch

from tierckpt.core.parts import Part
from tierckpt.state import tree_codec
from tierckpt.state.extras import DataPlace, Generator, LoaderPlace
from tierckpt.state.training_state import TrainingState

if TYPE_CHECKING:
    from tierckpt.checkpointer.loop import TrainingJob
    from tierckpt.resumable_loader import ResumableLoader
    from tierckpt.sampler import Position

    Place = ResumableLoader[Any] | Position

HELD = (
    "the loop took {count} batches before its first step, and one before each later one. If it "
    "prefetches, a restart loses what it holds at a boundary, and trains on other batches: {cure}"
)
EXPLICIT, IN_FORWARD = ("iteration_ends",), ("boundary_begins", "stepped")
"""Moments with something to do, by the setting `boundary`, if there are places."""
ONE_HELD = "give ResumableLoader(loader, ahead=1)"
MORE_HELD = "let it hold one at most, with ResumableLoader(loader, ahead=1), and workers load more"


class EpochEnds(Part):
    """The epoch ends of one checkpointer's loaders and samplers. Training thread."""

    @classmethod
    def of(cls, job: TrainingJob) -> Self:
        """Of every job."""
        explicit = job.config.boundary == "explicit"
        return cls(job.state, job.reports.notice_of_all, explicit)

    def __init__(
        self, state: TrainingState, say: Callable[[str, int], None], explicit: bool
    ) -> None:
        """Does not own `state`. `say` takes text and severity. `explicit`: calls of `step()` are
        boundaries."""
        self._state, self._say = state, say
        self._moments = EXPLICIT if explicit else IN_FORWARD
        self._held_is_said = False
        self._at_end: dict[int, tuple[int, Any]] = {}
        """By `id()` of a place, at the last boundary or step of an epoch: number, and `_mark`."""
        self.sleep(*EXPLICIT, *IN_FORWARD)
        self.find_places()

    def find_places(self) -> None:
        """The state has other objects: take in its loaders and samplers."""
        for place in self._places():
            self.wake(*self._moments)
            if isinstance(place, LoaderPlace):
                place.has_boundaries = True

    def boundary_begins(self, in_forward: bool) -> None:
        """Record a boundary in the forward pass of the next iteration."""
        for place in self._places() if in_forward else ():
            if isinstance(place, LoaderPlace):
                place.met_boundary()

    def stepped(self) -> None:
        """Record an optimizer step with its boundary later, in a forward pass."""
        for place in self._places():
            if isinstance(place, LoaderPlace):
                place.stepped()
                self._note_end(place)
            elif place.note_end is None:  # its batch is reported after the optimizer's step
                place.note_end = partial(self._note_end, place)

    def iteration_ends(self) -> None:
        """The batch of the iteration was trained on."""
        for place in self._places():
            place.passed()
            self._note_end(place)
            if isinstance(place, LoaderPlace) and place.held and not self._held_is_said:
                self._held_is_said = True
                cure = ONE_HELD if place.held == 1 else MORE_HELD
                self._say(HELD.format(count=place.held + 1, cure=cure), logging.WARNING)

    @contextlib.contextmanager
    def saving(self, trained: bool) -> Iterator[None]:
        """Mark the places while a version without a boundary is taken."""
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

    def _note_end(self, place: Place) -> None:
        if place.at_end and self._at_end.get(id(place), (-1,))[0] != place.epoch:
            self._at_end[id(place)] = place.epoch, self._mark()

    def _is_done(self, place: Place) -> bool:
        """Whether the loop has done its work at the end of the epoch. Where no boundary came at the
        last batch, there is nothing to compare with, and the answer is yes."""
        epoch, mark = self._at_end.get(id(place), (-1, None))
        return epoch != place.epoch or mark != self._mark()

    def _places(self) -> Iterator[Place]:
        for objects in (self._state.extra, self._state.extra_per_rank):
            places = (each for each in objects.values() if isinstance(each, DataPlace))
            yield from cast("Iterator[Place]", places)

    def _mark(self) -> Any:
        """Return a mark that differs once an object or an option has changed. For tensors, of which
        there may be many, it holds only whether they were written to. None if unknown."""
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
                if not isinstance(each, (DataPlace, Generator))
            ]
            return tree_codec.pack([options, objects], "extra", _written)
        except Exception:  # the code that takes the version meets the error, and reports it
            return None


def _written(tensor: torch.Tensor, path: str) -> Any:
    counter = None if tensor.is_inference() else tensor._version
    return [tensor.data_ptr(), counter, list(tensor.shape)]


__all__ = ["EpochEnds"]
