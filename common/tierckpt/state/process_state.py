"""State of the process that decides the bits of results: its random generators, and torch's
switches.

Random generators: their states are saved as bytes, and set.

Generator memory: the states of Python's and numpy's process-wide generators, read as bytes.

Their own methods make a Python integer of each of 624 words, which takes a tenth of a millisecond
at every boundary. So the words are read from the generators' memory. Where they are in it is found
once in a process, by experiments with generators of the same classes; where these do not succeed,
the generators' methods are used. Both ways give the same bytes. `rng_memory` says where a change
of a state would be seen: a generator that has not drawn need not be read again.

Switches of torch belong to the process: a version has them, and a restore names those that differ.
It does not set them, as the script decides.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from struct import Struct
from typing import Any, NamedTuple

import numpy as np
import torch

from tierckpt.errors import UnsupportedStateError

from . import tree_codec

__all__ = [
    "RNG_KINDS",
    "Switches",
    "differing_switches",
    "digests_of",
    "load_numpy",
    "load_python",
    "load_rng",
    "numpy_state",
    "pack_rng",
    "python_state",
    "read_switches",
    "rng_memory",
    "seed_of",
    "take_up",
]


PYTHON = Struct("<I624I?d")
"""Python's generator: position, words, whether a deviate is kept, the deviate."""
NUMPY = Struct("<2496sI?d")
"""numpy's: words, position, and the same."""
_WORDS_BYTES = 2500
"""Length of words and position."""
_KEPT, _REST = Struct("<iid"), Struct("<?d")
"""The kept deviate as in numpy's memory, where the second number is a gap; as in both forms."""


def python_state(own: random.Random | None = None) -> bytes:
    """The state of a generator, the process-wide one by default, in the form of `PYTHON`."""
    bound: Any = random.getstate
    generator: Any = bound.__self__ if own is None else own
    at, kind = _place_in_python(), type(generator)
    if at is None or kind is not random.Random:
        return _told_by_python(generator)
    words, kept = ctypes.string_at(id(generator) + at, _WORDS_BYTES), generator.gauss_next
    return words + _REST.pack(kept is not None, kept or 0.0)


def numpy_state(own: np.random.RandomState | None = None) -> bytes:
    """The state of a generator, the process-wide one by default, in the form of `NUMPY`. Raises
    UnsupportedStateError if it is not a Mersenne Twister."""
    bound: Any = np.random.get_state
    generator: Any = bound.__self__ if own is None else own
    at, bits, kind = _place_in_numpy(), generator._bit_generator, type(generator)
    if type(bits) is not np.random.MT19937:
        raise UnsupportedStateError(
            f"numpy's {'global generator' if own is None else 'RandomState'} is a "
            f"{type(bits).__name__}; let it be an MT19937, and use np.random.Generator(...) for "
            "another one"
        )
    if at is None or kind is not np.random.RandomState:
        return _told_by_numpy(generator)
    with bits.lock:
        words = ctypes.string_at(bits.ctypes.state_address, _WORDS_BYTES)
        kept, _, deviate = _KEPT.unpack(ctypes.string_at(id(generator) + at, 16))
    return words + _REST.pack(kept, deviate)


def load_python(state: bytes, own: random.Random | None = None) -> None:
    """Set a generator, the process-wide one by default."""
    place, *words, has_kept, kept = PYTHON.unpack(state)
    value = (3, (*words, place), kept if has_kept else None)
    (random.setstate if own is None else own.setstate)(value)


def load_numpy(state: bytes, own: np.random.RandomState | None = None) -> None:
    """Set a generator, the process-wide one by default."""
    keys, *rest = NUMPY.unpack(state)
    value = ("MT19937", np.frombuffer(keys, dtype=np.uint32), *rest)
    (np.random.set_state if own is None else own.set_state)(value)


def _told_by_python(generator: random.Random) -> bytes:
    _, words, kept = generator.getstate()
    return PYTHON.pack(words[-1], *words[:-1], kept is not None, kept or 0.0)


def _told_by_numpy(generator: np.random.RandomState) -> bytes:
    _, words, place, has_kept, kept = generator.get_state(legacy=True)
    return NUMPY.pack(words.tobytes(), place, has_kept, kept)  # type: ignore[union-attr]


@functools.cache
def _place_in_python() -> int | None:
    """Offset of position and words in the memory of a `random.Random`."""
    found = set()
    for seed in (1, 2):
        one = random.Random(seed)
        for _ in range(seed):
            one.random()
        found.add(_memory_of(one).find(_told_by_python(one)[:_WORDS_BYTES]))
    return _only(found)


@functools.cache
def _place_in_numpy() -> int | None:
    """Offset of the kept deviate, and of the mark before it, in a `RandomState`; None also if its
    words are not where numpy says."""
    found = set()
    for number, kept in ((1, 1), (2, 0), (3, 1)):
        one = np.random.RandomState(number)
        one.standard_normal(2 * number)
        state: Any = one.get_state(legacy=True)
        one.set_state((*state[:3], kept, number * 1.25e-200))
        pattern = _KEPT.pack(kept, 0, number * 1.25e-200)
        bits: Any = one._bit_generator
        its = ctypes.string_at(bits.ctypes.state_address, _WORDS_BYTES)
        same = its == _told_by_numpy(one)[:_WORDS_BYTES]
        found.add(_memory_of(one).find(pattern) if same else -1)
    return _only(found)


def _memory_of(obj: object) -> bytes:
    if sys.implementation.name != "cpython":
        return b""
    return ctypes.string_at(id(obj), type(obj).__basicsize__)


def _only(found: set[int]) -> int | None:
    place = found.pop() if len(found) == 1 else -1
    return None if place < 0 else place


def pack_rng(
    device: torch.device | None = None, known: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The states of the process-wide generators as bytes: Python, numpy, torch CPU, and all CUDA
    devices if CUDA is in use, with `device`, on which the process trains, as the first. Those in
    `known` are not read."""
    found = dict(known or ())
    if "python" not in found:
        found["python"] = python_state()
    if "numpy" not in found:
        found["numpy"] = numpy_state()
    if "torch" not in found:
        found["torch"] = _bytes_of(torch.default_generator.get_state())
    if "cuda" not in found:
        # Philox keeps seed and offset on the host: nothing is read back from a device here.
        devices = _devices(device) if torch.cuda.is_initialized() else []
        found["cuda"] = [_bytes_of(torch.cuda.get_rng_state(i)) for i in devices]
    return found


class RngMemory(NamedTuple):
    """What decides the state of one kind of generators. Addresses are given with their bytes."""

    names: list[tuple[dict[str, Any], str]]
    """The dicts and keys by which the generator is found."""
    fixed: list[tuple[int, int]]
    """Memory that says which parts it has."""
    tagged: list[dict[str, Any]]
    """Dicts that hold a part of the state."""
    spans: list[tuple[int, int]]
    """Memory with the rest of the state."""
    kept: list[Any]
    """Objects to which the memory belongs."""


_TYPE = object.__basicsize__ - 8
"""Offset of the type in an object."""


def rng_memory() -> dict[str, RngMemory]:
    """By kind, the memory that decides what `pack_rng` returns, without kinds for which it is not
    known. CUDA's only says that it is not in use."""
    found = {}
    if (python := _memory_of_python()) is not None:
        found["python"] = python
    if (numpy := _memory_of_numpy()) is not None:
        found["numpy"] = numpy
    cpu = torch.default_generator
    if _is_known_of_torch() and type(cpu) is torch.Generator:
        fixed = [(id(cpu) + _TYPE, 16)]
        names = [(vars(torch), "default_generator")]
        found["torch"] = RngMemory(names, fixed, [], [_block(cpu)], [cpu])
    if not torch.cuda.is_initialized() and "_initialized" in vars(torch.cuda):
        names = [(vars(torch), "cuda"), (vars(torch.cuda), "_initialized")]
        names.append((vars(torch.cuda), "is_initialized"))
        found["cuda"] = RngMemory(names, [], [], [], [])
    return found


def _memory_of_python() -> RngMemory | None:
    at = _place_in_python()
    generator: Any = getattr(random.getstate, "__self__", None)
    if at is None or type(generator) is not random.Random:
        return None
    fixed, words = (id(generator) + _TYPE, 8), (id(generator) + at, _WORDS_BYTES)
    return RngMemory([(vars(random), "getstate")], [fixed], [vars(generator)], [words], [generator])


def _memory_of_numpy() -> RngMemory | None:
    generator: Any = getattr(np.random.get_state, "__self__", None)
    if _place_in_numpy() is None or type(generator) is not np.random.RandomState:
        return None
    bits: Any = generator._bit_generator
    refers = _memory_of(generator).find(id(bits).to_bytes(8, sys.byteorder))
    if type(bits) is not np.random.MT19937 or refers < 0:
        return None
    fixed = [(id(each) + _TYPE, 8) for each in (generator, bits)]
    fixed.append((id(generator) + refers, 8))
    head = object.__basicsize__
    rest = id(generator) + head, type(generator).__basicsize__ - head
    return RngMemory(
        [(vars(np), "random"), (vars(np.random), "get_state")],
        fixed,
        [],
        [rest, (bits.ctypes.state_address, _WORDS_BYTES)],
        [generator, bits],
    )


def _block(generator: torch.Generator) -> tuple[int, int]:
    """Address and bytes of torch's own object, to which Python's refers."""
    address = ctypes.c_uint64.from_address(id(generator) + object.__basicsize__).value
    size = ctypes.CDLL(None).malloc_usable_size
    size.argtypes, size.restype = [ctypes.c_void_p], ctypes.c_size_t
    return address, size(address)


@functools.cache
def _is_known_of_torch() -> bool:
    """True if each change of a `torch.Generator` of the CPU changes that object, and nothing else
    does."""
    if sys.implementation.name != "cpython" or torch.Generator.__basicsize__ < 24:
        return False
    one = torch.Generator()
    other = one.get_state()
    one.manual_seed(1)
    changes: list[Callable[[], Any]] = [
        lambda: torch.rand(1, generator=one),
        lambda: torch.rand(700, generator=one),
        lambda: torch.randn(1, generator=one),
        lambda: torch.randn(1, generator=one),
        lambda: torch.randn(1, dtype=torch.float64, generator=one),
        lambda: torch.randperm(5, generator=one),
        lambda: one.manual_seed(7),
        lambda: one.set_state(other),
        lambda: one.seed(),
    ]
    place = _block(one)
    for change in changes:
        before, state = ctypes.string_at(*place), _bytes_of(one.get_state())
        if ctypes.string_at(*place) != before:
            return False
        change()
        told = _bytes_of(one.get_state()) != state
        if _block(one) != place or not told or ctypes.string_at(*place) == before:
            return False
    return True


def _bytes_of(state: torch.Tensor) -> bytes:
    return ctypes.string_at(state.data_ptr(), state.numel())


def _tensor_of(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _devices(first: torch.device | None) -> list[int]:
    """Numbers of the CUDA devices, `first` before the others (default: the current one). A rank
    keeps its stream when it trains on a device with another number later."""
    trains = torch.cuda.current_device() if first is None or first.index is None else first.index
    return [trains, *(i for i in range(torch.cuda.device_count()) if i != trains)]


def load_rng(value: dict[str, Any], device: torch.device | None = None) -> list[str]:
    """Set the generators; returns problems as text (fewer CUDA devices than saved)."""
    load_python(value["python"])
    load_numpy(value["numpy"])
    torch.set_rng_state(_tensor_of(value["torch"]))
    problems = []
    devices = _devices(device) if value["cuda"] and torch.cuda.is_available() else []
    for index, state in zip(devices, value["cuda"], strict=False):
        torch.cuda.set_rng_state(_tensor_of(state), index)
    if len(value["cuda"]) > len(devices):
        problems.append(
            f"RNG of {len(value['cuda'])} CUDA devices was saved, this process has {len(devices)}"
        )
    return problems


RNG_KINDS = ("python", "numpy", "torch", "cuda")


def digests_of(saved: Mapping[str, Any]) -> dict[str, str]:
    """Digests of a saved rank's streams, for the other ranks of a job that has grown.

    Args:
        saved: `rng` of a rank tree; see `pack_rng`.
    """
    return {kind: _digest(saved[kind]) for kind in RNG_KINDS}


def take_up(
    saved: Mapping[str, Any],
    version: int,
    rank: int,
    everyone: Sequence[Mapping[str, str]],
    device: torch.device | None = None,
) -> list[str]:
    """Set this process's generators after a restore; returns problems as text.

    Args:
        saved: `rng` of this rank's rank tree: of its own shard, or, if it had none, of shard `rank`
            modulo the number of shards.
        version: the version to restore.
        rank: of this process.
        everyone: `digests_of` every rank of the checkpoint, in order; may be empty if the job has
            not grown.
        device: the CUDA device that this process trains on, if it does.
    """
    problems = load_rng(dict(saved), device)
    if everyone and rank >= len(everyone):
        for kind in RNG_KINDS:
            seed = seed_of(kind, version, [states[kind] for states in everyone], rank)
            if seed is not None:
                _reseed(kind, seed)
    return problems


def seed_of(kind: str, version: int, states: Sequence[str], rank: int) -> int | None:
    """The seed of a new rank's stream, or None when it stays a copy; pure.

    Args:
        kind: one of `KINDS`.
        version: the version to restore.
        states: hexadecimal SHA-256 of every saved rank's state of that kind, in rank order.
        rank: the new rank's number.
    """
    if len(states) > 1 and len(set(states)) == 1:
        return None
    text = " ".join([f"tierckpt stream {kind} v{version}", *states])
    return (int.from_bytes(hashlib.sha256(text.encode()).digest(), "big") + rank) % 2**256


def _digest(state: bytes | Sequence[bytes]) -> str:
    return hashlib.sha256(state if isinstance(state, bytes) else b"".join(state)).hexdigest()


def _reseed(kind: str, seed: int) -> None:
    if kind == "python":
        random.seed(seed)
    elif kind == "numpy":
        np.random.seed(np.frombuffer(seed.to_bytes(32, "little"), dtype="<u4"))
    elif kind == "torch":
        torch.default_generator.manual_seed(seed % 2**64)
    else:
        torch.cuda.manual_seed_all(seed % 2**64)  # does nothing without CUDA


RARELY = 64
"""One boundary in so many looks at them."""
_ANY: dict[str, Callable[[], Any]] = {
    "torch.get_default_dtype()": lambda: str(torch.get_default_dtype()),
    "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled,
}
_CPU: dict[str, Callable[[], Any]] = {
    "torch.get_num_threads()": torch.get_num_threads,
}
_CUDA: dict[str, Callable[[], Any]] = {
    "torch.backends.cudnn.deterministic": torch._C._get_cudnn_deterministic,
    "torch.backends.cudnn.benchmark": torch._C._get_cudnn_benchmark,
    "torch.backends.cudnn.allow_tf32": torch._C._get_cudnn_allow_tf32,
    "torch.backends.cuda.matmul.allow_tf32": torch._C._get_cublas_allow_tf32,
}


def read_switches(cuda: bool) -> dict[str, Any]:
    """The switches that matter on this kind of device, by the names that users know."""
    found = {}
    for name, get in {**_ANY, **(_CUDA if cuda else _CPU)}.items():
        try:
            found[name] = get()
        except RuntimeError:  # torch refuses a mixture of its old and new settings
            continue
    return found


class Switches:
    """The switches of this process, packed. Training thread."""

    def __init__(self) -> None:
        self._looks, self._found = 0, dict[str, Any]()
        self._packed = tree_codec.Packed({})

    def packed(self, cuda: bool) -> tree_codec.Packed:
        """At a boundary: what `differing` takes. The same object while nothing changes."""
        if self._looks % RARELY == 0 and (found := read_switches(cuda)) != self._found:
            self._found, self._packed = found, tree_codec.Packed(found)
        self._looks += 1
        return self._packed


def differing_switches(saved: Mapping[str, Any], cuda: bool) -> list[str]:
    """A warning if switches of a version were others than those here."""
    now = read_switches(cuda)
    names = [
        f"{name} was {saved[name]} and is {now[name]}"
        for name in saved.keys() & now.keys()
        if saved[name] != now[name]
    ]
    if not names:
        return []
    return [
        f"{'; '.join(sorted(names))}: results may be rounded differently from "
        "the undisturbed run's. Set it as before the restart"
    ]
