"""A node's agent at its part of a flush, one shard of each version, controlled by its input.

    python -m tests.support.flush_processes <plan>

`plan` is JSON: the `url` of the place, the client's `options`, the `shard`, the number of `shards`
and their `pages`, and the `tries` of an operation. Every input line is a version; the answer is
true if it is complete now, false if it is not, or the error.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from tests.support.facts import facts_named
from tierckpt.format import ShardKey, VersionId
from tierckpt.storage.persistent import (
    PersistentStore,
    RetryPolicy,
    ShardSource,
    VersionName,
)
from tierckpt.testing import content_of, manifest_of

LIFE = "5eed"


def name_of(version: int, shards: int) -> VersionName:
    return VersionName(VersionId(1, version), shards, LIFE)


def open_store(plan: dict[str, Any]) -> PersistentStore:
    """Open the place."""
    policy = RetryPolicy(tries=plan["tries"], first_seconds=0.1)
    return PersistentStore(plan["url"], retry=policy, **plan["options"])


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
