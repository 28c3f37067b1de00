"""A node's agent at its part of a flush, one shard of each version, controlled by its input.

    python -m tests.support.flush_processes <plan>

`plan` is JSON: the `url` of the place, fsspec's `options`, the `shard`, the number of `shards` and
their `pages`, the `tries` of an operation, and the `stall_seconds` without an acknowledged byte
after which a connection is closed. Every input line is a version; the answer is true if it is
complete now, false if it is not, or the error.
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
    """Open the place without the client's own retries: the test is about Tierckpt's."""
    stall_ms = int(1e3 * plan["stall_seconds"])

    def impatient(where: tuple[Any, ...]) -> socket.socket:
        """Set the kernel's timeout for sent bytes, which the client's timeouts do not cover."""
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
    """Flush this node's shard; an error is an answer."""
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
