"""Hooks: they notice the start and end of steps and iterations."""

from typing import TYPE_CHECKING

from tierckpt import lazy_exports

if TYPE_CHECKING:
    from .iterations import STEPS_UNTIL_CALL, STEPS_UNTIL_FORWARD

__getattr__ = lazy_exports(__name__)
