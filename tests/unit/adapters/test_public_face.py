"""A Checkpointer shows the methods that scripts need; the methods for adapters are on the
protocol."""

from __future__ import annotations

import ddp_ckpt
import tierckpt
from ddp_ckpt.checkpointer import DDPAdapter
from tierckpt.checkpointer import Adapter, PlainAdapter

METHODS = {"step", "save", "restore", "wait", "complete", "pin", "unpin", "should_exit"}
METHODS |= {"close", "abandon", "close_or_abandon", "register", "add_callbacks"}
METHODS |= {"files", "load_from"}
ATTRIBUTES = {"exit_reason", "interrupted", "closed", "version", "iteration", "metric"}
ATTRIBUTES |= {"end", "newest", "restored_files"}


def test_a_checkpointer_has_no_other_public_names() -> None:
    shown = {name for name in dir(tierckpt.Checkpointer) if not name.startswith("_")}
    assert shown == METHODS | ATTRIBUTES


def test_the_class_for_ddp_only_makes_its_adapter() -> None:
    made = {
        name for name in vars(ddp_ckpt.Checkpointer) if callable(vars(ddp_ckpt.Checkpointer)[name])
    }
    assert made == {"__init__"}


def test_an_adapter_overrides_only_the_methods_of_the_protocol() -> None:
    asked = {name for name in dir(Adapter) if not name.startswith("_")}
    asked |= set(Adapter.__annotations__)
    plain = {name for name in vars(PlainAdapter) if not name.startswith("_")}
    assert plain == asked
    assert {name for name in vars(DDPAdapter) if not name.startswith("_")} <= asked
