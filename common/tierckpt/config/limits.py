"""Limits: checks of one value, whose errors name the setting and what it must be."""

from __future__ import annotations

from typing import Literal

from tierckpt.errors import ConfigError

from .level_tables import AUTO

DAY_SECONDS, YEAR_SECONDS = 24 * 3600, 365 * 24 * 3600
"""Limits for times: longer than any useful wait, and short enough for every clock of the system
(some are limited to 25 days)."""


def one_of(name: str, value: str, valid: tuple[str, ...]) -> None:
    if value not in valid:
        raise ConfigError(f"{name} is {value!r}; valid: {', '.join(valid)}")


def at_least(name: str, value: float | Literal["auto"], least: float) -> None:
    if value != AUTO and not value >= least:  # NaN is not
        raise ConfigError(f"{name} is {value}; it must be {least} or more")


def within(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:  # NaN is not
        named = {DAY_SECONDS: " (a day)", YEAR_SECONDS: " (a year)"}.get(int(most), "")
        raise ConfigError(f"{name} is {value}; it must be from {least} to {most}{named}")


__all__ = ["DAY_SECONDS", "YEAR_SECONDS", "at_least", "one_of", "within"]
