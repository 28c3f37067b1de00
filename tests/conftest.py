"""The tier of a test is the directory it is in: tests/unit, tests/store, ..."""

from pathlib import Path

import pytest

# Cheapest first: what a unit test finds need not be waited for.
TIERS = ("unit", "store", "dist", "crash", "gpu")


def tier_of(item: pytest.Item) -> str:
    tier = item.path.relative_to(Path(__file__).parent).parts[0]
    if tier not in TIERS:
        raise pytest.UsageError(f"{item.path} is in none of the tiers {', '.join(TIERS)}")
    return tier


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(tier_of(item))
    items.sort(key=lambda item: TIERS.index(tier_of(item)))
