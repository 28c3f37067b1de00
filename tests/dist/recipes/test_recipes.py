"""Scripts of other projects resume exactly after a kill, with the lines of docs/scripts.md.

Their sources are not part of the project: TIERCKPT_RECIPES names a folder with clones, see
CONTRIBUTING.md.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.rank_pool import HOROVODRUN
from tests.support.recipes import diffs
from tests.support.recipes.job import CLONES, RecipeJob, resumes_exactly
from tests.support.recipes.scripts import RECIPES

PAGE = Path(__file__).parents[3] / "docs" / "scripts.md"


def clones_with(repository: str) -> Path:
    """The folder with this clone; skips the test without it."""
    folder = Path(os.environ.get(CLONES, "/nowhere"))
    if not (folder / repository).is_dir():
        pytest.skip(f"{CLONES} names no folder with a clone of {repository}")
    return folder


@pytest.mark.parametrize("name", RECIPES)
def test_a_script_with_the_lines_of_the_page_resumes_exactly(
    name: str, tmp_path: Path, shm_dir: Path, launchable: Callable[[str], None]
) -> None:
    recipe = RECIPES[name]
    clones = clones_with(recipe.repository)
    for package in recipe.needs:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{recipe.repository} needs {package}")
    if recipe.horovod:
        launchable(HOROVODRUN)
    lines = diffs.blocks_of(PAGE)[recipe.repository]
    before = lines if recipe.own_state else ""
    plain = RecipeJob(recipe, clones, tmp_path / "plain", before, shm_dir)
    plain.start()
    assert plain.is_done(), plain.output()
    for kill in recipe.kills:
        ours = RecipeJob(recipe, clones, tmp_path / f"killed{kill}", lines, shm_dir)
        resumes_exactly(ours, plain, recipe, kill)
