"""The adapter of DDP: the communication hook of each DDP module releases layers."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.nn.parallel import DistributedDataParallel

import tierckpt
from tierckpt.checkpointer.adapter import Handle, PlainAdapter
from tierckpt.coordination.settings_check import refused
from tierckpt.state.extras import named_objects
from tierckpt.state.validate import refuse_model

from .comm_hook import CommHook, ReleaseHook
from .comm_hook_state import HookState
from .ddp_modules import common_group, find_ddps, reduced_by
from .launched import SHARED_STORE, restarts_share_a_store
from .torch_group import current_group

APART = (
    "{names}: trained now, and not reduced by DDP, as it was frozen when its module was made. From "
    "now on each rank stores its own values of it. If the loop does not reduce its gradients "
    "itself, ranks differ: make a new DDP module and a new Checkpointer after you unfreeze "
    "parameters"
)
HOOK_TAKEN = (
    "the model has a communication hook already: layers are copied from the forward pass on. To "
    "copy during the allreduce, pass the hook as comm_hook=(state, hook), or register it after the "
    "Checkpointer is made"
)


class DDPAdapter(PlainAdapter):
    """The adapter of a model of DDP modules, or of none. See `Adapter` for the methods."""

    newly_unreduced_notice = APART

    def __init__(
        self,
        model: torch.nn.Module,
        comm_hook: tuple[Any, CommHook] | None = None,
        extra_per_rank: Mapping[str, Any] | None = None,
    ) -> None:
        """Arguments of `ddp_ckpt.Checkpointer`. Collective; raises, on all ranks, ConfigError and
        UnsupportedStateError."""
        self._comm_hook = comm_hook
        try:
            refuse_model(model)
            ddps = find_ddps(model)
            objects = named_objects("extra_per_rank", extra_per_rank).values()
            self._hook_states = [obj for obj in objects if isinstance(obj, HookState)]
            _refuse_hooks(ddps, comm_hook, self._hook_states)
            members = common_group(ddps)
        except tierckpt.TierckptError as error:
            raise refused(error, current_group()) from error.__cause__
        self.group = current_group(members)
        """The ranks of the DDP modules."""
        self._hooks = {
            n: hook for n, ddp in ddps.items() if (hook := ReleaseHook.of(ddp)) is not None
        }
        self.releases_by_layer = bool(ddps) and self._hooks.keys() == ddps.keys()
        self._hook_is_taken = bool(ddps) and not self.releases_by_layer
        self._reduced: list[torch.nn.Parameter] | None = None
        if ddps and self.group.size > 1:
            self._reduced = [param for ddp in ddps.values() for param in reduced_by(ddp)]
        self._frozen = [param for param in self._reduced or () if not param.requires_grad]
        self._packed: dict[str, dict[str, list[int]]] = {}
        """The last result of `pack`."""

    def reduced_parameters(self) -> Sequence[torch.Tensor] | None:
        """The parameters of all DDP modules, without those that DDP is set to ignore."""
        return self._reduced

    def untrained_parameters(self) -> Sequence[torch.Tensor]:
        """The parameters that were frozen when the Checkpointer was made."""
        return self._frozen

    def attached(self, handle: Handle) -> None:
        """Take the communication hooks. Raises the error of a refused hook."""
        super().attached(handle)
        for hook in self._hooks.values():
            hook.attach(handle.release, self._look_at_hook, handle.traces)
            if self._comm_hook is not None:
                hook.give(*self._comm_hook)
        if self._hook_is_taken:
            handle.notice(HOOK_TAKEN, logging.INFO)
        shares = self.group.size > 1 and self.group.rank == 0
        if shares and restarts_share_a_store(os.environ):
            handle.notice(SHARED_STORE, logging.WARNING)

    def _look_at_hook(self, state: Any) -> None:
        """Refuse a hook that the user registered, or warn if its state is not saved."""
        _refuse_local_sgd(state)
        known = [obj.state for obj in self._hook_states]
        if state is None or isinstance(state, dist.ProcessGroup) or any(s is state for s in known):
            return
        changes_results = isinstance(state, PowerSGDState)
        self.handle.notice(
            f"the communication hook's state, a {type(state).__name__}, is not in the checkpoints: "
            "a resumed run starts without it"
            f"{' (its error feedback), and its losses differ' if changes_results else ''}. "
            'Pass extra_per_rank={"hook": ddp_ckpt.HookState(state)} to save it',
            logging.WARNING if changes_results else logging.INFO,
        )

    def step_completed(self, label: str) -> bool:
        """True. The first boundary may come after many steps."""
        if not self.handle.version:
            self._begin_iteration()
        return True

    def boundary_passed(self, agreed_vote: int) -> None:
        """Start a new iteration of the gradient means."""
        self._begin_iteration()

    def _begin_iteration(self) -> None:
        for hook in self._hooks.values():
            hook.begin_iteration()

    def newly_unreduced(self) -> Iterable[torch.Tensor]:
        """The parameters that were frozen when their DDP module was made, and are trained now."""
        thawed = [param for param in self._frozen if param.requires_grad]
        return [p for p in thawed if any(h.leaves_out(p) for h in self._hooks.values())]

    def pack(self) -> Any:
        """For each DDP module, by name: the order of its buckets, and the way it took the mean."""
        parts = [hook.packed() for hook in self._hooks.values()]
        if [*map(id, parts)] != [*map(id, self._packed.values())]:
            self._packed = dict(zip(self._hooks, parts, strict=True))
        return self._packed

    def load(self, value: Any) -> None:
        """Give DDP the buckets of the saved run. With two ranks the sums are the same in any
        buckets, but a hook may have state for each bucket."""
        for name, hook in self._hooks.items():
            saved = (value or {}).get(name) or {}
            order = saved.get("buckets")
            if order and (self.group.size > 2 or self._hook_states):
                hook.prime(order)
            hook.resume(saved.get("divided", ()))

    def closed(self) -> None:
        """Give the communication hooks back."""
        if hasattr(self, "handle"):
            for hook in self._hooks.values():
                hook.let_go_of(self.handle.release)


def _refuse_hooks(
    ddps: Mapping[str, DistributedDataParallel],
    comm_hook: tuple[Any, CommHook] | None,
    hook_states: Sequence[HookState],
) -> None:
    """Raise ConfigError or UnsupportedStateError, before anything is registered or any other rank
    is asked."""
    for state in (state for ddp in ddps.values() for state in ReleaseHook.states_of(ddp)):
        _refuse_local_sgd(state)
    if comm_hook is not None:
        _refuse_local_sgd(comm_hook[0])
        if len(ddps) > 1:
            raise tierckpt.ConfigError(
                f"comm_hook was given, and the model has several DDP modules ({', '.join(ddps)}): "
                "the state of a hook is for one module. Make the Checkpointer without comm_hook, "
                "then call register_comm_hook of each module"
            )
        if not all(map(ReleaseHook.may_be_given, ddps.values())) or not ddps:
            raise tierckpt.ConfigError(
                "comm_hook was given, but the model is no DistributedDataParallel module or has a "
                "communication hook already; give the hook here and do not register it yourself"
            )
        for ddp in ddps.values():
            ddp._check_comm_hook(comm_hook[1])  # raises the errors of `register_comm_hook`
    if hook_states and any(getattr(ddp, "static_graph", False) for ddp in ddps.values()):
        raise tierckpt.ConfigError(
            "HookState with static_graph=True: the state of a hook belongs to buckets, and DDP "
            "makes its final buckets only after the first iteration, so a restart cannot give it "
            "the saved ones. Leave one of the two out"
        )


def _refuse_local_sgd(state: Any) -> None:
    if isinstance(state, PostLocalSGDState):
        raise tierckpt.UnsupportedStateError(
            "the communication hook's state is a PostLocalSGDState: between two averagings each "
            "rank (or node) trains on its own gradients, so the models differ. A checkpoint has "
            "one copy of the model, and every rank stores a part of it. Use DDP without the hook, "
            "or with one that reduces over all ranks"
        )


__all__ = ["DDPAdapter"]
