"""The checks of `attach`: version, kind of parallelism, prepared objects. With a stand-in for
Accelerate."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tierckpt import accelerate as package
from tierckpt.accelerate import Checkpointer, ResumedLoader
from tierckpt.errors import ConfigError, UnsupportedStateError


class Accelerator:
    """As far as the checks look."""

    def __init__(self, kind: str = "NO", **attributes: Any) -> None:
        self.distributed_type = SimpleNamespace(name=kind)
        self._models, self._optimizers = [torch.nn.Linear(1, 1)], [object()]
        self._schedulers: list[Any] = []
        self._custom_objects: list[Any] = []
        self._dataloaders: list[Any] = []
        self.step, self.scaler = 0, None
        self.gradient_state = SimpleNamespace(sync_gradients=True)
        self.project_configuration = SimpleNamespace(iteration=0)
        vars(self).update(attributes)


Accelerator.__module__ = "accelerate.accelerator"


@pytest.fixture(autouse=True)
def accelerate(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("accelerate")
    module.__version__ = "1.15.0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "accelerate", module)
    return module


def checked(accelerator: Any) -> list[str]:
    said: list[str] = []
    package.check(accelerator, lambda text, severity: said.append(text))
    return said


@pytest.mark.parametrize("kind", ["NO", "MULTI_CPU", "MULTI_GPU"])
def test_data_parallelism_is_taken(kind: str) -> None:
    assert checked(Accelerator(kind)) == []


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA", "TP"])
def test_sharding_is_refused_by_name_with_the_way_out(kind: str) -> None:
    with pytest.raises(UnsupportedStateError, match=rf"distributed type {kind}: .*--multi_gpu"):
        Checkpointer(Accelerator(kind), path="unused")  # type: ignore[arg-type]


def test_a_parallelism_config_that_shards_is_refused() -> None:
    whole = SimpleNamespace(dp_replicate_size=2, tp_size=1, cp_size=1)
    assert checked(Accelerator("MULTI_GPU", parallelism_config=whole)) == []
    tensors = SimpleNamespace(dp_replicate_size=2, tp_size=2, cp_size=1)
    with pytest.raises(UnsupportedStateError, match=r"parallelism_config \(tp_size=2\)"):
        checked(Accelerator("MULTI_GPU", parallelism_config=tensors))


def test_another_version_is_warned_of(accelerate: ModuleType) -> None:
    accelerate.__version__ = "3.0.0"  # type: ignore[attr-defined]
    (text,) = checked(Accelerator())
    assert text.startswith("Accelerate 3.0.0 is not a version that Tierckpt was tested with")


def test_a_version_without_the_private_names_is_refused() -> None:
    accelerator = Accelerator()
    del accelerator._schedulers
    with pytest.raises(ConfigError, match=r"has no _schedulers"):
        checked(accelerator)


@pytest.mark.parametrize(("name", "kind"), [("_models", "model"), ("_optimizers", "optimizer")])
def test_an_accelerator_that_prepared_nothing_is_refused(name: str, kind: str) -> None:
    with pytest.raises(ConfigError, match=f"prepared no {kind}. Call attach after"):
        checked(Accelerator(**{name: []}))


def test_another_object_is_refused() -> None:
    with pytest.raises(ConfigError, match="takes an Accelerator"):
        checked(torch.nn.Linear(1, 1))


def test_a_name_that_attach_uses_is_refused() -> None:
    with pytest.raises(ConfigError, match="'accelerator': "):
        Checkpointer(Accelerator(), path="unused", extra={"accelerator": object()})  # type: ignore[arg-type]


def test_a_loader_that_was_not_prepared_is_refused() -> None:
    with pytest.raises(ConfigError, match="a DataLoader, was not prepared"):
        ResumedLoader(torch.utils.data.DataLoader([1, 2]), Accelerator())  # type: ignore[arg-type]
