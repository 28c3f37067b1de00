"""The persistent level on a file system of fsspec: that of URLs without a backend of their own."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support import persistent_shards
from tests.support.persistent_shards import facts_of, name_of
from tests.support.warm_python.servers import PYTHON
from tierckpt.format import ShardKey
from tierckpt.storage.persistent import WINDOW_BYTES, ShardSource
from tierckpt.testing import content_of, key_of, manifest_of

pytest.importorskip("fsspec")
LARGE_PAGES = 2 * WINDOW_BYTES // 4096
FSSPEC_KILLS = ["op=open", "op=write,hit=2", "op=close", "op=complete", "op=put", "op=delete"]


@pytest.mark.usefixtures("warm_python")
@pytest.mark.parametrize("at", FSSPEC_KILLS)
def test_a_flush_or_removal_killed_anywhere_is_repeated(at: str, tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "from tests.support import persistent_shards as p\n"
        "from tests.store.storage import test_persistent_fsspec as t\n"
        "store = p.fsspec_local(Path(sys.argv[1])).store; key = t.key_of(1)\n"
        "store.flush(p.facts_of(key), 1 << 25, [t.large(key)]); store.retire(p.name_of(key))\n"
    )
    done = subprocess.run(
        [PYTHON, "-c", program, str(tmp_path)],
        env={**os.environ, "TIERCKPT_FAULTS": f"kill@file:{at}"},
        timeout=120,
    )
    assert done.returncode == -signal.SIGKILL
    store = persistent_shards.fsspec_local(tmp_path).store
    assert store.versions() == ([name_of(key_of(1))] if at == "op=delete" else [])
    if at == "op=delete":
        store.retire(name_of(key_of(1)))
        assert store.versions() == []
        return
    assert store.flush(facts_of(key_of(1)), 1 << 25, [large(key_of(1))]).committed
    store.open_shard(name_of(key_of(1)), 0).verify()


def large(key: ShardKey) -> ShardSource:
    image = memoryview(content_of(key, LARGE_PAGES))
    return ShardSource(key.shard, image, manifest_of(key, LARGE_PAGES))
