"""Lightning's `.ckpt` files: a dict of `torch.save` with names of their own. Lightning is not
imported."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tierckpt.errors import ConfigError
from tierckpt.offline.load import Saved

from . import torch_file
from .foreign_state import (
    ForeignState,
    Unread,
    is_model,
    named_optimizers,
    schedulers_in,
    without_wrappers,
)

VERSION_KEY = "pytorch-lightning_version"
WRITTEN_AS = "2.4.0"
"""The oldest release that Tierckpt supports: a newer one reads its files without a message."""
STATE = "lightning"
"""Name of the Trainer's state in the versions of `tierckpt.lightning`."""
LOOPS = ("epoch_loop", "automatic_optimization", "manual_optimization", "val_loop")
SCALERS = ("MixedPrecision", "MixedPrecisionPlugin", "native_amp_scaling_state")
NOT_CARRIED = ("loops", "callbacks")


def recognizes(path: Path) -> bool:
    """True for a file with Lightning's version in it."""
    if not torch_file.is_torch_file(path):
        return False
    if path.suffix == ".ckpt":
        content = torch_file.load(path)
        return isinstance(content, Mapping) and VERSION_KEY in content
    return False


def read(path: Path) -> ForeignState:
    """The model, the optimizers, the schedulers and the scaler. Raises ConfigError."""
    content = torch_file.load(path)
    if not isinstance(content, Mapping) or not is_model(content.get("state_dict")):
        raise ConfigError(f"{path} is no checkpoint of Lightning: it has no state_dict")
    found = ForeignState("a checkpoint of Lightning")
    found.model = without_wrappers(content["state_dict"])
    found.optimizers = named_optimizers(content.get("optimizer_states") or [])
    schedulers = content.get("lr_schedulers") or []
    for number, state in enumerate(schedulers):
        found.extra["scheduler" if len(schedulers) == 1 else f"scheduler{number}"] = dict(state)
    for name in SCALERS:
        if content.get(name):
            found.extra["scaler"] = dict(content[name])
    found.values = {"epoch": content.get("epoch", 0)}
    found.iteration = found.steps = int(content.get("global_step", 0))
    known = {"state_dict", "optimizer_states", "lr_schedulers", "epoch", "global_step", VERSION_KEY}
    for key, value in content.items():
        if key in known or key in SCALERS or _is_nothing(value):
            continue
        what = value.name if isinstance(value, Unread) else "the Trainer's own"
        found.not_taken.append(f"{key} ({what})" if key in NOT_CARRIED else str(key))
    return found


def _is_nothing(value: Any) -> bool:
    return value is None or (isinstance(value, Mapping) and not value)


def write(saved: Saved, out: Path) -> list[str]:
    """Write a file for `Trainer.fit(ckpt_path=...)`. A version of `tierckpt.lightning` has the
    Trainer's loops; another one gets loops at the begin of an epoch, and the number of steps."""
    state = saved.extra_per_rank.get(STATE)
    own = state if isinstance(state, Mapping) else {}
    remarks = []
    if own:
        loops = _loops_of(json.loads(own["progress"]), own["batches_that_stepped"])
        schedulers = [each for _, each in own["schedulers"]]
    else:
        loops = _first_loops(saved.version)
        schedulers = [*schedulers_in(saved.extra).values()]
        remarks.append(
            "no state of a Trainer is in the version: Lightning begins an epoch, at global_step "
            f"{saved.version}"
        )
    epoch = loops["epoch_progress"]["current"]["completed"]
    content: dict[str, Any] = {
        "epoch": epoch,
        "global_step": saved.version,
        VERSION_KEY: WRITTEN_AS,
        "state_dict": saved.model,
        "loops": {"fit_loop": loops},
        "callbacks": dict(dict(own.get("scripts") or {}).get("callbacks") or {}),
        "optimizer_states": [*saved.optimizers.values()],
        "lr_schedulers": schedulers,
    }
    if scaler := saved.extra.get("scaler"):
        content["MixedPrecision"] = scaler
    torch_file.save(content, out)
    return remarks


def _loops_of(progress: Mapping[str, Any], batches_that_stepped: int) -> dict[str, Any]:
    """Lightning's flat dict of the counters of nested loops."""
    flat: dict[str, Any] = {"state_dict": {}}

    def add(prefix: str, counters: Mapping[str, Any]) -> None:
        for name, value in counters.items():
            if name in LOOPS:
                flat[f"{prefix}{name}.state_dict"] = {}
                add(f"{prefix}{name}.", value)
            else:
                flat[f"{prefix}{name}"] = value

    add("", progress)
    flat["epoch_loop.state_dict"] = {"_batches_that_stepped": batches_that_stepped}
    return flat


def _first_loops(steps: int) -> dict[str, Any]:
    none = {"ready": 0, "completed": 0, "started": 0, "processed": 0}
    made = {"ready": steps, "completed": steps}
    step = {"total": made, "current": {"ready": 0, "completed": 0}}
    zeroed = {name: {**counts, "started": counts["ready"]} for name, counts in step.items()}
    return {
        "state_dict": {},
        "epoch_loop.state_dict": {"_batches_that_stepped": steps},
        "epoch_loop.automatic_optimization.state_dict": {},
        "epoch_loop.automatic_optimization.optim_progress": {
            "optimizer": {"step": step, "zero_grad": zeroed}
        },
        "epoch_loop.manual_optimization.state_dict": {},
        "epoch_progress": {"total": dict(none), "current": dict(none)},
    }


__all__ = ["read", "recognizes", "write"]
