"""The Checkpointer of DDP jobs, and `wrap` for scripts with an unchanged loop.

In the adapter of DDP the communication hook of each DDP module releases layers. The way in which
torchrun started this process matters as far as restarts depend on it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar, Unpack

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.nn.parallel import DistributedDataParallel

import tierckpt
from tierckpt._milestones import ATTEMPT_VARIABLE
from tierckpt.checkpointer.adapter import Handle, PlainAdapter
from tierckpt.checkpointer.checkpointer import attach_to_script, give_attribute, refuse_second
from tierckpt.coordination.settings_check import refused
from tierckpt.settings import Arguments, with_settings
from tierckpt.state.extras import named_objects
from tierckpt.state.optimizers import refuse_model

from .comm_hook import CommHook, HookState, ReleaseHook
from .torch_group import common_group, current_group, find_ddps, reduced_by

__all__ = ["SHARED_STORE", "Checkpointer", "DDPAdapter", "restarts_share_a_store", "wrap"]


SHARED_STORE = (
    "torchrun uses one key-value store for all its restarts here, and processes that it restarts "
    "may read the addresses of dead ones from it: they fail to connect (gloo: connectFullMesh "
    "failed, NCCL: Connection refused), or wait for each other without end. Start it as "
    "`TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone ...`; with several nodes, use "
    "--rdzv-backend c10d --rdzv-endpoint HOST:PORT in place of --standalone. Without one of these "
    "options the variable has no effect"
)


def restarts_share_a_store(environment: Mapping[str, str]) -> bool:
    """True if ranks that torchrun restarts use the store that dead ranks have written to.

    Attempts share keys in this store: torch issues 135712, 167288. Under `tierckpt run` each has a
    store of its own.
    """
    shares = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    shares = shares and ATTEMPT_VARIABLE not in environment
    return shares and environment.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"


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
        self._passed = False
        """A boundary has passed."""

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
        if not (self._passed or self.handle.version):
            for hook in self._hooks.values():
                hook.start_iteration()
        return True

    def boundary_passed(self, agreed_vote: int) -> None:
        """Start a new iteration of the gradient means."""
        self._passed = True
        for hook in self._hooks.values():
            if hook.follows_iterations:
                hook.start_iteration()

    def newly_unreduced(self) -> Iterable[torch.Tensor]:
        """The parameters that were frozen when their DDP module was made, and are trained now."""
        thawed = [param for param in self._frozen if param.requires_grad]
        return [p for p in thawed if any(h.leaves_out(p) for h in self._hooks.values())]

    def pack(self) -> Any:
        """For each DDP module, by name: the order of its buckets, and the way it took the mean."""
        packed = self._packed
        for name, hook in self._hooks.items():
            part = hook.packed()
            if packed.get(name) is not part:
                packed = {**packed, name: part}
        self._packed = packed
        return packed

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
                hook.detach_from(self.handle.release)


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
    scheduler in `extra`, otherwise it restarts from its first value. The loop starts at the
    iteration that the script sets; with a `ResumableLoader` in `extra_per_rank` it continues with
    the next batch.

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
