"""All cases together."""

from __future__ import annotations

from tests.support.state_matrix import changes, extras, kinds, optimizers, product

CASES = {
    **optimizers.CASES,
    **kinds.CASES,
    **changes.CASES,
    **extras.CASES,
}
PRODUCT = product.CASES

TORCH_2_4_CANNOT = {
    "optimizer adamw fused": "refuses parameters without elements",
    "scheduler SequentialLR": "warns of its own argument",
    "scheduler SWALR": "has a function in its state_dict",
}
"""Cases that need torch 2.5."""
