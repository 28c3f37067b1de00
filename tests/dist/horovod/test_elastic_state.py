"""The elastic state over two real ranks: going back, models of any name, passes, callbacks."""

from __future__ import annotations

import logging
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tierckpt
from tests.dist.horovod.test_callbacks import Diary
from tests.support import exact
from tests.support.elastic_script import (
    BATCHES,
    RATE,
    SAMPLES,
    Adversaries,
    Script,
    distributed,
    start_again,
)
from tests.support.late_copies import copy_by_layer
from tests.support.rank_pool import RankPool
from tests.support.training import Place, batch, rank
from tierckpt.hooks import STEPS_UNTIL_CALL
from tierckpt.snapshot import snapshot

# --- going back ----------------------------------------------------------------------------------


def nothing_trained(script: Script) -> None:
    pass


def before_backward(script: Script) -> None:
    script.forward()


def one_rank_behind_backward(script: Script) -> None:
    loss = script.forward()
    if rank() == 1:
        loss.backward()


def behind_a_step_of_nan(script: Script) -> None:
    script.update(script.forward() * torch.nan)
    weights = torch.cat([p.detach().flatten() for p in script.state.model.parameters()])
    assert weights.isnan().all()


WRONG = (nothing_trained, before_backward, one_rank_behind_backward, behind_a_step_of_nan)


def course(place: Place, wrongs: bool) -> tuple[Any, Any]:
    """Digests at every commit, with or without a failing iteration after each."""
    script = Script(place, seed=1).start()
    digests: dict[int, dict[str, str]] = {}
    levels = []
    if wrongs:
        fresh = script.digests()
        with pytest.raises(tierckpt.RestoreError, match="nothing was committed yet"):
            script.state.restore()
        assert script.digests() == fresh
    for wrong in WRONG:
        digests.update(script.train_to(script.state.batch + 1))
        if wrongs:
            wrong(script)
            script.state.batch, script.state.seen = 99, []
            script.state.restore()
            levels.append((script.state.restored.version, script.state.restored.levels))
            assert script.digests() == digests[max(digests)], wrong.__name__
    digests.update(script.train_to(BATCHES))
    script.fail()
    script.state.batch = 99
    script.start(seed=300)  # the state is still committed, and is restored from there
    assert script.digests() == digests[BATCHES]
    script.end()
    return digests, levels


def test_restore_goes_back_to_the_last_commit(
    tmp_path: Path, shm_dir: Path, pool: RankPool
) -> None:
    """A script calls it at any point of an iteration; and the job continues as if nothing had
    happened."""
    undisturbed = pool.run(course, Place.under(tmp_path / "undisturbed", shm_dir), False)
    told = pool.run(course, Place.under(tmp_path / "disturbed", shm_dir), True)
    assert [digests for digests, _ in told] == [digests for digests, _ in undisturbed]
    versions = [(batch + 1, {"memory": 2}) for batch in range(len(WRONG))]
    assert [levels for _, levels in told] == [versions] * 2
    assert list(shm_dir.rglob("*")) == []


def overwritten(place: Place) -> list[Any]:
    """The loop changes weights right after a commit (the first one and two later ones), and goes
    back. Returns the version, and whether its state is that of the commit."""
    told: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        copy_by_layer(patch)
        patch.setattr(snapshot, "QUIET_SECONDS", 1e6)  # nothing is copied before the restore
        script = Script(place, seed=1).start()
        for batches in (1, 3, 2):
            goal = script.state.batch + batches
            digests = script.train_to(goal)
            model = script.state.model
            model.load_state_dict({n: torch.full_like(t, 7) for n, t in model.state_dict().items()})
            script.state.restore()
            at = script.state.batch
            told.append((goal - at, script.digests() == digests[at]))
        errors = [
            e.message for e in script.told if "weights were changed after commit()" in e.text()
        ]
        at = script.state.batch + 1
        digests = script.train_to(at)
        script.state.checkpointer.complete()  # as its documentation requires for `.data`
        for param in script.state.model.parameters():
            param.data.fill_(7)
        script.state.restore()
        told.append((at - script.state.batch, script.digests() == digests[at]))
        script.end()
    return [told, len(errors)]


def test_weights_that_are_changed_after_a_commit_are_those_of_the_commit(
    pool: RankPool, place: Place
) -> None:
    """Otherwise the commit is lost, with an error, and the previous one is restored; then commits
    wait."""
    told = pool.run(overwritten, place)
    assert told == [[[(0, True), (1, True), (0, True), (0, True)], 1]] * 2


def gradients_behind(place: Place) -> list[int]:
    """The number of gradients that are left after a call of restore(), a failure, and a change of
    hosts."""
    script = Script(place, seed=1).start()
    script.train_to(2)
    left = []
    for again in (script.state.restore, script.fail, script.hosts_change):
        script.forward().backward()
        again()
        if script.state.checkpointer is None:
            script.state.sync()
        left.append(sum(p.grad is not None for p in script.state.model.parameters()))
        script.train_to(script.state.batch + 1)
    script.end()
    return left


def test_no_gradient_of_an_iteration_cut_short_is_left(pool: RankPool, place: Place) -> None:
    """A loop that clears gradients after its steps would add to them, on the remaining ranks."""
    assert pool.run(gradients_behind, place) == [[0, 0, 0]] * 2


# --- several models ------------------------------------------------------------------------------


def adversaries(place: Place) -> tuple[Any, Any, Any]:
    """Digests of an undisturbed course, of one with a restart with all objects new; and the bits of
    the ranks if the second is new and the first has the live state."""
    make = partial(Adversaries, False, place)
    script = make(seed=1).start()
    undisturbed = script.train_to(BATCHES)
    script.end()

    script = make(seed=1).start()
    found = script.train_to(3)
    script.fail()
    script = make(seed=2).start(seed=200)
    found.update(script.train_to(BATCHES))

    script.hosts_change()
    live = exact.digest(script.replicated())
    if rank() == 1:
        script = make(seed=3)
    script.start()
    assert (script.state.restored, script.state.batch) == (None, BATCHES)
    joined = exact.digest(script.replicated())
    script.end()
    shutil.rmtree(place.path, ignore_errors=True)
    return undisturbed, found, (live, joined)


def test_models_and_optimizers_of_any_name(pool: RankPool, place: Place) -> None:
    told = pool.run(adversaries, place)
    for undisturbed, found, _ in told:
        assert found == undisturbed
    assert len({bits for _, _, bits in told for bits in bits}) == 1


# --- gradients of several passes -----------------------------------------------------------------


class Accumulating(Script):
    """Two backward passes per step, and a commit after the first."""

    def distribute(self, model: nn.Module) -> Any:
        return distributed(model, "", backward_passes_per_step=2)

    def train_to(self, end: int) -> dict[int, dict[str, str]]:
        state = self.state
        while state.batch < end:
            state.optimizer.zero_grad()
            for _ in range(2):
                state.model(batch(state.batch)).square().mean().backward()
                state.batch += 1
                if state.batch % 2 == 1:
                    state.commit()
            state.optimizer.step()
        return {}


def between_passes(place: Place) -> list[int]:
    """The number of reports of such commits after 16, 18 and 40 batches."""
    script = Accumulating(place, seed=1).start()
    said = []
    for end in (16, 18, 40):
        script.train_to(end)
        said.append(len(script.said("between the backward passes")))
    assert script.said("commit() of the state was not") == []  # they are calls all the same
    script.state.checkpointer.abandon()
    script.state.checkpointer = None
    return said


def test_commits_between_backward_passes_are_passed_over(pool: RankPool, place: Place) -> None:
    """Such a version would have half of a step's gradients."""
    assert pool.run(between_passes, place) == [[0, 1, 1]] * 2


def rare_commits(place: Place) -> tuple[str, list[int]]:
    """Whether another boundary is refused, and the severity of the event that none is committed."""
    with pytest.raises(tierckpt.ConfigError) as refused:
        Script(place, seed=1, boundary="forward")
    script = Script(place, seed=1, boundary="explicit").start()
    for _ in range(2 * STEPS_UNTIL_CALL):
        script.update(script.forward())
    said = [e for e in script.told if "commit() of the state was not called" in e.message]
    assert all("Call state.commit() after optimizer.step()" in each.message for each in said)
    assert script.state.checkpointer.version == 0
    script.state.commit()
    assert script.state.checkpointer.version == 2 * STEPS_UNTIL_CALL
    script.state.checkpointer.abandon()
    script.state.checkpointer = None
    return str(refused.value), [each.severity for each in said]


def test_the_boundary_is_the_commit_and_its_absence_an_error(pool: RankPool, place: Place) -> None:
    told = pool.run(rare_commits, place)
    for number, (refused, severities) in enumerate(told):
        assert "the boundary of an elastic job is always its commit()" in refused
        assert severities == [logging.DEBUG if number else logging.ERROR]


# --- callbacks -----------------------------------------------------------------------------------


def watched(place: Place) -> list[tuple[Any, ...]]:
    """The calls of callbacks that are given with the settings, added before the start, and after
    it, over a failure and a change of hosts."""
    diaries = [Diary(), Diary(), Diary()]
    script = Script(place, seed=1, callbacks=iter(diaries[:1]))
    script.state.add_callbacks(diaries[1])
    script.start()
    script.state.add_callbacks(diaries[2])
    script.train_to(2)
    script.fail()
    script.state.sync()
    script.train_to(3)
    script.hosts_change()
    script.state.sync()
    script.train_to(4)
    script.end()
    return [(d.boundaries, d.restored) for d in diaries]


def test_callbacks_outlive_checkpointers(pool: RankPool, place: Place) -> None:
    boundaries, came_back = [1, 2, 3, 4], [(0, False), (2, True)]
    heard = [(boundaries, came_back)] * 2 + [(boundaries, came_back[1:])]
    told = pool.run(watched, place)
    assert told == [heard] * 2


# --- reset callbacks -----------------------------------------------------------------------------


def warm_up(step: int) -> float:
    return min(1.0, (step + 1) / 8)


class WarmingUp(Script):
    """Its rates are shares of the schedule's own state."""

    def schedule(self, optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up)

    def rate(self) -> float:
        return float(self.state.optimizer.param_groups[0]["lr"])


def scaled_after(place: Place) -> dict[str, Any]:
    """The rates of this rank before and after a failure, and one batch later; the batch of the
    restore, the state of the model, and the dealt samples. Rank 1 is a new process for a lost one:
    it was never reset."""
    script = WarmingUp(place, seed=1).start()
    course = script.train_to(3)
    rates = [script.rate()]
    script.fail()
    newcomer = rank() == 1
    if newcomer:
        script = WarmingUp(place, seed=9)

    def scale() -> None:
        state = script.state
        state.optimizer.param_groups[0]["lr"] *= 0.5
        state.schedule.base_lrs = [0.5 * rate for rate in state.schedule.base_lrs]
        state.sampler.set_epoch(1)

    script.state.register_reset_callbacks([scale])
    if not newcomer:
        script.state.on_reset()
    script.state.sync()
    rates.append(script.rate())
    found = script.digests()
    params = [name for name in found if name.startswith("param ")]
    same = [found[n] for n in params] == [course[3][n] for n in params] != []
    dealt = list(script.state.sampler)
    script.update(script.forward())
    rates.append(script.rate())
    script.state.checkpointer.abandon()
    return {"rates": rates, "at": script.state.batch, "same": same, "dealt": dealt}


def test_settings_of_reset_callbacks_are_not_undone(pool: RankPool, place: Place) -> None:
    told = pool.run(scaled_after, place)
    for each in told:
        assert each["rates"] == [RATE * warm_up(3), *(0.5 * RATE * warm_up(n) for n in (3, 4))]
        assert each["at"] == 3
        assert each["same"]
    assert sorted(told[0]["dealt"] + told[1]["dealt"]) == list(range(SAMPLES))


# --- replicas that differ ------------------------------------------------------------------------


def drifted(place: Place) -> list[Any]:
    """A bit flips on rank 1, and hosts join or leave before the next round of replica checks."""
    script = Script(place, seed=1, memory_every_steps=1).start()
    script.train_to(4)
    if rank() == 1:
        weight = next(script.state.model.parameters())
        weight.data.view(torch.int32).view(-1)[0] ^= 1 << 20
    script.hosts_change()
    drifts = [event.message for event in script.told if event.name == "drifted"]
    script.start()
    alike = exact.digest(script.replicated())
    script.train_to(9)
    lost = [event.message for event in script.told if event.name in ("failed", "drifted")]
    safe = script.state.checkpointer._agreement.memory.safe.version
    notices = len(script.said("replicas differed when hosts joined or left"))
    script.end()
    return [drifts, alike, lost[1:], safe, notices]


def told_to_stop(place: Place) -> str:
    script = Script(place, seed=1, replicas="stop").start()
    script.train_to(4)
    next(script.state.model.parameters()).data.add_(rank())
    script.state.on_hosts_updated(1, 2)
    with pytest.raises(tierckpt.ReplicaError) as caught:
        script.state.check_host_updates()
    script.state.checkpointer.abandon()
    start_again()
    return str(caught.value)


def test_replicas_that_differ_are_named_before_ranks_are_renumbered(
    tmp_path: Path, shm_dir: Path, pool: RankPool, place: Place
) -> None:
    """Later groups could not find out since when; all continue from the state of one rank."""
    one, other = pool.run(drifted, place)
    name = "model/body.0.weight"
    for drifts, alike, lost, safe, _ in (one, other):
        assert len(drifts) == 1
        assert name in drifts[0]
        assert any(f"at v{version} all ranks were equal" in drifts[0] for version in (1, 2))
        assert (alike, lost, safe >= 7) == (one[1], [], True)
    assert (one[4], other[4]) == (1, 0)
    place = Place.under(tmp_path / "stop", shm_dir)
    assert all(name in text for text in pool.run(told_to_stop, place))
