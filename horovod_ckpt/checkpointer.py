"""The Checkpointer of Horovod jobs that are not elastic."""

from __future__ import annotations

import os
from typing import Any, Unpack

import horovod.torch as hvd
import torch

import tierckpt
from tierckpt.config import load_config
from tierckpt.settings import Arguments, with_settings

from .adapter import HorovodAdapter

FOLDERS = ("events_dir", "trace_dir")
"""Settings that name a folder where each rank has a file."""


@with_settings
class Checkpointer(tierckpt.Checkpointer):
    """Checkpoints a model that Horovod trains; see `tierckpt.Checkpointer` for the rest.

    Args:
        model: the module that is trained.
        optimizer: the result of `hvd.DistributedOptimizer`: one, a sequence, or a dict. There may
            also be plain optimizers among them, for parameters that are each rank's own.
        settings: `extra` and the other arguments of `tierckpt.Checkpointer`, and all settings.

    Its ranks are those of the optimizer's process set, numbered within it. Several process sets are
    several jobs: each needs a `path` of its own. If `events_dir` or `trace_dir` is set, each set
    has a folder in it, `process-set-<id>`.

    Raises ConfigError in an elastic job: use `horovod_ckpt.elastic.TorchState` there.
    """

    adapter: HorovodAdapter

    def __init__(
        self, model: torch.nn.Module, optimizer: Any, **settings: Unpack[Arguments]
    ) -> None:
        adapter = HorovodAdapter(model, optimizer)
        settings = _with_folders_apart(settings, adapter.process_set)
        super().__init__(model, optimizer, adapter=adapter, group=adapter.group, **settings)


def _with_folders_apart(settings: Arguments, process_set: Any) -> Arguments:
    """Give each process set its own folder in `events_dir` and `trace_dir`: files are named after
    ranks, each set numbers its ranks from 0, and all sets may have the same setting."""
    if process_set is hvd.global_process_set:
        return settings
    given = {name: settings.get(name) for name in FOLDERS}
    try:
        config = load_config(given, config_file=settings.get("config_file"))
    except tierckpt.ConfigError:
        return settings  # the Checkpointer raises it again, on all ranks
    folder = f"process-set-{process_set.process_set_id}"
    apart = settings.copy()
    if config.events_dir:
        apart["events_dir"] = os.path.join(config.events_dir, folder)
    if config.trace_dir:
        apart["trace_dir"] = os.path.join(config.trace_dir, folder)
    return apart


__all__ = ["Checkpointer"]
