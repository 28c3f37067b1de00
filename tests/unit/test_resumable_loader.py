"""A resumed loader: the very next batch, and every later draw, are those of an undisturbed loop."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

import tierckpt
from tierckpt.errors import TierckptError
from tierckpt.resumable_loader import ResumableLoader
from tierckpt.state import Arena, load_rng, pack_rng, pack_tree, unpack_tree

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


class Jitter:
    """A transform with a generator of its own."""

    __slots__ = ("rng",)

    def __init__(self) -> None:
        self.rng = random.Random(3)

    def __call__(self, value: float) -> float:
        return value + self.rng.random()


class OwnDraws(Augmented):
    """Draws from generators of its own: of all kinds, in attributes and in those of a transform."""

    def __init__(self) -> None:
        self.old, self.new = np.random.RandomState(4), np.random.default_rng(5)
        self.transforms = [Jitter()]

    def __getitem__(self, index: int) -> torch.Tensor:
        (jitter,) = self.transforms
        more = torch.tensor([jitter(index), self.old.rand(), self.new.random()])
        return torch.cat([super().__getitem__(index), more])


class Masks:
    """A collate function that makes its generator with the first batch, as those of Transformers
    do, and has another one in its arguments."""

    generator: torch.Generator | None = None

    def __call__(self, samples: list[torch.Tensor], rng: np.random.Generator) -> torch.Tensor:
        if self.generator is None:
            self.generator = torch.Generator().manual_seed(7)
        mask = torch.rand(len(samples), 1, generator=self.generator)
        return torch.cat([torch.stack(samples), mask, torch.full_like(mask, rng.random())], dim=1)


def own_draws() -> DataLoader[torch.Tensor]:
    collate = functools.partial(Masks(), rng=np.random.default_rng(8))
    data = torch.utils.data.Subset(OwnDraws(), range(LENGTH))
    return DataLoader(data, BATCH, shuffle=True, collate_fn=collate)


def own_draws_ahead() -> OneAhead:
    ahead = OneAhead()
    ahead.loader = own_draws()
    return ahead


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
    "own": (own_draws, {}),
    "own, reads ahead": (own_draws_ahead, {}),
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
        arena = Arena()
        place = json.dumps(pack_tree(self.data.state_dict(), "data", arena.keep))
        return json.dumps(
            [place, [list(t) if isinstance(t, bytes) else t.tolist() for t in arena.tensors]]
        ), json.dumps({kind: pack_rng()[kind].hex() for kind in ("python", "numpy", "torch")})

    def restore(self, saved: tuple[str, str]) -> None:
        place, tensors = json.loads(saved[0])
        kept = [torch.tensor(each, dtype=torch.uint8) for each in tensors]
        state = unpack_tree(json.loads(place), lambda node: kept[node["v"]])
        self.data.load_state_dict(state)
        streams = {kind: bytes.fromhex(each) for kind, each in json.loads(saved[1]).items()}
        load_rng({**streams, "cuda": []})
        self.data.restored()
        noise()  # numbers drawn before the loop do not count


@pytest.mark.filterwarnings("ignore:'set_vital'")  # torchdata, with a torch so new
@pytest.mark.parametrize("kind", LOADERS)
def test_a_resumed_loop_sees_the_same_samples_as_an_undisturbed_one(kind: str) -> None:
    make, options = LOADERS[kind]
    steps = 9 if kind == "drawn" else EPOCHS * 6
    at = {"drawn": (1, 2, 5), "workers": (1, 6, 8)}.get(kind, (1, 5, 6, 7, 15, 18))
    seeded(1)
    loop, saved, lengths, ended = Loop(make, options), {}, {}, {}
    for step, _ in zip(range(1, steps + 1), loop.boundaries(), strict=False):
        if step in at:
            saved[step], lengths[step] = loop.saved(), len(loop.seen)
            ended[step] = loop.data.state_dict()["place"]["ended"]
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
        witness = resumed.data.comparison
        assert (witness.batches, witness.differences) == (not ended[step], [])


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
    """A restart killed before its first step leaves the same position."""
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
    """A loop with a checkpoint of epoch 2."""
    data = ResumableLoader(sampled())
    data.set_epoch(2)
    source = iter(data)
    for _ in range(batches):
        next(source)
    other: ResumableLoader[Any] = ResumableLoader(make())
    other.load_state_dict(data.state_dict())
    return other


def test_a_loop_that_starts_at_epoch_0_again_is_refused() -> None:
    data = resumed_at(1, sampled)
    with pytest.raises(tierckpt.TierckptError, match="start the loop there"):
        data.set_epoch(0)
    data.loader.sampler.set_epoch(0)  # type: ignore[attr-defined]
    with pytest.raises(tierckpt.TierckptError, match=r"epoch 2 of the loader's sampler.*epoch 0"):
        iter(data)
    data.set_epoch(2)
    assert len(list(data)) == 2


@pytest.mark.parametrize(
    ("taken", "samples", "batch", "left", "refusal"),
    [
        (1, 11, 2 * BATCH, 2, r"batch_size=2, .*batch_size=4: .*epoch\(3\)"),
        (3, 4, BATCH, 1, r"ends after 1: .* set_epoch\(3\)"),
    ],
    ids=["another batch size", "shorter"],
)
def test_another_loader_within_an_epoch_is_refused_and_the_way_out_works(
    taken: int, samples: int, batch: int, left: int, refusal: str
) -> None:
    def changed() -> DataLoader[torch.Tensor]:
        data = torch.arange(float(samples))
        return DataLoader(data, batch, sampler=DistributedSampler(data, 2, 1))  # type: ignore[arg-type]

    data = resumed_at(taken, changed)
    data.loader.sampler.set_epoch(2)  # type: ignore[attr-defined]
    with pytest.raises(tierckpt.TierckptError, match=refusal):
        iter(data)
    data.set_epoch(3)
    assert len(list(data)) == left


class Hidden(Dataset[torch.Tensor]):
    """Draws from a generator too deep to be found, and knows its epoch."""

    def __init__(self, size: int = LENGTH) -> None:
        self.deep, self.size, self.epoch = [random.Random(1)] * 1000, size, 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), 100 * self.epoch])


class HiddenDraws(Hidden):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, self.deep[0].random()])


class CountsPasses:
    """An iterable with an order that depends on its own count."""

    passes = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.passes += 1
        yield from torch.arange(6) * self.passes


def saved_in_epoch_1(make: Make) -> dict[str, Any]:
    """The place after two batches of epoch 1, in a loop that tells the data set its epoch."""
    data: ResumableLoader[Any] = ResumableLoader(make())
    list(data)
    if isinstance(getattr(data.loader, "dataset", None), Hidden):
        data.loader.dataset.epoch = 1  # type: ignore[attr-defined]
    batches = iter(data)
    next(batches), next(batches)
    return data.state_dict()


@pytest.mark.parametrize(
    ("make", "now", "said"),
    [
        (lambda: DataLoader(HiddenDraws(), BATCH), None, "other augmentation: the samples have t"),
        (lambda: DataLoader(Hidden(), BATCH), None, "other augmentation: the samples have the sam"),
        (
            lambda: DataLoader(HiddenDraws(), BATCH, num_workers=2, persistent_workers=True),
            None,
            "other samples, or another augmentation of the same: the batch differs",
        ),
        (CountsPasses, None, "other samples, or another augmentation of the same: the batch diff"),
        (
            lambda: DataLoader(Hidden(), BATCH),
            lambda: DataLoader(Hidden(LENGTH + 4), BATCH),
            "another length, as the data set has 15 samples, and had 11; another length, as an ep",
        ),
        (
            lambda: DataLoader(Hidden(), BATCH, sampler=DistributedSampler(Hidden(), 1, 0)),
            lambda: DataLoader(Hidden(), BATCH, sampler=DistributedSampler(Hidden(), 1, 0, seed=3)),
            "another sampler, BatchSampler, DistributedSampler, seed=3, which was BatchSampler, D",
        ),
    ],
    ids=["own generator", "own epoch", "living workers", "counts passes", "grown", "seed"],
)
def test_other_data_are_refused_and_the_next_epoch_may_have_them(
    make: Make, now: Make | None, said: str
) -> None:
    data: ResumableLoader[Any] = ResumableLoader((now or make)())
    data.load_state_dict(saved := saved_in_epoch_1(make))
    with pytest.raises(tierckpt.RestoreError, match=re.escape(f"the loader: {said}")):
        iter(data)
    data.witnesses = False
    data.load_state_dict(saved)
    assert len(list(data)) >= 4
    data.witnesses = True
    data.load_state_dict(saved)
    data.set_epoch(2)
    assert len(list(data)) >= 6
    assert not data.comparison.differences


@pytest.mark.parametrize("place", ["in the first", "in the second", "side by side"])
def test_two_loaders(place: str) -> None:
    """The second one starts after steps that the resumed run made with the first one: these have
    drawn, also from a generator that both have. Side by side, both passes start before either one
    draws its order."""

    class Both:
        def __init__(self) -> None:
            self.shared = torch.Generator()
            loaders = [DataLoader(Augmented(), BATCH, shuffle=True) for _ in range(2)]
            self.both = [ResumableLoader(each, generators=[self.shared]) for each in loaders]

        def pass_(self) -> Iterator[Any]:
            chained = [itertools.chain(*self.both)]
            order = self.both if place == "side by side" else chained
            for batches in zip(*order, strict=True):
                yield *batches, torch.rand(()), torch.rand((), generator=self.shared)
                for each in self.both:
                    each.passed()

    torch.manual_seed(0)
    run, count = Both(), 8 if place == "in the second" else 2
    steps = run.pass_()
    for _ in range(count + 1):  # the boundary is passed when the next step is requested
        last = next(steps)
    saved = copy.deepcopy([each.state_dict() for each in run.both]), pack_rng()
    rest = [*steps]
    again = Both()
    load_rng(saved[1])
    for data, state in zip(again.both, saved[0], strict=True):
        data.load_state_dict(state)
        data.restored()
    torch.rand(7)  # draws until the loop starts do not count
    assert last
    for ours, theirs in zip(again.pass_(), rest, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def looked_at(looks: bool) -> Iterator[tuple[ResumableLoader[torch.Tensor], int]]:
    """A loop that may take a batch to look at before it starts."""
    data = ResumableLoader(DataLoader(torch.arange(6.0), BATCH, shuffle=True))
    data.has_boundaries = True
    if looks:
        next(iter(data))
    yield data, -1
    if looks:
        next(iter(data))
    for epoch in range(data.epoch, EPOCHS):
        data.set_epoch(epoch)
        for batch in data:
            data.passed()
            yield data, int(batch[0])


@pytest.mark.parametrize("looks", [True, False])
def test_a_look_at_a_batch_is_no_epoch(looks: bool) -> None:
    seeded(1)
    loop = looked_at(looks)
    steps = [next(loop) for _ in range(6)]  # the second batch of epoch 1
    saved, streams = copy.deepcopy(steps[-1][0].state_dict()), pack_rng()
    rest = [number for _, number in loop]
    assert (steps[-1][0].epoch, len(rest)) == (2, 4)
    again = looked_at(looks)
    data, _ = next(again)
    load_rng(streams)
    data.load_state_dict(saved)
    data.restored()
    assert [number for _, number in again] == rest


@pytest.mark.parametrize("resumed", [True, False])
@pytest.mark.parametrize("boundary", [ResumableLoader.passed, ResumableLoader.met_boundary])
def test_a_pass_between_two_boundaries_is_whole_in_the_resumed_run(
    boundary: Callable[[Any], None], resumed: bool
) -> None:
    """An evaluation, or an epoch of batches for one step. The boundaries are calls of `step()`,
    or forward passes."""
    data = ResumableLoader(DataLoader(torch.arange(6.0), BATCH))
    for _ in range(2):
        assert len([*data]) == 3
        boundary(data)
    if resumed:
        saved, data = data.state_dict(), ResumableLoader(DataLoader(torch.arange(6.0), BATCH))
        data.load_state_dict(saved)
    data.set_epoch(1)  # the loop makes this pass before the one of another loader, again
    assert len([*data]) == 3


@pytest.mark.parametrize(
    ("takes", "held"), [([2, 1, 1, 1], 1), ([1] * 4, 0), ([4, 1, 1, 1], 3), ([3, 2, 2, 2], 0)]
)
def test_a_loop_that_holds_batches_is_found(takes: list[int], held: int) -> None:
    data = ResumableLoader(DataLoader(torch.arange(20.0), BATCH))
    batches = iter(data)
    for count in takes:
        for _ in range(count):
            next(batches)
        data.passed()
    assert data.held == held


def test_an_iterable_data_set_receives_the_epoch() -> None:
    class Epochs(IterableDataset[int]):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[int]:
            return iter([self.epoch] * 3)

    data: ResumableLoader[Any] = ResumableLoader(DataLoader(Epochs(), batch_size=None))
    data.set_epoch(1)
    batches = iter(data)
    next(batches)
    resumed: ResumableLoader[Any] = ResumableLoader(DataLoader(Epochs(), batch_size=None))
    resumed.load_state_dict(data.state_dict())
    resumed.set_epoch(1)
    assert list(resumed) == list(batches) == [1, 1]


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


def test_a_sampler_that_counts_its_passes_is_refused_with_its_own_cure() -> None:
    class Counting(Sampler[int]):
        epoch = 0

        def __iter__(self) -> Iterator[int]:
            order = [(i + self.epoch) % 6 for i in range(6)]
            self.epoch += 1
            return iter(order)

        def __len__(self) -> int:
            return 6

    def made() -> tierckpt.ResumableLoader[Any]:
        return tierckpt.ResumableLoader(DataLoader(range(6), 2, sampler=Counting()))  # type: ignore[arg-type]

    data = made()
    assert len([*data]) == 3
    batches = iter(data)
    assert [len(next(batches)) for _ in range(2)] == [2, 2]
    data.passed()
    state, again = data.state_dict(), made()
    again.load_state_dict(state)
    with pytest.raises(TierckptError, match="own count, epoch, to 1 before the pass"):
        iter(again)
    again = made()
    again.load_state_dict(state)
    again.loader.sampler.epoch = 1  # type: ignore[attr-defined]
    assert [each.tolist() for each in again] == [next(batches).tolist()]
