"""The resumable sampler: every sample once an epoch, after a restart with any number of ranks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import chain, islice, product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

import tierckpt
from tierckpt.sampler import Deal, ResumableSampler

Batches = list[list[int]]


def job(ranks: int, length: int = 40, batch_size: int = 3, **options: Any) -> list[Any]:
    """The samplers of all ranks."""
    return [
        ResumableSampler(range(length), batch_size, rank=rank, ranks=ranks, **options)
        for rank in range(ranks)
    ]


def trained(sampler: ResumableSampler, steps: int | None = None, ahead: int = 0) -> Batches:
    """A loop over a loader that draws `ahead` more batches than the loop has seen."""
    source = iter(sampler)
    drawn: Iterator[list[int]] = iter(list(islice(source, steps + ahead)) if steps else source)
    seen = []
    for batch in islice(drawn, steps):
        sampler.step()
        seen.append(batch)
    return seen


def together(ranks: list[ResumableSampler], steps: int | None = None, ahead: int = 0) -> Batches:
    """Samples of all ranks, by step; all make equally many steps, none without samples."""
    each = [trained(sampler, steps, ahead) for sampler in ranks]
    assert len({len(batches) for batches in each}) == 1
    assert all(batch for batches in each for batch in batches)
    return [flat(batches) for batches in zip(*each, strict=True)]


def restarted(old: list[ResumableSampler], new: list[ResumableSampler]) -> list[ResumableSampler]:
    """`new` with the position that all of `old` agree on, by way of a file."""
    (state,) = {json.dumps(sampler.position.state_dict()) for sampler in old}
    for sampler in new:
        sampler.position.load_state_dict(json.loads(state))
    return new


def flat(batches: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(batches))


# --- dealing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_every_place_is_dealt_once_in_batches_that_all_ranks_have(
    ranks: int, drop_last: bool
) -> None:
    for batch_size, length in product((1, 2, 3), range(1, 18)):
        deal = Deal(length, batch_size, 0, ranks, drop_last)
        for start in range(length + 1):
            assert_dealt_once(deal, start)


def assert_dealt_once(deal: Deal, start: int) -> None:
    first, count, places = start, 0, []
    while (end := deal.end(first)) != first:
        shares = [replace(deal, rank=rank).share(first, end) for rank in range(deal.ranks)]
        sizes = {len(share) for share in shares}
        assert 1 <= min(sizes) <= max(sizes) <= min(min(sizes), deal.batch_size) + 1
        places += flat(shares)
        first, count = end, count + 1
    assert count == deal.batches(start)
    rest = deal.length - start
    if deal.drop_last:
        assert sorted(places) == list(range(start, start + count * deal.ranks * deal.batch_size))
        assert rest - len(places) < deal.ranks * deal.batch_size
    elif 0 < rest < deal.ranks:
        assert set(range(start, deal.length)) <= set(places)
        assert len(places) == deal.ranks
    else:
        assert sorted(places) == list(range(start, deal.length))


@pytest.mark.parametrize(
    ("length", "ranks", "drop_last"), [(48, 2, False), (50, 2, False), (41, 3, True), (3, 3, False)]
)
@pytest.mark.parametrize("shuffle", [True, False])
def test_the_batches_are_those_of_torchs_distributed_sampler(
    length: int, ranks: int, drop_last: bool, shuffle: bool
) -> None:
    for sampler in job(ranks, length, shuffle=shuffle, seed=7, drop_last=drop_last):
        plain = DistributedSampler(
            range(length), ranks, sampler.deal.rank, shuffle, seed=7, drop_last=drop_last
        )
        for epoch in range(3):
            sampler.set_epoch(epoch)
            plain.set_epoch(epoch)
            assert trained(sampler) == list(BatchSampler(plain, 3, drop_last))


# --- continuing ----------------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4), st.integers(0, 5)),
        min_size=1,
        max_size=5,
    ),
    st.integers(30, 70),
)
def test_no_sample_is_skipped_or_comes_twice_however_many_ranks_continue(
    lives: list[tuple[int, int, int, int]], length: int
) -> None:
    seen: list[int] = []
    samplers = job(1, length)
    for ranks, batch_size, steps, ahead in lives:
        if length - len(seen) < ranks:
            continue  # see below: only then do samples come twice
        samplers = restarted(samplers, job(ranks, length, batch_size))
        seen += flat(together(samplers, steps, ahead))
    seen += flat(together(restarted(samplers, job(1, length))))
    assert sorted(seen) == list(range(length))


@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 4), st.booleans())
def test_the_same_ranks_continue_as_if_nothing_had_happened(
    ranks: int, steps: int, ahead: int, drop_last: bool
) -> None:
    def fresh() -> list[ResumableSampler]:
        return job(ranks, 63, seed=3, drop_last=drop_last)

    for sampler in (undisturbed := fresh()):
        sampler.set_epoch(2)
    for sampler in (killed := fresh()):
        sampler.set_epoch(2)
    before = [trained(sampler, steps, ahead) for sampler in killed]
    resumed = restarted(killed, fresh())
    after = [trained(sampler) for sampler in resumed]
    expected = [trained(sampler) for sampler in undisturbed]
    assert [a + b for a, b in zip(before, after, strict=True)] == expected
    for sampler in [*resumed, *undisturbed]:
        sampler.set_epoch(3)
    assert together(resumed) == together(undisturbed)


def test_the_seed_is_the_checkpoints() -> None:
    before = job(2, seed=11)
    seen = flat(together(before, 3))
    after = restarted(before, job(2, seed=12))
    assert sorted(seen + flat(together(after))) == list(range(40))


@pytest.mark.parametrize(
    ("other", "said"),
    [({"length": 41}, "40 samples, shuffled"), ({"shuffle": False}, "40 samples, in their own")],
)
def test_another_order_is_refused_and_nothing_changed(other: dict[str, Any], said: str) -> None:
    (before,) = job(1)
    trained(before, 2)
    (after,) = job(1, **other)
    untouched = after.position.state_dict()
    with pytest.raises(tierckpt.ConfigError, match="sampler's has " if "length" in other else said):
        before.position.load_state_dict(untouched)
    with pytest.raises(tierckpt.ConfigError, match=r"40 samples, shuffled"):
        after.position.load_state_dict(before.position.state_dict())
    assert after.position.state_dict() == untouched


# --- a pass --------------------------------------------------------------------------------------


def test_the_length_is_that_of_the_pass_all_through_it() -> None:
    (sampler,) = job(1)  # 40 samples, batches of 3, the last of one sample
    assert len(sampler) == 14
    trained(sampler, 4)
    assert len(sampler) == 14
    (resumed,) = restarted([sampler], job(1))
    assert len(resumed) == 10
    assert len(trained(resumed)) == len(resumed) == 10
    resumed.set_epoch(1)
    assert len(resumed) == 14


def test_work_of_a_loop_at_the_end_of_an_epoch_is_not_lost() -> None:
    """A checkpoint at the last batch was taken before that: the epoch comes again, empty."""
    (sampler,) = job(1)
    trained(sampler)
    (resumed,) = restarted([sampler], job(1))
    assert resumed.epoch == 0
    resumed.set_epoch(0)
    iter(resumed)  # as a loader with workers does, which starts a pass twice
    assert list(resumed) == []
    resumed.set_epoch(1)
    sampler.set_epoch(1)
    assert trained(resumed) == trained(sampler)


def test_a_loaders_memory_of_another_epoch_does_not_count() -> None:
    """torchdata's loader keeps the state of its last pass until the next one starts."""
    (sampler,) = job(1)
    old = iter(sampler)
    for _ in old:
        sampler.step()
    sampler.set_epoch(1)
    new = iter(sampler)
    new.load_state_dict(old.state_dict())
    assert list(new) == list(sampler)
    new = iter(sampler)
    new.load_state_dict({**new.state_dict(), "drawn": 6})
    assert list(new) == list(sampler)[2:]


def test_a_finished_epoch_has_no_second_pass() -> None:
    (sampler,) = job(1)
    trained(sampler)
    with pytest.raises(tierckpt.TierckptError, match=r"set_epoch\(1\)"):
        iter(sampler)


def test_a_pass_ends_where_the_position_is_moved() -> None:
    (sampler,) = job(1)
    for move in (
        lambda: sampler.position.load_state_dict(sampler.position.state_dict()),
        lambda: sampler.set_epoch(sampler.epoch + 1),
        lambda: sampler.deal_to(0, 2),
    ):
        drawn = iter(sampler)
        next(drawn)
        sampler.step()
        move()
        with pytest.raises(tierckpt.TierckptError, match="again"):
            next(drawn)
        with pytest.raises(tierckpt.TierckptError, match="no batch was drawn"):
            sampler.step()


def test_a_step_without_a_batch_is_refused() -> None:
    (sampler,) = job(1)
    with pytest.raises(tierckpt.TierckptError, match="no batch was drawn"):
        sampler.step()
    drawn = iter(sampler)
    next(drawn)
    sampler.step()
    with pytest.raises(tierckpt.TierckptError, match="sample 3 of epoch 0"):
        sampler.step()


def test_a_loop_that_never_reports_its_samples_is_detected() -> None:
    (sampler,) = job(1)
    list(sampler)
    with pytest.raises(tierckpt.TierckptError, match=r"sampler.step\(\) after every batch"):
        sampler.set_epoch(1)


def test_a_loop_that_forgets_the_restored_epoch_is_found_out() -> None:
    (before,) = job(1)
    before.set_epoch(4)
    (after,) = restarted([before], job(1))
    with pytest.raises(tierckpt.TierckptError, match=r"range\(sampler.epoch, epochs\)"):
        after.set_epoch(0)


def test_the_ranks_may_become_others_in_the_middle() -> None:
    """Horovod elastic: the process stays and joins another job."""
    samplers = job(3)
    seen = flat(together(samplers, 2, ahead=2))
    for rank, sampler in enumerate(samplers[:2]):
        sampler.deal_to(rank, 2)
    assert sorted(seen + flat(together(samplers[:2]))) == list(range(40))


def test_an_order_of_ones_own() -> None:
    class Backwards(ResumableSampler):
        def order(self) -> torch.Tensor:
            return torch.arange(self.position.length).flip(0)

    assert flat(trained(Backwards(range(5), 2, rank=0, ranks=1))) == [4, 3, 2, 1, 0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"rank": 2, "ranks": 2}, "rank=2, ranks=2"),
        ({"ranks": None}, "so the rank is unknown"),
        ({"ranks": 4, "drop_last": True}, "4 rank.s. of 3 each with drop_last"),
    ],
)
def test_impossible_values_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(tierckpt.ConfigError, match=said):
        ResumableSampler(range(10), **{"batch_size": 3, "rank": 0, "ranks": 1, **options})


def test_a_loader_of_its_own_generator_leaves_the_global_stream_alone() -> None:
    """As the docstring promises; without it, each pass draws one number from the global stream."""
    (sampler,) = job(1)
    loader = DataLoader(range(40), batch_sampler=sampler, generator=torch.Generator())
    before = torch.get_rng_state()
    assert next(iter(loader)).tolist() == next(iter(sampler))
    assert torch.equal(torch.get_rng_state(), before)
    next(iter(DataLoader(range(40), batch_sampler=sampler)))
    assert not torch.equal(torch.get_rng_state(), before)
