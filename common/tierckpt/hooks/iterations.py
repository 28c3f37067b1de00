"""Iterations: the boundaries between them, found by hooks on the optimizers and the model.

With `boundary="explicit"` a call of `step()` is the boundary. With `boundary="forward"` the
boundary is the first forward pass in training mode after an optimizer step; for optimizers with a
closure, it is the next step. The settings decide the mode for the whole run.

`restore()` returns calls of `step()` in the first mode, optimizer steps in the second. A version
records which of the two its number counts.

`Accumulation` looks at the gradients that a loop accumulates: those of backward passes since an
optimizer's last step. They belong to the weights of these passes. `load_from` refuses to put other
weights below them.

`Hooks` are those of one checkpointer on its model and on optimizers, installed and removed
together. Before any step of any optimizer of the process, one of three cases is found: a given
optimizer (`Iterations`), another one that changes the state (`UnregisteredOptimizers`), or an
unrelated one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from tierckpt._text import some
from tierckpt.core.parts import Parts
from tierckpt.errors import RestoreError
from tierckpt.restored import Restored
from tierckpt.state.counters import Counters
from tierckpt.state.optimizers import optimizers_inside
from tierckpt.state.training_state import TrainingState

from .optimizer_steps import (
    Arguments,
    CustomMethods,
    GlobalStepHook,
    UnregisteredOptimizers,
    after_first_call,
    closure_of,
    never_compiled,
)

__all__ = ["Accumulation", "Hooks", "Iterations", "Unattached"]


STEPS_UNTIL_CALL = 16
"""Optimizer steps without any call of `step()` after which an error is reported. (A loop may make
several optimizer steps in one iteration.)"""

STEPS_UNTIL_FORWARD = 32
"""Optimizer steps without a forward pass of the module after which an error is reported."""

STEPLESS_CALLS = 1000
"""Calls of `step()` in a row without an optimizer step: the loop steps another optimizer. No loop
accumulates gradients for that long."""

NO_STEPS = (
    f"no checkpoint is taken: step() was called {STEPLESS_CALLS} times, and the optimizer given to "
    "the checkpointer made no step. Give the optimizer that the loop steps: the result of "
    "DistributedOptimizer(), not its argument; the result of Accelerate's prepare(), or the "
    "optimizer inside it. A step replayed from a CUDA graph cannot be seen either"
)
NO_CALLS = (
    f"no checkpoint is taken: the optimizer made {STEPS_UNTIL_CALL} steps, and step() of the "
    "checkpointer was not called. Call checkpointer.step() once per iteration, after "
    'optimizer.step(). If you cannot change the loop, set boundary="forward": then the next '
    "forward pass in training mode after an optimizer step is the boundary. A loop that makes more "
    f"than {STEPS_UNTIL_CALL} steps in one iteration needs no change"
)
FIRST_CALL = (
    "step() of the checkpointer was called for the first time, after {steps} optimizer steps: "
    "checkpoints are taken from here on"
)
NO_EFFECT = (
    'step() of the checkpointer does nothing but take `metric` if boundary="forward": the '
    "boundary is the next forward pass in training mode after an optimizer step. Remove the "
    'call; or set boundary="explicit", and calls of step() are the boundaries'
)
NO_FORWARD = (
    f"no checkpoint is taken: the optimizer made {STEPS_UNTIL_FORWARD} steps, and the module given "
    "to the checkpointer was not called in training mode. Give the module that the loop calls, not "
    "one that contains it; or give the argument "
    'boundary="explicit", and call checkpointer.step() once per iteration'
)
IN_THE_GRAPH = (
    'Tierckpt uses forward passes of this module as the boundary (boundary="forward"). For one '
    "graph call the checkpointer's step() once per iteration and give the argument "
    'boundary="explicit", or give the checkpointer the result of torch.compile()'
)
COUNTED_CALLS = (
    'restore() returns {number}: v{version} was taken with boundary="explicit", and this is its '
    'number of calls of step(). This run has boundary="forward": its versions count optimizer '
    'steps, and continue from {version}. To keep counting calls, set boundary="explicit" and call '
    "step() once per iteration. To count steps, make sure that the loop may start at {number}; "
    "later restarts return optimizer steps"
)
COUNTED_STEPS = (
    'restore() returns {number}: v{version} was taken with boundary="forward", and this is its '
    "number of optimizer steps, maybe in the middle of an iteration. This run has "
    'boundary="explicit": its versions count calls of step(), and continue from {number}. To keep '
    'counting steps, set boundary="forward". To count calls, make sure that the loop may start at '
    "{number}: if it makes several optimizer steps in one iteration, that is not an iteration"
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
        made_step: Callable[[str], bool] | None,
        stepped: Callable[[Iterable[str]], None],
        keep_streams: Callable[[], None],
        say: Say,
        step_class: Callable[[torch.optim.Optimizer], type[torch.optim.Optimizer]] = type,
        no_calls: str = NO_CALLS,
    ) -> None:
        """Store the callbacks; all of them are called on the training thread.

        Args:
            mode: `Config.boundary`.
            boundary: a forward pass (or the step of a closure) started the next iteration.
            before_step: the optimizer of this label is about to change something. (If the backward
                pass is the closure of its step, this was called once before: `after_first_call`.)
            made_step: its step ended; returns False if the step was not part of the training. None:
                every step is.
            stepped: a step was made; receives the labels of `Iterations.since`.
            keep_streams: a step was made and the next forward pass is its boundary: the next batch
                is drawn before that.
            say: reports problems of the loop, each text once.
            step_class: the class with the `step` that changes an optimizer's parameters.
            no_calls: the error after STEPS_UNTIL_CALL steps without a call of `step()`.
        """
        self.explicit = mode == "explicit"
        """True if boundaries are calls of `step()`."""
        self.counts = "calls" if self.explicit else "steps"
        """The unit of version numbers; see `VersionFacts.iteration_counts`."""
        self.stepping: set[str] = set()
        """Labels of optimizers in the middle of a step."""
        self.repeating = False
        """True while a restart makes steps of a journal again: these do not count."""
        self._boundary, self._before_step = boundary, before_step
        self._made_step, self._tell_stepped = made_step, stepped
        self._keep_streams = never_compiled("Tierckpt copies random streams here")(keep_streams)
        self._say, self._step_class, self._no_calls = say, step_class, no_calls
        self.since: dict[str, int] = {}
        """Steps of each optimizer since the last boundary; its keys are their labels."""
        self._called = False
        """True after the first call of `step()` in this run."""
        self._uncalled: Counter[str] = Counter()
        """Steps of each optimizer before that call."""
        self._stepless = 0
        """Calls of `step()` since the last optimizer step."""
        self._said: set[str] = set()
        self.labels: dict[int, str] = {}
        """Labels of the watched optimizers, by `id()`."""
        self._hooks: list[Any] = []
        self._process = os.getpid()

    def watch(
        self, model: torch.nn.Module, steppers: Mapping[str, Iterable[torch.optim.Optimizer]]
    ) -> None:
        """Register the hooks. In addition the caller must call `step_starts` before all steps.

        `steppers` has for each label the optimizers with steps that count for it; one of them may
        step within another's step. The model gets a hook only if forward passes are boundaries:
        `torch.compile` and `torch.jit.script` treat a module with a hook differently.
        """
        for label, optimizers in steppers.items():
            for optimizer in optimizers:
                self.labels[id(optimizer)] = label
                self._hooks.append(optimizer.register_step_post_hook(self._counter(label)))
        if not self.explicit:
            self._hooks.append(model.register_forward_pre_hook(self._before_forward))

    def unwatch(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.labels.clear()

    @property
    def steps(self) -> int:
        """Optimizer steps since the last boundary; several optimizers step side by side."""
        return max(self.since.values(), default=0)

    def pass_boundary(self) -> int:
        """Start counting at 0 again; returns the steps made."""
        steps = max(self.since.values(), default=0)
        self.since.clear()
        return steps

    def count_one(self) -> None:
        """Count a change of the state without an optimizer as a step."""
        self.since[""] = self.since.get("", 0) + 1

    def called(self) -> bool:
        """The loop called `step()`; returns whether that ends an iteration."""
        if not self.explicit:
            self._say_once(NO_EFFECT, logging.ERROR)
            return False
        if not self._called and self._no_calls in self._said:
            steps = max(self._uncalled.values())
            self._say_once(FIRST_CALL.format(steps=steps), logging.INFO)
        self._called = True
        self._stepless = 0 if self.since else self._stepless + 1
        if self._stepless >= STEPLESS_CALLS:
            self._say_once(NO_STEPS, logging.ERROR)
        return True

    def continue_from(self, restored: Restored) -> None:
        """The state of a version was loaded. Warns if its number has another unit than this
        run's."""
        self.pass_boundary()
        self.stepping.clear()  # a step that an exception ended is undone by the restore
        if restored.iteration_counts != self.counts:
            text = COUNTED_STEPS if self.explicit else COUNTED_CALLS
            text = text.format(number=int(restored), version=restored.version)
            self._say_once(text, logging.WARNING)

    def step_starts(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments | None:
        """A step of a watched optimizer starts; return other arguments for it, or None.

        Must be called before every other hook: a user's hook may change state during its copy.
        """
        if self.repeating:
            return None
        label = self.labels[id(optimizer)]
        closure = closure_of(args, kwargs) if len(args) > 1 or kwargs else None
        if closure is None:
            self.stepping.add(label)
            self._before_step(label)
            return None
        if callable(closure) and label in self.since and not self.explicit:
            self._pass_forward()  # the forward passes come inside the step, too late for a boundary
        self.stepping.add(label)
        step, then = self._step_class(optimizer).step, partial(self._before_step, label)
        others = after_first_call(optimizer, step, args, kwargs, then)
        if others is None:
            self._before_step(label)
        return others

    def _counter(self, label: str) -> Callable[..., None]:
        """A hook that runs after each step; a step inside another (Horovod's) calls it twice."""

        def after_step(*_: Any) -> None:
            if label not in self.stepping:
                return
            self.stepping.discard(label)
            if self._made_step is not None and not self._made_step(label):
                return
            self.since[label] = self.since.get(label, 0) + 1
            self._tell_stepped(self.since)
            if not self.explicit:
                self._keep_streams()
                if self.since[label] == STEPS_UNTIL_FORWARD:
                    self._say_once(NO_FORWARD, logging.ERROR)
            elif not self._called:
                self._uncalled[label] += 1
                if self._uncalled[label] == STEPS_UNTIL_CALL:
                    self._say_once(self._no_calls, logging.ERROR)

        return after_step

    @never_compiled(IN_THE_GRAPH)
    def _before_forward(self, module: torch.nn.Module, *_: Any) -> None:
        if self.since and not self.stepping and module.training and torch.is_grad_enabled():
            self._pass_forward()

    def _pass_forward(self) -> None:
        """Pass a boundary that the loop does not call."""
        if os.getpid() == self._process:
            # A forked child has the hooks as well, but not the agent connection or the threads.
            self._boundary()

    def _say_once(self, text: str, severity: int) -> None:
        if text not in self._said and os.getpid() == self._process:
            self._said.add(text)
            self._say(text, severity)

    def __reduce__(self) -> tuple[Any, ...]:
        """Keep the copies that `copy.deepcopy(model)` and `torch.save(model)` make of the hooks
        inert."""
        return (Unattached, ())


class Unattached:
    """Replaces the hooks in a copy of a model: every call does nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _do_nothing


def _do_nothing(*_: Any, **__: Any) -> None:
    """Do nothing, for `Unattached`."""


REMEDY = (
    "Call load_from() after the step that uses these gradients (Accelerate: where "
    "accelerator.sync_gradients is true). To give them up: model.zero_grad() first"
)

Seen = tuple[weakref.ref[torch.Tensor], int] | None
"""A gradient and its version counter; None: there was none."""


class Accumulation:
    """Knows whether an optimizer has gradients that no step has used. Training thread; keeps no
    gradient alive.

    A backward pass makes a gradient, or adds to one, and then the gradient's version counter grows.
    So a gradient unchanged since the optimizer's step was used by it. Those that another
    optimizer's backward pass has left in the same iteration are no accumulation: a GAN's generator
    is trained through the discriminator, which drops them.
    """

    def __init__(self, state: TrainingState) -> None:
        """`state` stays its owner's."""
        self._state = state
        self._seen: dict[str, list[Seen]] = {}
        """By optimizer, the watched gradients after the last step of the iteration."""

    def stepped(self, labels: Iterable[str]) -> None:
        """A step has ended; `labels`: the optimizers with steps in this iteration."""
        for label in labels:
            if label in self._state.optimizers:
                self._seen[label] = _look(self._state.optimizers[label].param_groups)

    def refuse(self) -> None:
        """Raise RestoreError if this rank accumulates gradients."""
        if names := [repr(label) for label in self._state.optimizers if self._accumulates(label)]:
            raise RestoreError(
                "load_from() in the middle of a gradient accumulation: optimizer "
                f"{some(names)} has gradients of backward passes since its last step. Its next "
                "step would add them up with those of other weights. Nothing was changed",
                REMEDY,
            )

    def _accumulates(self, label: str) -> bool:
        groups = self._state.optimizers[label].param_groups
        now = _look(groups)
        before = self._seen.get(label) or [None] * len(now)
        if not any(a is not None and a != b for a, b in zip(now, before, strict=False)):
            return False
        gradients = [*_gradients_of(param for group in groups for param in group["params"])]
        # A step that a GradScaler skipped leaves infinite ones, and the loop drops them.
        finite = all(bool(torch.isfinite(each).all()) for each in gradients)
        return finite and any(bool(each.any()) for each in gradients)


def _look(groups: Sequence[Any]) -> list[Seen]:
    """The gradients of a few parameters of an optimizer. One call, as it is in every step."""
    if not groups:
        return []
    seen: list[Seen] = []
    first, last = groups[0]["params"], groups[-1]["params"]
    middles = *first[len(first) // 2 :][:1], *last[len(last) // 2 :][:1]
    for param in (*first[:1], *middles, *last[-1:]):
        gradient = param.grad
        seen.append(None if gradient is None else (weakref.ref(gradient), gradient._version))
    return seen


def _gradients_of(params: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    for param in params:
        if (gradient := param.grad) is not None:
            yield gradient.coalesce().values() if gradient.is_sparse else gradient


class Hooks:
    """Owns the hooks: `close` removes them. Training thread."""

    def __init__(
        self,
        model: torch.nn.Module,
        state: TrainingState,
        iterations: Iterations,
        before_unregistered: Callable[[], None],
        before_change: Callable[[], None],
        say: Callable[[str, int], None],
        parts: Parts,
    ) -> None:
        """`before_unregistered` returns when an optimizer that was not given may change the state,
        and `before_change`, a method, when other code than a step may. `say` takes text and
        severity, each text once. `parts` learn of every optimizer's steps."""
        self._iterations = iterations
        self._unregistered = UnregisteredOptimizers(state, before_unregistered, say)
        self._counters = Counters(state, say)
        self._parts = parts
        given, steppers = state.given.values(), state.steppers
        with contextlib.ExitStack() as undo:
            undo.callback(iterations.unwatch)
            iterations.watch(model, steppers)
            within = [inner for each in given for _, inner in optimizers_inside(each)]
            undo.callback(CustomMethods([*given, *within], state.hollow, before_change).close)
            undo.callback(GlobalStepHook(self._before_any_step).close)
            self._undo = undo.pop_all()

    @property
    def unregistered(self) -> list[torch.optim.Optimizer]:
        """Optimizers that were not given and step parameters of the model."""
        return self._unregistered.found()

    def called(self) -> None:
        """The loop called the checkpointer's `step()`: the iteration is over."""
        stepped = [*self._iterations.since]
        if stepped != self._unregistered.idle.usual:
            self._unregistered.idle.boundary(stepped)
        if stepped and not self._counters.done:
            self._counters.boundary()

    def close(self) -> None:
        """Remove the hooks. May be called again."""
        self._undo.close()

    def _before_any_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments | None:
        for called in self._parts.optimizer_called:
            called()
        if id(optimizer) in self._iterations.labels:
            return self._iterations.step_starts(optimizer, args, kwargs)
        self._unregistered.step_starts(optimizer)
        return None
