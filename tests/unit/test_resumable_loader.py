"""A resumed loader: the very next batch, and every later draw, are those of an undisturbed loop."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

import tierckpt
from tierckpt.resumable_loader import ResumableLoader
from tierckpt.state import rng, tree_codec

EPOCHS, LENGTH, BATCH = 3, 11, 2  # six batches an epoch, the last one short


class Augmented(Dataset[torch.Tensor]):
    """Each sample draws from all three global generators, as transforms do."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, random.random(), np.random.rand(), torch.rand(())])


class Stream(IterableDataset[torch.Tensor]):
    """Without indices."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in range(LENGTH):
            yield torch.tensor([index, torch.rand(()).item()])


class OneAhead:
    """Fetches a batch before it gives the one before, as Accelerate's loaders do."""

    def __init__(self) -> None:
        self.loader = DataLoader(Augmented(), BATCH, shuffle=True)

    def __iter__(self) -> Iterator[torch.Tensor]:
        batches = iter(self.loader)
        held = next(batches)
        for batch in batches:
            yield held
            held = batch
        yield held


def drawn() -> Iterator[torch.Tensor]:
    """No place at all: each batch is drawn."""
    while True:
        yield torch.randint(0, 1000, (4,))


def sampled() -> DataLoader[torch.Tensor]:
    data = Augmented()
    return DataLoader(data, BATCH, sampler=DistributedSampler(data, num_replicas=2, rank=1))


def stateful() -> Any:
    """A loader that stores its place itself, but not the generators."""
    kind = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    return kind(Augmented(), BATCH, shuffle=True)


def with_generators() -> DataLoader[torch.Tensor]:
    data = Augmented()
    sampler = torch.utils.data.RandomSampler(
        data, replacement=True, num_samples=9, generator=torch.Generator().manual_seed(5)
    )
    generator = torch.Generator().manual_seed(6)
    return DataLoader(data, BATCH, sampler=sampler, generator=generator)


Make = Callable[[], Any]
LOADERS: dict[str, tuple[Make, dict[str, Any]]] = {
    "shuffled": (lambda: DataLoader(Augmented(), BATCH, shuffle=True), {}),
    "loaded again": (lambda: DataLoader(Augmented(), BATCH, shuffle=True), {"skip": "load"}),
    "workers": (lambda: DataLoader(Augmented(), BATCH, shuffle=True, num_workers=2), {}),
    "distributed": (sampled, {}),
    "generators": (with_generators, {}),
    "stateful": (stateful, {}),
    "stream": (lambda: DataLoader(Stream(), BATCH), {}),
    "reads ahead": (OneAhead, {}),
    "held": (lambda: DataLoader(Augmented(), BATCH, shuffle=True), {"ahead": 1}),
    "held, reads ahead": (OneAhead, {"ahead": 1}),
    "drawn": (drawn, {"ahead": 1, "skip": "none"}),
}


def seeded(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def noise() -> list[float]:
    """Random numbers of a training step."""
    return [random.random(), float(np.random.rand()), torch.rand(()).item()]


class Loop:
    """A training loop that records its samples, and can be left at any boundary."""

    def __init__(self, make: Make, options: dict[str, Any]) -> None:
        self.ahead = options.get("ahead", 0)
        self.data: ResumableLoader[torch.Tensor] = ResumableLoader(make(), **options)
        self.seen: list[Any] = []

    def boundaries(self) -> Iterator[None]:
        for epoch in range(self.data.epoch, EPOCHS):
            self.data.set_epoch(epoch)
            batches = iter(self.data)
            if self.ahead:
                yield from self._prefetching(batches)
            else:
                for batch in batches:
                    self.seen.append((batch.tolist(), noise()))
                    yield
            self.seen.append(("the epoch's end", noise()))

    def _prefetching(self, batches: Iterator[torch.Tensor]) -> Iterator[None]:
        batch = next(batches, None)
        while batch is not None:
            trained = batch.tolist()
            batch = next(batches, None)
            self.seen.append((trained, noise()))
            yield

    def saved(self) -> tuple[str, str]:
        """The place and the global generators, as a checkpoint has them: text."""
        arena = tree_codec.Arena()
        place = json.dumps(tree_codec.pack(self.data.state_dict(), "data", arena.keep))
        return json.dumps(
            [place, [list(t) if isinstance(t, bytes) else t.tolist() for t in arena.tensors]]
        ), json.dumps({kind: rng.pack_rng()[kind].hex() for kind in ("python", "numpy", "torch")})

    def restore(self, saved: tuple[str, str]) -> None:
        place, tensors = json.loads(saved[0])
        kept = [torch.tensor(each, dtype=torch.uint8) for each in tensors]
        self.data.load_state_dict(
            tree_codec.unpack(json.loads(place), lambda node: kept[node["v"]])
        )
        streams = {kind: bytes.fromhex(each) for kind, each in json.loads(saved[1]).items()}
        rng.load_rng({**streams, "cuda": []})
        self.data.restored()
        noise()  # numbers drawn before the loop do not count


@pytest.mark.filterwarnings("ignore:'set_vital'")  # torchdata, with a torch so new
@pytest.mark.parametrize("kind", LOADERS)
def test_a_resumed_loop_sees_the_same_samples_as_an_undisturbed_one(kind: str) -> None:
    make, options = LOADERS[kind]
    if kind == "drawn":
        steps, at = 9, (1, 2, 5)
    else:
        steps, at = EPOCHS * 6, (1, 5, 6, 7, 15, 18)
    if kind == "workers":
        at = (1, 6, 8)
    seeded(1)
    loop, saved, lengths = Loop(make, options), {}, {}
    for step, _ in zip(range(1, steps + 1), loop.boundaries(), strict=False):
        if step in at:
            saved[step], lengths[step] = loop.saved(), len(loop.seen)
    assert saved
    for step, kept in saved.items():
        seeded(2)
        resumed = Loop(make, options)
        resumed.restore(kept)
        for _ in zip(range(steps - step + 1), resumed.boundaries(), strict=False):
            pass
        expected = loop.seen[lengths[step] :]
        assert expected or step == steps
        assert resumed.seen[: len(expected)] == expected, f"resumed at step {step}"


@pytest.mark.parametrize("kind", ["shuffled", "held"])
def test_a_resumed_loop_counts_on(kind: str) -> None:
    loop = Loop(*LOADERS[kind])
    assert loop.data.start == 0
    for _ in zip(range(8), loop.boundaries(), strict=False):
        pass
    assert loop.data.start == 0, "the next pass is a whole one"
    resumed = Loop(*LOADERS[kind])
    resumed.restore(loop.saved())
    assert resumed.data.start == 2
    count, batches = resumed.data.start, iter(resumed.data)
    assert resumed.data.start == 0
    assert count + len(list(batches)) == 6
    resumed.restore(loop.saved())
    resumed.data.set_epoch(resumed.data.epoch + 1)
    assert resumed.data.start == 0


def test_the_loader_s_attributes_are_there() -> None:
    loader = OneAhead()
    loader.mixup_enabled = True  # type: ignore[attr-defined]
    data = ResumableLoader(loader)
    assert data.mixup_enabled
    data.mixup_enabled = False
    assert not loader.mixup_enabled  # type: ignore[attr-defined]
    data.note = 1
    assert data.note == 1
    assert not hasattr(loader, "note")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = data.nothing
    assert copy.copy(data).loader is loader


def test_a_place_saved_before_the_loop_continues_is_the_restored_one() -> None:
    """A restart that is killed before its first step leaves the same position."""
    loop = Loop(*LOADERS["generators"])
    for _ in zip(range(2), loop.boundaries(), strict=False):
        pass
    saved = loop.saved()
    again = Loop(*LOADERS["generators"])
    again.restore(saved)
    assert again.saved()[0] == saved[0]


def test_an_epoch_that_was_left_early_is_over() -> None:
    data = ResumableLoader(DataLoader(Augmented(), BATCH))
    assert len(data) == 6
    for _ in data:
        break
    first = [int(batch[0, 0]) for batch in data]
    assert (data.epoch, first[0], len(first)) == (1, 0, 6)


def test_a_pass_that_a_restore_overtook_is_refused() -> None:
    data = ResumableLoader(DataLoader(Augmented(), BATCH))
    batches = iter(data)
    next(batches)
    data.load_state_dict(data.state_dict())
    with pytest.raises(tierckpt.TierckptError, match="iterate over the ResumableLoader again"):
        next(batches)


def resumed_at(batches: int, make: Make) -> ResumableLoader[Any]:
    """A loop whose checkpoint was taken in epoch 2."""
    data = ResumableLoader(sampled())
    data.set_epoch(2)
    source = iter(data)
    for _ in range(batches):
        next(source)
    other: ResumableLoader[Any] = ResumableLoader(make())
    other.load_state_dict(data.state_dict())
    return other


def test_a_loop_that_begins_at_epoch_0_again_is_refused() -> None:
    data = resumed_at(1, sampled)
    with pytest.raises(tierckpt.TierckptError, match="start the loop there"):
        data.set_epoch(0)
    data.loader.sampler.set_epoch(0)  # type: ignore[attr-defined]
    with pytest.raises(tierckpt.TierckptError, match=r"epoch 2 of the loader's sampler.*epoch 0"):
        iter(data)
    data.set_epoch(2)
    assert len(list(data)) == 2


def test_another_batch_size_amid_an_epoch_is_refused_and_the_way_out_works() -> None:
    def larger() -> DataLoader[torch.Tensor]:
        data = torch.arange(11.0)
        return DataLoader(data, 2 * BATCH, sampler=DistributedSampler(data, 2, 1))  # type: ignore[arg-type]

    data = resumed_at(1, larger)
    data.loader.sampler.set_epoch(2)  # type: ignore[attr-defined]
    with pytest.raises(tierckpt.TierckptError, match=r"batch_size=2, .*batch_size=4: .*epoch\(3\)"):
        iter(data)
    data.set_epoch(3)
    assert len(list(data)) == 2


def test_a_loader_that_became_shorter_is_refused_and_the_way_out_works() -> None:
    def short() -> DataLoader[torch.Tensor]:
        data = torch.arange(4.0)
        return DataLoader(data, BATCH, sampler=DistributedSampler(data, 2, 1))  # type: ignore[arg-type]

    data = resumed_at(3, short)
    data.loader.sampler.set_epoch(2)  # type: ignore[attr-defined]
    with pytest.raises(tierckpt.TierckptError, match=r"ends after 1: .* set_epoch\(3\)"):
        iter(data)
    data.set_epoch(3)
    assert len(list(data)) == 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"ahead": 2}, "ahead=2"),
        ({"skip": "all"}, "skip='all': it must be one of auto, load, index, none"),
        ({"skip": "index"}, "over a Stream, which has none; skip='load' takes any"),
    ],
)
def test_impossible_values_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(tierckpt.ConfigError, match=text):
        ResumableLoader(DataLoader(Stream(), BATCH), **options)


def test_other_generators_are_refused() -> None:
    saved = ResumableLoader(DataLoader(Augmented(), BATCH)).state_dict()
    with pytest.raises(tierckpt.ConfigError, match=r"drew from 0 generators .* this one has 2"):
        ResumableLoader(with_generators()).load_state_dict(saved)
    more = ResumableLoader(DataLoader(Augmented(), BATCH), generators=[np.random.default_rng(1)])
    more.load_state_dict(more.state_dict())
