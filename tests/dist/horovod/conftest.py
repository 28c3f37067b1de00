"""Two ranks under horovodrun, and places for their checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.rank_pool import HOROVODRUN, RankPool
from tests.support.training import Place


@pytest.fixture
def pool(ranks: Any) -> RankPool:
    found: RankPool = ranks(2, HOROVODRUN)
    return found


@pytest.fixture
def place(tmp_path: Path, shm_dir: Path) -> Place:
    return Place.under(tmp_path, shm_dir)


@pytest.fixture
def losable(tmp_path: Path, shm_dir: Path) -> Place:
    """A place with memory that can be lost."""
    (shm_dir / "memory").mkdir()
    return Place.under(tmp_path, shm_dir / "memory")
