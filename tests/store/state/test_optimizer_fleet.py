"""Every optimizer of torch in every variant, and every one of pytorch_optimizer, is restored
exactly and trains on exactly; or it is refused or reported, with the words listed here.

They train side by side, in one job for each of the two libraries; differences are reported by name.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tierckpt
from tests.support.state_matrix.fleet import (
    Fleet,
    Maker,
    Ship,
    differences,
    plain,
    small,
    with_closure,
)

# --- torch's own ---------------------------------------------------------------------------------

VARIANTS = ("foreach", "fused")
"""Cases besides the plain loop. Differentiable ones step no leaves; capturable ones need GPUs."""


@functools.cache
def torchs() -> dict[str, Maker]:
    """Options as in torch's own tests: momentum, amsgrad, maximize, rates in tensors, ...

    Skips the test on a torch without its own tests. Loads the list on demand: that takes seconds.
    """
    try:
        from torch.testing._internal.common_optimizers import optim_db
    except ImportError:  # some packages of torch lack it
        pytest.skip("this torch has no torch.testing._internal.common_optimizers")
    found: dict[str, Maker] = {}
    for info in optim_db:
        for given in info.optim_inputs_func(device="cpu"):
            name = f"{info.optim_cls.__name__} {given.desc}"
            for variant in ("", *(v for v in VARIANTS if v in info.supported_impls)):
                options = {**given.kwargs, **({variant: True} if variant else {})}
                if variant == "foreach" and isinstance(options.get("lr"), torch.Tensor):
                    continue  # torch: for capturable ones alone
                maker = partial(torch_ship, info.optim_cls, options)
                found.setdefault(f"{name} {variant}".strip(), maker)
    return found


def torch_ship(kind: Any, options: dict[str, Any]) -> Ship:
    own = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    model = small()
    if kind is torch.optim.SparseAdam:
        model = nn.Sequential(nn.Embedding(9, 6, sparse=True))
    params = [p for p in model.parameters() if p.ndim == 2 or kind.__name__ != "Muon"]
    step = with_closure if kind is torch.optim.LBFGS else plain
    return Ship(model, kind(params, **own), step)


@pytest.mark.filterwarnings("ignore")
def test_every_variant_of_torchs_optimizers_is_exact(path: Path, shm_dir: Path) -> None:
    assert differences(torchs(), path, shm_dir) == {}


def test_there_are_as_many_as_torch_has_classes() -> None:
    classes = {name.split()[0] for name in torchs()}
    assert len(torchs()) >= 150
    assert classes >= {"Adam", "AdamW", "SGD", "LBFGS", "SparseAdam", "RMSprop", "Adagrad"}


# --- pytorch_optimizer ---------------------------------------------------------------------------

HERE = importlib.util.find_spec("pytorch_optimizer") is not None
if HERE:
    import pytorch_optimizer

NOT_IN_THIS_FLEET = {
    "demo": "asks for einops",
    "distributedmuon": "asks for a process group",
    "alig": "asks for its loss in a closure, after the gradients",
}
NOT_STORABLE = {
    "conda": r"Conda\.state\['0\.weight'\]\['projector'\] is a pytorch_optimizer\S*GaLoreProjector",
    "scalableshampoo": r"ScalableShampoo\.state\['0\.weight'\]\['\w+'\] is a pytorch_optimizer\S+",
}
"""Accepted at attach, since it appears with the first step; then every version fails with these."""
NO_STEPS = {"lomo": "LOMO", "adalomo": "AdaLOMO"}
"""They change weights in the backward pass, and no step is called."""
MATRICES = ("muon", "muonclip", "normuon", "adago", "adamuon")
OWN_OPTIONS = {
    "ranger21": {"num_iterations": 20},
    "bsam": {"num_data": 5},
    "spectralsphere": {"solver_max_iterations": 2},  # else it takes as long as all others
}
LISTED = {*NOT_IN_THIS_FLEET, *NOT_STORABLE, *NO_STEPS}


def others() -> dict[str, Maker]:
    if not HERE:
        return {}
    names = pytorch_optimizer.get_supported_optimizers()
    return {name: partial(other_ship, name) for name in names if name not in LISTED}


def other_ship(name: str) -> Ship:
    kind, model = pytorch_optimizer.load_optimizer(name), small()
    weights, biases = ([p for p in model.parameters() if p.ndim == n] for n in (2, 1))
    if name in MATRICES:
        groups = [{"params": weights, "use_muon": True}, {"params": biases, "use_muon": False}]
        return Ship(model, kind([{**group, "lr": 0.01} for group in groups]), plain)
    if name in ("adammini", *NO_STEPS):
        return Ship(model, kind(model, lr=0.01), plain)
    params = weights if name == "spectralsphere" else list(model.parameters())
    step = with_closure if "sam" in name or name == "lbfgs" else plain
    if name in ("adahessian", "sophiah"):
        step = with_graph
    return Ship(model, kind(params, lr=0.01, **OWN_OPTIONS.get(name, {})), step)


def with_graph(model: nn.Module, optimizer: Any) -> None:
    """A model for optimizers that need second derivatives."""
    optimizer.zero_grad()
    model(torch.randn(5, 6)).square().mean().backward(create_graph=True)
    optimizer.step()


def wrapped(kind: str, *args: Any, **options: Any) -> Ship:
    """Its optimizers that step another one."""
    model = small()
    base = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = getattr(pytorch_optimizer, kind)(base, *args, **options)
    if kind == "ScheduleFreeWrapper":
        optimizer.train()
    return Ship(model, optimizer, plain)


def climbing() -> Ship:
    """SAM by its two halves: its own step is never called."""
    model = small()
    sam = pytorch_optimizer.SAM(model.parameters(), torch.optim.AdamW, lr=0.01)

    def iterate(model: nn.Module, sam: Any) -> None:
        x = torch.randn(5, 6)
        for half in (sam.first_step, sam.second_step):
            model(x).square().mean().backward()
            half(zero_grad=True)

    return Ship(model, sam, iterate)


OTHERS = others()
if HERE:
    OTHERS |= {
        "around SGD: Lookahead": partial(wrapped, "Lookahead", k=2),
        "around SGD: Lookahead pullback": partial(
            wrapped, "Lookahead", k=2, pullback_momentum="pullback"
        ),
        "around SGD: ScheduleFree": partial(wrapped, "ScheduleFreeWrapper"),
        "around SGD: TRAC": partial(wrapped, "TRAC"),
        "around SGD: OrthoGrad": partial(wrapped, "OrthoGrad"),
        "around SGD: PCGrad": partial(wrapped, "PCGrad"),
        "around AdamW: SAM in halves": climbing,
    }


@pytest.mark.skipif(not HERE, reason="pytorch_optimizer is not installed")
@pytest.mark.filterwarnings("ignore")
def test_every_optimizer_of_pytorch_optimizer_is_exact(path: Path, shm_dir: Path) -> None:
    assert differences(OTHERS, path, shm_dir) == {}


def said_by(name: str, settings: dict[str, Any], path: Path) -> tuple[int, list[str]]:
    """The last version of a job, and its errors."""
    fleet = Fleet({name: partial(other_ship, name)}, seed=1)
    ship, events = fleet.ships[name], list[tierckpt.Event]()
    given = {"path": path, "agent": "inline", "on_event": events.append, **settings}
    with tierckpt.Checkpointer(ship.model, ship.optimizer, **given) as ckpt:
        for _ in range(6):
            if name in NO_STEPS:
                ship.optimizer.zero_grad()
                loss = ship.model(torch.randn(5, 6)).square().mean()
                ship.optimizer.fused_backward(loss, 0.01)
            else:
                fleet.iterate()
            ckpt.step()
        ckpt.abandon()
    return ckpt.version, [e.message for e in events if e.severity >= logging.ERROR]


@pytest.mark.skipif(not HERE, reason="pytorch_optimizer is not installed")
@pytest.mark.parametrize("name", NOT_STORABLE)
def test_state_that_no_checkpoint_can_hold_is_named_with_the_remedy(
    name: str, settings: dict[str, Any], path: Path
) -> None:
    _, said = said_by(name, settings, path)
    assert re.search(NOT_STORABLE[name], said[0])
    assert "register_state_dict_post_hook" in said[0]


@pytest.mark.skipif(not HERE, reason="pytorch_optimizer is not installed")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NO_STEPS)
def test_weights_that_no_step_changes_are_an_error(
    name: str, settings: dict[str, Any], path: Path
) -> None:
    version, said = said_by(name, settings, path)
    assert version == 0
    assert len(said) == 1
    assert f"but the given optimizers ('optimizer', {NO_STEPS[name]}) made no step" in (said[0])


@pytest.mark.skipif(not HERE, reason="pytorch_optimizer is not installed")
def test_every_name_of_it_is_listed_once() -> None:
    names = set(pytorch_optimizer.get_supported_optimizers())
    assert len(names) >= 128
    assert names >= LISTED
