"""The Checkpointer of DDP jobs, and `wrap` for a script whose loop cannot be touched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, Unpack

import torch

import tierckpt
from tierckpt.checkpointer.script_mode import attach_to_script, give_attribute, refuse_second
from tierckpt.settings import Arguments

from .adapter import DDPAdapter
from .comm_hook import CommHook

Given = TypeVar(
    "Given",
    bound=torch.optim.Optimizer
    | Sequence[torch.optim.Optimizer]
    | Mapping[str, torch.optim.Optimizer],
)
"""One optimizer, or several."""


class Checkpointer(tierckpt.Checkpointer):
    """Checkpoints a model of DDP modules, or of none; see `tierckpt.Checkpointer` for the rest.

    Args:
        model: a DistributedDataParallel module; a module with some in it (a GAN's in a ModuleDict),
            of the same ranks; or any module (one process, or gradients reduced some other way):
            layers are then copied from the forward pass on.
        optimizer: as in `tierckpt.Checkpointer`. Where there are DDP modules, a parameter that none
            of them reduces is every rank's own: each shard has all of it, from the boundary.
        comm_hook: the communication hook to use for the reduction, as `(state, hook)`: what you
            would have given to `register_comm_hook`. Without one, a plain allreduce with the
            same arithmetic as DDP's own. Calling a DDP module's `register_comm_hook` afterwards
            works too, and is the way where there are several. What such a hook remembers is not in
            the checkpoints by itself: see `HookState`.
        settings: as in `tierckpt.Checkpointer`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Any,
        *,
        comm_hook: tuple[Any, CommHook] | None = None,
        **settings: Unpack[Arguments],
    ) -> None:
        adapter = DDPAdapter(model, comm_hook, settings.get("extra_per_rank"))
        super().__init__(model, optimizer, adapter=adapter, group=adapter.group, **settings)


def wrap(
    optimizer: Given,
    model: torch.nn.Module,
    *,
    restore: bool = True,
    close_at_exit: bool = True,
    comm_hook: tuple[Any, CommHook] | None = None,
    **settings: Unpack[Arguments],
) -> Given:
    """Checkpoints for a script whose loop cannot be touched: one line after the optimizer's, or
    after the scheduler's where there is one, which goes into `extra`: it would begin anew else.
    The loop begins where the script begins it: a `ResumableLoader` in `extra_per_rank` has it go on
    at the next batch.

    Takes one optimizer, or all of a job that has several, as a sequence or a dict, and returns what
    it was given: optimizers stay what schedulers and scalers expect. The `checkpointer` attribute
    of each is the Checkpointer, `checkpointer.restored` what was restored. The boundary is the
    next forward pass. With `restore`, the newest version is brought back at once.
    With `close_at_exit`, a script that ends without an exception gets its final checkpoint.

    Raises ConfigError, with nothing attached, for a model, an optimizer or a path that another call
    has taken already, besides what Checkpointer raises.
    """
    refuse_second(model, optimizer, settings)
    settings.setdefault("boundary", "forward")
    checkpointer = Checkpointer(model, optimizer, comm_hook=comm_hook, **settings)
    give_attribute(checkpointer)
    attach_to_script(checkpointer, restore, close_at_exit)
    return optimizer


__all__ = ["Checkpointer", "wrap"]
