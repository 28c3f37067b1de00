"""The simulated module `_thread`: locks and threads of the scheduler's tasks."""

from __future__ import annotations

import _thread
import types
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .scheduler import Task
    from .world import World

TIMEOUT_MAX = 1e9


class Lock:
    """A lock of the world. The death of its owner's process frees it: the next owner belongs to
    another process, which has memory of its own in reality."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._owner: Task | None = None
        self._held = False
        self._waiting: deque[Task] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """As of `_thread.lock`."""
        if not self._held or (self._owner is not None and not self._owner.owner.alive):
            self._held, self._owner = True, self._world.scheduler.current
            return True
        if not blocking:
            return False
        scheduler = self._world.scheduler
        task = scheduler.current
        if task is None:
            raise RuntimeError("the scheduler itself waits for a lock")
        end = None if timeout < 0 else scheduler.now + timeout
        while self._held:
            left = None if end is None else end - scheduler.now
            if left is not None and left <= 0:
                return False
            self._waiting.append(task)
            if not scheduler.park(left):
                self._waiting.remove(task)
        self._held, self._owner = True, task
        return True

    def release(self) -> None:
        """As of `_thread.lock`."""
        if not self._held:
            raise RuntimeError("release unlocked lock")
        self._held, self._owner = False, None
        while self._waiting:
            task = self._waiting.popleft()
            if task.owner.alive:
                self._world.scheduler.wake(task)
                break

    def locked(self) -> bool:
        """As of `_thread.lock`."""
        return self._held

    def _at_fork_reinit(self) -> None:
        self._held, self._owner = False, None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


def thread_module(world: World) -> types.ModuleType:
    """The module `_thread` of a world."""
    module = types.ModuleType("_thread")

    def start_new_thread(
        function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> int:
        return world.start_thread(lambda: function(*args, **(kwargs or {}))).ident

    def get_ident() -> int:
        task = world.scheduler.current
        return 0 if task is None else task.ident

    def get_native_id() -> int:
        return get_ident() - world.scheduler.first_ident

    def set_sentinel() -> Lock:
        lock = Lock(world)
        world.sentinel(lock)
        return lock

    module.__dict__.update(
        start_new_thread=start_new_thread,
        start_new=start_new_thread,
        allocate_lock=lambda: Lock(world),
        get_ident=get_ident,
        get_native_id=get_native_id,
        _set_sentinel=set_sentinel,
        LockType=Lock,
        TIMEOUT_MAX=TIMEOUT_MAX,
        error=RuntimeError,
        stack_size=lambda size=0: 0,
        interrupt_main=lambda *_: None,
        exit=_thread.exit,
        _ExceptHookArgs=_thread._ExceptHookArgs,
        _excepthook=_thread._excepthook,
        _is_main_interpreter=lambda: True,
        daemon_threads_allowed=lambda: True,
    )
    return module
