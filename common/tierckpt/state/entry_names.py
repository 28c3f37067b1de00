"""Names of tensors in checkpoints, and their parts. Pure, and without torch."""

from __future__ import annotations

FIXED = ("model/", "buffer/")
"""Prefixes of tensors that exist before any restore; optimizer state is created and dropped."""


def path_of(name: str) -> tuple[str, str]:
    """(parameter, key) of the optimizer state with the name `label/parameter/key`."""
    first, last = name.index("/"), name.rindex("/")
    return name[first + 1 : last], name[last + 1 :]


def parameter_of(name: str) -> str:
    """The parameter or buffer that the entry `name` belongs to."""
    return name.split("/", 1)[1] if name.startswith(FIXED) else path_of(name)[0]


__all__ = ["FIXED", "parameter_of", "path_of"]
