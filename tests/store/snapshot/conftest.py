"""These tests are about copies beside the training."""

import pytest


@pytest.fixture(autouse=True)
def _by_layer(by_layer: None) -> None:
    """Their models stand for large ones."""
