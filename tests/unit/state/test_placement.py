"""One place decides which ranks have which elements of a parameter."""

from __future__ import annotations

import pytest
import torch

from tierckpt.errors import ConfigError
from tierckpt.format import PER_RANK
from tierckpt.state import Placements


class Model(torch.nn.Module):
    """A layer, an embedding with rows scaled by the forward pass, and a weight beside."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.rows = torch.nn.Embedding(4, 2, max_norm=1.0)
        self.beside = torch.nn.Parameter(torch.ones(2))


def per_rank(placements: Placements, model: Model) -> set[str]:
    names = {id(p): n for n, p in model.named_parameters()}
    found = placements.of([*model.parameters()], [*model.modules()], lambda p: names[id(p)])
    assert set(found.values()) == {PER_RANK}
    return {names[number] for number in found}


def test_without_an_adapters_word_all_but_renormed_weights_are_replicated() -> None:
    assert per_rank(Placements(None, ()), Model()) == {"rows.weight"}


def test_tensors_that_nobody_reduces_are_per_rank() -> None:
    model = Model()
    placements = Placements([*model.layer.parameters()], ())
    assert per_rank(placements, model) == {"rows.weight", "beside"}


def test_tensors_that_nobody_trains_are_replicated_until_they_are_declared_per_rank() -> None:
    model = Model()
    placements = Placements([*model.parameters()], [model.layer.bias, model.beside])
    assert per_rank(placements, model) == {"rows.weight"}
    assumed = placements.assumed_replicated(model.parameters())
    assert {id(p) for p in assumed} == {id(model.layer.bias), id(model.beside)}
    placements.keep_apart([model.beside])
    assert per_rank(placements, model) == {"rows.weight", "beside"}
    (left,) = placements.assumed_replicated(model.parameters())
    assert left is model.layer.bias


def test_tensors_that_the_forward_pass_changes_are_named_with_patterns() -> None:
    model, placements = Model(), Placements(None, ())
    names = [name for name, _ in model.named_parameters()]
    placements.forward_changes("layer.*, beside", names)
    assert per_rank(placements, model) == {*names}
    with pytest.raises(ConfigError, match=r"'head\.\*'"):
        placements.forward_changes("beside, head.*", names)
