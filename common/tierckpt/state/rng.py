"""The process-wide random generators: their states as text, and set again."""

from __future__ import annotations

import array
import base64
import random
from typing import Any

import numpy as np
import torch

from . import tree_codec


def pack_rng(device: torch.device | None = None) -> tree_codec.Later:
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

    return tree_codec.Later(written)


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


__all__ = ["load_rng", "pack_rng"]
