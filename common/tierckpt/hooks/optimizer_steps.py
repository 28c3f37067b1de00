"""Optimizer steps: what is called before any change of weights by any optimizer of this process.

*The step hook.* State under copy must not change before the barrier. A user's hook may
change it (its own weight decay, through `.data`), and torch calls hooks in order of registration,
the global ones first. So `GlobalStepHook` is a global one, and is moved to the front.

*Closures.* If the forward and backward pass are the closure of `optimizer.step(closure)`, the step
starts before them, and a barrier at its start would overlap with nothing. All optimizers of torch
call the closure before they change anything, so the barrier of such a step comes after the first
call. For any other step the barrier comes before everything else: an unknown step may change
weights first (SAM does), and so may other hooks.

*Custom methods* are those of an optimizer's class beside torch's, which may change weights outside
a step. SAM climbs in `first_step()`, ScheduleFree swaps weights in `train()` and `eval()`. torch
calls no hook before these, so the snapshot would be torn. Each of them therefore waits for copies,
as a step does; and so does the step of an optimizer for which torch calls no hooks.

*Unregistered optimizers* change the model's parameters, and the checkpointer was not given them.
Such a step would change parameters during a copy, and a fused one does not change autograd's
version counters: the version would mix two steps, and its checksums would be right. So there is a
barrier before these steps, too, and a warning that their state is in no checkpoint.

*Idle optimizers* are given, but make no steps, while other code changes their parameters. Versions
are numbered by the steps of the given optimizers. A loop that steps another one (a wrapper, a
copy, the result of a library's `prepare()`) would train for hours without a version, or with the
first state of an optimizer in every version.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import types
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook

from tierckpt._text import some
from tierckpt.state.training_state import TrainingState, optimizer_class

__all__ = [
    "BOUNDARIES",
    "CALL_IT_FIRST",
    "STEPS",
    "Arguments",
    "CustomMethods",
    "GlobalStepHook",
    "IdleOptimizers",
    "UnregisteredOptimizers",
    "Waiting",
    "after_first_call",
    "closure_of",
    "never_compiled",
    "others_come_first",
]


Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a step, the optimizer itself first."""

CALL_IT_FIRST = frozenset(
    f"torch.optim.{module}.{name}.step"
    for module, name in (
        *(("_adafactor", "Adafactor"), ("_muon", "Muon"), ("adadelta", "Adadelta")),
        *(("adagrad", "Adagrad"), ("adam", "Adam"), ("adamax", "Adamax"), ("asgd", "ASGD")),
        *(("lbfgs", "LBFGS"), ("nadam", "NAdam"), ("radam", "RAdam"), ("rmsprop", "RMSprop")),
        *(("rprop", "Rprop"), ("sgd", "SGD"), ("sparse_adam", "SparseAdam")),
    )
)
"""Steps with a source that was read; a test checks them, too. AdamW uses Adam's step since torch
2.7; an older AdamW, like any unlisted step, has the barrier before it."""

_TORCH = os.path.dirname(torch.__file__) + os.sep


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The closure argument of a step, or None."""
    return args[1] if len(args) > 1 else kwargs.get("closure")


def after_first_call(
    optimizer: torch.optim.Optimizer,
    step: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    then: Callable[[], None],
) -> Arguments | None:
    """Other arguments for `step`: with them `then` is called once, after the closure has returned
    for the first time. None, and no effect, if there is no closure or if something may change
    before the closure is called."""
    closure = closure_of(args, kwargs)
    if not callable(closure) or not _calls_it_first(step) or others_come_first(optimizer):
        return None
    if step.__qualname__ == "LBFGS.step" and not optimizer.state:
        return None  # the first step makes an entry there before the call
    ours = _in_place_of(closure, then)
    if len(args) > 1:
        return (args[0], ours, *args[2:]), kwargs
    return args, {**kwargs, "closure": ours}


def _in_place_of(closure: Callable[[], Any], then: Callable[[], None]) -> Callable[[], Any]:
    """A replacement of the closure for one step. In a compiled step the closure is still compiled,
    and `then` is not."""
    left = [torch.compiler.disable(then)]

    def first_call() -> Any:
        loss = closure()
        if left:
            left.pop()()
        return loss

    ours: Callable[[], Any] = torch.compiler.disable(first_call, recursive=False)
    return ours


def others_come_first(optimizer: Any) -> bool:
    """Whether pre-hooks of other code may change weights before a step does."""
    hooks = [
        *getattr(optimizer, "_optimizer_step_pre_hooks", {}).values(),
        *_global_optimizer_pre_hooks.values(),
    ]
    return any(not (getattr(h, "__module__", None) or "").startswith("tierckpt.") for h in hooks)


@functools.lru_cache(256)
def _calls_it_first(step: Callable[..., Any]) -> bool:
    """Whether it is a step of torch, wrapped by nothing but torch."""
    if f"{step.__module__}.{step.__qualname__}" not in CALL_IT_FIRST:
        return False
    while True:
        code = getattr(step, "__code__", None)
        if code is None or not code.co_filename.startswith(_TORCH):
            return False
        if not hasattr(step, "__wrapped__"):
            return True
        step = step.__wrapped__


BeforeStep = Callable[[torch.optim.Optimizer, tuple[Any, ...], dict[str, Any]], Arguments | None]
"""Takes the optimizer and its step's arguments; returns other arguments, or None."""

Function = TypeVar("Function", bound=Callable[..., Any])


def never_compiled(reason: str) -> Callable[[Function], Function]:
    """Exclude a function from `torch.compile`: compiled code has a graph break there or, with
    `fullgraph=True`, an error, which contains the reason if this torch supports that."""
    with_reason = "reason" in inspect.signature(torch.compiler.disable).parameters

    def marked(function: Function) -> Function:
        disabled: Function = torch.compiler.disable(
            function, **({"reason": reason} if with_reason else {})
        )
        return disabled

    return marked


class GlobalStepHook:
    """Owns the hook: `close` removes it."""

    def __init__(self, before_step: BeforeStep) -> None:
        """`before_step` is a method; its object is not kept alive. It is called on the thread that
        makes the step: the training thread."""
        # A forked child has the hook as well, but not the thread that makes the copies.
        weak, process = weakref.WeakMethod(before_step), os.getpid()

        @never_compiled("Tierckpt waits here for copies; leave optimizer.step() out of the graph")
        def before_any_step(
            optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> Arguments | None:
            call = weak()
            if call is None or os.getpid() != process:
                return None
            return call(optimizer, args, kwargs)

        self._hook: Any = register_optimizer_step_pre_hook(before_any_step)
        _put_first(self._hook)

    def close(self) -> None:
        """Remove the hook."""
        self._hook.remove()


def _put_first(handle: Any) -> None:
    """Move a hook before the existing ones, as far as this torch allows."""
    hooks = getattr(handle, "hooks_dict_ref", lambda: None)()
    if isinstance(hooks, OrderedDict) and handle.id in hooks:
        hooks.move_to_end(handle.id, last=False)


# Horovod's methods wait for reductions, and copies continue; its step has torch's hooks.
NOT_THEIRS = ("torch.", "horovod.", "tierckpt", "abc", "builtins", "typing")


class CustomMethods:
    """Owns the replaced methods: `close` restores them. Training thread."""

    def __init__(
        self, optimizers: Iterable[Any], hollow: Iterable[Any], barrier: Callable[[], None]
    ) -> None:
        """`barrier`, a method of an object not kept alive, returns when weights may change. The
        steps of the `hollow` optimizers wait, too."""
        weak, process = weakref.WeakMethod(barrier), os.getpid()

        @never_compiled("Tierckpt waits here for copies")
        def before() -> None:
            call = weak()
            if call is not None and os.getpid() == process:
                call()

        self._put: list[tuple[weakref.ref[Any], str, Waiting]] = []
        steps = {id(each) for each in hollow}
        for each in optimizers:
            for name, function in _own(type(each), with_step=id(each) in steps):
                with contextlib.suppress(AttributeError, TypeError):
                    waiting = Waiting(each, function, before, vars(each).get(name))
                    setattr(each, name, waiting)
                    self._put.append((weakref.ref(each), name, waiting))

    def close(self) -> None:
        """Restore the methods, except those that other code has replaced since."""
        for weak, name, waiting in self._put:
            each = weak()
            if each is None or vars(each).get(name) is not waiting:
                continue
            if waiting.before is None:
                delattr(each, name)
            else:
                setattr(each, name, waiting.before)
        self._put.clear()


class Waiting:
    """A method of one object that waits before it runs. In a copy of the object it is the plain
    method."""

    def __init__(
        self,
        owner: Any,
        function: Callable[..., Any],
        wait: Callable[[], None],
        before: Callable[..., Any] | None,
    ) -> None:
        """`before`: an earlier replacement of the class's `function` on this object, such as a
        scheduler's."""
        self.before = before
        self._owner = weakref.ref(owner)
        if before is not None:
            self._function = _ignoring_first(before)
        else:
            self._function = function
        self.__doc__, self.__name__ = function.__doc__, function.__name__
        plain = self._function

        def waits(owner: Any, *args: Any, **kwargs: Any) -> Any:
            wait()
            return plain(owner, *args, **kwargs)

        self.__func__ = waits
        """The attribute of a bound method that schedulers read."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method."""
        return self.__func__(self._owner(), *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy for `copy.deepcopy`: the owner's copy is in `memo` before its attributes are
        copied."""
        owner = self._owner()
        return types.MethodType(self._function, memo.get(id(owner), owner))

    def __reduce__(self) -> tuple[Any, ...]:
        """Reduce for pickle."""
        return getattr, (self._owner(), self.__name__)


def _ignoring_first(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with an additional first argument, ignored."""

    def called(_owner: Any, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return called


def _own(kind: type, with_step: bool) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Public methods that torch.optim.Optimizer does not have, as the class defines them."""
    base = vars(torch.optim.Optimizer)
    found: dict[str, Callable[..., Any]] = {}
    for each in kind.__mro__:
        if f"{each.__module__}.".startswith(NOT_THEIRS):
            continue
        for name, function in vars(each).items():
            if isinstance(function, types.FunctionType) and not name.startswith("_"):
                found.setdefault(name, function)
    for name, function in found.items():
        if (name == "step" and with_step) or (name not in base and name != "step"):
            yield name, function


BOUNDARIES = 4
"""Number of boundaries in a row without a step of the given optimizer and with a step of another
one on its parameters."""
STEPS = 32
"""Number of steps of the other optimizer, if the loop calls no boundary."""

Say = Callable[[str, int], None]
_counter = attrgetter("_version")


class IdleOptimizers:
    """Reports each idle optimizer once. Training thread."""

    def __init__(self, state: TrainingState, say: Say) -> None:
        self._state, self._say = state, say
        self._since: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        """Other optimizers that stepped since the last boundary."""
        self._steps: Counter[str] = Counter()
        """By label: steps of other optimizers on its parameters, since its own last step."""
        self._boundaries: Counter[str] = Counter()
        self._changed = 0
        """Boundaries in a row with changed parameters and without a step."""
        self._counters: list[int] | None = None
        self._reported: set[str] = set()
        self.usual: Collection[str] | None = None
        """With these steps since the last boundary, and none of another optimizer, nothing is to be
        done: it was so at the last boundary."""

    def unregistered_step(self, optimizer: torch.optim.Optimizer, members: Iterable[int]) -> None:
        """An optimizer that was not given makes a step; `members` are the `id()`s of its
        parameters."""
        self._since.add(optimizer)
        self.usual = None
        for label in self._stepped_by(set(members)):
            self._steps[label] += 1
            if self._steps[label] == STEPS and not self._boundaries:
                self._report(label, optimizer, f"while it made {STEPS} steps")

    def _stepped_by(self, members: set[int]) -> list[str]:
        """Labels of the given optimizers with any of these parameters."""
        return [
            label
            for label in self._state.given
            if any(id(p) in members for p in self._params_of(label))
        ]

    def _params_of(self, label: str) -> list[torch.Tensor]:
        groups = self._state.optimizers[label].param_groups
        return [param for group in groups for param in group["params"]]

    def boundary(self, stepped: Collection[str]) -> None:
        """The loop called `step()`; the optimizers in `stepped` made steps since the last call.
        Not needed if these are the `usual` ones."""
        outer = {self._state.outer.get(label, label) for label in stepped}
        others = list(self._since)
        self._since.clear()
        for label in self._state.given:
            if label in outer:
                self._steps.pop(label, None)
                self._boundaries[label] = 0
            elif not others:
                continue
            elif other := self._other(label, others):
                self._boundaries[label] += 1
                if self._boundaries[label] == BOUNDARIES:
                    self._report(label, other, f"at {BOUNDARIES} boundaries in a row")
        self._watch_values(bool(outer or others))
        self.usual = None if others or outer != {*self._state.given} else stepped

    def _other(
        self, label: str, others: Iterable[torch.optim.Optimizer]
    ) -> torch.optim.Optimizer | None:
        own = {id(param) for param in self._params_of(label)}
        return next((o for o in others if not own.isdisjoint(_members(o))), None)

    def _watch_values(self, stepped: bool) -> None:
        """Watch for steps without torch's hooks: most of them still change version counters."""
        if stepped:
            self._changed, self._counters = 0, None
            return
        before, params = self._counters, list(self._state.model.parameters())
        self._counters = list(map(_counter, params))
        if before is None or len(before) != len(params):
            return
        moved = [p for p, a, b in zip(params, before, self._counters, strict=True) if a != b]
        self._changed = self._changed + 1 if moved else 0
        if self._changed == BOUNDARIES and "" not in self._reported:
            self._reported.add("")
            names = some([self._state.name_of(param) for param in moved])
            ours = some([f"{n!r}, {optimizer_class(o)}" for n, o in self._state.given.items()])
            self._say(
                f"no checkpoint is taken: step() was called {BOUNDARIES + 1} times and parameters "
                f"changed ({names}), but the given optimizers ({ours}) made no step. The "
                "checkpointer sees only calls of step() of a torch.optim.Optimizer. If weights are "
                "changed in another way (during the backward pass, as LOMO does), train with an "
                "optimizer that the loop steps",
                logging.ERROR,
            )

    def _report(self, label: str, other: torch.optim.Optimizer, when: str) -> None:
        if label in self._reported:
            return
        self._reported.add(label)
        own, name = optimizer_class(self._state.given[label]), optimizer_class(other)
        names = some([self._state.name_of(p) for p in self._params_of(label)])
        lone = len(self._state.given) == 1
        lost = "no checkpoint is taken" if lone else "all checkpoints have its first state"
        line = "optimizer=..." if lone else f"optimizer={{{label!r}: ..., ...}}"
        self._say(
            f"optimizer {label!r}, a {own}, made no step {when}, and a {name} that the "
            f"checkpointer was not given steps its parameters ({names}): {lost}. Give the "
            f"optimizer that the loop steps: {line} with that {name}",
            logging.ERROR,
        )


def _members(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(param) for group in optimizer.param_groups for param in group["params"]}


class UnregisteredOptimizers:
    """Makes the steps of unregistered optimizers wait. Used on the threads that make the steps: the
    training's."""

    def __init__(
        self,
        state: TrainingState,
        barrier: Callable[[], None],
        say: Callable[[str, int], None],
    ) -> None:
        """`barrier` returns when the state may change. `say` takes text and severity; it is called
        once per class."""
        self._state, self._barrier, self._say = state, barrier, say
        self.idle = IdleOptimizers(state, say)
        self._cache: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[Any, bool, bool]] = (
            weakref.WeakKeyDictionary()
        )
        """Cached decisions: whether an optimizer changes the state, and whether it is
        unregistered."""
        self._reported: set[str] = set()

    def step_starts(self, optimizer: torch.optim.Optimizer) -> None:
        """A step of an optimizer that was not given starts."""
        # Both may grow: a group is added, a layer is added to the model.
        sizes = [len(group["params"]) for group in getattr(optimizer, "param_groups", ())]
        now = (sizes, self._state.looks)
        cached = self._cache.get(optimizer)
        if cached is None or cached[0] != now:
            cached = self._cache[optimizer] = (now, *self._judged(optimizer))
        if cached[1]:
            self._barrier()
        if cached[2]:
            held = (id(p) for group in optimizer.param_groups for p in group["params"])
            self.idle.unregistered_step(optimizer, held)

    def found(self) -> list[torch.optim.Optimizer]:
        """Unregistered optimizers that were seen to step and to change the state."""
        return [optimizer for optimizer, (_, _, is_one) in self._cache.items() if is_one]

    def _judged(self, optimizer: torch.optim.Optimizer) -> tuple[bool, bool]:
        """Whether it changes the state, and whether it is unregistered; warns about the first of a
        class."""
        names = self._state.held_by(optimizer)
        if self._state.keeps_state_of(optimizer):
            return bool(names), False
        name = optimizer_class(optimizer)
        if names and name not in self._reported:
            self._reported.add(name)
            self._say(
                f"{name} changes {some(names)}, and the checkpointer was not given it: its state "
                "is in no checkpoint, so a resumed run starts without it. Give it, too: "
                f"optimizer={{'name': ..., 'other name': ...}}. Its steps wait for copies like "
                "those of given optimizers",
                logging.WARNING,
            )
        return bool(names), bool(names)
