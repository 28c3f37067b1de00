"""Golden directories of jobs of one process, and what commands say of all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.golden.archive import Places
from tests.golden.job import ALONE
from tests.golden.reading import (
    CASES,
    look,
    name_of,
    put_together,
    ready,
    restart,
    restarts_of,
)


@pytest.fixture
def places(tmp_path: Path, shm_dir: Path) -> Places:
    return Places(tmp_path, shm_dir)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_without_a_job(case: dict[str, Any], places: Places) -> None:
    """A list, a verdict and the state of the model, of the files as they were written."""
    ready(case, places)
    for each in case["looks"]:
        found = look(each["paths"], places, each["variables"], each["load"] is not None)
        assert found == {name: each[name] for name in found}


@pytest.mark.parametrize(("case", "each"), restarts_of(ALONE), ids=name_of)
def test_a_restart(case: dict[str, Any], each: dict[str, Any], places: Places) -> None:
    ready(case, places, each["edits"])
    where = (each["settings"], places, each["call"], each["variables"], each["then"])
    told = restart(each["model"], ALONE, *where)
    assert put_together([told]) == each["gives"]
