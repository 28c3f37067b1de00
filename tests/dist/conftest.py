"""Pools of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import pytest

from tests.dist.rankpool import RankPool

Ranks = Callable[[int], RankPool]


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """`ranks(2)`: a pool of two ranks, shared by all tests."""
    pools: dict[int, RankPool] = {}

    def of_size(size: int) -> RankPool:
        if size not in pools:
            pools[size] = RankPool(size, tmp_path_factory.mktemp(f"ranks{size}-"))
        return pools[size]

    yield of_size
    for pool in pools.values():
        pool.kill()


@pytest.fixture
def own_ranks(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[..., RankPool]]:
    """`own_ranks(env, ...)`: a pool for this test alone, a rank for each environment."""
    pools = []

    def start(env: Sequence[Mapping[str, str]], process_group: bool = True) -> RankPool:
        folder = tmp_path_factory.mktemp("own-ranks-")
        pools.append(RankPool(len(env), folder, env, process_group))
        return pools[-1]

    yield start
    for pool in pools:
        pool.kill()
