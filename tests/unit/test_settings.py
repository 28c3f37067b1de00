"""The typed and explained settings are those that there are."""

from __future__ import annotations

import importlib
import pydoc
from inspect import signature
from typing import get_type_hints

import make_settings
import pytest

import ddp_ckpt
import tierckpt
from tests.support.horovod_here import horovod_missing
from tierckpt.config import ARGUMENTS, known_settings
from tierckpt.settings import Arguments, Settings


def test_settings_are_typed_and_explained_as_config_declares_them() -> None:
    """`Settings` is for editors, type checkers and `help()`."""
    there = make_settings.TARGET.read_text()
    assert make_settings.written(there) == there, "run: python tools/make_settings.py"
    assert list(get_type_hints(Settings)) == list(known_settings())


@pytest.mark.parametrize(
    "way_in",
    [
        *("tierckpt.Checkpointer", "ddp_ckpt.Checkpointer", "ddp_ckpt.wrap"),
        *("horovod_ckpt.Checkpointer", "horovod_ckpt.install"),
        *("horovod_ckpt.DistributedOptimizer", "horovod_ckpt.torch.DistributedOptimizer"),
    ],
)
def test_help_explains_every_setting(way_in: str) -> None:
    """Name and type, then meaning and default."""
    if way_in.startswith("horovod") and (why := horovod_missing()):
        pytest.skip(why)
    module, _, name = way_in.rpartition(".")
    text = pydoc.plain(pydoc.render_doc(getattr(importlib.import_module(module), name)))
    words = " ".join(text.replace("|", " ").split())
    assert "local_every_seconds: float Take one also after this time, which bounds" in words
    assert "Directory of the local level, and, unless `job_id` says" in words
    for setting in known_settings():
        _, found, after = words.partition(f" {setting}: ")
        assert found, setting
        assert " Default: `" in after, setting


def test_a_checkpointer_and_the_adapters_take_them_all() -> None:
    """`Arguments` has all other keyword arguments, and each is a parameter of a Checkpointer."""
    parameters = signature(tierckpt.Checkpointer).parameters
    assert parameters["settings"].annotation == "Unpack[Settings]"
    besides = get_type_hints(Arguments).keys() - get_type_hints(Settings).keys()
    assert besides < parameters.keys()
    assert {*ARGUMENTS} == {*besides, "comm_hook", "group"}
    for way_in in (ddp_ckpt.Checkpointer, ddp_ckpt.wrap):
        assert signature(way_in).parameters["settings"].annotation == "Unpack[Arguments]"
