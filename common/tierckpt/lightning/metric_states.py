"""The accumulators of torchmetrics' metrics, which their modules leave out of `state_dict()`."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from tierckpt.state.names import inside

KEPT = ("_update_count", "_computed", "_forward_cache", "_is_synced")


def pack(module: torch.nn.Module) -> dict[str, Any]:
    """The accumulators of all metrics in the module, by the metric's name."""
    found = {
        name: {key: getattr(metric, key) for key in (*metric._defaults, *KEPT)}
        for name, metric in module.named_modules()
        if _is_metric(metric)
    }
    for name, collection in module.named_modules():
        # Of metrics with equal states, a MetricCollection updates only the first.
        if getattr(collection, "_groups_checked", False):
            for first, *others in collection._groups.values():
                for other in others:
                    found[inside(name, other)] = found[inside(name, first)]
    return found


def load(module: torch.nn.Module, packed: dict[str, Any]) -> None:
    """Set the accumulators of the metrics that still exist."""
    metrics: dict[str, Any] = {n: m for n, m in module.named_modules() if _is_metric(m)}
    for name in packed.keys() & metrics.keys():
        for key, value in packed[name].items():
            setattr(metrics[name], key, moved(value, metrics[name].device))


def moved(value: Any, device: Any) -> Any:
    """The value with all tensors in it on the device."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), value)


def _is_metric(module: Any) -> bool:
    names = ("_defaults", "_reductions", *KEPT)
    return isinstance(module, torch.nn.Module) and all(hasattr(module, name) for name in names)


__all__ = ["load", "moved", "pack"]
