"""A process's own copy of the product: its modules, made from code that is compiled once.

`STANDARD` modules come from the simulated library, all others from the real one. Copies are used
again by later processes: what a module had right after its import is put back.
"""

from __future__ import annotations

import builtins
import copy
import functools
import importlib.util
import itertools
import sys
import types
import typing
import weakref
from collections import deque
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from .plants import planted

if TYPE_CHECKING:
    from .world import World

ROOT = Path(__file__).resolve().parents[2]
OWN = ("tierckpt", "ddp_ckpt", "horovod_ckpt")
"""Packages that each process has for itself."""
CONTAINERS = (dict, list, set, deque, weakref.WeakSet, weakref.WeakKeyDictionary)
OF_THE_INTERPRETER = ("tierckpt.snapshot.tensor_memory", "tierckpt.state.process_state")
"""Modules that look for places in memory, which are the same for each simulated process."""
PROGRAMS = "tests.simulator.programs"
"""A module that each process has for itself, too."""


@functools.cache
def find(name: str) -> tuple[Path, bool] | None:
    """The file of a module of the product, and whether it is a package."""
    base = ROOT / "common" if name.split(".")[0] == "tierckpt" else ROOT
    path = base.joinpath(*name.split("."))
    if (path / "__init__.py").is_file():
        return path / "__init__.py", True
    return (path.with_suffix(".py"), False) if path.with_suffix(".py").is_file() else None


planting: list[str] = []
"""The fault to plant, see `plants`; to be set before the first process."""


@functools.cache
def compiled(path: Path) -> types.CodeType:
    """The code of a file."""
    if planting:
        return compile(
            planted(planting[0], path.read_text(), str(path)), str(path), "exec", dont_inherit=True
        )
    found = SourceFileLoader(path.stem, str(path)).get_code(path.stem)
    assert found is not None
    return found


class Fresh(typing.NamedTuple):
    """A module right after its import."""

    names: dict[str, Any]
    containers: dict[str, Any]
    counters: dict[str, Any]
    caches: list[Any]


class Image:
    """The modules of one process."""

    free: typing.ClassVar[list[Image]] = []
    shown: typing.ClassVar[Image | None] = None
    """Whose modules are in `sys.modules`."""

    def __init__(self, world: World, standard: dict[str, types.ModuleType], opener: Any) -> None:
        self.world = world
        self.standard = standard
        self.modules: dict[str, types.ModuleType] = {}
        self.at_exit: list[Callable[[], Any]] = []
        """What modules have registered when they were made."""
        self.builtins = {**builtins.__dict__, "__import__": self._import, "open": opener}
        self._fresh: dict[str, Fresh] = {}
        self._known_hints: dict[Any, dict[str, Any]] = {}
        self._known_fields: set[Any] = set()

    @classmethod
    def take(cls, world: World, standard: dict[str, types.ModuleType], opener: Any) -> Image:
        """A copy for a new process."""
        if cls.free:
            image = cls.free.pop()
            image.standard = standard
            image.reset()
            return image
        return cls(world, standard, opener)

    def load(self, name: str) -> types.ModuleType:
        """Import a module of the product."""
        if name in self.modules:
            return self.modules[name]
        parent, _, last = name.rpartition(".")
        if parent and parent.split(".")[0] in OWN:
            self.load(parent)
            if name in self.modules:
                return self.modules[name]
        found = find(name)
        if found is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        path, is_package = found
        module = types.ModuleType(name)
        space = module.__dict__
        space["__file__"] = str(path)
        space["__package__"] = name if is_package else parent
        space["__builtins__"] = self.builtins
        space["__spec__"] = importlib.util.spec_from_file_location(name, path)
        if is_package:
            space["__path__"] = [str(path.parent)]
        self.modules[name] = sys.modules[name] = module
        Image.shown = None
        try:
            with self.world.aside():
                exec(compiled(path), space)
        except BaseException:
            del self.modules[name]
            raise
        if space.get("get_type_hints") is typing.get_type_hints:
            space["get_type_hints"] = self._hints
        if space.get("convert") is msgspec.convert:
            space["convert"] = self._convert
        self._keep(name, space)
        if parent in self.modules:
            setattr(self.modules[parent], last, module)
        return module

    def _hints(self, kind: Any) -> dict[str, Any]:
        if kind not in self._known_hints:
            names = {}
            for each in reversed(kind.__mro__):
                names.update(vars(self.modules.get(each.__module__, typing)))
            self._known_hints[kind] = typing.get_type_hints(kind, globalns=names)
        return self._known_hints[kind]

    def _convert(self, value: Any, kind: Any) -> Any:
        """As `msgspec.convert`, which looks the types of fields up once, in `sys.modules`."""
        if kind not in self._known_fields:
            self.show()
            self._known_fields.add(kind)
        return msgspec.convert(value, kind)

    def _import(
        self,
        name: str,
        globals: Any = None,
        locals: Any = None,
        fromlist: Any = (),
        level: int = 0,
    ) -> types.ModuleType:
        if level:
            base = globals["__package__"].split(".")
            base = base[: len(base) - level + 1]
            name = ".".join([*base, *filter(None, [name])])
        if name.split(".")[0] in OWN or name == PROGRAMS:
            module = self.load(name)
            if not fromlist:
                return self.modules[name.split(".")[0]]
            for each in fromlist:
                if not hasattr(module, each) and find(f"{name}.{each}"):
                    self.load(f"{name}.{each}")
            return module
        if name in self.standard:
            return self.standard[name if fromlist else name.split(".")[0]]
        return builtins.__import__(name, None, None, fromlist, 0)

    def import_module(self, name: str, package: str | None = None) -> types.ModuleType:
        """As `importlib.import_module`."""
        name = importlib.util.resolve_name(name, package)
        if name.split(".")[0] in OWN:
            return self.load(name)
        return importlib.import_module(name)

    def show(self) -> None:
        """Let `pickle` find this process's classes."""
        if Image.shown is not self:
            sys.modules.update(self.modules)
            Image.shown = self

    # --- for the next process -------------------------------------------------------------------

    def _keep(self, name: str, space: dict[str, Any]) -> None:
        """Remember a module as it is after its import, and what its containers have."""
        containers = {
            key: value.copy()
            for key, value in space.items()
            if type(value) in CONTAINERS and not key.startswith("__")
        }
        counters = {k: copy.copy(v) for k, v in space.items() if isinstance(v, itertools.count)}
        caches = [v for v in space.values() if isinstance(v, functools._lru_cache_wrapper)]
        if name not in OF_THE_INTERPRETER:
            self._fresh[name] = Fresh({**space}, containers, counters, caches)

    def reset(self) -> None:
        """Put everything back that a process has changed in its modules."""
        for name, fresh in self._fresh.items():
            space = self.modules[name].__dict__
            space.clear()
            space.update(fresh.names)
            for key, content in fresh.containers.items():
                container = space[key]
                container.clear()
                add = container.extend if isinstance(container, list | deque) else container.update
                add(content)
            for key, counter in fresh.counters.items():
                space[key] = copy.copy(counter)
            for cache in fresh.caches:
                cache.cache_clear()
        for name, module in self.modules.items():
            parent, _, last = name.rpartition(".")
            if parent in self.modules:
                setattr(self.modules[parent], last, module)
