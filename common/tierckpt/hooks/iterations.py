"""Iterations: where one ends and the next begins, by hooks on the optimizers and the model.

With `boundary="explicit"` a call of `step()` is the boundary. With `boundary="forward"` it is the
first forward pass in training mode after an optimizer step; with optimizers that take a closure,
the next step. The mode is that of the settings, for the whole run.

`restore()` returns calls of `step()` in the one mode, optimizer steps in the other. A version
records which of the two its number counts.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch

from tierckpt.restored import Restored

from .closures import Arguments, after_first_call, closure_of
from .step_hook import never_compiled

STEPS_UNTIL_CALL = 16
"""Optimizer steps without any call of `step()` after which an error is reported. (A loop may well
make several optimizer steps in one iteration.)"""

STEPS_UNTIL_FORWARD = 32
"""Optimizer steps without a forward pass of the module after which an error is reported."""

STEPLESS_CALLS = 1000
"""Calls of `step()` in a row without a step of an optimizer: the loop steps another one. Nobody
accumulates gradients for that long."""

NO_STEPS = (
    f"step() was called {STEPLESS_CALLS} times, and the optimizer given to the checkpointer made "
    "no step in all of them: no checkpoint is taken. Give it the optimizer whose step() the loop "
    "calls (what a library's prepare() or DistributedOptimizer() returned, not what went in). A "
    "step that is replayed from a CUDA graph cannot be seen either"
)
NO_CALLS = (
    f"the optimizer made {STEPS_UNTIL_CALL} steps, and step() of the checkpointer was not called: "
    "no checkpoint is taken until it is. Call checkpointer.step() once an iteration, after "
    'optimizer.step(); where the loop cannot be changed, set boundary="forward", and the next '
    "forward pass in training mode after an optimizer step is the boundary. A loop that makes more "
    f"than {STEPS_UNTIL_CALL} steps in one iteration need do nothing"
)
FIRST_CALL = (
    "step() of the checkpointer was called for the first time, after {steps} optimizer steps: "
    "checkpoints are taken from here on"
)
NO_EFFECT = (
    'step() of the checkpointer does nothing with boundary="forward", but that it takes `metric`: '
    "the next forward pass in training mode after an optimizer step is the boundary. Remove the "
    'call; or give the argument boundary="explicit", and calls of step() are the boundaries'
)
NO_FORWARD = (
    f"the optimizer made {STEPS_UNTIL_FORWARD} steps, and the module given to the checkpointer was "
    "not called in training mode in all of them: no boundary is seen, and no checkpoint is taken. "
    "Give it the module that the loop calls, not one that only holds it; or give the argument "
    'boundary="explicit", and call checkpointer.step() once an iteration'
)
IN_THE_GRAPH = (
    'Tierckpt takes forward passes of this module for the boundary (boundary="forward"). For one '
    "graph call the checkpointer's step() once an iteration and give the argument "
    'boundary="explicit", or give the checkpointer what torch.compile() returned'
)
COUNTED_CALLS = (
    "restore() returns {number}, the calls of step() up to v{version}, which was taken with "
    'boundary="explicit". This run has boundary="forward": its versions count optimizer steps, and '
    'go on from {version}. To go on counting calls, give the argument boundary="explicit" and call '
    "step() once an iteration. To go on with steps, make sure that the loop may begin at {number}; "
    "later restarts return optimizer steps"
)
COUNTED_STEPS = (
    "restore() returns {number}, the optimizer steps up to v{version}, which was taken with "
    'boundary="forward", maybe in the middle of an iteration. This run has boundary="explicit": '
    "its versions count calls of step(), and go on from {number}. To go on counting steps, set "
    'boundary="forward". To go on with calls, make sure that the loop may begin at {number}: '
    "where it makes several optimizer steps in one iteration, that is none of its iterations"
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
        keep_streams: Callable[[], None],
        say: Say,
        step_of: Callable[[torch.optim.Optimizer], Callable[..., Any]] = lambda each: (
            type(each).step
        ),
        no_calls: str = NO_CALLS,
    ) -> None:
        """Callbacks, all of them called on the training thread.

        Args:
            mode: `Config.boundary`.
            boundary: a forward pass (or the step of a closure) began the next iteration.
            before_step: the optimizer of this label is about to change something. (Where the
                backward pass is the closure of its step, that has been called once: `closures`.)
            made_step: its step ended; returns False when that was none of the training's.
            keep_streams: a step was made whose boundary is a forward pass: the next batch is drawn
                before that.
            say: reports what is odd about the loop, each thing once.
            step_of: the function that changes an optimizer's parameters.
            no_calls: the error after STEPS_UNTIL_CALL steps without a call of `step()`.
        """
        self.explicit = mode == "explicit"
        """Boundaries are calls of `step()`."""
        self.counts = "calls" if self.explicit else "steps"
        """What the number of a version counts; see `VersionFacts.iteration_counts`."""
        self.stepping: set[str] = set()
        """Optimizers whose step has begun."""
        self._boundary, self._before_step = boundary, before_step
        self._made_step, self._keep_streams = made_step, keep_streams
        self._say, self._step_of, self._no_calls = say, step_of, no_calls
        self._since: dict[str, int] = {}
        """Steps of each optimizer since the last boundary."""
        self._called = False
        """`step()` was, in this run."""
        self._uncalled: Counter[str] = Counter()
        """Steps of each optimizer before that."""
        self._stepless = 0
        """Calls of `step()` since an optimizer made one."""
        self._said: set[str] = set()
        self._labels: dict[int, str] = {}
        """Of the optimizers, by `id()`."""
        self._hooks: list[Any] = []
        self._process = os.getpid()

    def watch(
        self, model: torch.nn.Module, steppers: Mapping[str, Iterable[torch.optim.Optimizer]]
    ) -> None:
        """Register the hooks; beside them `begins` is to be called before all steps.

        `steppers` has for each label the optimizers whose steps are its; one of them may step
        within another's step. The model gets a hook only where forward passes are boundaries: a
        module with a hook is another one to `torch.compile` and `torch.jit.script`.
        """
        for label, optimizers in steppers.items():
            for optimizer in optimizers:
                self._labels[id(optimizer)] = label
                self._hooks.append(optimizer.register_step_post_hook(self._counter(label)))
        if not self.explicit:
            self._hooks.append(model.register_forward_pre_hook(self._before_forward))

    def unwatch(self) -> None:
        """The inverse of `watch`."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._labels.clear()

    @property
    def steps(self) -> int:
        """Optimizer steps since the last boundary; several optimizers step side by side."""
        return max(self._since.values(), default=0)

    @property
    def stepped(self) -> list[str]:
        """Labels of those that made steps since the last boundary."""
        return [label for label, steps in self._since.items() if steps]

    def pass_boundary(self) -> int:
        """Begin to count at 0 again; returns the steps that were made."""
        steps = self.steps
        self._since.clear()
        return steps

    def count_one(self) -> None:
        """Count as a step what changed the state without an optimizer."""
        self._since[""] = self._since.get("", 0) + 1

    def called(self) -> bool:
        """`step()` was called; returns whether that ends an iteration."""
        if not self.explicit:
            self._say_once(NO_EFFECT, logging.ERROR)
            return False
        if not self._called and self._no_calls in self._said:
            steps = max(self._uncalled.values())
            self._say_once(FIRST_CALL.format(steps=steps), logging.INFO)
        self._called = True
        self._stepless = 0 if self._since else self._stepless + 1
        if self._stepless >= STEPLESS_CALLS:
            self._say_once(NO_STEPS, logging.ERROR)
        return True

    def go_on_from(self, restored: Restored) -> None:
        """The state is that of a version. Warns where its number counts what this run does not."""
        self.pass_boundary()
        self.stepping.clear()  # of one that an exception ended, which the restore has undone
        if restored.iteration_counts != self.counts:
            text = COUNTED_STEPS if self.explicit else COUNTED_CALLS
            text = text.format(number=int(restored), version=restored.version)
            self._say_once(text, logging.WARNING)

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
        if callable(closure) and label in self._since and not self.explicit:
            self._pass_forward()  # the forward passes come inside the step, too late for a boundary
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
            if not self.explicit:
                self._keep_streams()
                if self._since[label] == STEPS_UNTIL_FORWARD:
                    self._say_once(NO_FORWARD, logging.ERROR)
            elif not self._called:
                self._uncalled[label] += 1
                if self._uncalled[label] == STEPS_UNTIL_CALL:
                    self._say_once(self._no_calls, logging.ERROR)

        return after_step

    @never_compiled(IN_THE_GRAPH)
    def _before_forward(self, module: torch.nn.Module, *_: Any) -> None:
        if self._since and not self.stepping and module.training and torch.is_grad_enabled():
            self._pass_forward()

    def _pass_forward(self) -> None:
        """A boundary that the loop does not call."""
        if os.getpid() == self._process:
            # A forked child has the hooks as well, and neither the agent nor its threads.
            self._boundary()

    def _say_once(self, text: str, severity: int) -> None:
        if text not in self._said and os.getpid() == self._process:
            self._said.add(text)
            self._say(text, severity)

    def __reduce__(self) -> tuple[Any, ...]:
        """`copy.deepcopy(model)` and `torch.save(model)` take the hooks along, and not us."""
        return (Unattached, ())


class Unattached:
    """In a copy of a model, in the place of the original's hooks: every call does nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _do_nothing


def _do_nothing(*_: Any, **__: Any) -> None:
    """See Unattached."""


__all__ = ["Iterations", "Unattached"]
