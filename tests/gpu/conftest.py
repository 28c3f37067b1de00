"""Setup of every test on a GPU: CUDA is initialized before."""

from __future__ import annotations

import os

import pytest
import torch

# The same sums in every process; it is read when the first handle of cuBLAS is made.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(scope="session", autouse=True)
def cuda_is_up() -> None:
    """The driver opens descriptors of its own, once: before any test is looked at for leaks."""
    if not torch.cuda.is_available():
        return
    layer = torch.nn.Linear(8, 8).cuda()
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.randn(4, 8, device="cuda")).sum().backward()
    optimizer.step()
    stream, event = torch.cuda.Stream(), torch.cuda.Event(blocking=True)
    pinned = torch.empty(1 << 20, pin_memory=True)
    with torch.cuda.stream(stream):
        pinned.copy_(torch.ones(1 << 20, device="cuda"), non_blocking=True)
        event.record(stream)
    event.synchronize()
    torch.cuda.synchronize()
