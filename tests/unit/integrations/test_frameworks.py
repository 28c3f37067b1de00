"""Versions of a framework, and the private names that an integration needs."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from tierckpt.errors import ConfigError
from tierckpt.integrations import Framework

FRAMEWORK = Framework("Torchlight", "2.4", "2.10")


@pytest.mark.parametrize("version", ["2.4.0", "2.4.1rc1", "2.9", "2.10.7", "2.10.0+cu126"])
def test_tested_versions_are_silent(version: str) -> None:
    said: list[str] = []
    FRAMEWORK.warn_if_unknown(version, lambda text, severity: said.append(text))
    assert said == []


@pytest.mark.parametrize("version", ["2.3.9", "1.10.0", "2.11.0", "3.0.0.dev0"])
def test_other_versions_are_warned_of(version: str) -> None:
    said: list[tuple[str, int]] = []
    FRAMEWORK.warn_if_unknown(version, lambda *args: said.append(args))
    ((text, severity),) = said
    assert text.startswith(f"Torchlight {version} is not a version that Tierckpt was tested with")
    assert "(2.4 to 2.10)" in text
    assert severity == logging.WARNING


def test_missing_names_are_refused_together() -> None:
    owner = SimpleNamespace(loop=SimpleNamespace(there=None))
    FRAMEWORK.require("2.4", owner, ["loop", "loop.there"])
    with pytest.raises(ConfigError, match=r"^Torchlight 2\.4 has no loop\.gone, other\.name, "):
        FRAMEWORK.require("2.4", owner, ["loop.there", "loop.gone", "other.name"])
