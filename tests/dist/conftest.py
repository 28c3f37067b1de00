"""Pools of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import pytest

from tests.support.horovod_here import horovod_missing, mpi_missing
from tests.support.rank_pool import ALONE, COLLECTIVE_SECONDS, GLOO, LAUNCHERS, MPIRUN, RankPool

Ranks = Callable[..., RankPool]


def skip_if_missing(kind: str) -> None:
    """Skip a test that needs ranks under a missing launcher.

    Tests have no skip mark: ranks import test modules, and must not look for Horovod again.
    """
    if kind in LAUNCHERS:
        why_not = mpi_missing() if kind == MPIRUN else horovod_missing()
        if why_not:
            pytest.skip(why_not)


@pytest.fixture(scope="session", autouse=True)
def _warm(warm_python: None) -> None:
    """Before the first test, as it starts processes that last."""


@pytest.fixture(scope="session")
def launchable() -> Callable[[str], None]:
    """For tests that start a launcher by themselves: `launchable(MPIRUN)` skips without one."""
    return skip_if_missing


def environment(kind: str, size: int) -> dict[str, str]:
    """Environment variables of a shared pool's ranks, besides the test's own."""
    if kind not in LAUNCHERS:
        return {}
    settings = {
        "HOROVOD_STALL_CHECK_TIME_SECONDS": str(COLLECTIVE_SECONDS // 2),
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(COLLECTIVE_SECONDS),
        "HOROVOD_GLOO_TIMEOUT_SECONDS": "86400",  # a pool may be paused for long
    }
    if size > 2:
        # Fusion of gradients depends on time, and sums over three ranks depend on the fusion.
        settings["HOROVOD_FUSION_THRESHOLD"] = "0"
        settings["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
    return settings


@pytest.fixture(scope="session")
def shared_pools() -> Iterator[dict[tuple[int, str], RankPool]]:
    """All pools that tests share, by size and kind."""
    pools: dict[tuple[int, str], RankPool] = {}
    yield pools
    for pool in pools.values():
        pool.kill()


@pytest.fixture(scope="module", autouse=True)
def launchers_rest_behind_the_module(
    shared_pools: dict[tuple[int, str], RankPool],
) -> Iterator[None]:
    """Horovod's ranks keep talking to each other when they have nothing to do: up to a core."""
    yield
    for pool in shared_pools.values():
        if pool.kind in LAUNCHERS:
            pool.pause()


@pytest.fixture(scope="session")
def ranks(
    shared_pools: dict[tuple[int, str], RankPool], tmp_path_factory: pytest.TempPathFactory
) -> Ranks:
    """`ranks(2)`, `ranks(2, HOROVODRUN)`: a pool of two ranks, shared by all tests.

    Of pools under a launcher only the one asked for last runs, and to the module's end.
    """

    def of(size: int, kind: str = GLOO) -> RankPool:
        skip_if_missing(kind)
        if kind in LAUNCHERS:
            for other, pool in shared_pools.items():
                if other != (size, kind) and pool.kind in LAUNCHERS:
                    pool.pause()
        if (size, kind) not in shared_pools:
            folder = tmp_path_factory.mktemp(f"{kind}{size}-")
            environments = [environment(kind, size)] * size
            shared_pools[size, kind] = RankPool(size, folder, environments, kind)
        return shared_pools[size, kind]

    return of


@pytest.fixture
def own_ranks(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[..., RankPool]]:
    """`own_ranks(env, ...)`: a pool for this test alone, a rank for each environment."""
    pools = []

    def start(
        env: Sequence[Mapping[str, str]], process_group: bool = True, kind: str = GLOO
    ) -> RankPool:
        skip_if_missing(kind)
        folder = tmp_path_factory.mktemp("own-ranks-")
        pools.append(RankPool(len(env), folder, env, kind if process_group else ALONE))
        return pools[-1]

    yield start
    for pool in pools:
        pool.kill()
