"""Writers of a persistent path are killed at every kind of operation on its file system.

Existing versions stay sound, and the next writer finishes the unfinished ones.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.store.storage import test_persistent_store
from tests.store.storage.test_persistent_store import (
    LARGEST_BYTES,
    LAYOUTS,
    check,
    facts,
    made,
    name,
    sources,
)
from tierckpt._faults import FAULTS_VARIABLE
from tierckpt.storage.persistent import PersistentStore, RetentionPolicy

FLUSH_KILLS = [
    "op=mkdir",
    "op=open,hit=2",
    "op=write,hit=3",
    "op=fsync,hit=2",
    "op=rename,target=v0000000001.g000001.of00005.5eed.manifest",
    "op=fsync_directory,hit=2",
]
REMOVAL_KILLS = [
    "op=open",
    "op=fsync",
    "op=rename",
    "op=fsync_directory,hit=2",
    "op=unlink,hit=2",
    "op=rmdir",
]
PROGRAM = (
    "import sys, json; from pathlib import Path\n"
    f"from tests.store.storage import {test_persistent_store.__name__.rpartition('.')[2]} as t\n"
    "store = t.made(Path(sys.argv[1]), json.loads(sys.argv[2]))\n"
)


def in_turn(kills: list[str]) -> list[tuple[str, str]]:
    """Each with one layout; `StoreConformance` kills at every operation in both."""
    return [*zip(kills, itertools.cycle(LAYOUTS), strict=False)]


def killed(does: str, at: str, place: Path, layout: str) -> PersistentStore:
    """Return the path after another process was killed during that operation."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + does, str(place), json.dumps(LAYOUTS[layout])],
        env={**os.environ, FAULTS_VARIABLE: f"kill@file:{at}"},
        timeout=60,
    )
    assert done.returncode == -signal.SIGKILL
    return made(place, LAYOUTS[layout])


@pytest.mark.parametrize(("at", "layout"), in_turn(FLUSH_KILLS))
def test_a_flush_is_finished_by_the_next(at: str, tmp_path: Path, layout: str) -> None:
    flush = "store.flush(t.facts(1), t.LARGEST_BYTES, t.sources(1))"
    store = killed(flush, at, tmp_path, layout)
    assert store.versions() == []
    assert store.flush(facts(1), LARGEST_BYTES, sources(1)).committed
    check(store, 1)
    store.clean()
    assert not list(tmp_path.rglob(".*")), "a temporary file is left"


@pytest.mark.parametrize(("at", "layout"), in_turn(REMOVAL_KILLS))
def test_a_removal_is_finished_by_the_next(at: str, tmp_path: Path, layout: str) -> None:
    store = made(tmp_path, LAYOUTS[layout])
    for version in (1, 2):
        store.flush(facts(version), LARGEST_BYTES, sources(version))
    store = killed("store.retire(t.name(1))", at, tmp_path, layout)
    if name(1) in store.versions():
        check(store, 1)
    check(store, 2)
    store.retain(RetentionPolicy(keep_last=1), name(2))
    assert store.versions() == [name(2)]
    assert store.incomplete() == store.retired() == []
    assert not list(tmp_path.rglob("v0000000001*")), "nothing of v1 is left"
    check(store, 2)
