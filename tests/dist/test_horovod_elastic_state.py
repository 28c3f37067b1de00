"""The elastic state over two real ranks: going back, models of any name, and restarts that fail.

Horovod's launcher is not elastic here, so ranks fail by the exception that Horovod would raise, and
all stay. tests/crash/test_horovod_elastic.py has real kills.
"""

from __future__ import annotations

import importlib
import logging
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import tierckpt
from tests import exact
from tests.dist.rankpool import HOROVODRUN
from tests.dist.test_horovod_callbacks import Diary
from tests.dist.training import Net, Place, batch, horovod, rank
from tierckpt import checkpointer, restore
from tierckpt.progress import Progress

BATCHES = 5
SAMPLES = 80
RATE = 1e-2
SCRIBBLED = 12345.0
PATIENCE_SECONDS = 60.0


def elastic() -> Any:
    return importlib.import_module("horovod_ckpt.elastic")


def failure() -> Any:
    """What Horovod raises on the ranks that are left."""
    return importlib.import_module("horovod.common.exceptions").HorovodInternalError


def interrupt() -> Any:
    """What a commit raises when hosts came or went."""
    return importlib.import_module("horovod.common.exceptions").HostsUpdatedInterrupt


class Script:
    """A training script's objects and its loop; told is what it heard of checkpoints."""

    def __init__(self, place: Place, seed: int, **settings: Any) -> None:
        self.told: list[tierckpt.Event] = []
        self.settings = {
            "path": place.path,
            "shm_dir": place.shm,
            "agent": "inline",
            "local_every_seconds": 0,
            "on_event": self.told.append,
            **settings,
        }
        torch.manual_seed(seed)
        self.state = self.make()

    def make(self) -> Any:
        """The state, with all that is in it."""
        model = self.net()
        optimizer = self.distribute(model)
        sampler = elastic().ElasticSampler(range(SAMPLES))
        objects = {"schedule": self.schedule(optimizer), "sampler": sampler}
        values = {"batch": 0, "seen": []}
        return elastic().TorchState(model, optimizer, **objects, **values, tierckpt=self.settings)

    def net(self) -> nn.Module:
        return Net(norm=nn.BatchNorm1d)

    def distribute(self, model: nn.Module) -> Any:
        return distributed(model, "")

    def schedule(self, optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-2, total_steps=1000)

    def start(self, seed: int = 100) -> Script:
        """Random streams are each rank's own, unless something is restored."""
        torch.manual_seed(seed + rank())
        self.state.sync()
        return self

    def forward(self) -> torch.Tensor:
        self.state.optimizer.zero_grad()
        return self.state.model(batch(self.state.batch)).square().mean()

    def update(self, loss: torch.Tensor) -> None:
        loss.backward()
        self.state.optimizer.step()
        self.state.schedule.step()
        self.state.sampler.record_batch(0, 4)

    def train_to(self, end: int) -> dict[int, dict[str, str]]:
        """Digests of the state at every commit."""
        course = {}
        while self.state.batch < end:
            self.update(self.forward())
            self.state.seen = [*self.state.seen, self.state.batch]
            self.state.batch += 1
            course[self.state.batch] = self.digests()
            self.state.commit()
        return course

    def replicated(self) -> dict[str, Any]:
        return exact.replicated(self.state.model, self.state.optimizer)

    def digests(self) -> dict[str, str]:
        """Of every bit that a next step would depend on."""
        found = {
            **self.replicated(),
            **exact.buffers(self.state.model),
            **exact.streams(),
            "schedule": exact.image(self.state.schedule.state_dict()),
            "sampler": exact.image(self.state.sampler.state_dict()),
            "values": exact.image([self.state.batch, self.state.seen]),
        }
        return {name: exact.digest(value) for name, value in found.items()}

    def fail(self) -> None:
        """What Horovod's loop does with the state when a rank is gone."""
        try:
            raise failure()
        except failure():
            self.state.restore()
        assert self.state.checkpointer is None

    def hosts_change(self) -> None:
        """What Horovod's loop does with it when ranks come or go, and none is lost."""
        self.state.on_hosts_updated(1, 2)
        with pytest.raises(interrupt()):
            self.state.check_host_updates()
        assert self.state.checkpointer is None

    def end(self) -> None:
        self.state.checkpointer.close()
        self.state.checkpointer = None

    def said(self, text: str) -> list[tierckpt.Event]:
        return [event for event in self.told if text in event.message]


def distributed(
    model: nn.Module, prefix: str, kind: Callable[..., Any] = torch.optim.AdamW, **options: Any
) -> Any:
    named = [(prefix + name, param) for name, param in model.named_parameters()]
    return horovod().DistributedOptimizer(
        kind(model.parameters(), lr=RATE), named_parameters=named, **options
    )


def lose(*paths: str) -> None:
    """As lost machines would; all ranks call it, with nothing attached."""
    horovod().barrier()
    if rank() == 0:
        for path in paths:
            shutil.rmtree(path, ignore_errors=True)
    horovod().barrier()
    Path(paths[0]).mkdir(exist_ok=True)
    horovod().barrier()


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
    """Digests at every commit, with an iteration that goes wrong after each or without."""
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
    script.start(seed=300)  # the state is still committed, and comes back from there
    assert script.digests() == digests[BATCHES]
    script.end()
    return digests, levels


def test_restore_goes_back_to_the_last_commit(ranks: Any, tmp_path: Path, shm_dir: Path) -> None:
    """Called by a script, wherever its iteration stands; and the job goes on as if nothing was."""
    pool = ranks(2, HOROVODRUN)
    undisturbed = pool.run(course, Place.under(tmp_path / "undisturbed", shm_dir), False)
    told = pool.run(course, Place.under(tmp_path / "disturbed", shm_dir), True)
    assert [digests for digests, _ in told] == [digests for digests, _ in undisturbed]
    versions = [(batch + 1, {"memory": 2}) for batch in range(len(WRONG))]
    assert [levels for _, levels in told] == [versions] * 2
    assert list(shm_dir.rglob("*")) == []


# --- several models ------------------------------------------------------------------------------


class Adversaries(Script):
    """Two models that are trained against each other, by two optimizers."""

    def __init__(self, named: bool, place: Place, seed: int) -> None:
        self.named = named
        super().__init__(place, seed)

    def make(self) -> Any:
        g, d = nn.Linear(6, 24), nn.Sequential(nn.Linear(24, 8), nn.Tanh(), nn.Linear(8, 1))
        opt_g, opt_d = distributed(g, "g."), distributed(d, "d.")
        self.parts = (g, d, opt_g, opt_d)
        state = elastic().TorchState
        if self.named:
            given = {"generator": g, "discriminator": d, "opt_g": opt_g, "opt_d": opt_d}
            return state(batch=0, tierckpt=self.settings, **given)
        return state(g, opt_g, type=d, opt_d=opt_d, batch=0, tierckpt=self.settings)

    def train_to(self, end: int) -> dict[int, dict[str, str]]:
        g, d, opt_g, opt_d = self.parts
        course = {}
        while self.state.batch < end:
            made = g(torch.randn(3, 6))
            opt_d.zero_grad()
            (d(made.detach()).mean() - d(batch(self.state.batch)).mean()).backward()
            opt_d.step()
            opt_g.zero_grad()
            d.requires_grad_(False)
            (-d(made)).mean().backward()
            d.requires_grad_(True)
            opt_g.step()
            self.state.batch += 1
            course[self.state.batch] = self.digests()
            self.state.commit()
        return course

    def replicated(self) -> dict[str, Any]:
        g, d, opt_g, opt_d = self.parts
        one, other = exact.replicated(g, opt_g), exact.replicated(d, opt_d)
        return {f"g {k}": v for k, v in one.items()} | {f"d {k}": v for k, v in other.items()}

    def digests(self) -> dict[str, str]:
        found = {**self.replicated(), **exact.streams(), "batch": self.state.batch}
        return {name: exact.digest(exact.image(value)) for name, value in found.items()}


def adversaries(named: bool, place: Place) -> tuple[Any, Any, Any]:
    """Digests of an undisturbed course; of one with a restart, all objects new; and the bits of
    the ranks when the second is new and the first has what is live."""
    make = partial(Adversaries, named, place)
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


@pytest.mark.parametrize("named", [True, False])
def test_models_and_optimizers_of_any_name(
    named: bool, ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    told = ranks(2, HOROVODRUN).run(adversaries, named, Place.under(tmp_path, shm_dir))
    for undisturbed, found, _ in told:
        assert found == undisturbed
    assert len({bits for _, _, bits in told for bits in bits}) == 1


# --- restarts that fail --------------------------------------------------------------------------


Instead = tuple[Any, str, Callable[..., Any]]


def lost_in(call: Callable[[], Any], instead: Instead) -> None:
    """`call`, in which another rank is lost: what `instead` names is replaced and raises."""
    with mock.patch.object(*instead), pytest.raises(failure()):
        call()


def half_loaded(loader: Any, *window: Any) -> None:
    for name, tensor in loader._live.items():
        if name.startswith("model/"):
            tensor.fill_(SCRIBBLED)
    raise failure()


def about_to_load(progress: Any, phase: str, total_bytes: int = 0) -> None:
    if phase.startswith("loading"):
        raise failure()


def all_loaded(*_: object) -> None:
    raise failure()


TORN: Instead = (restore.Loader, "load_window", half_loaded)
BEFORE: Instead = (Progress, "begin", about_to_load)
BEHIND: Instead = (checkpointer, "all_finished", all_loaded)
SOUND = {"as it was": BEFORE, "loaded": BEHIND}


def lost_behind_a_step(place: Place, seed: int) -> tuple[Script, dict[int, Any]]:
    """Two batches are committed, the third has made its step when a rank is lost."""
    script = Script(place, seed).start()
    digests = script.train_to(2)
    script.update(script.forward())
    script.state.batch = 3
    script.fail()
    return script, digests


def in_memory(tmp_path: Path, shm_dir: Path) -> Place:
    """A place whose memory can be lost."""
    (shm_dir / "memory").mkdir()
    return Place.under(tmp_path, shm_dir / "memory")


def protected(script: Script) -> None:
    """Return when the other node can make the newest version's shard of this one."""
    ckpt = script.state.checkpointer
    ckpt.save(now=True)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not any((e.name, e.level) == ("committed", "peer") for e in script.told):
        assert time.monotonic() < deadline, [e.text() for e in script.told]
        time.sleep(0.01)
        ckpt._collect()


def a_node_is_lost(place: Place) -> None:
    """Its disk and memory, and the other's memory; then a new process is in its place."""
    nodes = {"node": f"node{rank()}", "peer_redundancy": "partner", "peer_interface": "lo"}
    often = {"local_every_steps": 100, "slots": 3, "when_busy": "wait", "agent": "process"}
    script = Script(place, seed=1, **nodes, **often).start()
    digests = script.train_to(3)
    protected(script)
    script.fail()
    lose(place.shm, place.path.format(node="node1"))
    if rank() == 1:
        script = Script(place, seed=2, **nodes, **often)
    script.start()
    assert script.state.restored.levels == {"local": 1, "peer": 1}
    assert script.digests() == digests[3]
    script.train_to(BATCHES)
    script.end()


def torn_everywhere(place: Place) -> None:
    script, digests = lost_behind_a_step(place, seed=1)
    for _ in range(2):  # the levels have it, so nothing is lost
        lost_in(script.state.sync, TORN)
        script.fail()
    script.state.sync()
    assert script.digests() == digests[2]

    script.state.batch = 99
    lost_in(script.state.restore, TORN if rank() else BEFORE)  # a restore() of the script's own
    script.fail()
    lose(place.shm, place.path)
    for _ in range(2):
        with pytest.raises(tierckpt.RestoreError, match="no model holds a whole state"):
            script.state.sync()
        assert script.state.checkpointer is None

    # Nothing of the kind was known of by those that never trained.
    script = Script(place, seed=2).start()
    digests = script.train_to(2)
    script.fail()
    script = Script(place, seed=3)
    lost_in(script.start, TORN)
    lose(place.shm, place.path)
    with pytest.raises(tierckpt.RestoreError, match="no model holds a whole state"):
        script.start()
    assert script.state.batch == 0


def torn_on_one(place: Place, sound: str) -> tuple[str, str]:
    """Bits of rank 0, which is sound, and those with which all go on."""
    script, _ = lost_behind_a_step(place, seed=1)
    lost_in(script.state.sync, TORN if rank() else SOUND[sound])
    script.fail()
    lose(place.shm, place.path)
    batches = 2 if sound == "loaded" else 3
    assert script.state.batch == (3 if rank() else batches)
    before = exact.digest(script.replicated())
    script.state.sync()
    assert script.said("no level has a complete version")
    assert (script.state.batch, script.state.checkpointer.version) == (batches, batches)
    found = exact.digest(script.replicated())
    after = script.train_to(5)
    script.fail()
    script.state.sync()
    assert (script.digests(), script.state.restored.version) == (after[5], 5)
    script.end()
    return before, found


def torn_by_a_broadcast(place: Place) -> None:
    """Rank 0 has what is live, and is lost while rank 1, which is new, gets it."""
    script, _ = lost_behind_a_step(place, seed=1)
    lose(place.shm, place.path)
    if rank() == 1:
        script = Script(place, seed=2)

    def sent_half(held: Any, root: int, buffers: bool) -> None:
        horovod().broadcast_parameters(held.model.state_dict(), root_rank=root)
        raise failure()

    attributes = importlib.import_module("horovod_ckpt.attributes").Attributes
    lost_in(script.state.sync, (attributes, "broadcast", sent_half))
    if rank() == 0:
        script = Script(place, seed=3)
    with pytest.raises(tierckpt.RestoreError, match="no model holds a whole state"):
        script.state.sync()


def unseen(place: Place) -> None:
    """Only models have the state, and it cannot be seen what the persistent level has."""
    persistent = Path(place.path).parent / "persistent"
    script = Script(place, seed=1, persistent_path=str(persistent)).start()
    digests = script.train_to(3)
    script.fail()
    lose(place.shm, place.path)
    if rank() == 0:
        shutil.rmtree(persistent, ignore_errors=True)
        persistent.write_text("in its place")
    horovod().barrier()
    script.state.sync()
    assert script.digests() == digests[3]
    (told,) = [e for e in script.told if "no level has a complete version" in e.message]
    assert told.severity >= 40
    assert str(persistent) in told.message
    digests.update(script.train_to(BATCHES))
    script.fail()
    script.state.sync()
    assert script.state.restored.levels == {"memory": 2}
    assert script.digests() == digests[BATCHES]
    script.state.checkpointer.abandon()
    script.state.checkpointer = None
    lose(place.shm, place.path)

    script = Script(place, seed=1, persistent_path=str(persistent))
    with pytest.raises(tierckpt.RestoreError, match="could not be seen"):
        script.start()  # where nothing is live, that is no fresh start


def test_a_lost_node_is_made_again_by_its_peer(ranks: Any, tmp_path: Path, shm_dir: Path) -> None:
    place = in_memory(tmp_path, shm_dir)
    path = str(tmp_path / "{node}" / "ckpts")
    ranks(2, HOROVODRUN).run(a_node_is_lost, Place(path, place.shm))


def test_a_rank_is_lost_while_all_load(ranks: Any, tmp_path: Path, shm_dir: Path) -> None:
    """What is half loaded is loaded again, or refused: nothing is trained on it."""
    place = in_memory(tmp_path, shm_dir)
    ranks(2, HOROVODRUN).run(torn_everywhere, place)


@pytest.mark.parametrize("sound", SOUND)
def test_a_sound_state_wins_over_a_torn_one(
    sound: str, ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    """Rank 0 is stopped before it has changed anything, or behind the last byte."""
    one, other = ranks(2, HOROVODRUN).run(torn_on_one, in_memory(tmp_path, shm_dir), sound)
    assert one[0] == one[1] == other[1] != other[0]


def test_a_rank_is_lost_while_it_sends(ranks: Any, tmp_path: Path, shm_dir: Path) -> None:
    ranks(2, HOROVODRUN).run(torn_by_a_broadcast, in_memory(tmp_path, shm_dir))


def test_a_live_state_wins_over_what_cannot_be_seen(
    ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    ranks(2, HOROVODRUN).run(unseen, in_memory(tmp_path, shm_dir))


# --- reset callbacks -----------------------------------------------------------------------------


def warm_up(step: int) -> float:
    return min(1.0, (step + 1) / 8)


class WarmingUp(Script):
    """Its rates are shares of what the schedule itself holds."""

    def schedule(self, optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up)

    def rate(self) -> float:
        return float(self.state.optimizer.param_groups[0]["lr"])


def scaled_after(place: Place, newcomer: bool) -> dict[str, Any]:
    """Rates of this rank before and after a failure, and one batch later; at which batch it came
    back, what is in the model, and which samples are dealt to it."""
    script = WarmingUp(place, seed=1).start()
    course = script.train_to(3)
    rates = [script.rate()]
    script.fail()
    if newcomer and rank() == 1:
        script = WarmingUp(place, seed=9)  # a process in the lost one's place: it was never reset

    def scale() -> None:
        state = script.state
        state.optimizer.param_groups[0]["lr"] *= 0.5
        state.schedule.base_lrs = [0.5 * rate for rate in state.schedule.base_lrs]
        state.sampler.set_epoch(1)

    script.state.register_reset_callbacks([scale])
    if not (newcomer and rank() == 1):
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


@pytest.mark.parametrize("newcomer", [False, True])
def test_what_reset_callbacks_set_is_not_undone(
    newcomer: bool, ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    told = ranks(2, HOROVODRUN).run(scaled_after, Place.under(tmp_path, shm_dir), newcomer)
    for each in told:
        assert each["rates"] == [RATE * warm_up(3), *(0.5 * RATE * warm_up(n) for n in (3, 4))]
        assert each["at"] == 3
        assert each["same"]
    assert sorted(told[0]["dealt"] + told[1]["dealt"]) == list(range(SAMPLES))


def going_back_past_a_skip(place: Place) -> tuple[int, bool]:
    script = Script(place, seed=1).start()
    script.train_to(2)
    with mock.patch.object(script.state.checkpointer._schedule, "decide", skips):
        script.train_to(3)
    script.state.restore()
    told = script.state.batch, bool(script.said("the last commit, v3, was skipped"))
    script.end()
    return told


def skips(version: int, agreed: Any) -> Any:
    return importlib.import_module("tierckpt.policy").Decision()


def test_going_back_farther_than_the_last_commit_is_said(
    ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    place = Place.under(tmp_path, shm_dir)
    assert ranks(2, HOROVODRUN).run(going_back_past_a_skip, place) == [(2, True)] * 2


def going_back_at_a_failure(place: Place) -> list[list[tuple[int, str]]]:
    """What is said, and how severe it is, when a step behind the last commit is lost; when commits
    that no level has are lost; and when nothing is."""
    found = []
    for last_taken, last_commit, steps in ((2, 2, 1), (2, 4, 0), (4, 4, 0)):
        script = Script(place, seed=1).start()
        script.train_to(last_taken)
        with mock.patch.object(script.state.checkpointer._schedule, "decide", skips):
            script.train_to(last_commit)
        for _ in range(steps):
            script.update(script.forward())
        script.fail()
        script.state.sync()
        assert script.state.batch == last_taken
        found.append([(e.severity, e.message) for e in script.said("this goes back to")])
        script.end()
    return found


def test_going_back_at_a_failure_is_said(ranks: Any, tmp_path: Path, shm_dir: Path) -> None:
    """By one rank; as a warning where it is behind the last commit."""
    place = Place.under(tmp_path, shm_dir)
    told, other = ranks(2, HOROVODRUN).run(going_back_at_a_failure, place)
    ((said,), (warned,), nothing) = told
    assert said == (logging.INFO, "this goes back to v2 from v3")
    assert warned[0] == logging.WARNING
    assert "back to v2 from v4: the commits behind it, to v4," in warned[1]
    assert nothing == []
    assert other == [[], [], []]


# --- what is sent to others ----------------------------------------------------------------------


class Forgetful(Script):
    """An optimizer that remembers nothing, and whose steps without gradients move weights."""

    def distribute(self, model: nn.Module) -> Any:
        return distributed(model, "", partial(torch.optim.SGD, weight_decay=0.5))

    def schedule(self, optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def joined(script: Script, new: int, anew: Callable[[], Script]) -> tuple[str, str, str]:
    """Hosts change, and rank `new` is new: bits of the state that is live, of that which both go on
    with, and of that two batches later."""
    script.train_to(3)
    script.hosts_change()
    live = exact.digest(script.replicated())
    if rank() == new:
        script = anew()
    script.start()
    assert (script.state.restored, script.state.batch) == (None, 3)
    found = exact.digest(script.replicated())
    script.train_to(5)
    later = exact.digest(script.replicated())
    script.end()
    return live, found, later


def without_optimizer_state(place: Place, new: int) -> tuple[bool, tuple[str, str, str]]:
    script = Forgetful(place, seed=1)
    before = exact.digest(script.replicated())
    script.start()
    unmoved = exact.digest(script.replicated()) == before
    return unmoved, joined(script, new, partial(Forgetful, place, seed=9))


@pytest.mark.parametrize("new", [1, 0])
def test_an_optimizer_without_state(new: int, ranks: Any, tmp_path: Path, shm_dir: Path) -> None:
    """Neither a fresh start nor sending moves weights, and learning rates come along."""
    place = Place.under(tmp_path, shm_dir)
    told = ranks(2, HOROVODRUN).run(without_optimizer_state, place, new)
    assert [unmoved for unmoved, _ in told] == [True, True]
    (_, (live, found, later)), (_, others) = told
    assert live == found != later
    assert others == (live, found, later)


class Tempered(Script):
    """The optimizer has a parameter that is in no module."""

    def distribute(self, model: nn.Module) -> Any:
        self.log_temp = nn.Parameter(torch.randn(3))
        named = [*model.named_parameters(), ("log_temp", self.log_temp)]
        adam = torch.optim.AdamW([param for _, param in named], lr=RATE)
        return horovod().DistributedOptimizer(adam, named_parameters=named)

    def forward(self) -> torch.Tensor:
        return super().forward() * self.log_temp.exp().sum()

    def replicated(self) -> dict[str, Any]:
        return {**super().replicated(), "log_temp": exact.image(self.log_temp)}


def with_a_loose_parameter(place: Place, new: int) -> tuple[str, tuple[str, str, str]]:
    """Bits at a fresh start, where ranks were made differently, and those of `joined`."""
    script = Tempered(place, seed=1 + rank()).start()
    fresh = exact.digest(script.replicated())
    return fresh, joined(script, new, partial(Tempered, place, seed=9))


@pytest.mark.parametrize("new", [1, 0])
def test_parameters_of_no_module_are_sent(
    new: int, ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    """At a fresh start, and to a rank that is new."""
    place = Place.under(tmp_path, shm_dir)
    one, other = ranks(2, HOROVODRUN).run(with_a_loose_parameter, place, new)
    (fresh, (live, found, later)) = one
    assert other == one
    assert fresh != live == found != later


LARGEST = 100


def sent_in_slices(root: int) -> tuple[list[list[int]], bool]:
    """Bytes of each broadcast by its tensor, and whether all of `root`'s came, in place."""
    sending = importlib.import_module("horovod_ckpt.sending")

    def values(of: int) -> dict[str, torch.Tensor]:
        made = torch.Generator().manual_seed(of)
        return {
            "double": torch.randn(7, 9, generator=made, dtype=torch.float64),
            "empty": torch.empty(0),
            "exact": torch.randint(256, (2 * LARGEST,), generator=made, dtype=torch.uint8),
            "half": torch.randn(1200, generator=made).half(),
            "scalar": torch.randn((), generator=made),
            "transposed": torch.randn(11, 13, generator=made).t(),
        }

    mine = values(rank())
    sizes: dict[str, list[int]] = {name: [] for name in mine}
    addresses = [tensor.data_ptr() for tensor in mine.values()]

    def send(named: dict[str, torch.Tensor], root: int) -> None:
        for name, part in named.items():
            sizes[name.split("#")[0]].append(part.nbytes)
        horovod().broadcast_parameters(named, root)

    with (
        mock.patch.object(sending, "MOST_BYTES", LARGEST),
        mock.patch.object(sending, "hvd", mock.Mock(broadcast_parameters=send)),
    ):
        sending.send_tensors(mine, root)
    came = [exact.image(t) for t in mine.values()] == [
        exact.image(t) for t in values(root).values()
    ]
    in_place = addresses == [tensor.data_ptr() for tensor in mine.values()]
    return list(sizes.values()), came and in_place


@pytest.mark.parametrize("root", [0, 1])
def test_large_tensors_are_sent_in_slices(root: int, ranks: Any) -> None:
    """Horovod would count the bytes of one over 2 GiB wrongly."""
    slices = [[100] * 5 + [4], [], [100, 100], [100] * 24, [4], [100] * 5 + [72]]
    assert ranks(2, HOROVODRUN).run(sent_in_slices, root) == [(slices, True)] * 2


class Counting(Net):
    """Counts its calls, in what is no tensor."""

    calls = 0

    def forward(self, x: torch.Tensor, use_branch: bool = False) -> torch.Tensor:
        self.calls += 1
        return super().forward(x, use_branch)

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


class WithExtraState(Script):
    """A model that has more than tensors."""

    def net(self) -> nn.Module:
        return Counting()

    def replicated(self) -> dict[str, Any]:
        return {**super().replicated(), "calls": self.state.model.calls}


def with_extra_state(place: Place, new: int) -> tuple[int, tuple[str, str, str]]:
    script = WithExtraState(place, seed=1)
    script.state.model.calls = 10 + rank()
    script.start()
    return script.state.model.calls, joined(script, new, partial(WithExtraState, place, seed=9))


@pytest.mark.parametrize("new", [1, 0])
def test_modules_extra_state_is_sent(new: int, ranks: Any, tmp_path: Path, shm_dir: Path) -> None:
    """At a fresh start, and to a rank that is new."""
    told = ranks(2, HOROVODRUN).run(with_extra_state, Place.under(tmp_path, shm_dir), new)
    (calls, (live, found, later)), others = told
    assert (calls, live) == (10, found)
    assert others == (10, (live, found, later))


def only_one_made_both_steps(place: Place, ahead: int) -> tuple[list[str], bool]:
    """Rank `ahead` stepped D and G, the other only D, when a third was lost with all versions."""
    script = Adversaries(True, place, seed=1).start()
    script.train_to(2)
    g, d, opt_g, opt_d = script.parts
    (d(g(torch.randn(3, 6)))).mean().backward()
    opt_d.step()
    opt_g.synchronize()
    if rank() == ahead:
        with opt_g.skip_synchronize():
            opt_g.step()
    script.fail()
    lose(place.shm, place.path)
    digests = [exact.digest(script.replicated())]
    script.state.sync()
    digests.append(exact.digest(script.replicated()))
    said = bool(script.said("no level has a complete version"))
    script.train_to(4)
    digests.append(exact.digest(script.replicated()))
    script.end()
    return digests, said


@pytest.mark.parametrize("ahead", [0, 1])
def test_survivors_that_differ_are_made_alike(
    ahead: int, ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    """Both have as many steps behind them, and other weights."""
    place = in_memory(tmp_path, shm_dir)
    (one, said), (other, also) = ranks(2, HOROVODRUN).run(only_one_made_both_steps, place, ahead)
    assert one[0] != other[0]
    assert one[1:] == other[1:]
    assert one[1] == one[0]
    assert said
    assert also


# --- gradients of several passes -----------------------------------------------------------------


class Accumulating(Script):
    """Two backward passes for a step; commits are where `due` says."""

    def __init__(self, due: Callable[[int], bool], place: Place, seed: int) -> None:
        super().__init__(place, seed)
        self.due = due

    def distribute(self, model: nn.Module) -> Any:
        return distributed(model, "", backward_passes_per_step=2)

    def train_to(self, end: int) -> dict[int, dict[str, str]]:
        state = self.state
        while state.batch < end:
            if state.batch % 2 == 0:
                state.optimizer.zero_grad()
            state.model(batch(state.batch)).square().mean().backward()
            state.batch += 1
            if state.batch % 2 == 0:
                state.optimizer.step()
            if self.due(state.batch):
                state.commit()
        return {end: self.digests()}


def every_third(batch: int) -> bool:
    return batch % 3 == 0


def odd(batch: int) -> bool:
    return batch % 2 == 1


def between_passes(place: Place) -> tuple[bool, int, list[int]]:
    """Whether a course with a failure behind batch 9 ends as one without; where it went on; and
    of how many commits, none of which can be taken, it is said where they are."""
    script = Accumulating(every_third, place, seed=1).start()
    undisturbed = script.train_to(12)
    script.end()
    script = Accumulating(every_third, place, seed=1).start()
    script.train_to(9)
    script.fail()
    script = Accumulating(every_third, place, seed=2).start(seed=200)
    began = script.state.batch
    same = script.train_to(12) == undisturbed
    script.end()
    script = Accumulating(odd, place, seed=1).start()
    said = []
    for end in (16, 18, 40):
        script.train_to(end)
        said.append(len(script.said("between the backward passes")))
    script.state.checkpointer.abandon()
    script.state.checkpointer = None
    return same, began, said


def test_commits_between_backward_passes(ranks: Any, tmp_path: Path, shm_dir: Path) -> None:
    """They would have half of a step's gradients behind them, and are passed over."""
    told = ranks(2, HOROVODRUN).run(between_passes, Place.under(tmp_path, shm_dir))
    assert told == [(True, 6, [0, 1, 1])] * 2


# --- callbacks -----------------------------------------------------------------------------------


def watched(place: Place) -> list[tuple[Any, ...]]:
    """What is heard by who is given with the settings, is added before the start, and behind it,
    over a failure and a change of hosts."""
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


def test_callbacks_outlive_checkpointers(ranks: Any, tmp_path: Path, shm_dir: Path) -> None:
    boundaries, came_back = [1, 2, 3, 4], [(0, False), (2, True)]
    heard = [(boundaries, came_back)] * 2 + [(boundaries, came_back[1:])]
    told = ranks(2, HOROVODRUN).run(watched, Place.under(tmp_path, shm_dir))
    assert told == [heard] * 2
