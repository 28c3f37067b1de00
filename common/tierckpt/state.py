"""The training state: which tensors and values make it up, under which names.

Three kinds, kept apart because they change at different times and belong to different ranks:

- *striped* tensors: parameters and optimizer state. The same on every rank, changed only by the
  optimizer's step, so they can be copied any time before the next one.
- *own* tensors: BatchNorm statistics and other buffers. Changed by the forward pass, and not the
  same on every rank until DDP broadcasts them, so every rank stores its own, copied at the
  boundary. So are parameters that ranks may not have alike: embeddings with `max_norm`, whose rows
  the forward pass scales as it looks them up, and those whose gradients are not reduced.
- the *rank tree*: learning rates, RNG streams, `extra` objects. Small, copied at the boundary.

Not thread-safe: used by the thread that trains.
"""

from __future__ import annotations

import array
import base64
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch

from . import tree
from .errors import ConfigError, UnsupportedStateError

EXTRA_STATES = "modules' extra state"
"""What `ExtraStates` is called among the `extra` objects."""

FIXED = ("model/", "buffer/")
"""Names of tensors that are there before any restore; optimizer state is created and dropped."""

_GROUP_KEYS_NOT_STORED = ("params", "param_names")


@dataclass
class Walk:
    """All tensors of the state, as they are now, in an order that only structure decides."""

    params: list[torch.Tensor]
    state: list[tuple[torch.Tensor, torch.Tensor, int, str]]
    """Optimizer state: (tensor, its parameter, optimizer index, key)."""
    odd: list[tuple[torch.Tensor, int, str, Any]]
    """Optimizer state that is no tensor: (parameter, optimizer index, key, packed value)."""
    buffers: list[torch.Tensor]
    own_params: set[int]
    """`id()`s of parameters that are, with their optimizer state, every rank's own."""

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Parameters, then optimizer state."""
        return [*self.params, *(s[0] for s in self.state)]

    def nbytes(self) -> tuple[int, int]:
        """Of parameters and optimizer state: what is striped, and every rank's own."""
        of_param = [(p, p) for p in self.params] + [(t, p) for t, p, _, _ in self.state]
        own = sum(t.nbytes for t, p in of_param if id(p) in self.own_params)
        return sum(t.nbytes for t, _ in of_param) - own, own


class TrainingState:
    """Names and finds everything that a checkpoint holds. Holds references, copies nothing."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: Mapping[str, torch.optim.Optimizer],
        extra: Mapping[str, Any] | None = None,
        extra_per_rank: Mapping[str, Any] | None = None,
        reduced: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """`reduced`: see `Checkpointer.reduced`."""
        self.model = unwrap(model)
        self.optimizers = dict(optimizers)
        self.extra = dict(extra or {})
        if of_modules := ExtraStates(self.model):
            self.extra.setdefault(EXTRA_STATES, of_modules)
        self.extra_per_rank = dict(extra_per_rank or {})
        self.torn = False
        """A restore began to change it and did not get to its end."""
        self.looks = 0
        """How often its structure was looked up (again)."""
        self._forward_changes: tuple[str, ...] = ()
        self._modules: list[torch.nn.Module] = []
        self._buffer_slots: list[tuple[dict[str, Any], str]] | None = None
        self._buffer_count = 0
        self._names: dict[int, str] = {}
        self._reduced = None if reduced is None else {id(p): p for p in reduced}
        for optimizer in self.optimizers.values():
            _refuse_optimizer(optimizer)
        for name, obj in {**self.extra, **self.extra_per_rank}.items():
            check_extra(name, obj)
        self.refresh_names()

    def refresh_names(self) -> None:
        """Look the modules and parameter names up again; after a structural change."""
        self.looks += 1
        self._modules = list(self.model.modules())
        self._buffer_slots = None
        self._names = {id(p): n for n, p in named_parameters(self.model)}
        for label, optimizer in self.optimizers.items():
            for g, group in enumerate(optimizer.param_groups):
                for i, param in enumerate(group["params"]):
                    self._names.setdefault(id(param), f"{label}.group{g}.param{i}")

    # --- walking -------------------------------------------------------------------------------

    def walk(self) -> Walk:
        """Collect the tensors. For a new layout only: see `containers` for the quick look."""
        params = {id(p): p for m in self._modules for p in m._parameters.values() if p is not None}
        state: list[tuple[torch.Tensor, torch.Tensor, int, str]] = []
        odd: list[tuple[torch.Tensor, int, str, Any]] = []
        for index, optimizer in enumerate(self.optimizers.values()):
            _refuse_odd_keys(optimizer)
            for group in optimizer.param_groups:
                for param in group["params"]:
                    params.setdefault(id(param), param)
                    for key, value in sorted(optimizer.state.get(param, _NOTHING).items()):
                        if isinstance(value, torch.Tensor):
                            state.append((value, param, index, key))
                            continue
                        # LBFGS keeps lists of tensors: striped like any, the list is odd.
                        inner: list[tuple[str, torch.Tensor]] = []
                        node = tree.pack(value, key, tree.entries_into(inner))
                        state += [(tensor, param, index, path) for path, tensor in inner]
                        odd.append((param, index, key, node))
        own = {id(p) for p in (*_renormed(self._modules), *self._not_reduced(params.values()))}
        own.update(id(p) for p in params.values() if self._forward_changes_it(p))
        return Walk(list(params.values()), state, odd, self.live_buffers(), own)

    def forward_changes(self, patterns: str) -> None:
        """Say which parameters the forward pass changes: see `Config.forward_changes`. Raises
        ConfigError for a pattern that is none's name."""
        self._forward_changes = tuple(filter(None, map(str.strip, patterns.split(","))))
        for pattern in self._forward_changes:
            if not any(fnmatchcase(name, pattern) for name in self._names.values()):
                raise ConfigError(
                    f"forward_changes: {pattern!r} is the name of no parameter; there are "
                    f"{', '.join([*self._names.values()][:5])}, ..."
                )

    def _forward_changes_it(self, param: torch.Tensor) -> bool:
        patterns = self._forward_changes
        return bool(patterns) and any(fnmatchcase(self.name_of(param), p) for p in patterns)

    def _not_reduced(self, params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Those whose gradients, and so whose values, may differ between ranks."""
        if self._reduced is None:
            return []
        return [p for p in params if id(p) not in self._reduced]

    def cuda_device(self) -> torch.device | None:
        """The CUDA device that is trained on, if there is one."""
        if not torch.cuda.is_initialized():
            return None
        found = (p.device for module in self._modules for p in module.parameters() if p.is_cuda)
        return next(found, None)

    def containers(self) -> list[dict[Any, Any]]:
        """The dicts that hold all `Walk.tensors`, in an order that only structure decides.

        A plan stays good while these and what is in them are the very same objects; looking that
        up costs some 30 nanoseconds a tensor, a walk twenty times as much.
        """
        found: list[dict[Any, Any]] = [m._parameters for m in self._modules]
        found += [m._modules for m in self._modules]
        for optimizer in self.optimizers.values():
            found += optimizer.state.values()
        return found

    def live_buffers(self) -> list[torch.Tensor]:
        """Every persistent buffer, once."""
        count = sum([len(m._buffers) for m in self._modules])
        if self._buffer_slots is None or count != self._buffer_count:
            self._buffer_count = count
            self._buffer_slots = [
                (m._buffers, name)
                for m in self._modules
                for name in m._buffers
                if name not in m._non_persistent_buffers_set
            ]
        found = [held.get(name) for held, name in self._buffer_slots]
        return list({id(b): b for b in found if b is not None}.values())

    # --- naming (at layout time only) ----------------------------------------------------------

    def name_of(self, param: torch.Tensor) -> str:
        """Fully qualified name of a parameter, without wrappers' prefixes."""
        name = self._names.get(id(param))
        if name is None:
            self.refresh_names()
            name = self._names[id(param)]
        return name

    def held_by(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """Names of those of the state's parameters that an optimizer, any one, has."""
        held = [p for group in optimizer.param_groups for p in group["params"]]
        mine = {id(p) for p in self.model.parameters()}
        mine.update(
            id(p) for o in self.optimizers.values() for g in o.param_groups for p in g["params"]
        )
        return [self.name_of(p) for p in held if id(p) in mine]

    def keeps_state_of(self, optimizer: torch.optim.Optimizer) -> bool:
        """True for one that was given, and for a wrapper that shares such a one's state."""
        state = getattr(optimizer, "state", None)
        return any(o is optimizer or o.state is state for o in self.optimizers.values())

    def entries(self, walk: Walk) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
        """(name, tensor, parameter that it belongs to) of all `walk.tensors`, and checks them."""
        labels = list(self.optimizers)
        named = [(f"model/{self.name_of(p)}", p, p) for p in walk.params]
        named += [(f"{labels[i]}/{self.name_of(p)}/{k}", t, p) for t, p, i, k in walk.state]
        for name, tensor, _ in named:
            tree.refuse_in_place(tensor, name)
        devices = [(name, tensor.device) for name, tensor, _ in named]
        devices += [(f"buffer/{n}", b.device) for n, b in named_buffers(self.model)]
        refuse_several_gpus(devices)
        return named

    def buffer_entries(self, walk: Walk) -> list[tuple[str, torch.Tensor]]:
        """(name, tensor) of all persistent buffers, and checks them."""
        names = {id(b): n for n, b in named_buffers(self.model)}
        named = [(f"buffer/{names[id(b)]}", b) for b in walk.buffers]
        for name, tensor in named:
            tree.refuse_in_place(tensor, name)
        return named

    def structure(self) -> dict[str, Any]:
        """What changes only when the layout does: optimizer classes and groups' members."""
        return {
            label: {
                "class": optimizer_class(optimizer),
                "groups": [[self.name_of(p) for p in g["params"]] for g in optimizer.param_groups],
            }
            for label, optimizer in self.optimizers.items()
        }

    def group_sizes(self) -> list[int]:
        """Cheap fingerprint of the groups' membership."""
        return [len(g["params"]) for o in self.optimizers.values() for g in o.param_groups]

    # --- the rank tree -------------------------------------------------------------------------

    def group_odd(
        self, odd: Sequence[tuple[torch.Tensor, int, str, Any]]
    ) -> dict[str, dict[str, Any]]:
        """A walk's odd state by parameter: numbers, None, lists of tensors (LBFGS)."""
        labels = list(self.optimizers)
        grouped: dict[str, dict[str, Any]] = {}
        for param, index, key, node in odd:
            grouped.setdefault(f"{labels[index]}/{self.name_of(param)}", {})[key] = node
        return grouped

    def pack_groups(self, keep: tree.KeepTensor) -> dict[str, Any]:
        """Options of every param group (learning rate, betas, ...)."""
        return {
            label: [
                tree.pack(
                    {k: v for k, v in group.items() if k not in _GROUP_KEYS_NOT_STORED},
                    f"{label}.param_groups[{i}]",
                    keep,
                )
                for i, group in enumerate(optimizer.param_groups)
            ]
            for label, optimizer in self.optimizers.items()
        }

    def pack_extra(self, which: Mapping[str, Any], arena: tree.Arena) -> dict[str, Any]:
        """The `state_dict()`s of the user's objects."""
        return {name: _pack_extra(name, obj, arena) for name, obj in which.items()}


_NOTHING: dict[str, Any] = {}


class ExtraStates:
    """What modules have in their `state_dict()` beside parameters and buffers: see
    `torch.nn.Module.get_extra_state`. One of the `extra` objects; false where no module has any."""

    def __init__(self, model: torch.nn.Module) -> None:
        plain = torch.nn.Module.get_extra_state
        self._modules = {
            name: module
            for name, module in named_modules(model)
            if type(module).get_extra_state is not plain
        }

    def __bool__(self) -> bool:
        return bool(self._modules)

    def state_dict(self) -> dict[str, Any]:
        """By the module's name."""
        return {name: module.get_extra_state() for name, module in self._modules.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Into the modules that are still there."""
        for name, module in self._modules.items():
            if name in state:
                module.set_extra_state(state[name])


def _renormed(modules: Sequence[torch.nn.Module]) -> list[torch.Tensor]:
    """Weights that the forward pass changes in place: rows longer than `max_norm` are scaled.

    Each rank looks up rows of its own, so these are not alike on all ranks, nor, with a weight
    decay, is what an optimizer keeps for them.
    """
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    found = [m for m in modules if isinstance(m, kinds) and m.max_norm is not None]
    return [w for m in found if (w := m._parameters.get("weight")) is not None]


# --- unwrapping and names ------------------------------------------------------------------------


def wrapped(module: torch.nn.Module) -> torch.nn.Module | None:
    """What is inside DistributedDataParallel, DataParallel, torch.compile; None if it is none."""
    parallel = (torch.nn.parallel.DistributedDataParallel, torch.nn.parallel.DataParallel)
    if isinstance(module, parallel):
        return module.module  # type: ignore[no-any-return]
    if type(module).__name__ == "OptimizedModule" and hasattr(module, "_orig_mod"):
        return module._orig_mod  # type: ignore[return-value]
    return None


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """The user's own module inside all wrappers."""
    while (inner := wrapped(model)) is not None:
        model = inner
    return model


def named_modules(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """Every module once, in torch's order. A wrapper has the name of what it wraps, wherever in the
    model it is; a module of the user's own that is called `module` keeps its name."""
    found: dict[int, tuple[str, torch.nn.Module]] = {}

    def look(name: str, module: torch.nn.Module) -> None:
        if id(module) in found:
            return
        found[id(module)] = (name, module)
        inner = wrapped(module)
        for own, child in module._modules.items():
            if child is not None:
                look(name if child is inner else _inside(name, own), child)

    look("", model)
    return list(found.values())


def _inside(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name


def path_of(name: str) -> tuple[str, str]:
    """(parameter, key) of optimizer state called `label/parameter/key`."""
    parameter, key = name.split("/", 1)[1].rsplit("/", 1)
    return parameter, key


def parameter_of(name: str) -> str:
    """The parameter or buffer that an entry called `name` belongs to."""
    return name.split("/", 1)[1] if name.startswith(FIXED) else path_of(name)[0]


def named_parameters(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Every parameter once (tied weights under their first name)."""
    return _once(
        (_inside(prefix, name), param)
        for prefix, module in named_modules(model)
        for name, param in module._parameters.items()
    )


def named_buffers(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Every persistent buffer once, as `state_dict()` has them."""
    return _once(
        (_inside(prefix, name), buffer)
        for prefix, module in named_modules(model)
        for name, buffer in module._buffers.items()
        if name not in module._non_persistent_buffers_set
    )


def _once(named: Iterable[tuple[str, torch.Tensor | None]]) -> list[tuple[str, torch.Tensor]]:
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in named:
        if tensor is not None:
            found.setdefault(id(tensor), (name, tensor))
    return list(found.values())


def optimizer_class(optimizer: torch.optim.Optimizer) -> str:
    """Class name; adapters' dynamic subclasses carry the name of the class they wrap."""
    return type(optimizer).__name__


def label_optimizers(
    optimizers: torch.optim.Optimizer
    | Sequence[torch.optim.Optimizer]
    | Mapping[str, torch.optim.Optimizer],
) -> dict[str, torch.optim.Optimizer]:
    """Names for one optimizer, several, or a dict of them; the names go into the checkpoint."""
    if isinstance(optimizers, torch.optim.Optimizer):
        return {"optimizer": optimizers}
    if isinstance(optimizers, Mapping):
        for label in optimizers:
            if not label or "/" in str(label):
                raise ConfigError(f"optimizer name {label!r}: it must be text without '/'")
            if label in ("model", "buffer"):
                raise ConfigError(f"optimizer name {label!r} is taken; choose another one")
        return dict(optimizers)
    return {f"optimizer{i}": o for i, o in enumerate(optimizers)}


def _refuse_optimizer(optimizer: torch.optim.Optimizer) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UnsupportedStateError(
            f"{type(optimizer).__name__} is not a torch.optim.Optimizer; its step could not be "
            "held back until the copies are complete."
        )
    kinds = {c.__name__ for c in type(optimizer).__mro__}
    if "PostLocalSGDOptimizer" in kinds:
        raise UnsupportedStateError(
            "PostLocalSGDOptimizer lets ranks train apart between its averagings: weights and "
            "momentum differ from rank to rank, and this package is for replicated state. Train "
            "with the optimizer inside it (its attribute 'optim') and DDP's own allreduce, or save "
            "each rank's state by itself."
        )
    if "ZeroRedundancyOptimizer" in kinds:
        raise UnsupportedStateError(
            "ZeroRedundancyOptimizer keeps a different part of its state on every rank, and this "
            "package is for replicated state. Use the inner optimizer class directly, or "
            "torch.distributed.checkpoint."
        )
    _refuse_hollow(optimizer)


def _refuse_hollow(optimizer: torch.optim.Optimizer) -> None:
    """A wrapper that never came to torch.optim.Optimizer's own __init__ can have no hooks."""
    try:
        optimizer.register_step_post_hook(_do_nothing).remove()
    except AttributeError:
        held = vars(optimizer).items()
        inside = [name for name, value in held if isinstance(value, torch.optim.Optimizer)]
        where = (
            f"the optimizer inside it (its attribute {inside[0]!r})" if inside else "another one"
        )
        raise UnsupportedStateError(
            f"{type(optimizer).__name__} was made without torch.optim.Optimizer's __init__, so its "
            "step could not be held back until the copies are complete. Give the checkpointer "
            f"{where}, if that makes the steps."
        ) from None


def _do_nothing(*_: Any) -> None:
    """A hook."""


def _refuse_odd_keys(optimizer: torch.optim.Optimizer) -> None:
    """State that does not belong to a parameter has no name under which it could come back."""
    name = type(optimizer).__name__
    for owner, values in optimizer.state.items():
        if not isinstance(owner, torch.Tensor):
            raise UnsupportedStateError(
                f"{name}.state[{owner!r}] belongs to no parameter. Give the object that keeps it a "
                "state_dict() and load_state_dict(), and pass it as extra={...}."
            )
        for key in values:
            if not isinstance(key, str) or "/" in key:
                raise UnsupportedStateError(
                    f"{name} keeps state under the key {key!r}; only text without '/' can be "
                    "stored. Pass an object with state_dict() that wraps it as extra={...}."
                )


def refuse_model(model: torch.nn.Module) -> None:
    """Raise UnsupportedStateError for sharded models; the text names the module."""
    for name, module in model.named_modules():
        kinds = {c.__name__ for c in type(module).__mro__}
        if kinds & {"FullyShardedDataParallel", "FSDPModule"}:
            raise UnsupportedStateError(
                f"module {name or '(root)'!r} is sharded by FSDP; this package is for replicated "
                "models (DDP, Horovod). Use torch.distributed.checkpoint for it."
            )


def refuse_several_gpus(named: Sequence[tuple[str, torch.device]]) -> None:
    """Raise UnsupportedStateError when tensors of the state, by name, are on two GPUs.

    Copies of a snapshot are ordered behind the training's work by the streams of one device.
    """
    first = next(((name, device) for name, device in named if device.type == "cuda"), None)
    for name, device in named:
        if first is not None and device.type == "cuda" and device != first[1]:
            raise UnsupportedStateError(
                f"{first[0]} is on {first[1]}, {name} on {device}; this package is for one GPU a "
                "process. Start one process per GPU (torchrun --nproc-per-node), each with the "
                "whole model on its own; for a model that one GPU cannot hold use "
                "torch.distributed.checkpoint."
            )


# --- extras --------------------------------------------------------------------------------------


def check_extra(name: str, obj: Any) -> None:
    """Raise UnsupportedStateError when `obj` has no way to give and take its state."""
    if isinstance(obj, (torch.Generator, np.random.Generator)):
        return
    if not (
        callable(getattr(obj, "state_dict", None))
        and callable(getattr(obj, "load_state_dict", None))
    ):
        raise UnsupportedStateError(
            f"extra[{name!r}] is a {type(obj).__name__} without state_dict() and "
            "load_state_dict(); give it both, or wrap it in an object that has them."
        )


def _pack_extra(name: str, obj: Any, arena: tree.Arena) -> Any:
    path = f"extra[{name!r}]"
    if isinstance(obj, torch.Generator):
        return {"generator": arena.keep(obj.get_state(), path)}
    if isinstance(obj, np.random.Generator):
        return {"bit_generator": tree.pack(obj.bit_generator.state, path, arena.keep)}
    if isinstance(obj, torch.amp.GradScaler):
        return _pack_scaler(obj, arena)
    return tree.pack(obj.state_dict(), path, arena.keep)


def _pack_scaler(scaler: torch.amp.GradScaler, arena: tree.Arena) -> Any:
    """GradScaler.state_dict() without its `.item()`s, which would make the CPU wait for the GPU.

    Falls back to state_dict() where torch's internals are not what is expected here.
    """
    scale = getattr(scaler, "_scale", None)
    tracker = getattr(scaler, "_growth_tracker", None)
    if not scaler.is_enabled() or scale is None or tracker is None:
        return tree.pack(scaler.state_dict(), "extra[GradScaler]", arena.keep)
    return {
        "scale": arena.keep_item(scale),
        "growth_factor": scaler.get_growth_factor(),
        "backoff_factor": scaler.get_backoff_factor(),
        "growth_interval": scaler.get_growth_interval(),
        "_growth_tracker": arena.keep_item(tracker),
    }


def load_extra(obj: Any, value: Any) -> None:
    """Give `obj` back what `pack_extra` took from it."""
    if isinstance(obj, torch.Generator):
        obj.set_state(value["generator"])
    elif isinstance(obj, np.random.Generator):
        obj.bit_generator.state = value["bit_generator"]
    else:
        obj.load_state_dict(value)


# --- random number generators --------------------------------------------------------------------


def pack_rng(device: torch.device | None = None) -> tree.Later:
    """State of the process-wide generators: python, numpy, torch CPU, every CUDA device in use;
    first of those the one that trains, `device`.

    Read now, since the next forward pass may draw; all of it is copies. Writing 10 KB of it down as
    text would be a sixth of what the boundary does, so that is left to whoever encodes the tree.
    """
    version, words, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state(legacy=True)
    cpu = torch.get_rng_state()
    cuda: list[torch.Tensor] = []
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        # Philox keeps seed and offset on the host: nothing is read back from a device here.
        cuda = [torch.cuda.get_rng_state(i) for i in _devices(device)]

    def written() -> dict[str, Any]:
        return {
            "python": [version, base64.b64encode(array.array("I", words)).decode(), gauss],
            "numpy": [kind, base64.b64encode(np.asarray(keys).tobytes()).decode(), *rest],
            "torch": _text_of(cpu),
            "cuda": [_text_of(each) for each in cuda],
        }

    return tree.Later(written)


def _text_of(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _state_of(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def _devices(first: torch.device | None) -> list[int]:
    """The CUDA devices' numbers, `first` in front (default: the current one): on another node, or
    with more ranks on it, a rank trains on a device of another number, and its stream goes along.
    """
    trains = torch.cuda.current_device() if first is None or first.index is None else first.index
    return [trains, *(i for i in range(torch.cuda.device_count()) if i != trains)]


def load_rng(value: dict[str, Any], device: torch.device | None = None) -> list[str]:
    """Set the generators; returns what could not be set (fewer CUDA devices than saved)."""
    version, words, gauss = value["python"]
    random.setstate((version, tuple(array.array("I", base64.b64decode(words))), gauss))
    kind, keys, pos, has_gauss, cached = value["numpy"]
    keys = np.frombuffer(base64.b64decode(keys), dtype=np.uint32)
    np.random.set_state((kind, keys, pos, has_gauss, cached))
    torch.set_rng_state(_state_of(value["torch"]))
    problems = []
    devices = _devices(device) if value["cuda"] and torch.cuda.is_available() else []
    for index, state in zip(devices, value["cuda"], strict=False):
        torch.cuda.set_rng_state(_state_of(state), index)
    if len(value["cuda"]) > len(devices):
        problems.append(
            f"RNG of {len(value['cuda'])} CUDA devices was saved, this process has {len(devices)}"
        )
    return problems
