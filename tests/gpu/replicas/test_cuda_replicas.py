"""The replica check's sums on a GPU: every bit counts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tierckpt.replicas import GPU_PART_ELEMENTS, NONE, Look, ReplicatedState, weighted_sum
from tierckpt.state import TrainingState

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def digest(state: TrainingState) -> int:
    look = Look(ReplicatedState(state, 3), range(3), 0, 0)
    look.finish()
    return look.fetch()


def test_a_bit_that_flips_on_the_gpu_is_another_digest() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(GPU_PART_ELEMENTS // 512 + 3, 700), nn.Linear(700, 5)).cuda()
    optimizer = torch.optim.Adam(model.parameters())  # its counts of steps are on the host
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    state = TrainingState(model, {"optimizer": optimizer}, None, None, None)
    before = digest(state)
    assert before == digest(state) != NONE
    for tensor in (model[0].weight, model[1].bias, optimizer.state[model[1].bias]["exp_avg"]):
        bits = tensor.detach().view(torch.int32).view(-1)
        for bit in (0, 15, 30):
            bits[-1] ^= 1 << bit
            assert digest(state) != before
            bits[-1] ^= 1 << bit
    assert digest(state) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_gpu_sum_equals_the_cpu_sum(dtype: torch.dtype) -> None:
    values = torch.randn(100_003, dtype=torch.float64).to(dtype)
    assert weighted_sum(values.cuda()).cpu() == weighted_sum(values)
