"""Values of classes that are not imported by the reader: they are named, never replaced
silently."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tierckpt
from tierckpt.cli import run_command
from tierckpt.state import ForeignValue

MODULE = "a_library_of_modes"
SOURCE = """
import enum
class Mode(enum.Enum):
    SLOW, FAST = 1, 2
"""
Box = dict[str, Any]


class Keeper:
    """A user's object in `extra`."""

    def __init__(self, kept: Any) -> None:
        self.kept = kept

    def state_dict(self) -> Box:
        return {"kept": self.kept}

    def load_state_dict(self, state: Box) -> None:
        self.kept = state["kept"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TIERCKPT_SHM_DIR", str(shm_dir))
    folder = tmp_path / "library"
    folder.mkdir()
    (folder / f"{MODULE}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(folder)
    yield
    sys.modules.pop(MODULE, None)


def attached(path: Path, kept: Any, where: str) -> tierckpt.Checkpointer:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    extra: Any = {where: {"keeper": Keeper(kept)}}
    return tierckpt.Checkpointer(model, optimizer, path=path, agent="inline", **extra)


def kept_in(kind: str) -> Any:
    fast = __import__(MODULE).Mode.FAST
    kinds = {
        "value": fast,
        "key": {fast: 1},
        "set": {fast},
        "frozen set": [frozenset([fast])],
        "deque": deque([fast]),
    }
    return kinds[kind]


KINDS = ["value", "key", "set", "frozen set", "deque"]


def write(path: Path, kept: Any, where: str) -> None:
    """Version 1."""
    with attached(path, kept, where) as ckpt:
        (optimizer,) = ckpt._state.optimizers.values()
        optimizer.step()
        ckpt.step()


def written(path: Path, kind: str, where: str) -> None:
    """Write it in a process that has the class; this process no longer has it."""
    write(path, kept_in(kind), where)
    del sys.modules[MODULE]


@pytest.mark.parametrize(
    ("kind", "where"), [("value", "extra_per_rank"), *((kind, "extra") for kind in KINDS)]
)
def test_it_is_refused_by_name_and_had_as_it_says(kind: str, where: str, tmp_path: Path) -> None:
    path = tmp_path / "c"
    written(path, kind, where)
    with pytest.raises(tierckpt.RestoreError, match=rf"v1: .*{where}.* is a {MODULE}\.Mode") as no:
        tierckpt.load(path)
    assert f"First: import {MODULE} (`tierckpt export ... --import {MODULE}`)" in str(no.value)
    parts = getattr(tierckpt.load(path, as_parts=True), where)
    assert ForeignValue(f"{MODULE}:Mode", 2) in [*flat(parts)]
    expected = kept_in(kind)  # imports it
    assert getattr(tierckpt.load(path), where) == {"keeper": {"kept": expected}}


def flat(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for pair in value.items():
            yield from flat(list(pair))
    elif isinstance(value, list | set | frozenset | deque):
        for each in value:
            yield from flat(each)
    else:
        yield value


@pytest.mark.parametrize("where", ["extra", "extra_per_rank"])
def test_a_restore_does_not_take_it_either(where: str, tmp_path: Path) -> None:
    path = tmp_path / "c"
    written(path, "set", where)
    ckpt = attached(path, set(), where)
    with pytest.raises(tierckpt.RestoreError, match="that class is not imported here"):
        ckpt.restore()
    ckpt.abandon()


def test_an_export_imports_the_named_modules(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = str(tmp_path / "c"), str(tmp_path / "all.pt")
    written(tmp_path / "c", "value", "extra")
    assert run_command(["export", path, out]) == 1
    assert f"--import {MODULE}" in capsys.readouterr().err
    assert not Path(out).exists()
    assert (
        run_command(["export", path, str(tmp_path / "model.safetensors")]) == 0
    )  # does not need it
    assert run_command(["export", path, out, "--import", "a_library_of_models"]) == 1
    assert "--import a_library_of_models: ModuleNotFoundError" in capsys.readouterr().err
    assert run_command(["export", path, out, "--import", MODULE]) == 0
    exported = torch.load(out, weights_only=False)
    assert exported["extra"]["keeper"]["kept"] is kept_in("value")


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (MODULE, f"{MODULE} is imported but does not define it any more: use the release"),
        ("__main__", "Its script defines it: load it in a script with the same definition"),
    ],
)
def test_where_an_import_would_not_help_it_is_not_advised(
    module: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = __import__(MODULE)
    path = tmp_path / "c"
    if module == "__main__":
        library.Mode.__module__ = module
        monkeypatch.setattr(sys.modules[module], "Mode", library.Mode, raising=False)
    write(path, library.Mode.FAST, "extra")
    monkeypatch.undo()
    monkeypatch.delattr(library, "Mode")
    with pytest.raises(tierckpt.RestoreError, match=said):
        tierckpt.load(path)
