"""Every dtype that this torch has: as a buffer, and as a frozen parameter."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import tierckpt
from tests.support import exact

NUMBERS = 12
DTYPES = sorted(
    {d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=lambda d: str(d)
)


pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")


def filled(dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bytes, so also values that are not numbers."""
    size = NUMBERS * torch.empty(0, dtype=dtype).element_size()
    top = 2 if dtype is torch.bool else 256
    chance = torch.Generator().manual_seed(seed)
    return torch.randint(0, top, (size,), generator=chance, dtype=torch.uint8).view(dtype)


def can_be_made(dtype: torch.dtype) -> bool:
    """Some dtypes are only names, or need separate scales."""
    if str(dtype).startswith("torch.q"):
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some are experimental
            filled(dtype, 0)
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    return True


class Holder(nn.Module):
    """A buffer and a frozen parameter of each dtype."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        for number, dtype in enumerate(filter(can_be_made, DTYPES)):
            self.register_buffer(f"kept {number}", filled(dtype, seed + number))
            frozen = nn.Parameter(filled(dtype, seed + 100 + number), requires_grad=False)
            self.register_parameter(f"frozen {number}", frozen)


def test_they_come_back_to_the_bit(path: Path, shm_dir: Path) -> None:
    def attached(model: Holder) -> tierckpt.Checkpointer:
        optimizer = torch.optim.SGD(model.layer.parameters(), lr=0.1)
        return tierckpt.Checkpointer(
            model, optimizer, path=path, shm_dir=str(shm_dir), agent="inline"
        )

    first, second = Holder(1), Holder(1000)
    with attached(first) as ckpt:
        first.layer(torch.ones(1, 2)).sum().backward()
        next(iter(ckpt._state.optimizers.values())).step()
        ckpt.step()
    with attached(second) as ckpt:
        assert ckpt.restore().version == 1
    assert exact.image({**second.state_dict()}) == exact.image({**first.state_dict()})


def test_there_are_as_many_as_torch_had_long_ago() -> None:
    assert sum(map(can_be_made, DTYPES)) >= 15
