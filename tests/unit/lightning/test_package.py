"""The checks before a fit: version, strategy, training step. With a stand-in for Lightning."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tierckpt.errors import ConfigError, TierckptError, UnsupportedStateError
from tierckpt.lightning import package


class Anything:
    """Has every attribute."""

    def __getattr__(self, name: str) -> Anything:
        return Anything()


def strategy(*names: str) -> Any:
    kind: type = object
    for name in reversed(names):
        kind = type(name, (kind,), {})
    return kind()


def trainer_of(root: str, kind: Any = None, **attributes: Any) -> Any:
    made = type("Trainer", (Anything,), {"__module__": f"{root}.trainer.trainer"})()
    made.strategy = kind or strategy("DDPStrategy")
    made.lightning_module = SimpleNamespace(training_step=lambda batch: None)
    made.callbacks = []
    vars(made).update(attributes)
    return made


@pytest.fixture
def lightning(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for name in ("lightning", "lightning.pytorch", "pytorch_lightning"):
        module = ModuleType(name)
        module.__version__ = "2.6.1"  # type: ignore[attr-defined]
        module.Callback = type("Callback", (), {"__module__": name})  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    return sys.modules["lightning.pytorch"]


def checked(trainer: Any) -> list[str]:
    said: list[str] = []
    package.check(trainer, lambda text, severity: said.append(text))
    return said


@pytest.mark.parametrize("root", package.PACKAGES)
@pytest.mark.parametrize(
    "names", [["DDPStrategy"], ["Mine", "DDPStrategy"], ["SingleDeviceStrategy"]]
)
def test_plain_strategies_are_supported(lightning: Any, root: str, names: list[str]) -> None:
    assert checked(trainer_of(root, strategy(*names))) == []


@pytest.mark.parametrize(
    "names", [["FSDPStrategy", "ParallelStrategy"], ["DeepSpeedStrategy", "DDPStrategy"]]
)
def test_strategies_that_shard_are_refused_by_name(lightning: Any, names: list[str]) -> None:
    with pytest.raises(UnsupportedStateError, match=f"^{names[0]}: it shards the model"):
        checked(trainer_of("lightning.pytorch", strategy(*names)))


def test_an_unknown_version_is_a_warning(lightning: Any) -> None:
    lightning.__version__ = "2.7.0"
    (text,) = checked(trainer_of("lightning.pytorch"))
    assert "Lightning 2.7.0 is not a version that Tierckpt was tested with (2.4 to 2.6)" in text


def test_a_version_without_a_private_name_is_refused(lightning: Any) -> None:
    trainer = trainer_of("lightning.pytorch", _logger_connector=SimpleNamespace())
    with pytest.raises(ConfigError, match=r"has no _logger_connector\._callback_metrics, "):
        checked(trainer)


def test_a_step_that_fetches_its_batches_is_refused(lightning: Any) -> None:
    module = SimpleNamespace(training_step=lambda dataloader_iter: None)
    with pytest.raises(UnsupportedStateError, match="it fetches batches itself"):
        checked(trainer_of("lightning.pytorch", lightning_module=module))


@pytest.mark.parametrize("name", package.CHANGES)
def test_callbacks_that_change_the_training_at_each_start_are_refused(
    lightning: Any, name: str
) -> None:
    callback = strategy("Mine", name)
    with pytest.raises(UnsupportedStateError, match=r"^the callback Mine: it "):
        checked(trainer_of("lightning.pytorch", callbacks=[object(), callback]))


def test_another_object_than_a_trainer_is_refused(lightning: Any) -> None:
    with pytest.raises(TierckptError, match="is a callback of Lightning's Trainer, not of"):
        checked(SimpleNamespace())


def test_a_callback_derives_from_the_base_class_of_every_imported_package(
    lightning: Any,
) -> None:
    other = sys.modules["pytorch_lightning"].Callback
    base = package.callback_base()
    assert base is lightning.Callback
    kind = type("Ours", (base,), {})
    assert issubclass(package.for_every_package(kind), other)
    assert issubclass(package.for_every_package(kind), kind)
