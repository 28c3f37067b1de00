"""Any training state is restored bit for bit, and trains on bit for bit.

The cases are in `tests/support/state_matrix`, and `proof.py` there defines the checks of each;
`tests/dist/state/test_state_matrix.py` runs a third of them in jobs of two ranks. Odd cases restore
from memory, even ones from disk.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations as pairs
from itertools import product as combinations
from pathlib import Path

import pytest
import torch

from tests.support.state_matrix import product
from tests.support.state_matrix.matrix import CASES, PRODUCT, TORCH_2_4_CANNOT
from tests.support.state_matrix.proof import Bench, restores_and_trains_on


def every_other(names: Iterable[str]) -> dict[str, bool]:
    return {name: index % 2 == 1 for index, name in enumerate(names)}


ON_DISK = every_other(CASES)


@pytest.mark.parametrize("name", CASES)
def test_restores_and_trains_on_bit_for_bit(name: str, tmp_path: Path, shm_dir: Path) -> None:
    if name in TORCH_2_4_CANNOT and torch.__version__.startswith("2.4."):
        pytest.skip(f"torch 2.4's {name.split()[1]} {TORCH_2_4_CANNOT[name]}")
    restores_and_trains_on(CASES[name], Bench(tmp_path, shm_dir, ON_DISK[name]))


# By fives: an optimizer has four cases.
PRODUCT_ON_DISK = {name: index % 5 in (1, 3) for index, name in enumerate(PRODUCT)}


@pytest.mark.parametrize("name", PRODUCT)
def test_so_does_every_optimizer_with_every_type_and_feature(
    name: str, tmp_path: Path, shm_dir: Path
) -> None:
    restores_and_trains_on(PRODUCT[name], Bench(tmp_path, shm_dir, PRODUCT_ON_DISK[name]))


def test_both_levels_and_every_kind_are_in_the_matrix() -> None:
    kinds = {"optimizer": 30, "scheduler": 15}
    for kind, least in kinds.items():
        assert sum(name.startswith(kind) for name in CASES) >= least
    assert abs(sum(ON_DISK.values()) - len(CASES) / 2) <= 1


def test_each_two_of_an_optimizer_a_type_and_a_feature_meet() -> None:
    axes = [map(str, axis) for axis in (product.OPTIMIZERS, product.DTYPES, product.FEATURES)]
    for one, other in pairs([list(axis) for axis in axes], 2):
        for first, second in combinations(one, other):
            assert any(first in name and second in name for name in PRODUCT), (first, second)
        for value in (*one, *other):
            of_it = [name for name in PRODUCT if value in name]
            assert {PRODUCT_ON_DISK[name] for name in of_it} == {False, True}
