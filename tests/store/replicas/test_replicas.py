"""Replicas that differ, with ranks that are threads of one process: the messages, refusals, marks
and retention, and the report at a restore."""

from __future__ import annotations

import io
import logging
import shutil
import threading
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import tierckpt
from tests.support import exact
from tests.support.parts import monitor_of
from tierckpt.cli import export_version, list_versions
from tierckpt.offline import open_version
from tierckpt.replicas import ReplicatedState, replicated_state
from tierckpt.storage import local_suspects, persistent_suspects
from tierckpt.storage.persistent import PersistentStore
from tierckpt.testing import ThreadGroup, run_ranks

ROUND = 4
STOP = f"stop every {ROUND}"


class Ranks:
    """A job with ranks that train on their own data."""

    optimizer = torch.optim.AdamW

    def __init__(self, tmp_path: Path, shm_dir: Path, **settings: Any) -> None:
        self.path, self.shm, self.settings = tmp_path, shm_dir, settings
        self.size = 2

    def run(self, program: Callable[[Rank], Any], size: int = 2, **settings: Any) -> list[Any]:
        self.size = size
        return run_ranks(size, lambda group: program(Rank(self, group, settings)))

    def folder(self, rank: int) -> Path:
        return self.path / f"n{rank}"

    def listed(self) -> str:
        text = io.StringIO()
        paths = [str(self.folder(rank)) for rank in range(self.size)]
        list_versions(Namespace(path=paths, json=False, files=False), Console(file=text, width=300))
        return text.getvalue()

    def exported_and_compared(self, version: int) -> Iterator[str]:
        """The output of each command for that version."""
        paths = [str(self.folder(rank)) for rank in range(self.size)]
        for name in ("all.pt", "model.safetensors"):
            text, out = io.StringIO(), self.path / name
            given = {"version": version, "force": True, "modules": []}
            given |= dict.fromkeys(("format", "prefix", "max_shard_bytes"))
            export_version(Namespace(path=paths, out=out, **given), Console(file=text, width=300))
            yield text.getvalue()
        with closing(open_version(str(self.path / "{node}"), version, lambda read: None)) as opened:
            yield opened.text()


class Rank:
    """One rank of the job."""

    def __init__(self, job: Ranks, group: ThreadGroup, settings: dict[str, Any]) -> None:
        self.rank, self.group = group.rank, group
        self.net = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2))
        source = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for param in self.net.parameters():
                param.copy_(torch.randn(param.shape, generator=source))
        self.optimizer = job.optimizer(self.net.parameters(), lr=0.01)
        self.events: list[tierckpt.Event] = []
        common = {
            "replicas": f"warn every {ROUND}",
            "local_every_steps": 1,
            "local_every_seconds": 0,
            "agent": "inline",
            "halt_signals": "",
            "slots": 3,
            "when_busy": "wait",
        }
        self.ckpt = tierckpt.Checkpointer(
            self.net,
            self.optimizer,
            group=group,
            path=job.folder(self.rank),
            node=f"n{self.rank}",
            shm_dir=job.shm,
            **{**common, **job.settings, **settings},
            on_event=self.events.append,
        )
        # torch's hooks for all optimizers are the process's, and no rank may step as others attach.
        group.all_gather_object(None)

    def train(
        self, steps: int, apart: bool = False, then: Callable[[], object] | None = None
    ) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            seed = self.ckpt._live.steps_made + 1000 * self.rank
            x = torch.randn(5, 6, generator=torch.Generator().manual_seed(seed))
            self.net(x).square().mean().backward()
            if not apart:
                self.reduce()
            self.optimizer.step()
            if then is not None:
                then()
            self.ckpt.step()

    def leave(self) -> None:
        """Abandon the checkpointer, when no rank steps any more that could meet hooks that go."""
        self.group.all_gather_object(None)
        self.ckpt.abandon()

    def reduce(self) -> None:
        """Make replicas equal, as DDP does."""
        params = [p for p in self.net.parameters() if p.grad is not None]
        for param, *grads in zip(
            params, *self.group.all_gather_object([p.grad for p in params]), strict=True
        ):
            param.grad = sum(grads) / self.group.size

    def flip(self, on: int = 1) -> None:
        """A bit of one weight, on one rank."""
        if self.rank == on:
            self.net[2].weight.detach().view(torch.int32)[1, 3] ^= 1 << 21

    def told(self, name: str) -> list[str]:
        return [e.message for e in self.events if e.name == name]

    def loud(self) -> list[str]:
        return [e.text() for e in self.events if e.severity >= logging.WARNING]


@pytest.fixture
def ranks(tmp_path: Path, shm_dir: Path) -> Ranks:
    return Ranks(tmp_path, shm_dir)


def test_ranks_that_nobody_makes_equal_get_no_version(ranks: Ranks) -> None:
    def never_wrapped(rank: Rank) -> tuple[Any, ...]:
        rank.train(8, apart=True)
        rank.ckpt.close()
        return rank.told("drifted"), sum(e.name == "sealed" for e in rank.events)

    for drifted, sealed in ranks.run(never_wrapped):
        (text,) = drifted
        assert "ranks train apart: model/0.weight, model/0.bias" in text
        assert "No further version is taken" in text
        assert "taken before this was known are marked as suspect" in text
        assert "rank 0 and rank 1 differ, seen at v1" in text
        assert "DistributedDataParallel" in text
        assert "forward_changes" in text
        assert sealed == 2, "those before all knew"
    assert {id_.version for id_ in local_suspects(ranks.folder(0)).marked()} >= {1, 2}

    def again(rank: Rank) -> tuple[int, list[str]]:
        restored = rank.ckpt.restore()
        told = rank.loud()
        rank.leave()
        return restored.version, [*told, restored.suspect]

    (version, told), (other, _) = ranks.run(again)
    assert version == other <= 2
    assert "rank 0 and rank 1 differ" in told[-1]
    (text,) = [each for each in told[:-1] if "was restored and is suspect" in each]
    assert "there is no older one that is not" in text


def test_tensors_declared_per_rank_may_differ(ranks: Ranks) -> None:
    """The remedy that the error names."""

    def train(rank: Rank) -> tuple[Any, ...]:
        rank.train(7, apart=True)
        before = exact.parameters(rank.net)
        rank.ckpt.close()
        return rank.loud(), before

    told = ranks.run(train, forward_changes="*")
    assert [loud for loud, _ in told] == [[], []]

    def restore(rank: Rank) -> list[str]:
        rank.ckpt.restore()
        found = exact.differences(told[rank.rank][1], exact.parameters(rank.net))
        rank.leave()
        return found

    assert ranks.run(restore, forward_changes="*") == [[], []]


def test_once_all_replicas_are_equal_versions_are_taken_again(ranks: Ranks) -> None:
    apart = 5
    start: dict[str, torch.Tensor] = {}

    def late(rank: Rank) -> tuple[Any, ...]:
        def make_alike() -> None:
            if rank.ckpt._live.steps_made == apart:
                if rank.rank == 0:
                    start.update({name: tensor.clone() for name, tensor in live(rank).items()})
                rank.group.barrier()
                for name, tensor in live(rank).items():
                    tensor.copy_(start[name])

        rank.train(apart, apart=True, then=make_alike)
        rank.train(3 * ROUND)
        rank.ckpt.close()
        notices = [e.message for e in rank.events if "alike again" in e.message]
        sealed = {e.version for e in rank.events if e.name == "sealed"}
        return rank.told("drifted"), notices, sealed

    for drifted, notices, taken in ranks.run(late):
        assert len(drifted) == len(notices) == 1
        assert f"since v{apart} at the latest" in notices[0]
        assert taken == {1, 2, *range(apart + 2, apart + 3 * ROUND + 1)}
    (line,) = [line for line in ranks.listed().splitlines() if "a restart takes this" in line]
    assert line.strip().startswith(f"v{apart + 3 * ROUND} ")
    assert "suspect" not in line


def test_weights_written_between_boundary_and_step_are_no_drift(ranks: Ranks) -> None:
    """Ranks may have looked before or after the write."""

    def swap(rank: Rank) -> list[str]:
        for _ in range(3 * ROUND):
            rank.train(1)
            kept = [param.detach().clone() for param in rank.net.parameters()]
            with torch.no_grad():
                for param in rank.net.parameters():
                    param.mul_(1 + rank.rank)
                for param, before in zip(rank.net.parameters(), kept, strict=True):
                    param.copy_(before)
        rank.leave()
        return rank.told("drifted")

    assert ranks.run(swap) == [[], []]


def live(rank: Rank) -> dict[str, torch.Tensor]:
    found = {f"model {n}": p.detach() for n, p in rank.net.named_parameters()}
    for i, state in enumerate(rank.optimizer.state.values()):
        found.update({f"state {i} {key}": value for key, value in state.items()})
    return found


def test_a_drift_marks_versions_that_may_be_mixed_and_keeps_the_others(ranks: Ranks) -> None:
    clean = 2 * ROUND

    def drift(rank: Rank) -> tuple[Any, ...]:
        rank.train(clean)
        rank.train(1, then=rank.flip)
        rank.train(3 * ROUND - 1)
        rank.ckpt.close()
        return rank.told("drifted"), rank.ckpt.version

    told = ranks.run(drift, local_keep=1)
    for drifted, last in told:
        (text,) = drifted
        assert "model/2.weight: rank 0 and rank 1 differ" in text
        assert "all ranks were equal" in text
        assert "restore(version=" in text
        assert last == clean + 3 * ROUND
    kept = int(text.split("restore(version=")[1].split(")")[0])
    assert 1 <= kept <= clean
    listed = ranks.listed()
    (line,) = [line for line in listed.splitlines() if line.strip().startswith(f"v{kept} ")]
    assert "suspect" not in line
    (line,) = [line for line in listed.splitlines() if "a restart takes this" in line]
    assert "suspect" in line
    assert "suspect, as replicas differed when they were taken: " in listed
    assert "model/2.weight: rank 0 and rank 1 differ" in listed
    for version, suspect in ((kept, False), (clean + 3 * ROUND, True)):
        for said in ranks.exported_and_compared(version):
            assert ("model/2.weight: rank 0 and rank 1 differ" in said) is suspect, said

    def restore(rank: Rank, version: int | None = None) -> tuple[Any, ...]:
        restored = rank.ckpt.restore(version)
        rank.train(2)
        rank.leave()
        return restored.version, restored.suspect, rank.loud()

    (version, suspect, loud), _ = ranks.run(restore)
    assert version == clean + 3 * ROUND
    assert "model/2.weight" in suspect
    (text,) = [each for each in loud if "was restored and is suspect" in each]
    assert f"is the newest that is not. To take that: restore(version={kept})" in text
    (version, suspect, loud), _ = ranks.run(lambda rank: restore(rank, kept))
    assert (version, suspect) == (kept, "")
    assert loud == []


def test_the_persistent_level_knows_its_suspects(ranks: Ranks, tmp_path: Path) -> None:
    clean, shared = 2 * ROUND, tmp_path / "shared"
    settings = {"persistent_path": shared, "persistent_every_steps": 2, "persistent_keep": 50}

    def drift(rank: Rank) -> int:
        rank.train(clean)
        rank.train(1, then=rank.flip)
        rank.train(2 * ROUND)
        rank.ckpt.close()
        return int(rank.told("drifted")[0].split("; at v")[1].split()[0])

    known, _ = ranks.run(drift, **settings)
    with closing(PersistentStore(str(shared))) as store:
        there = {name.id.version for name in store.versions()}
        told = persistent_suspects(store).texts()
    assert {name.id.version for name in told} == {number for number in there if number > known}
    assert min(there) <= known < max(there)
    assert all("model/2.weight" in text for text in told.values())
    for rank in range(2):
        shutil.rmtree(ranks.folder(rank))
    shutil.rmtree(ranks.shm)
    ranks.shm.mkdir()

    def restore(rank: Rank) -> tuple[int, str, dict[str, int]]:
        restored = rank.ckpt.restore()
        rank.leave()
        return restored.version, restored.suspect, restored.levels

    for version, suspect, levels in ranks.run(restore, **settings):
        assert (version, levels) == (max(there), {"persistent": 2})
        assert "model/2.weight: rank 0 and rank 1 differ" in suspect
    saved = tierckpt.load(shared, progress=False)
    assert "model/2.weight" in saved.suspect
    assert tierckpt.load(shared, known // 2 * 2, progress=False).suspect == ""


def test_of_three_ranks_the_odd_one_is_named_and_the_job_stopped(ranks: Ranks) -> None:
    def stopped(rank: Rank) -> tuple[Any, ...]:
        rank.train(
            2 * ROUND, then=lambda: rank.ckpt._live.steps_made == 2 * ROUND and rank.flip(on=2)
        )
        said = "rank 2 differs from the other 2"
        with pytest.raises(tierckpt.ReplicaError, match=said) as raised:
            rank.train(3 * ROUND)
        version = rank.ckpt.version
        rank.leave()
        return version, raised.value.names, raised.value.ranks

    told = ranks.run(stopped, size=3, replicas=STOP)
    assert len(set(told)) == 1
    assert told[0][1:] == (("model/2.weight",), (2,))
    assert told[0][0] <= 2 * ROUND + ROUND + 2


def test_other_tensors_are_reported_as_such(ranks: Ranks) -> None:
    def one_more(rank: Rank) -> list[str]:
        rank.train(ROUND)
        if rank.rank == 1:
            rank.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
        rank.train(3 * ROUND)
        rank.leave()
        return rank.told("drifted")

    for (text,) in ranks.run(one_more):
        assert "ranks have different tensors" in text
        assert "optimizer.group1.param0: float32 [3]" in text


def test_a_group_that_all_add_is_nothing(ranks: Ranks) -> None:
    def add(rank: Rank) -> list[str]:
        rank.train(ROUND + 1)
        extra = nn.Parameter(torch.ones(3))
        rank.net.register_parameter("extra", extra)
        rank.optimizer.add_param_group({"params": [extra]})
        rank.train(4 * ROUND)
        rank.ckpt.close()
        return rank.loud()

    assert ranks.run(add) == [[], []]


def test_off_it_looks_at_nothing(ranks: Ranks) -> None:
    def train(rank: Rank) -> list[str]:
        rank.train(3, apart=True)
        rank.ckpt.close()
        return rank.loud()

    assert ranks.run(train, replicas="off") == [[], []]


def test_steps_that_change_nothing_are_reported_once(ranks: Ranks) -> None:
    def stale(rank: Rank) -> list[str]:
        rank.train(2)
        for param in rank.net.parameters():
            param.requires_grad_(False)
        rank.net[2].bias.requires_grad_(True)
        rank.optimizer.param_groups[0]["params"] = [*rank.net.parameters()][:-1]
        rank.train(8)
        rank.ckpt.close()
        return rank.loud()

    first, second = ranks.run(stale)
    (text,) = first
    assert "are equal bit for bit" in text
    assert "AdamW 'optimizer' (of 0.weight, 0.bias, 2.weight) changed nothing" in text
    assert second == []


@pytest.mark.parametrize(("lr", "severities"), [(0.0, [logging.INFO]), (0.1, [])])
def test_a_learning_rate_of_zero_is_no_warning(
    lr: float, severities: list[int], tmp_path: Path, shm_dir: Path
) -> None:
    net, events = nn.Linear(4, 4), list[tierckpt.Event]()
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    where = {"path": tmp_path / "ckpts", "shm_dir": shm_dir, "agent": "inline"}
    with tierckpt.Checkpointer(net, optimizer, **where, on_event=events.append) as ckpt:
        for _ in range(8):
            optimizer.zero_grad()
            net(torch.ones(4)).sum().backward()
            optimizer.step()
            ckpt.step()
    assert [e.severity for e in events if "equal bit for bit" in e.message] == severities


def test_one_frozen_layer_is_nothing(ranks: Ranks) -> None:
    def train(rank: Rank) -> list[str]:
        rank.net[0].requires_grad_(False)
        rank.train(8)
        rank.ckpt.close()
        return rank.loud()

    assert ranks.run(train) == [[], []]


class Swapping(torch.optim.AdamW):
    """Has its own weights between `train()` and `eval()`, as ScheduleFree has."""

    def train(self) -> None:
        self._times(2.0)

    def eval(self) -> None:
        self._times(0.5)

    @torch.no_grad()
    def _times(self, factor: float) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.mul_(factor)


def test_looks_end_before_an_optimizers_own_method_changes_weights(ranks: Ranks) -> None:
    def program(rank: Rank) -> tuple[int | None, list[str]]:
        with closing(rank.ckpt):
            for _ in range(4 * ROUND):
                rank.optimizer.train()  # type: ignore[attr-defined]
                rank.train(1, then=rank.optimizer.eval)  # type: ignore[attr-defined]
            clean = monitor_of(rank.ckpt)._clean
            rank.flip()
            for _ in range(3 * ROUND):
                rank.optimizer.train()  # type: ignore[attr-defined]
                rank.train(1, then=rank.optimizer.eval)  # type: ignore[attr-defined]
            return clean, rank.told("drifted")

    ranks.optimizer = Swapping
    for clean, drifted in ranks.run(program):
        assert clean is not None
        assert clean >= 2 * ROUND
        assert len(drifted) == 1
        assert "model/2.weight: rank 0 and rank 1 differ" in drifted[0]


def test_a_check_that_never_sees_a_change_is_reported(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop clips weights after the boundary: if a look is large, ranks would look at different
    moments."""
    monkeypatch.setattr(replicated_state, "INLINE_BYTES", 1)

    def program(rank: Rank) -> list[str]:
        with closing(rank.ckpt):
            for _ in range(6 * ROUND):
                rank.train(1)
                with torch.no_grad():
                    for param in rank.net.parameters():
                        param.clamp_(-1, 1)
            return [text for text in rank.loud() if "replicas were not compared" in text]

    told, quiet = ranks.run(program)
    assert len(told) == 1
    assert "Do that before the boundary" in told[0]
    assert not quiet


class Apart:
    """A loop with every backward pass on all ranks, and a step that one rank sometimes skips."""

    def __init__(self, skip: int, flip: int = -1) -> None:
        """Take the iterations at which rank 1 skips its step, and has a bit flipped."""
        self.skip, self.flip = skip, flip
        self._met = threading.Barrier(2, timeout=120)
        self._grads: list[list[torch.Tensor]] = [[], []]

    def __call__(self, rank: Rank) -> list[str]:
        one = rank.rank == 1
        for iteration in range(5 * ROUND):
            rank.optimizer.zero_grad()
            seed = iteration + 1000 * rank.rank
            x = torch.randn(5, 6, generator=torch.Generator().manual_seed(seed))
            rank.net(x).square().mean().backward()
            self._reduce(rank)
            if not (one and iteration == self.skip):
                rank.optimizer.step()
            if iteration == self.flip:
                rank.flip()
            rank.ckpt.step()
        self._met.wait()  # or hooks would go while the other one steps
        rank.ckpt.abandon()
        return rank.told("drifted")

    def _reduce(self, rank: Rank) -> None:
        mine = [p.grad.clone() for p in rank.net.parameters() if p.grad is not None]
        self._grads[rank.rank] = mine
        self._met.wait()  # as an allreduce does
        for param, one, other in zip(rank.net.parameters(), *self._grads, strict=True):
            param.grad = (one + other) / 2
        self._met.wait()


def test_a_rank_that_skips_a_step_is_found(ranks: Ranks) -> None:
    """The rank reaches the same boundaries one iteration late."""
    for drifted in ranks.run(Apart(skip=6)):
        assert len(drifted) == 1
        assert "skipped a step" in drifted[0]
        assert "all_reduce the value that decides" in drifted[0]


@pytest.mark.parametrize("late", [0, 2, 4])
def test_nobody_waits_for_a_rank_that_skips_a_step_while_it_is_asked(
    late: int, ranks: Ranks
) -> None:
    """The job ends in each iteration from the flip of a bit until all ranks know the difference."""
    for drifted in ranks.run(Apart(flip=2 * ROUND, skip=2 * ROUND + late), replicas="warn every 1"):
        assert len(drifted) == 1


# --- consequences of replicas="stop" -------------------------------------------------------------


def stopped(rank: Rank, at: int = 1) -> int:
    """Train until a flipped bit stops the job; returns the clean version, -1 if there was none in
    that run."""
    rank.train(at)
    turns = iter(range(4 * ROUND))
    with pytest.raises(tierckpt.ReplicaError, match="rank 0 and rank 1 differ") as raised:
        rank.train(4 * ROUND, then=lambda: rank.flip() if next(turns) == 0 else None)
    rank.leave()
    clean = str(raised.value).partition("; at v")[2]
    return int(clean.split()[0]) if clean else -1


def test_a_job_that_stopped_resumes_from_a_version_not_suspect(ranks: Ranks) -> None:
    clean, _ = ranks.run(lambda rank: stopped(rank, 2 * ROUND), replicas=STOP)

    def again(rank: Rank, version: int | None = None) -> tuple[Any, ...]:
        restored = rank.ckpt.restore(version)
        rank.leave()
        return restored.version, restored.suspect, rank.loud()

    newest, suspect, (text,) = ranks.run(again)[0]
    assert newest > clean
    assert suspect
    assert f"v{newest} was restored and is suspect" in text
    assert 'replicas="stop"' in text
    (version, suspect, (text,)), (other, *_) = ranks.run(again, replicas=STOP)
    assert version == other
    assert version == clean
    assert suspect == ""
    assert f"v{clean} is restored, the newest version that is not suspect" in text
    assert f"v{newest}, " in text
    assert "model/2.weight: rank 0 and rank 1 differ" in text
    ask = partial(again, version=newest)
    version, suspect, (text,) = ranks.run(ask, replicas=STOP)[0]
    assert version == newest
    assert "it was asked for" in text

    def on(rank: Rank) -> tuple[int, list[str]]:
        rank.ckpt.restore()
        rank.train(3 * ROUND)
        rank.ckpt.close()
        return rank.ckpt.version, rank.loud()[1:]

    assert ranks.run(on, replicas=STOP) == [(clean + 3 * ROUND, [])] * 2
    assert ranks.run(again, replicas=STOP)[0] == (clean + 3 * ROUND, "", [])


def test_a_job_that_stops_again_and_again_is_not_tried_forever(ranks: Ranks) -> None:
    def again(rank: Rank) -> int:
        version = rank.ckpt.restore().version
        stopped(rank, 0)
        return version

    clean, _ = ranks.run(lambda rank: stopped(rank, 2 * ROUND), replicas=STOP)
    assert ranks.run(again, replicas=STOP) == [clean] * 2, "it may have been a cosmic ray"

    def refused(rank: Rank) -> str:
        with pytest.raises(tierckpt.RestoreError, match="Nothing was changed") as raised:
            rank.ckpt.restore()
        rank.leave()
        return str(raised.value)

    text, other = ranks.run(refused, replicas=STOP)
    assert text == other
    assert f"restore(version={clean}) tries" in text
    assert "TIERCKPT_REPLICAS=warn" in text
    assert ranks.run(lambda r: tried(r, clean), replicas=STOP) == [clean] * 2
    assert min(ranks.run(lambda r: tried(r, None), replicas="warn")) > clean


def tried(rank: Rank, version: int | None) -> int:
    restored = rank.ckpt.restore(version)
    rank.leave()
    return restored.version


def test_where_all_are_suspects_the_newest_is_taken(ranks: Ranks) -> None:
    def drift(rank: Rank) -> None:
        with pytest.raises(tierckpt.ReplicaError, match="train apart"):
            rank.train(8, apart=True)
        rank.leave()

    ranks.run(drift, replicas=STOP)

    def again(rank: Rank) -> tuple[int, list[str]]:
        version = rank.ckpt.restore().version
        rank.leave()
        return version, rank.loud()

    (version, (text,)), _ = ranks.run(again, replicas=STOP)
    assert version == 2
    assert "there is no older one that is not suspect" in text


def test_a_drift_seen_only_at_the_end_is_raised_then(ranks: Ranks) -> None:
    def late(rank: Rank) -> tuple[int, list[str]]:
        rank.train(3 * ROUND)
        rank.train(1, then=rank.flip)
        with pytest.raises(tierckpt.ReplicaError, match="rank 0 and rank 1 differ"):
            rank.ckpt.close()
        assert rank.ckpt.closed
        return rank.ckpt.version, rank.told("committed")

    for version, committed in ranks.run(late, replicas=STOP):
        assert version == 3 * ROUND + 1
        assert committed
    assert {id_.version for id_ in local_suspects(ranks.folder(0)).marked()} >= {3 * ROUND + 1}


def test_a_drift_at_the_end_is_seen_by_ranks_that_looked_at_other_boundaries(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two looks the monitor rests: it learns later how many boundaries have passed."""
    monkeypatch.setattr("tierckpt.checkpointer.loop.LOOK_SECONDS", 1000.0)
    monkeypatch.setattr("tierckpt.hooks.unsaved_objects.OFTEN", 1)

    def late(rank: Rank) -> None:
        rank.train(3 * ROUND - 1)
        if rank.rank == 0:
            rank.ckpt._rounds.look_seconds = 0.0
        rank.train(1, then=rank.flip)
        assert rank.ckpt._parts.resting == bool(rank.rank)
        with pytest.raises(tierckpt.ReplicaError, match="rank 0 and rank 1 differ"):
            rank.ckpt.close()

    ranks.run(late, replicas=STOP, local_every_steps=0, memory_every_steps=100)


def test_in_with_it_is_raised_at_the_end_too(ranks: Ranks) -> None:
    def train(rank: Rank) -> None:
        with rank.ckpt:
            rank.train(3 * ROUND)
            rank.train(1, then=rank.flip)

    def late(rank: Rank) -> None:
        with pytest.raises(tierckpt.ReplicaError, match="rank 0 and rank 1 differ"):
            train(rank)

    ranks.run(late, replicas=STOP)


# --- no drift -----------------------------------------------------------------------------------


def test_weights_written_without_a_version_counter_are_no_drift(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`.data` changes no counter: one rank's copier reads before the write, the other's after
    it."""
    monkeypatch.setattr(
        replicated_state, "INLINE_BYTES", 0
    )  # else so little is hashed at the boundary

    def program(rank: Rank) -> tuple[list[str], int]:
        monitor = monitor_of(rank.ckpt)
        if rank.rank == 1:
            monitor._submit = lambda look: None  # a slow copier
        for _ in range(8 * ROUND):
            rank.train(1)
            if rank.rank == 0:
                monitor.settle()  # a fast one
            for param in rank.net.parameters():
                param.data.mul_(0.99)
        rank.ckpt.close()
        return [e.text() for e in rank.events if e.name == "drifted"], len(rank.loud())

    (told, loud), (quiet, _) = ranks.run(program, replicas=STOP)
    assert len(told) == len(quiet) == 2
    assert loud == 2
    assert all("were alike again two steps later" in text for text in told)
    assert "inside the checkpointer's step()" not in told[0]
    assert "inside the checkpointer's step()" in told[1]


class Listing(torch.optim.SGD):
    """Keeps tensors in lists, without keys."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                past = [*self.state[param].get("past", []), param.detach().clone()]
                self.state[param]["past"] = past[-2:]
        return loss


def test_state_in_lists_is_walked_over_a_few_times_a_round(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    slices, made = 20, Counter[int]()

    walk = ReplicatedState.__init__

    def counted(self: ReplicatedState, state: Any, slices: int) -> None:
        made[threading.get_ident()] += 1
        walk(self, state, slices)

    monkeypatch.setattr(ReplicatedState, "__init__", counted)

    def program(rank: Rank) -> list[str]:
        rank.train(2 * slices)
        walks = made[threading.get_ident()]
        assert walks <= 12, "six of each round's twenty slices"
        rank.leave()
        return rank.loud()

    ranks.optimizer = Listing
    assert not any(ranks.run(program, replicas=f"warn every {slices}"))
