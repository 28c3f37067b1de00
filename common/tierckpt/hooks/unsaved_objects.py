"""Unsaved objects: they belong to the training, have a state, and were not given.

A scheduler's place in its schedule, a scaler's scale, averaged weights: without them a resumed run
differs, and nothing fails. torch keeps no list of them, and an optimizer does not know its
schedulers; they know it. So the process's objects are searched once, at the first boundary, when a
script has made and registered its objects; and again when an option in an optimizer's groups shows
a new scheduler. A scaler is found as the caller of the step.
"""

from __future__ import annotations

import gc
import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from tierckpt._text import in_words
from tierckpt.state.extras import PlainValues
from tierckpt.state.optimizers.nested import inside
from tierckpt.state.training_state import TrainingState, optimizer_class

from . import stateful_objects
from .object_reach import reached, vars_of

MOST_FRAMES = 24
"""Limit of frames between a scaler and the optimizer's step that it calls: wrappers and hooks."""
MARKS = ("_wrapped_by_lr_sched", "_with_counter")
"""torch's schedulers set one of them on the `step` of their optimizer; the second in older
versions."""
MOST_LOOKS = 8
"""Limit of searches: some optimizers may keep changing the keys of their groups."""
COMPARED = 3
"""Boundaries at which copies of the model are compared."""
OFTEN, SELDOM = 64, 16
"""So many boundaries look for the marks of a new scheduler; then one in so many does."""
EXTRA, PER_RANK = "extra=", "extra_per_rank="

Say = Callable[[str, int], None]
_Ref = Callable[[], Any]

_earlier: list[_Ref] = []
"""Averages and loaders of trainings that this process has ended."""


class Unsaved:
    """Searches for unsaved objects and reports how to give them. Training thread; not
    collective."""

    def __init__(
        self,
        state: TrainingState,
        unregistered: Callable[[], Iterable[torch.optim.Optimizer]],
        line: str,
        say: Say,
    ) -> None:
        """`unregistered` returns optimizers that step the model's parameters and were not given.
        `line` shows how to give an object, with `{name}` and `{it}`. `say` takes text and
        severity."""
        self._state, self._unregistered, self._line, self._say = state, unregistered, line, say
        self._scalers: list[_Ref] = []
        self._looks = self._boundaries = 0
        self._marks: list[Any] = []
        self._copies: list[tuple[_Ref, list[Any]]] = []
        """Copies of the model, with samples of their values at the first boundaries."""
        self._reported: list[_Ref] = []
        self._known: list[_Ref] = []
        """Averages and loaders of this training, given or not."""
        self.texts: list[str] = []
        """The warnings so far."""
        self.schedulers = 0
        """Number of schedulers found, given or not."""

    def close(self) -> None:
        """Leave the objects of this training out of the searches of later ones in the process."""
        weak = [each for each in self._known if isinstance(each, weakref.ref)]
        _earlier[:] = [*(each for each in _earlier if each() is not None), *weak]
        self._known = []

    def step_begins(self) -> None:
        """A step of any optimizer starts; called inside the step."""
        if self._looks:
            return
        frame = sys._getframe(1)
        for _ in range(MOST_FRAMES):
            if frame.f_code.co_name == "step":
                scaler: Any = frame.f_locals.get("self")
                if issubclass(type(scaler), torch.amp.GradScaler) and scaler.is_enabled():
                    if not _has(self._scalers, scaler):
                        self._scalers.append(_ref(scaler))
                    return
            if frame.f_back is None:
                return
            frame = frame.f_back

    def boundary(self, speaks: bool) -> None:
        """Search at the first boundary, or if something shows a new object. Only the rank that
        `speaks` searches, as the objects are the same on all ranks."""
        try:
            if self._is_due(speaks):
                self._look()
            elif self._copies:
                self._compare_copies()
        except Exception as error:  # the search reads other libraries' objects
            self._looks = MOST_LOOKS
            text = f"the search for unsaved objects failed: {in_words(error)}"
            self._say(text, logging.INFO)

    def _is_due(self, speaks: bool) -> bool:
        if self._looks >= MOST_LOOKS or (self._looks and not speaks):
            return False
        self._boundaries += 1
        if self._looks and self._boundaries > OFTEN and self._boundaries % SELDOM:
            return False
        marks = [_marks_of(each) for each in self._state.given.values()]
        if self._looks and marks == self._marks:
            return False
        self._looks, self._marks = self._looks + 1, marks
        return speaks

    def _look(self) -> None:
        found = stateful_objects.look()
        if by_hand := self._by_hand(found.trainers):
            self._warn(by_hand)
            self._looks = MOST_LOOKS
            return
        missing = self._missing(found)
        if self._looks == 1 and EXTRA in self._line:
            self._look_for_copies(found.averages)
        del found
        if missing:
            gc.collect()  # objects kept alive only by a cycle are not in use
        for ref, name, text in missing:
            if (each := ref()) is not None:
                self._report(each, name, text)
        if not self.schedulers:
            self._say_of_hidden()

    def _look_for_copies(self, averages: list[Any]) -> None:
        copies = stateful_objects.copies_of(self._state.model)
        stored = reached([*self._given(), *averages], copies)
        lost = [each for each in copies if id(each) not in stored and not _has(_earlier, each)]
        self._copies = [(_ref(each), [stateful_objects.sample_of(each)]) for each in lost]

    def _compare_copies(self) -> None:
        """Report copies that change with every step: averages of the weights."""
        for ref, samples in self._copies:
            if (each := ref()) is not None:
                samples.append(stateful_objects.sample_of(each))
                if len(samples) == COMPARED and all(a != b for a, b in pairwise(samples)):
                    self._report(each, "averages", OF_MEAN)
        self._copies = [pair for pair in self._copies if len(pair[1]) < COMPARED and pair[0]()]

    def _given(self) -> list[Any]:
        every = (*self._state.extra.values(), *self._state.extra_per_rank.values())
        return [each for each in every if not isinstance(each, PlainValues)]

    def _by_hand(self, trainers: list[Any]) -> str:
        """A warning if a framework runs this training, and no integration was used; or empty."""
        if not trainers or reached(self._given(), trainers):
            return ""
        frame: Any = sys._getframe(2)  # a look at `_look`'s own would keep all that it has found
        running = set()
        while frame is not None:
            running.add(id(frame.f_locals.get("self")))
            frame = frame.f_back
        stepped = [*self._ours()]
        for each in trainers:
            held = [getattr(it, "optimizer", it) for it in vars_of(each).get("_optimizers", ())]
            if id(each) in running or any(it is mine for it in held for mine in stepped):
                package = stateful_objects.package_of(type(each))
                name = stateful_objects.TRAINERS[package]
                return BY_HAND.format(package=package, name=name, line=LINES[package])
        return ""

    def _missing(self, found: stateful_objects.Found) -> list[tuple[_Ref, str, str]]:
        """Objects that were not given: a reference, a name, and a description of each."""
        ours = [*self._ours()]
        schedulers = [each for each in found.schedulers if stateful_objects.steps_any(each, ours)]
        self.schedulers = len(schedulers)
        averages = [
            e for e in found.averages if stateful_objects.averages_any(e, self._state.model)
        ]
        scalers = [each for ref in self._scalers if (each := ref()) is not None]
        loaders = found.loaders if EXTRA in self._line else []
        seeded = [each for each in loaders if any(each is it for it in self._given())]
        seeded = [*filter(stateful_objects.draws_seeds_again, seeded)]
        stored = reached(self._given(), [*schedulers, *scalers, *averages, *loaders])
        if any(id(each) in stored for each in loaders):  # the others are an evaluation's
            loaders = []
        lost = [each for each in schedulers if not stateful_objects.is_stored(each, stored)]
        missing = [
            (_ref(each), "scheduler", self._of_scheduler(each))
            for each in stateful_objects.outermost(lost)
        ]
        for name, text, every in (
            ("scaler", OF_SCALER, scalers),
            ("averages", OF_MEAN, averages),
            ("data", OF_LOADER, stateful_objects.trained_on(loaders)),
        ):
            missing += [(_ref(each), name, text) for each in every if id(each) not in stored]
        lasting = found.with_persistent_workers()[:1]
        missing += [(_ref(each), "loader", PERSISTENT) for each in lasting]
        missing += [(_ref(each), "loader", SEEDS) for each in seeded[:1]]
        self._known = [*map(_ref, (*averages, *loaders, *lasting))]
        missing = [each for each in missing if not _has((*self._reported, *_earlier), each[0]())]
        others = self._of_others(found.trainers, [ref() for ref, *_ in missing])
        return [each for each in missing if id(each[0]()) not in others]

    def _of_others(self, trainers: list[Any], objects: list[Any]) -> set[int]:
        """`id()`s of the objects that only other Trainers than this training's refer to."""
        mine = reached(self._given(), trainers) if objects else ()
        if not mine:  # no Trainer's training, or one that the checkpointer does not know
            return set()
        ours = reached([each for each in trainers if id(each) in mine], objects)
        return reached([each for each in trainers if id(each) not in mine], objects) - ours

    def _ours(self) -> Iterator[Any]:
        """Optimizers whose steps change the model."""
        for each in (*self._state.given.values(), *self._unregistered()):
            yield each
            yield from (inner for _, inner in inside(each))

    def _of_scheduler(self, scheduler: Any) -> str:
        label, optimizer = next(
            (
                (label, each)
                for label, each in self._state.given.items()
                if stateful_objects.steps_any(scheduler, [each])
            ),
            ("", None),
        )
        owner = f"optimizer {label!r}, {optimizer_class(optimizer)}" if optimizer else SOME
        return OF_SCHEDULER.format(owner=owner)

    def _report(self, obj: Any, name: str, text: str) -> None:
        self._reported.append(_ref(obj))
        if text in (PERSISTENT, SEEDS):
            self._warn(f"a {type(obj).__name__} {text}")
            return
        it = name_in_script(obj) or name
        name = it.rpartition(".")[2]
        if text is OF_LOADER:
            line = self._line.replace(EXTRA, PER_RANK).format(name=name, it=it)
            line = f"{it} = tierckpt.ResumableLoader({it}), and give that: {line}"
            self._warn(f"{type(obj).__name__} {text} Wrap it, {line}")
            return
        line = self._line.format(name=name, it=it)
        self._warn(f"{type(obj).__name__} {text} Give it, too: {line}")

    def _say_of_hidden(self) -> None:
        """Warn of a scheduler after gc.freeze(), which hides objects; torch's mark is still
        there."""
        marked = any(_marks_of(each)[0] for each in self._state.given.values())
        given = any(isinstance(each, LRScheduler) for each in self._given())
        if marked and not given and gc.get_freeze_count():  # which counts them one by one
            line = self._line.format(name="scheduler", it="scheduler")
            self._warn(f"A scheduler {OF_SCHEDULER.format(owner=SOME)} Give it, too: {line}")

    def _warn(self, text: str) -> None:
        self.texts.append(text)
        self._say(text, logging.WARNING)


LIGHTNING = "Trainer(callbacks=[tierckpt.lightning.TierCheckpoint(path=...)])"
LINES = {
    "lightning": LIGHTNING,
    "pytorch_lightning": LIGHTNING,
    "transformers": "tierckpt.transformers.TierTrainer(..., tierckpt={'path': ...}).train()",
    "accelerate": "ckpt = tierckpt.accelerate.attach(accelerator, path=...), and loop over "
    "ckpt.resume(loader)",
}
"""The lines of the integrations, by the framework's package."""
BY_HAND = (
    "this training belongs to {package}'s {name}, and the checkpointer was attached by hand: "
    "loops, counters, schedulers and the place in the data are in no checkpoint, so a resumed run "
    "is not exact. Use the integration in its place: {line}"
)
SOME = "an optimizer that steps parameters of the model"
NOTHING = "and no object given to the checkpointer stores it:"
OF_SCHEDULER = (
    f"sets the learning rate of {{owner}}, {NOTHING} its place in the schedule is in no "
    "checkpoint, so a resumed run starts the schedule again."
)
OF_SCALER = (
    f"scales the loss, {NOTHING} its scale is in no checkpoint, so a resumed run starts with the "
    "first scale, and skips other steps."
)
OF_MEAN = (
    f"has averages of the model's weights, {NOTHING} they are in no checkpoint, so a resumed run "
    "starts new averages."
)
OF_LOADER = (
    f"is in the middle of a pass, {NOTHING} its place in the data is in no checkpoint, so a "
    "resumed run starts the epoch again."
)

PERSISTENT = (
    "has persistent_workers=True: random numbers that samples draw in its workers go on from epoch "
    "to epoch, and it draws from torch's generator only at its first pass in a process. Both are "
    "in no checkpoint, so a resumed run draws other random numbers in later epochs. For an exact "
    "restart set persistent_workers=False, also for the loader of an evaluation."
)
SEEDS = (
    "was given itself: it stores its place in the data, and not the random numbers. In a resumed "
    "run it draws seeds again when it goes on in the middle of a pass, so dropout, random "
    "transforms or later shuffles differ. For an exact restart wrap it: data = "
    "tierckpt.ResumableLoader(loader), loop over data, and give extra_per_rank={'data': data}."
)


def _ref(obj: Any) -> _Ref:
    """A weak reference, if the class allows it."""
    try:
        return weakref.ref(obj)
    except TypeError:
        return lambda: obj


def _has(refs: Iterable[_Ref], obj: Any) -> bool:
    return any(ref() is obj for ref in refs)


def _marks_of(optimizer: Any) -> tuple[bool, int]:
    """Traces of schedulers on an optimizer: a mark, and their own options in the groups."""
    groups = getattr(optimizer, "param_groups", None) or [{}]
    step = getattr(optimizer, "step", None)
    step = getattr(step, "before", step)
    return any(hasattr(step, mark) for mark in MARKS), len(groups[0])


def name_in_script(obj: Any) -> str:
    """The name of the variable, or attribute of `self`, in the running functions that holds the
    object; empty if there is none."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in stateful_objects.OWN:
            names: dict[str, Any] = {**frame.f_globals, **frame.f_locals}
            for name, value in names.items():
                if value is obj and not name.startswith("_"):
                    return name
            for name, value in getattr(names.get("self"), "__dict__", {}).items():
                if value is obj:
                    return f"self.{name}"
        frame = frame.f_back
    return ""


__all__ = ["Unsaved", "name_in_script"]
