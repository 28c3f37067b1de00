"""The process-wide random generators: saving their states as bytes, and setting them."""

from __future__ import annotations

import ctypes
import hashlib
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from .generator_memory import load_numpy, load_python, numpy_state, python_state


def pack_rng(device: torch.device | None = None) -> dict[str, Any]:
    """The states of the process-wide generators as bytes: Python, numpy, torch CPU, and all CUDA
    devices if CUDA is in use, with `device`, on which the process trains, as the first."""
    cuda: list[bytes] = []
    if torch.cuda.is_initialized():
        # Philox keeps seed and offset on the host: nothing is read back from a device here.
        cuda = [_bytes_of(torch.cuda.get_rng_state(i)) for i in _devices(device)]
    cpu = _bytes_of(torch.default_generator.get_state())
    return {"python": python_state(), "numpy": numpy_state(), "torch": cpu, "cuda": cuda}


def _bytes_of(state: torch.Tensor) -> bytes:
    return ctypes.string_at(state.data_ptr(), state.numel())


def _tensor_of(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _devices(first: torch.device | None) -> list[int]:
    """Numbers of the CUDA devices, beginning with `first` (default: the current one). A rank keeps
    its stream when it trains on a device with another number later."""
    trains = torch.cuda.current_device() if first is None or first.index is None else first.index
    return [trains, *(i for i in range(torch.cuda.device_count()) if i != trains)]


def load_rng(value: dict[str, Any], device: torch.device | None = None) -> list[str]:
    """Set the generators; returns problems in words (fewer CUDA devices than saved)."""
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


KINDS = ("python", "numpy", "torch", "cuda")


def digests_of(saved: Mapping[str, Any]) -> dict[str, str]:
    """Digests of a saved rank's streams, for the other ranks of a job that has grown.

    Args:
        saved: `rng` of a rank tree; see `pack_rng`.
    """
    return {kind: _digest(saved[kind]) for kind in KINDS}


def take_up(
    saved: Mapping[str, Any],
    version: int,
    rank: int,
    everyone: Sequence[Mapping[str, str]],
    device: torch.device | None = None,
) -> list[str]:
    """Set this process's generators after a restore; returns problems in words.

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
        for kind in KINDS:
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


__all__ = ["KINDS", "digests_of", "load_rng", "pack_rng", "seed_of", "take_up"]
