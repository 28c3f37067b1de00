"""Golden directories restored by real groups: DDP over gloo, and Horovod."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.golden.archive import Places
from tests.golden.job import DDP, HOROVOD
from tests.golden.reading import name_of, put_together, ready, restart, restarts_of
from tests.support.rank_pool import GLOO, HOROVODRUN

KINDS = {DDP: GLOO, HOROVOD: HOROVODRUN}
HELD_BY_XOR = {
    *("memory", "local", "memory of one lost", "too many lost"),
    *("damaged parity", "damaged shard"),
}
"""Restarts that are the same whatever the scheme of the parity is; those of xor3 are made."""
RESTARTS = [
    (case, each)
    for case, each in restarts_of(DDP, HOROVOD)
    if case["case"] not in ("partner2", "partner3", "rs4") or each["name"] not in HELD_BY_XOR
]


@pytest.mark.parametrize(("case", "each"), RESTARTS, ids=name_of)
def test_a_restart(
    case: dict[str, Any], each: dict[str, Any], ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    places = Places(tmp_path, shm_dir)
    ready(case, places, each["edits"])
    where = (each["settings"], places, each["call"], each["variables"], each["then"])
    pool = ranks(each["ranks"], KINDS[each["adapter"]])
    told = pool.run(restart, each["model"], each["adapter"], *where)
    assert put_together(told) == each["gives"]
