"""The Group over torch.distributed is a Group like any other."""

from __future__ import annotations

from typing import Any

import pytest

from ddp_ckpt.group import TorchGroup
from tierckpt.testing.groupsuite import GroupConformance, Program


def with_group(program: Program) -> Any:
    group = TorchGroup()
    try:
        return program(group)
    finally:
        group.close()


class TestTorchGroup(GroupConformance):
    @pytest.fixture(autouse=True)
    def use_pools(self, ranks: Any) -> None:
        self.ranks = ranks

    def run(self, size: int, program: Program) -> list[Any]:
        return self.ranks(size).run(with_group, program)
