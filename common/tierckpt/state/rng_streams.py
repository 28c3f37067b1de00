"""The random streams of ranks that a checkpoint did not have.

A rank that comes back takes its streams up where they were. When a job has grown, there are ranks
whose streams nobody saved, and a copy of another rank's would draw the same dropout masks twice.
The rule, for each kind of stream (`KINDS`) by itself:

- If all saved ranks, two at least, had the same state, they share it in order to draw alike (which
  layer to drop, how long a sequence to take): a new rank takes a copy, and goes on drawing alike.
- Otherwise a new rank's stream begins with the seed

      SHA-256("tierckpt stream <kind> v<version>", then a space and the hexadecimal SHA-256 of each
      saved rank's state as JSON, in rank order), as a big-endian number, + rank, modulo 2 ** 256.

It depends on checkpoint and rank alone, so a restart that is repeated draws the same. Adding the
rank keeps the seeds of new ranks apart also where a generator takes 32 bits of them (torch's on the
CPU); numbering streams under one key is the idea of counter-based generators (Salmon et al.,
"Parallel random numbers: as easy as 1, 2, 3", SC 2011). The version makes it another seed when a
job grows again and the ranks that stayed have drawn nothing since.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from .rng import load_rng

KINDS = ("python", "numpy", "torch", "cuda")


def digests_of(saved: Mapping[str, Any]) -> dict[str, str]:
    """What the other ranks of a job that has grown need of a saved rank's streams.

    Args:
        saved: `rng` of a rank tree; see `generators.pack_rng`.
    """
    return {kind: _digest(saved[kind]) for kind in KINDS}


def take_up(
    saved: Mapping[str, Any],
    version: int,
    rank: int,
    everyone: Sequence[Mapping[str, str]],
    device: torch.device | None = None,
) -> list[str]:
    """Set this process's generators after a restore; returns what could not be set.

    Args:
        saved: `rng` of the rank tree that this rank has: of its own shard, or, where it had none,
            of shard `rank` modulo the number of shards.
        version: that is being restored.
        rank: of this process.
        everyone: `digests_of` every rank that the checkpoint is of, in order; may be empty where
            the job has not grown.
        device: the CUDA device that this one trains on, if it does.
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
        version: that is being restored.
        states: hexadecimal SHA-256 of every saved rank's state of that kind, in rank order.
        rank: the new rank's number.
    """
    if len(states) > 1 and len(set(states)) == 1:
        return None
    text = " ".join([f"tierckpt stream {kind} v{version}", *states])
    return (int.from_bytes(hashlib.sha256(text.encode()).digest(), "big") + rank) % 2**256


def _digest(state: Any) -> str:
    return hashlib.sha256(json.dumps(state).encode()).hexdigest()


def _reseed(kind: str, seed: int) -> None:
    if kind == "python":
        random.seed(seed)
    elif kind == "numpy":
        np.random.seed(np.frombuffer(seed.to_bytes(32, "little"), dtype="<u4"))
    elif kind == "torch":
        torch.default_generator.manual_seed(seed % 2**64)
    else:
        torch.cuda.manual_seed_all(seed % 2**64)  # nothing where there is no CUDA
