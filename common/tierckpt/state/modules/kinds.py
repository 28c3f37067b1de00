"""Checks for modules with their own way of saving or loading. Pure."""

from __future__ import annotations

import torch

_LOAD_HOOKS = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")


def saves(module: torch.nn.Module) -> str:
    """Kind of saving. Empty: torch's own code. `alone`: the module's own code does not touch the
    state of the modules inside it. `whole`: it does."""
    if _overrides(module, "state_dict") or module._state_dict_hooks:
        return "whole"
    alone = module._state_dict_pre_hooks or _overrides(module, "_save_to_state_dict")
    return "alone" if alone else ""


def has_hooks_alone(module: torch.nn.Module) -> bool:
    """True if hooks are the module's only own code, and no module inside it has any."""
    return not any(
        _overrides(each, "state_dict")
        or _overrides(each, "_save_to_state_dict")
        or (each is not module and saves(each))
        for each in module.modules()
    )


def loads(module: torch.nn.Module) -> bool:
    """True if loading the module runs more than torch's own code for loading tensors."""
    return (
        any(getattr(module, kind) for kind in _LOAD_HOOKS)
        or _overrides(module, "load_state_dict")
        or _overrides(module, "_load_from_state_dict")
    )


def _overrides(module: torch.nn.Module, method: str) -> bool:
    if method in vars(module):
        return True
    theirs = getattr(type(module), method, None)
    if theirs is getattr(torch.nn.Module, method):
        return False
    return not getattr(theirs, "__module__", "").startswith("torch.nn.modules.")


__all__ = ["has_hooks_alone", "loads", "saves"]
