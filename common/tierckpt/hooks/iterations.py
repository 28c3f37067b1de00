"""Iterations: where one ends and the next begins, from hooks on the optimizers and the model.

A loop that calls `step()` says so itself. For one that never does, the boundary is the first
forward pass after an optimizer step; with optimizers that take a closure it is the next step.

The two are counted apart: `restore()` returns calls of `step()`, or optimizer steps where
boundaries were guessed. A version tells which, and a loop that has called `step()` once is one that
calls it in all runs that follow: it may be killed before its first call.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch

from tierckpt.restored import Restored

from .closures import Arguments, after_first_call, closure_of
from .step_hook import never_compiled

AUTOMATIC_AFTER_STEPS = 16
"""So many steps of an optimizer without a call of `step()` mean that there will be none. (A loop
may well make several optimizer steps in one iteration.)"""

STEPLESS_CALLS = 1000
"""So many calls of `step()` in a row without a step of an optimizer: the loop steps another one.
Nobody accumulates gradients for that long."""

CALLLESS_STEPS = 1000
"""So many steps of an optimizer without a call of `step()`, where that is the boundary, are worth a
word."""

NO_STEPS = (
    f"step() was called {STEPLESS_CALLS} times, and the optimizer given to the checkpointer made "
    "no step meanwhile: no checkpoint is taken. Give it the optimizer whose step() the loop calls "
    "(what a library's prepare() or DistributedOptimizer() returned, not what went in). A step "
    "that is replayed from a CUDA graph cannot be seen either"
)
NO_CALLS = (
    f"the optimizer made {CALLLESS_STEPS} steps, and step() of the checkpointer was not called: no "
    "checkpoint was taken"
)
NO_CALLS_ANY_MORE = (
    f"{NO_CALLS}. It was called in the run before, so no boundary is guessed in this one. Where "
    'the loop does not call it any more, set boundary="forward"'
)
NO_FORWARD = (
    f"the optimizer made {2 * AUTOMATIC_AFTER_STEPS} steps, and the module given to the "
    "checkpointer was not called in training mode meanwhile: no boundary is seen, and no "
    "checkpoint is taken. Give it the module that the loop calls, not one that only holds it, or "
    "call the checkpointer's step() once an iteration. Where a function that is compiled calls the "
    'module, boundary="forward" lets that be seen'
)
IN_THE_GRAPH = (
    'Tierckpt takes forward passes of this module for the boundary (boundary="forward", or step() '
    "was not called). For one graph call the checkpointer's step() once an iteration and set "
    'boundary="explicit", or give the checkpointer what torch.compile() returned'
)
GUESSING = (
    f"step() was not called in the first {AUTOMATIC_AFTER_STEPS} steps of the optimizer: from now "
    "on the first forward pass after a step is the boundary, and restore() will return the number "
    "of optimizer steps. Where the loop does call step(), after more steps than that, set "
    'boundary="explicit": a restart would go on at a number that is none of its iterations. Where '
    'it never does, boundary="forward" says so'
)
MIXED = (
    "step() was called for the first time, after boundaries had been guessed: versions up to "
    "v{version} tell restore() optimizer steps, later ones calls of step(), {iteration} with this "
    'one{since}. Set boundary="explicit" where the loop makes more than '
    f"{AUTOMATIC_AFTER_STEPS} steps a call"
)

Say = Callable[[str, int], None]
"""Takes text and severity."""


class Iterations:
    """Counts the optimizers' steps since the last boundary. Training thread."""

    def __init__(
        self,
        mode: str,
        *,
        boundary: Callable[[], None],
        before_step: Callable[[str], None],
        made_step: Callable[[str], bool],
        left_to_us: Callable[[], None],
        say: Say,
        step_of: Callable[[torch.optim.Optimizer], Callable[..., Any]] = lambda each: (
            type(each).step
        ),
    ) -> None:
        """Who is told what, on the training thread.

        Args:
            mode: `Config.boundary`.
            boundary: an iteration of a loop that does not call `step()` is over.
            before_step: the optimizer of this label is about to change something. (Where the
                backward pass is the closure of its step, that has been called once: `closures`.)
            made_step: its step ended; returns False when that was none of the training's.
            left_to_us: a step was made in such a loop, and the next batch is drawn before the
                boundary.
            say: what is odd about the loop, each thing once.
            step_of: the function that changes an optimizer's parameters.
        """
        self.explicit = mode == "explicit"
        """Boundaries are calls of `step()`: it is said so, or it was called, in this run or before
        the version that it goes on from."""
        self.guessed = False
        """The newest boundary was none."""
        self.stepping: set[str] = set()
        """Optimizers whose step has begun."""
        self._mode = mode
        self._boundary, self._before_step = boundary, before_step
        self._made_step, self._left_to_us = made_step, left_to_us
        self._say, self._step_of = say, step_of
        self._since: dict[str, int] = {}
        """Steps of each optimizer since the last boundary."""
        self._seen: dict[str, int] = {}
        """And since the beginning."""
        self._stepless = 0
        """Calls of `step()` since an optimizer made one."""
        self._called = False
        """In this run."""
        self._told: set[str] = set()
        self._labels: dict[int, str] = {}
        """Of the optimizers, by `id()`."""
        self._hooks: list[Any] = []
        self._model: torch.nn.Module | None = None
        """Whose forward passes are not heard of yet."""
        self._process = os.getpid()

    def watch(
        self, model: torch.nn.Module, steppers: Mapping[str, Iterable[torch.optim.Optimizer]]
    ) -> None:
        """Register the hooks; beside them `begins` is to be called before all steps. `steppers`:
        for each label those whose steps are its; one of them may step within another's step."""
        for label, optimizers in steppers.items():
            for optimizer in optimizers:
                self._labels[id(optimizer)] = label
                self._hooks.append(optimizer.register_step_post_hook(self._counter(label)))
        if self._mode != "explicit":
            self._model = model
        if self._mode == "forward":
            self._listen()

    @never_compiled("Tierckpt looks for the module that the loop calls")
    def _listen(self) -> None:
        """Hear of forward passes. Not before they may be boundaries: a module with a hook is
        another one to who compiles or scripts it."""
        if self._model is not None:
            asked = self._mode == "forward"
            for module in [self._model] if asked else _called_as(self._model):
                self._hooks.append(module.register_forward_pre_hook(self._before_forward))
            self._model = None

    def unwatch(self) -> None:
        """The inverse of `watch`."""
        self._model = None
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._labels.clear()

    @property
    def steps(self) -> int:
        """Optimizer steps since the last boundary; several optimizers step side by side."""
        return max(self._since.values(), default=0)

    def steps_of(self, label: str) -> int:
        """The same of one optimizer."""
        return self._since.get(label, 0)

    @property
    def stepped(self) -> list[str]:
        """Labels of those that made steps since the last boundary."""
        return [label for label, steps in self._since.items() if steps]

    def pass_boundary(self) -> int:
        """Start counting anew; returns the steps that were made."""
        steps = self.steps
        self._since.clear()
        return steps

    def count_one(self) -> None:
        """Count as a step what changed the state without an optimizer."""
        self._since[""] = self._since.get("", 0) + 1

    def called(self) -> None:
        """`step()` was called."""
        self.explicit = self._called = True
        self.guessed = False
        self._stepless = 0 if self._since else self._stepless + 1
        if self._stepless >= STEPLESS_CALLS:
            self._tell(NO_STEPS, logging.ERROR)

    def go_on_from(self, restored: Restored) -> None:
        """The state is that of a version. Says what is odd about its number.

        Whoever asks for the forward pass as the boundary has that, whatever was before.
        """
        self.pass_boundary()
        self.stepping.clear()  # of one that an exception ended, which the restore has undone
        self.guessed = restored.guessed and self._mode != "explicit"
        if self._mode == "auto":
            self.explicit = self._called or restored.counts_calls
        if odd := _odd_number(restored, self._mode):
            self._tell(odd, logging.WARNING)

    def automatic(self) -> bool:
        """True when `step()` is evidently never called."""
        if self.explicit:
            return False
        seen = max(self._seen.values(), default=0)
        return self._mode == "forward" or seen >= AUTOMATIC_AFTER_STEPS

    def watches(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it is one of these."""
        return id(optimizer) in self._labels

    def begins(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments | None:
        """A step of one of these begins; returns what it is to be called with instead, if anything.

        To be called before every other hook: one of the user's may change what is being copied.
        """
        label = self._labels[id(optimizer)]
        closure = closure_of(args, kwargs)
        if callable(closure) and label in self._since and self.automatic():
            self._guess()  # the forward passes come inside the step, too late for a boundary
        self.stepping.add(label)
        step, then = self._step_of(optimizer), partial(self._before_step, label)
        others = after_first_call(optimizer, step, args, kwargs, then)
        if others is None:
            self._before_step(label)
        return others

    def _counter(self, label: str) -> Callable[..., None]:
        """Hook that runs after each step; a step inside another (Horovod's) fires it twice."""

        def after_step(*_: Any) -> None:
            if label not in self.stepping:
                return
            self.stepping.discard(label)
            if not self._made_step(label):
                return
            self._since[label] = self._since.get(label, 0) + 1
            self._seen[label] = self._seen.get(label, 0) + 1
            if self.automatic():
                self._listen()
                self._left_to_us()
            self._miss_boundary(self._since[label])

        return after_step

    def _miss_boundary(self, steps: int) -> None:
        """Say it when so many steps without a boundary are too many."""
        if self.automatic():
            if steps == 2 * AUTOMATIC_AFTER_STEPS:
                self._tell(NO_FORWARD, logging.ERROR)
        elif steps == CALLLESS_STEPS and not self._called:
            if self._mode == "explicit":
                self._tell(NO_CALLS, logging.INFO)
            else:
                self._tell(NO_CALLS_ANY_MORE, logging.WARNING)

    @never_compiled(IN_THE_GRAPH)
    def _before_forward(self, module: torch.nn.Module, *_: Any) -> None:
        if not self._since or self.stepping or not self.automatic():
            return
        if module.training and torch.is_grad_enabled():
            self._guess()

    def _guess(self) -> None:
        """A boundary of a loop that does not tell any."""
        if os.getpid() != self._process:
            return  # a forked child has the hooks as well, and neither the agent nor its threads
        if self._mode == "auto":
            self._tell(GUESSING, logging.WARNING)
        self.guessed = True
        self._boundary()

    def _tell(self, text: str, severity: int) -> None:
        """Once."""
        if text not in self._told:
            self._told.add(text)
            self._say(text, severity)

    def __reduce__(self) -> tuple[Any, ...]:
        """`copy.deepcopy(model)` and `torch.save(model)` take the hooks along, and not us."""
        return (Unattached, ())


def _called_as(model: torch.nn.Module) -> list[torch.nn.Module]:
    """What `torch.compile` made of the module before, else the module. A graph of one of torch's
    own modules has no hook that comes later, and must not get one when it is made anew."""
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None:
        return [model]
    compiled = [each for each in gc.get_objects() if type(each) is dynamo.OptimizedModule]
    return [each for each in compiled if each._orig_mod is model] or [model]


class Unattached:
    """What a copy of a model has where the original has our hooks: every call does nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _do_nothing


def _do_nothing(*_: Any, **__: Any) -> None:
    """See Unattached."""


def _odd_number(restored: Restored, mode: str) -> str:
    """What to say of the number that `restore()` returns; empty where it is what one expects."""
    number = int(restored)
    taken = f"v{restored.version} was taken before step() was ever called"
    if restored.guessed and mode == "auto":
        return (
            f"{taken}: restore() returns {number}, its optimizer steps. Where the loop calls "
            "step(), after several of them, that is none of its iterations: start it again with "
            f'boundary="explicit", and restore() returns {restored.calls}. Where it never does, '
            'boundary="forward" says so'
        )
    if restored.guessed and mode == "explicit":
        return (
            f"{taken}, maybe in the middle of an iteration: restore() returns {number}, the calls "
            "of step(), and what had been done of the next iteration is in the weights"
        )
    if mode == "forward" and restored.counts_calls and number != restored.version:
        return (
            f"restore() returns {number}, the calls of step() up to v{restored.version}; later "
            'versions will tell it optimizer steps, because of boundary="forward"'
        )
    return ""


__all__ = ["Iterations", "Unattached"]
