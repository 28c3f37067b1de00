"""A node's agent at its part of a flush, told by its input: one shard of each version.

    python -m tests.support.flush_processes <plan>

`plan` is JSON: the `url` of the place, fsspec's `options`, the `shard` of so many `shards`, each of
`pages`, in how many `tries` an operation is given up, and after how many `stall_seconds` without an
acknowledged byte a connection. Every line is a version; the answer says whether it is complete now,
or the error.
"""

from __future__ import annotations

import json
import socket
import sys
from typing import Any

from tests.support.facts import facts_named
from tierckpt.format.ids import ShardKey, VersionId
from tierckpt.storage.persistent import (
    PersistentStore,
    RetryPolicy,
    ShardSource,
    VersionName,
)
from tierckpt.testing.store_program import content_of, manifest_of

LIFE = "5eed"


def name_of(version: int, shards: int) -> VersionName:
    return VersionName(VersionId(1, version), shards, LIFE)


def open_store(plan: dict[str, Any]) -> PersistentStore:
    """Without the client's own retries: ours are what is tested, and they are told."""
    stall_ms = int(1e3 * plan["stall_seconds"])

    def impatient(where: tuple[Any, ...]) -> socket.socket:
        """The client's timeouts do not hold for what it sends: for that, the kernel's is needed."""
        made = socket.socket(*where[:3])
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, stall_ms)
        return made

    options = dict(plan["options"])
    connector = {"connector_args": {"socket_factory": impatient}}
    options["config_kwargs"] = {**options["config_kwargs"], **connector}
    policy = RetryPolicy(tries=plan["tries"], first_seconds=0.1)
    store = PersistentStore(plan["url"], retry=policy, **options)
    store.backend.inner._fs.retries = 1  # type: ignore[attr-defined]
    return store


def flush(store: PersistentStore, plan: dict[str, Any], version: int) -> dict[str, Any]:
    """This node's shard; the error is an answer."""
    key = ShardKey(VersionId(1, version), plan["shard"], plan["shards"])
    image = memoryview(content_of(key, plan["pages"]))
    source = ShardSource(plan["shard"], image, manifest_of(key, plan["pages"]))
    facts = facts_named(name_of(version, plan["shards"]))
    try:
        result = store.flush(facts, len(image), [source])
    except OSError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"committed": result.committed, "reused_bytes": result.reused_bytes}


def main() -> None:
    plan = json.loads(sys.argv[1])
    store = open_store(plan)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        print(json.dumps(flush(store, plan, json.loads(line))), flush=True)
    store.close()


if __name__ == "__main__":
    main()
