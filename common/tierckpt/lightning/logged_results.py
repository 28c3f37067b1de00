"""Logged values: the metrics of the epoch in progress, which `self.log` accumulates.

Lightning keeps them in objects that it makes when a name is logged for the first time, and stores
them in no checkpoint. Values of torchmetrics' metrics stay in these; see `metric_states`.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from .package import part

STATES = ("value", "cumulated_batch_size")
KEPT = ("_forward_cache", "_computed", "has_reset", "_update_count")
FACTS = (
    *("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph"),
    *("add_dataloader_idx", "dataloader_idx", "metric_attribute"),
)


def pack(results: Any) -> dict[str, Any]:
    """The values of a `_ResultCollection`, by key. Leaves out values that are reduced over a
    process group of the script's own."""
    return {key: _packed(each) for key, each in results.items() if each.meta.sync._group is None}


def _packed(result: Any) -> dict[str, Any]:
    meta = result.meta
    names = (*STATES, *KEPT) if result.is_tensor else KEPT
    return {
        "is_tensor": result.is_tensor,
        "facts": json.dumps({name: getattr(meta, name) for name in FACTS}),
        "reduce": meta.reduce_fx.__name__,
        "sync": json.dumps([meta.sync.should, meta.sync.rank_zero_only, meta.sync.op]),
        "values": {name: getattr(result, name) for name in names if hasattr(result, name)},
    }


def load(trainer: Any, results: Any, packed: dict[str, Any]) -> None:
    """Set the values in place of all that `results` has."""
    results.clear()
    package = part(trainer, "trainer.connectors.logger_connector.result")
    for key, saved in packed.items():
        meta = package._Metadata(
            **json.loads(saved["facts"]), reduce_fx=getattr(torch, saved["reduce"])
        )
        should, rank_zero_only, op = json.loads(saved["sync"])
        meta.sync = package._Sync(
            _should=should, fn=trainer.strategy.reduce, rank_zero_only=rank_zero_only, _op=op
        )
        result = package._ResultMetric(meta, saved["is_tensor"])
        for name, value in saved["values"].items():
            setattr(result, name, value)
        if not saved["is_tensor"]:
            result.value = trainer.lightning_module.get_submodule(meta.metric_attribute)
        results[key] = result.to(trainer.lightning_module.device)


__all__ = ["load", "pack"]
