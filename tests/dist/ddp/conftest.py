"""Two ranks over gloo, and a place for their checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.rank_pool import RankPool
from tests.support.training import Place


@pytest.fixture
def pool(ranks: Any) -> RankPool:
    found: RankPool = ranks(2)
    return found


@pytest.fixture
def place(tmp_path: Path, shm_dir: Path) -> Place:
    return Place.under(tmp_path, shm_dir)
