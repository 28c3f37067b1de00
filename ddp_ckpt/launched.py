"""How torchrun started this process, as far as a restart depends on it."""

from __future__ import annotations

from collections.abc import Mapping

SHARED_STORE = (
    "torchrun keeps one key-value store for all its restarts here, in which processes that it "
    "starts again may read the addresses of dead ones: they fail to meet (gloo: connectFullMesh "
    "failed, NCCL: Connection refused), or wait for each other without end. Start it as "
    "`TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone ...`, and where there are several "
    "nodes with --rdzv-backend c10d --rdzv-endpoint HOST:PORT in place of --standalone: without "
    "either the variable changes nothing"
)


def restarts_share_a_store(environment: Mapping[str, str]) -> bool:
    """Whether ranks that torchrun starts again meet in the store that dead ones have written to.

    Attempts share keys in there: torch issues 135712, 167288.
    """
    shares = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return shares and environment.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"


__all__ = ["SHARED_STORE", "restarts_share_a_store"]
