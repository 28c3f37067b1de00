"""A new run's agent cleans up while the agent of the run before finishes its last commit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tierckpt.format import PAGE_BYTES, ShardKey, VersionId
from tierckpt.storage import LocalStore
from tierckpt.storage import local as localstore


def test_a_commit_that_ends_while_files_are_cleaned_up_keeps_its_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, key = LocalStore(tmp_path), ShardKey(VersionId(1, 8), 0, 2)
    store.commit(key, memoryview(bytes(PAGE_BYTES)), b"manifest")
    manifest, held = tmp_path / f"{key.stem}.manifest", tmp_path / "held back"
    manifest.rename(held)

    def unlocked_now(path: Path) -> bool:
        """At this moment the other agent has made its manifest and released the lock on the
        data."""
        if held.exists():
            held.rename(manifest)
        return True

    monkeypatch.setattr(localstore, "unlocked", unlocked_now)
    store.clean(key.shard)
    assert store.keys() == [key]
    store.open_image(key).close()
