"""Generators that a loader, its data set and its functions have are found by path."""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tierckpt.state import MAX_MEMBERS, HeldGenerators, generator_state

named = np.random.default_rng(1)
"""A global variable, as scripts have them."""


def helper(value: float) -> float:
    return value + named.random()


class Jitter:
    __slots__ = ("missing", "rng")

    def __init__(self) -> None:
        self.rng = random.Random(2)

    def __call__(self, value: float) -> float:
        return value + self.rng.random()


class Module(torch.nn.Module):
    """A transform of torchvision's newer kind."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.inner = torch.Generator(), torch.nn.Identity()

    def forward(self, value: float) -> float:
        return value


class Samples(Dataset[float]):
    def __init__(self) -> None:
        self.transforms = [Jitter(), Module()]
        self.old, self.same = np.random.RandomState(3), None
        self.data = [np.random.default_rng(i) for i in range(MAX_MEMBERS + 1)]
        self.loop = self
        self.generator: Any = None

    @property
    def lazy(self) -> Any:
        raise AssertionError("no property is read")

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> float:
        return self.augmented(index)

    def augmented(self, index: int) -> float:
        return helper(index)


def paths(root: Any) -> set[str]:
    return {*HeldGenerators(root).found}


def test_generators_of_a_loader_s_data_are_found() -> None:
    data = torch.utils.data.Subset(Samples(), [0, 1])
    loader = DataLoader(data, shuffle=True, generator=torch.Generator())
    assert paths(loader) == {
        "generator",
        "dataset.dataset.old",
        "dataset.dataset.transforms[0].rng",
        "dataset.dataset.transforms[1].source",
        "dataset.dataset.augmented.helper.named",
    }


def test_generators_of_a_collate_function_are_found() -> None:
    inner = np.random.default_rng(3)

    default = random.Random(4)

    def collate(samples: Any, rng: Any = default, *, key: Any = None) -> Any:
        return samples, rng, inner.random()

    found = HeldGenerators(DataLoader([1, 2], collate_fn=functools.partial(collate, rng=inner)))
    assert set(found.found) == {"collate_fn.func.inner", "collate_fn.func.__defaults__[0]"}
    assert paths(DataLoader([1, 2], collate_fn=Samples().augmented)) >= {"collate_fn.__self__.old"}


def test_generators_of_the_process_and_of_nothing_are_not_found() -> None:
    held: Any = {"random": random._inst, "numpy": np.random.mtrand._rand}  # type: ignore[attr-defined]
    held |= {"torch": torch.default_generator, "system": random.SystemRandom()}
    assert paths(DataLoader([1, 2], collate_fn=functools.partial(print, held))) == set()
    assert paths(iter([named])) == set()


def test_a_loader_as_its_own_iterator_is_searched_and_its_iterator_is_not() -> None:
    class Loader(Jitter):
        def __init__(self) -> None:
            super().__init__()
            self.inner = iter(DataLoader(Samples()))

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> Any:
            raise StopIteration

    assert paths(Loader()) == {"rng"}
    assert paths([Loader()]) == set()


@pytest.mark.parametrize(
    "generator",
    [torch.Generator(), random.Random(5), np.random.RandomState(6), np.random.default_rng(7)],
    ids=lambda each: type(each).__name__,
)
def test_a_generator_that_does_not_exist_yet_is_made(generator: Any) -> None:
    held = HeldGenerators(DataLoader(Samples()))
    state = generator_state(generator)
    assert held.put("dataset.generator", state)
    made = held.found["dataset.generator"]
    assert type(made) is type(generator)
    assert str(generator_state(made)) == str(state)
    assert not held.put("dataset.generator", state), "there is one now"
    assert not held.put("dataset.transforms[0].missing", state), "no attribute of its own"
    assert not held.put("elsewhere.generator", state)
