"""torch.set_default_device: our own tensors are made on the host all the same.

The meta device stands for any device other than the host: a tensor there has no bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_ckpt
import tierckpt
from tests.support.training import Place


@contextmanager
def elsewhere() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


def layers(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 64), nn.BatchNorm1d(64), nn.Linear(64, 64))


def attached(place: Place, alone: bool, seed: int) -> tuple[nn.Module, Any, Any]:
    net = layers(seed) if alone else DistributedDataParallel(layers(seed))
    optimizer = torch.optim.Adam(net.parameters())
    kind: Any = tierckpt.Checkpointer if alone else ddp_ckpt.Checkpointer
    with elsewhere():
        # The rank that reads encoded files sends them to all others.
        more = {"local_every_steps": 1, "local_codecs": "zstd", "when_busy": "wait"}
        ckpt = kind(net, optimizer, path=place.path, shm_dir=place.shm, **more)
    return net, optimizer, ckpt


def there_and_back(place: Place, alone: bool) -> tuple[int, bool, bool, set[str]]:
    """The restored version, whether anything was sent, whether all is equal, and the devices."""
    net, optimizer, ckpt = attached(place, alone, seed=1)
    batches = [torch.randn(8, 4) for _ in range(3)]
    with elsewhere():
        ckpt.restore()
        for batch in batches:
            net(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            ckpt.step()
        ckpt.close()
    other_memory = Path(place.shm) / "other"  # or slots would be mapped
    other_memory.mkdir(exist_ok=True)
    place = replace(place, shm=str(other_memory))
    again, other, ckpt = attached(place, alone, seed=2)
    with elsewhere():
        restored = ckpt.restore()
        ckpt.abandon()
    wanted, now = net.state_dict(), again.state_dict()
    states = list(zip(optimizer.state.values(), other.state.values(), strict=True))
    same = all(torch.equal(now[name], wanted[name]) for name in wanted) and all(
        torch.equal(then[key], kept[key]) for then, kept in states for key in then
    )
    devices = {t.device.type for t in now.values()}
    devices |= {t.device.type for _, kept in states for t in kept.values()}
    return int(restored), restored.exchanged_bytes > 0, same and bool(states), devices


def test_one_rank(tmp_path: Path, shm_dir: Path) -> None:
    place = Place.under(tmp_path, shm_dir)
    assert there_and_back(place, alone=True) == (3, False, True, {"cpu"})


def test_two_ranks(ranks: Any, tmp_path: Path, shm_dir: Path) -> None:
    told = ranks(2).run(there_and_back, Place.under(tmp_path, shm_dir), False)
    assert told == [(3, True, True, {"cpu"})] * 2
