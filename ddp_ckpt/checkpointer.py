"""The adapter proper: each DDP module's communication hook releases layers; little else."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.nn.parallel import DistributedDataParallel

import tierckpt
from tierckpt.checkpointer.script_mode import attach_to_script, refuse_second
from tierckpt.coordination.settings_check import refused
from tierckpt.state.extras import named_objects
from tierckpt.state.validate import refuse_model

from .comm_hook import CommHook, ReleaseHook
from .comm_hook_state import HookState
from .ddp_modules import common_group, find_ddps, reduced_by
from .launched import SHARED_STORE, restarts_share_a_store
from .torch_group import current_group

Given = TypeVar(
    "Given",
    bound=torch.optim.Optimizer
    | Sequence[torch.optim.Optimizer]
    | Mapping[str, torch.optim.Optimizer],
)
"""One optimizer, or several."""

APART = (
    "{names}: trained now, and not reduced by DDP, as it was frozen when its module was made. From "
    "now on it is kept for each rank. Where the loop does not reduce it by hand, ranks differ: "
    "make the DDP module, and the Checkpointer, anew when something is frozen no more"
)


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
        **settings: Any,
    ) -> None:
        try:
            refuse_model(model)
            ddps = find_ddps(model)
            objects = named_objects("extra_per_rank", settings.get("extra_per_rank")).values()
            self._hook_states = [obj for obj in objects if isinstance(obj, HookState)]
            _refuse_hooks(ddps, comm_hook, self._hook_states)
            members = common_group(ddps)
        except tierckpt.TierckptError as error:
            raise refused(error, current_group()) from error.__cause__
        group = current_group(members)
        self._hooks = {
            n: hook for n, ddp in ddps.items() if (hook := ReleaseHook.of(ddp)) is not None
        }
        self.releases_by_layer = bool(ddps) and self._hooks.keys() == ddps.keys()
        if ddps and group.size > 1:
            self.reduced = [param for ddp in ddps.values() for param in reduced_by(ddp)]
        self._frozen = [param for param in self.reduced or () if not param.requires_grad]
        super().__init__(model, optimizer, group=group, **settings)
        self.state.assumed_alike = {id(param) for param in self._frozen}
        for hook in self._hooks.values():
            hook.release, hook.chained = self.release, self._look_at_hook
            if comm_hook is not None:
                hook.give(*comm_hook)
        if ddps and not self.releases_by_layer:
            self._reports.notice(
                "the model has a communication hook already: layers are copied from the forward "
                "pass on. Pass it as comm_hook=(state, hook) to copy under the allreduce, or "
                "register it after the Checkpointer is made",
                logging.INFO,
            )
        if group.size > 1 and group.rank == 0 and restarts_share_a_store(os.environ):
            self._reports.notice(SHARED_STORE, logging.WARNING)

    def _shut_down(self, remove: bool, abandoned: bool = False) -> None:
        super()._shut_down(remove, abandoned)
        for hook in self._hooks.values():
            hook.let_go_of(self.release)

    def _look_at_hook(self, state: Any) -> None:
        """Of one that is registered: refuse it, or say it when it remembers what is not saved."""
        _refuse_local_sgd(state)
        known = [obj.state for obj in self._hook_states]
        if state is None or isinstance(state, dist.ProcessGroup) or any(s is state for s in known):
            return
        changes_results = isinstance(state, PowerSGDState)
        self._reports.notice(
            f"the communication hook's state, a {type(state).__name__}, is not in the checkpoints: "
            "a resumed run begins without what it remembers"
            f"{' (its error feedback), and its curve is another one' if changes_results else ''}. "
            'Give extra_per_rank={"hook": ddp_ckpt.HookState(state)} to have it saved',
            logging.WARNING if changes_results else logging.INFO,
        )

    def _boundary(self, force: bool = False) -> None:
        super()._boundary(force)
        self._begin_iteration()

    def _made_step(self, label: str) -> bool:
        if not self.version:  # the first boundary may come after many steps
            self._begin_iteration()
        return super()._made_step(label)

    def _begin_iteration(self) -> None:
        for hook in self._hooks.values():
            hook.mean.begin_iteration()

    def pack_adapter(self) -> Any:
        """By the names of DDP modules: the order of its buckets, and how it took the mean. And the
        last moment to see what is each rank's own."""
        self._find_apart()
        return {
            name: {"buckets": hook.order(), "divided": hook.mean.divided()}
            for name, hook in self._hooks.items()
        }

    def _find_apart(self) -> None:
        thawed = [param for param in self._frozen if param.requires_grad]
        left_out = (p for p in thawed if any(h.leaves_out(p) for h in self._hooks.values()))
        self._keep_apart(left_out, APART)

    def load_adapter(self, value: Any) -> None:
        """Make DDP's buckets those of the saved run. For two ranks any buckets sum alike, but a
        hook may remember something of each."""
        for name, hook in self._hooks.items():
            saved = (value or {}).get(name) or {}
            order = saved.get("buckets")
            if order and (self.group.size > 2 or self._hook_states):
                hook.prime(order)
            hook.mean.resume(saved.get("divided", ()))


def _refuse_hooks(
    ddps: Mapping[str, DistributedDataParallel],
    comm_hook: tuple[Any, CommHook] | None,
    hook_states: Sequence[HookState],
) -> None:
    """Raise for what cannot be, before anything is registered or any other rank is asked."""
    for state in (state for ddp in ddps.values() for state in ReleaseHook.states_of(ddp)):
        _refuse_local_sgd(state)
    if comm_hook is not None:
        _refuse_local_sgd(comm_hook[0])
        if len(ddps) > 1:
            raise tierckpt.ConfigError(
                f"comm_hook was given, and the model has several DDP modules ({', '.join(ddps)}): "
                "what a hook remembers is of one. Make the Checkpointer without, and then call "
                "register_comm_hook of each of them"
            )
        if not all(map(ReleaseHook.may_be_given, ddps.values())) or not ddps:
            raise tierckpt.ConfigError(
                "comm_hook was given, but the model is no DistributedDataParallel module or has a "
                "communication hook already; give the hook here and do not register it yourself"
            )
        for ddp in ddps.values():
            ddp._check_comm_hook(comm_hook[1])  # raises what `register_comm_hook` raises
    if hook_states and any(getattr(ddp, "static_graph", False) for ddp in ddps.values()):
        raise tierckpt.ConfigError(
            "HookState with static_graph=True: DDP makes its final buckets after the first "
            "iteration and cannot be shown them before, and what the hook remembers is by "
            "bucket. Leave one of the two out"
        )


def _refuse_local_sgd(state: Any) -> None:
    if isinstance(state, PostLocalSGDState):
        raise tierckpt.UnsupportedStateError(
            "the communication hook's state is a PostLocalSGDState: between two averagings each "
            "rank (or node) trains on gradients of its own, so the models differ, and a checkpoint "
            "has one copy of them, of which every rank stores a part. Use DDP without the hook, or "
            "with one that reduces over all ranks"
        )


def wrap(
    optimizer: Given,
    model: torch.nn.Module,
    *,
    restore: bool = True,
    close_at_exit: bool = True,
    **settings: Any,
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
    checkpointer = Checkpointer(model, optimizer, **{"boundary": "forward", **settings})
    for each in checkpointer.state.given.values():
        each.checkpointer = checkpointer  # type: ignore[attr-defined]
    attach_to_script(checkpointer, restore, close_at_exit)
    return optimizer


__all__ = ["Checkpointer", "wrap"]
