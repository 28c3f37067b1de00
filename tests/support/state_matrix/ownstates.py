"""Models with modules that have their own methods to save or load."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel

from tests.support.state_matrix.jobs import Cases, Job, adam, trained
from tests.support.state_matrix.models import Scaled, Wrapped, normalised

CASES = Cases()
"""Names of the cases that `tierckpt.load().model` loads with `strict=True`."""


class Counting(Wrapped):
    """Counts its steps in an attribute: the cases differ in how they save it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = int(torch.randint(1, 1000, ()))
        self.seen: list[torch.Tensor] = [torch.randn(2)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.seen = [*self.seen[-3:], x.detach().mean(0)]
        return self.first(x) / (1 + self.count % 7) + self.seen[0].sum()


class Overridden(Counting):
    """Saved and loaded by methods of its own."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}count"], destination[f"{prefix}seen"] = self.count, self.seen

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        for name in ("count", "seen"):
            if f"{prefix}{name}" in state_dict:
                setattr(self, name, state_dict.pop(f"{prefix}{name}"))
        super()._load_from_state_dict(state_dict, prefix, *rest)


def take_count(module: Any, state_dict: Any, prefix: str, *_: Any) -> None:
    for name in ("count", "seen"):
        if f"{prefix}{name}" in state_dict:
            setattr(module, name, state_dict.pop(f"{prefix}{name}"))


def give_count(module: Any, state_dict: Any, prefix: str, *_: Any) -> None:
    state_dict[f"{prefix}count"], state_dict[f"{prefix}seen"] = module.count, module.seen


Hook = Callable[..., None]


def add_hooks(module: nn.Module, out: Hook, take: Hook, private: bool = False) -> None:
    """`out` changes saved values, `take` loaded ones. In torch 2.4 these hooks are private."""
    if private or not hasattr(module, "register_state_dict_post_hook"):
        module._register_state_dict_hook(lambda *given: out(*given))
        module._register_load_state_dict_pre_hook(take, with_module=True)
    else:
        module.register_state_dict_post_hook(out)
        module.register_load_state_dict_pre_hook(take)


def hooked(private: bool = False) -> nn.Module:
    made = Counting()
    add_hooks(made, give_count, take_count, private)
    return made


class Prepared(Counting):
    """A pre-hook puts the count into a buffer, a hook after loading takes it out."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros((), dtype=torch.int64))
        self.register_state_dict_pre_hook(lambda module, *_: module.kept.fill_(module.count))
        self.register_load_state_dict_post_hook(
            lambda module, _: setattr(module, "count", int(module.kept))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.first(x) / (1 + self.count % 7)


class Started(Wrapped):
    """Takes its scale from the first batch, unless it was loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.started = False
        self.register_buffer("scale", torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.started:
            self.started = True
            self.scale.copy_(x.detach().std(0))
        return self.first(x) / self.scale

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)
        self.started = True


class Replacing(Overridden):
    """Makes a new parameter when it is loaded: an optimizer would keep the old one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.scale = nn.Parameter(state_dict[f"{prefix}scale"].clone())
        super()._load_from_state_dict(state_dict, prefix, *rest)


class Late(Overridden):
    """Has no extra state before the first forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.seen = 0, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen or [torch.ones(1)]
        return super().forward(x)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        nn.Module._save_to_state_dict(self, destination, prefix, keep_vars)
        if self.seen:
            give_count(self, destination, prefix)


class Transposing(Wrapped):
    """Saves its weight in another order of dimensions, and under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.bias = nn.Parameter(torch.randn(6))
        add_hooks(self, self._out, self._in)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) @ self.weight + self.bias

    @staticmethod
    def _out(module: Any, state_dict: Any, prefix: str, *_: Any) -> None:
        state_dict[f"{prefix}weight"] = state_dict[f"{prefix}weight"].t().contiguous()
        state_dict[f"{prefix}old.bias"] = state_dict.pop(f"{prefix}bias")

    @staticmethod
    def _in(module: Any, state_dict: Any, prefix: str, *_: Any) -> None:
        state_dict[f"{prefix}weight"] = state_dict[f"{prefix}weight"].t()
        state_dict[f"{prefix}bias"] = state_dict.pop(f"{prefix}old.bias")


def prefixing() -> nn.Module:
    """All names have a prefix in the `state_dict()`."""
    model = nn.Sequential(Overridden(), nn.Linear(6, 2))

    def out(module: Any, state_dict: Any, prefix: str, *_: Any) -> None:
        for key in [*state_dict]:
            state_dict[f"{prefix}net.{key[len(prefix) :]}"] = state_dict.pop(key)

    def take(module: Any, state_dict: Any, prefix: str, *_: Any) -> None:
        for key in [*state_dict]:
            state_dict[prefix + key[len(f"{prefix}net.") :]] = state_dict.pop(key)

    add_hooks(model, out, take)
    return model


def dropping() -> nn.Module:
    """Leaves a frozen part out; loading makes up for it."""
    model = nn.Sequential(Overridden(), nn.Linear(6, 2))
    model[1].requires_grad_(False)

    def out(module: Any, state_dict: Any, prefix: str, *_: Any) -> None:
        del state_dict[f"{prefix}1.weight"], state_dict[f"{prefix}1.bias"]

    def take(module: Any, state_dict: Any, prefix: str, *_: Any) -> None:
        state_dict[f"{prefix}1.weight"] = module[1].weight
        state_dict[f"{prefix}1.bias"] = module[1].bias

    add_hooks(model, out, take)
    return model


class Nested(Wrapped):
    """The root's `state_dict()` has a different structure."""

    def __init__(self) -> None:
        super().__init__()
        self.count = int(torch.randint(1, 1000, ()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return super().forward(x) / (1 + self.count % 5)

    def state_dict(self, *_: Any, **__: Any) -> Any:
        return {"layers": [self.first.state_dict()], "facts": {"count": self.count}}

    def load_state_dict(self, state_dict: Any, *_: Any, **__: Any) -> None:
        self.first.load_state_dict(state_dict["layers"][0])
        self.count = state_dict["facts"]["count"]


class Adapted(Wrapped):
    """Only the adapters are saved, as in scripts that train adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)
        whole = self.state_dict
        kept = ("down.", "up.")
        self.state_dict = lambda *_, **__: {  # type: ignore[method-assign]
            k: v for k, v in whole().items() if k.startswith(kept)
        }

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) + self.up(self.down(x))


class Averaging(nn.Module):
    """An average inside the model: a deep copy and a counter, besides the trained modules."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(Overridden(), nn.BatchNorm1d(6))
        self.average = AveragedModel(self.net, use_buffers=True)
        self.average.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


def averaging() -> Job:
    return trained(
        Averaging(), after=lambda job, _: job.model.average.update_parameters(job.model.net)
    )


class Shared(nn.Module):
    """One module of the kind at two places."""

    def __init__(self) -> None:
        super().__init__()
        self.one = Overridden()
        self.both = nn.ModuleDict({"again": self.one, "other": Overridden()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.both["other"](self.one(x))


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([torch.randn(6, 6), torch.randn(6)])
        self.named = nn.ParameterDict({"scale": torch.randn(6)})
        self.own = Overridden()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(x @ self.parts[0] + self.parts[1]) * self.named["scale"]


def compiled_within() -> nn.Module:
    """A compiled module of the kind, inside one with a hook that sees all names."""
    model = prefixing()
    model[0] = torch.compile(model[0], backend="eager")
    return model


def lazy() -> nn.Module:
    model = nn.Sequential(nn.LazyLinear(5), nn.LazyBatchNorm1d(), Overridden5())
    model(torch.randn(4, 6))
    return model


class Overridden5(Overridden):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.first(x) / (1 + self.count % 7)


def checkpointed() -> nn.Module:
    """torch's own wrappers, with hooks that remove their name."""
    return nn.Sequential(
        *(checkpoint_wrapper(layer) for layer in (nn.Linear(6, 6), nn.BatchNorm1d(6), hooked()))
    )


def weight_normed(old: bool) -> nn.Module:
    norm: Callable[..., Any] = nn.utils.weight_norm if old else parametrizations.weight_norm
    return nn.Sequential(norm(nn.Linear(6, 6)), nn.Linear(6, 2))


def spectral_normed_as_before() -> nn.Module:
    return nn.Sequential(nn.utils.spectral_norm(nn.Linear(6, 6)), nn.Linear(6, 2))


class Quantized(Wrapped):
    """Frozen layers of integers, with weights but no parameters."""

    def __init__(self) -> None:
        super().__init__()
        dynamic = torch.ao.nn.quantized.dynamic.Linear(6, 6)
        weight = torch.quantize_per_channel(
            torch.randn(6, 6), torch.rand(6, dtype=torch.float64), torch.arange(6), 0, torch.qint8
        )
        dynamic.set_weight_bias(weight, torch.randn(6))
        static = torch.ao.nn.quantized.Linear(6, 6)
        static.set_weight_bias(
            torch.quantize_per_tensor(torch.randn(6, 6), 1 / 3, 0, torch.qint8), torch.randn(6)
        )
        static.scale, static.zero_point = float(torch.rand(())), int(torch.randint(9, ()))
        into = torch.ao.nn.quantized.Quantize(0.1, 3, torch.quint8)
        self.frozen = nn.Sequential(dynamic, into, static, torch.ao.nn.quantized.DeQuantize())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(self.frozen(x))


def parametrized() -> nn.Module:
    class Symmetric(Overridden):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return x.triu() + x.triu(1).mT + self.count % 3

    layer = nn.Linear(6, 6)
    nn.utils.parametrize.register_parametrization(layer, "weight", Symmetric(), unsafe=True)
    return nn.Sequential(layer, parametrizations.orthogonal(nn.Linear(6, 6)))


CASES.add("methods of its own", lambda: trained(nn.Sequential(Overridden(), nn.Linear(6, 2))))
CASES.add("the model's own methods", lambda: trained(Overridden(), adam))
CASES.add("hooks", lambda: trained(nn.Sequential(nn.Linear(6, 6), hooked())))
CASES.add("torch's private hooks", lambda: trained(nn.Sequential(nn.Linear(6, 6), hooked(True))))
CASES.add("a hook before, and one after loading", lambda: trained(nn.Sequential(Prepared())))
CASES.add("loading that says it was started", lambda: trained(nn.Sequential(Started())))
CASES.add("loading that makes parameters", lambda: trained(nn.Sequential(Replacing()), adam))
CASES.add("nothing before the first forward pass", lambda: trained(nn.Sequential(Late())))
CASES.add("transposed and renamed", lambda: trained(nn.Sequential(Transposing()), adam))
CASES.add("all renamed", lambda: trained(prefixing(), adam))
CASES.add("part left out", lambda: trained(dropping()))
CASES.add("another state_dict altogether", lambda: trained(Nested()))
CASES.add("an average inside", averaging)
CASES.add("at two places", lambda: trained(Shared()))
CASES.add("lists and dicts of parameters", lambda: trained(Lists()))
CASES.add("compiled within", lambda: trained(compiled_within()))
CASES.add("activations made anew", lambda: trained(checkpointed()))
CASES.add("lazy modules", lambda: trained(lazy()))
CASES.add("weight norm", lambda: trained(weight_normed(False), adam))
CASES.add("weight norm as before", lambda: trained(weight_normed(True), adam))
CASES.add("spectral norm as before", lambda: trained(spectral_normed_as_before(), adam))
CASES.add("quantized layers", lambda: trained(Quantized()))
CASES.add("parametrized by a module of the kind", lambda: trained(parametrized()))
CASES.add(
    "extra state beside", lambda: trained(nn.Sequential(Scaled(), Overridden(), normalised()))
)
CASES.add("adapters alone", lambda: trained(Adapted()))
