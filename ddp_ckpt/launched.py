"""The way in which torchrun started this process, as far as restarts depend on it."""

from __future__ import annotations

from collections.abc import Mapping

from tierckpt._milestones import ATTEMPT_VARIABLE

SHARED_STORE = (
    "torchrun uses one key-value store for all its restarts here, and processes that it restarts "
    "may read the addresses of dead ones from it: they fail to connect (gloo: connectFullMesh "
    "failed, NCCL: Connection refused), or wait for each other without end. Start it as "
    "`TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone ...`; with several nodes, use "
    "--rdzv-backend c10d --rdzv-endpoint HOST:PORT in place of --standalone. Without one of these "
    "options the variable has no effect"
)


def restarts_share_a_store(environment: Mapping[str, str]) -> bool:
    """True if ranks that torchrun restarts use the store that dead ranks have written to.

    Attempts share keys in this store: torch issues 135712, 167288. Under `tierckpt run` each has a
    store of its own.
    """
    shares = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    shares = shares and ATTEMPT_VARIABLE not in environment
    return shares and environment.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"


__all__ = ["SHARED_STORE", "restarts_share_a_store"]
