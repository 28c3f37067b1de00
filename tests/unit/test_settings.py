"""The typed names of settings are those that there are."""

from __future__ import annotations

import os
from collections.abc import Mapping
from inspect import signature
from typing import Any, Literal, get_args, get_type_hints

import ddp_ckpt
import tierckpt
from tierckpt.config import ARGUMENTS, AUTOMATIC, known_settings
from tierckpt.settings import Arguments, Settings


def test_settings_are_typed_as_config_has_them() -> None:
    """`Settings` is for editors and type checkers; a name in one is in the other."""
    typed, known = get_type_hints(Settings), known_settings()
    assert list(typed) == list(known)
    for name, kind in known.items():
        accepted = set(get_args(typed[name])) or {typed[name]}
        assert kind in accepted, name
        assert (Literal["auto"] in accepted) == (name in AUTOMATIC)
        # Other allowed types: a path, or a table.
        others = accepted - {kind, Literal["auto"]}
        assert others in (set(), {os.PathLike[str]}, {Mapping[str, Any]}), name


def test_a_checkpointer_and_the_adapters_take_them_all() -> None:
    """`Arguments` has all other keyword arguments, and each is a parameter of a Checkpointer."""
    parameters = signature(tierckpt.Checkpointer).parameters
    assert parameters["settings"].annotation == "Unpack[Settings]"
    besides = get_type_hints(Arguments).keys() - get_type_hints(Settings).keys()
    assert besides < parameters.keys()
    assert {*ARGUMENTS} == {*besides, "comm_hook", "group"}
    for way_in in (ddp_ckpt.Checkpointer, ddp_ckpt.wrap):
        assert signature(way_in).parameters["settings"].annotation == "Unpack[Arguments]"
