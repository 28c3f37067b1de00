"""The Checkpointer of DDP jobs, and `wrap` for scripts with an unchanged loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, Unpack

import torch

import tierckpt
from tierckpt.checkpointer.script_mode import attach_to_script, give_attribute, refuse_second
from tierckpt.settings import Arguments, with_settings

from .adapter import DDPAdapter
from .comm_hook import CommHook

Given = TypeVar(
    "Given",
    bound=torch.optim.Optimizer
    | Sequence[torch.optim.Optimizer]
    | Mapping[str, torch.optim.Optimizer],
)
"""One optimizer, or several."""


@with_settings
class Checkpointer(tierckpt.Checkpointer):
    """Checkpoints a model with or without DDP modules; see `tierckpt.Checkpointer` for the rest.

    Args:
        model: a DistributedDataParallel module; a module that contains some, all of the same ranks
            (a GAN's in a ModuleDict); or any module (one process, or gradients reduced in another
            way): then layers are copied from the forward pass on.
        optimizer: as in `tierckpt.Checkpointer`. If there are DDP modules, a parameter that none
            of them reduces is each rank's own: every shard has all of it, from the boundary.
        comm_hook: the communication hook to use for the reduction, as `(state, hook)`: the
            arguments of `register_comm_hook`. None: a plain allreduce with the same arithmetic as
            DDP's own. You can also call `register_comm_hook` of a DDP module afterwards, and must
            do so if there are several. The checkpoints contain the state of such a hook only with
            `HookState`.
        settings: `extra` and the other arguments of `tierckpt.Checkpointer`, and all settings.
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


@with_settings
def wrap(
    optimizer: Given,
    model: torch.nn.Module,
    *,
    restore: bool = True,
    close_at_exit: bool = True,
    comm_hook: tuple[Any, CommHook] | None = None,
    **settings: Unpack[Arguments],
) -> Given:
    """Add checkpoints to a script without a change of its loop.

    Call it in one line after the optimizer, or after the scheduler if there is one; pass the
    scheduler in `extra`, otherwise it restarts from its beginning. The loop starts at the iteration
    that the script sets; with a `ResumableLoader` in `extra_per_rank` it continues with the next
    batch.

    Takes one optimizer, or all optimizers of the job as a sequence or a dict, and returns its
    argument: optimizers keep the type that schedulers and scalers expect. The attribute
    `checkpointer` of each optimizer is the Checkpointer, and `checkpointer.restored` the result of
    the restore. The boundary is the next forward pass. With `restore`, the newest version is
    restored at once. With `close_at_exit`, a script that ends without an exception takes a final
    checkpoint.

    Raises ConfigError, with nothing attached, if another call has taken the model, an optimizer or
    the path already, and the errors of Checkpointer.
    """
    refuse_second(model, optimizer, settings)
    settings.setdefault("boundary", "forward")
    checkpointer = Checkpointer(model, optimizer, comm_hook=comm_hook, **settings)
    give_attribute(checkpointer)
    attach_to_script(checkpointer, restore, close_at_exit)
    return optimizer


__all__ = ["Checkpointer", "wrap"]
