"""Chaos: random faults by a seed; after every recovery, every bit is that of the reference.

It is short here, and long by hand (`make chaos`). A finding names the command that repeats it.
"""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.chaos.course import REFUSAL, UNSEEN, Course, FindingError
from tests.chaos.driver import Run
from tests.chaos.plan import AIMED, APART, LIVES, RANKS, STEPS, Shape, make_round
from tests.chaos.truth import Truth
from tests.support.thorough import points
from tierckpt.restore import search

SEEDS = tuple(map(int, points(("11", "2193", "97924"), "11")))
BASIC = {"trainer", "agent", "node", "flip", "truncate", "fill"}
"""The kinds of faults that a run with all seeds has to meet in one job."""
OWED: dict[int, tuple[int, set[str]]] = {
    11: (1, {"disks"}),
    2193: (0, set()),
    97924: (3, {"memory", "disks", "persistent"}),
}
"""By seed: the least number of runs that owed a version, and the places that decided it. More
depends on the progress of agents: seed 11 damages memory after every run, and 2193, which has every
basic kind of fault, loses so much that slow agents may leave no version."""


@pytest.fixture(scope="session", autouse=True)
def fork_server() -> None:
    """Started before the first test, as it holds descriptors; it forks the ranks."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.chaos.preloaded"])
    multiprocessing.forkserver.ensure_running()


def test_a_job_broken_again_and_again(tmp_path: Path, shm_dir: Path) -> None:
    run = Run("ddp", tmp_path, shm_dir)
    for seed in SEEDS:
        findings = run.round(seed)
        again = f"python -m tests.chaos --seed {seed} --rounds 1"
        assert findings == [], f"play it again: {again}"
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert sum("fault" in line for line in lines) >= LIVES * len(SEEDS)
    assert any(line["version"] > 0 for line in lines if "promised" in line), "nothing came back"
    for seed in SEEDS:
        something_was_owed(seed, [line for line in lines if line["seed"] == seed])
    if points(["that it is noticed"]):  # two rounds more
        it_is_noticed_when_bits_differ(run)
        it_is_noticed_when_a_version_is_older_than_promised(run)


def something_was_owed(seed: int, lines: list[dict[str, Any]]) -> None:
    """Otherwise no restored version could have been too old."""
    owed = [line["owed"] for line in lines if "owed" in line]
    promised = [max(each.values()) for each in owed]
    lives, places = OWED[seed]
    assert sum(version > 0 for version in promised) >= lives, owed
    decided = {
        place
        for each, version in zip(owed, promised, strict=True)
        for place in each
        if each[place] == version > 0
    }
    assert decided >= places, owed


def it_is_noticed_when_bits_differ(run: Run) -> None:
    """The reference is made to differ in one bit of one rank's stream, in every version."""
    states, _ = run.reference
    before = [dict(each) for each in states]
    states[2].update({v: {**names, "stream": "?"} for v, names in states[2].items()})
    (finding,) = run.round(8)
    assert "came back to rank 2 with wrong ['stream']" in finding
    states[:] = before


def it_is_noticed_when_a_version_is_older_than_promised(run: Run) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Truth, "promised", lambda truth: STEPS + 1)
        (finding,) = run.round(11)
    assert f"v{STEPS + 1} was promised" in finding


# --- the schedule --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("owed", "said", "finding"),
    [
        (0, f"tierckpt.errors.RestoreError: {REFUSAL} (v4 was one) and has none now", ""),
        (
            4,
            f"tierckpt.errors.RestoreError: {REFUSAL} (v4 was one) and has none now",
            "by it",
        ),
        (0, f"tierckpt.errors.RestoreError: {UNSEEN}: r00000.0: the manifest is damaged", ""),
        (0, "KeyError: 'a mistake of ours'", "by itself"),
    ],
)
def test_a_refusal_is_right_where_nothing_is_owed(
    owed: int, said: str, finding: str, tmp_path: Path
) -> None:
    """A run that ends before its first step, by an error that all its ranks raise."""
    text = Path(search.__file__).read_text()
    assert all(refusal in text for refusal in (REFUSAL, UNSEEN)), "it still says so"
    cluster: Any = SimpleNamespace(
        folder=tmp_path,
        ranks=[SimpleNamespace(exitcode=1)] * RANKS,
        expire_lease=lambda: None,
    )
    plan = next(r for r in map(make_round, range(99)) if r.lives[0].end is not None)
    lines: list[dict[str, Any]] = []
    course = Course(plan, cluster, [], [], lambda **line: lines.append(line))
    course._start = lambda life: (tmp_path / "life1-r0.log").write_text(said)  # type: ignore
    course._truth.owed = lambda: {"disks": owed}  # type: ignore[method-assign]
    if finding:
        with pytest.raises(FindingError, match=finding):
            course.run()
    else:
        course.run()
        assert "nothing is owed" in lines[-1]["ended"]


def test_the_schedule_is_a_function_of_the_seed() -> None:
    assert make_round(7) == make_round(7)
    assert len({make_round(seed) for seed in range(50)}) == 50


def test_some_job_has_every_basic_kind_of_fault() -> None:
    kinds = []
    for each in map(make_round, OWED):
        lives = [life for life in each.lives if life.ranks == RANKS]
        faults = [
            f for life in lives for f in (*life.during, *filter(None, [life.end]), *life.after)
        ]
        kinds.append({fault.kind for fault in faults})
    assert any(each >= BASIC for each in kinds), kinds


def test_every_kind_of_fault_comes_and_all_that_mends_itself_is_mended() -> None:
    rounds = [make_round(seed) for seed in range(200)]
    kinds = set()
    for each in rounds:
        down: set[tuple[str, int]] = set()
        for life in each.lives:
            assert [f.at for f in life.during] == sorted(f.at for f in life.during)
            for fault in (*life.during, *filter(None, [life.end]), *life.after):
                kinds.add(f"{fault.kind} {fault.level}".strip())
                for node in fault.nodes:
                    if fault.kind in ("stop", "fill"):
                        down.add((fault.kind, node))
                    elif fault.kind in ("wake", "free"):
                        down.discard(({"wake": "stop", "free": "fill"}[fault.kind], node))
        assert not down, each.seed
        assert sum(life.end.at for life in each.lives if life.end) + 2 < STEPS
    assert kinds == {
        *("trainer", "loading", "node", "nodes", "reboot", "power", "allocation", "agent"),
        *("stop", "wake", "fill", "free", "flip memory"),
        *(f"{kind} {level}" for kind in ("flip", "truncate") for level in DISKS),
        *("flip aimed", "flip copies"),
    }


def test_every_round_has_aimed_faults_and_a_run_of_another_size_and_some_move_their_ranks() -> None:
    moved = 0
    for each in map(make_round, range(50)):
        faults = [fault for life in each.lives for fault in life.after]
        assert sum(fault.level in ("aimed", "copies") for fault in faults) == AIMED
        sizes = [life.ranks for life in each.lives]
        assert len([size for size in sizes if size != RANKS]) == 1
        assert all({*life.nodes} == {*each.shape.nodes} for life in each.lives)
        moved += len({life.nodes for life in each.lives if life.ranks == RANKS}) > 1
    assert moved > 25


DISKS = ("local", "parity", "persistent")


# --- owed versions -------------------------------------------------------------------------------


class Told:
    """A truth, and the reports of its ranks in short."""

    def __init__(self, survives: int = 1) -> None:
        self.truth = Truth(Shape(APART, "xor", survives, 2), keep_last=2)
        self.truth.placed(1, APART)
        self.truth.began(1, 1, (0, 0))

    def all_say(self, event: str, level: str, *versions: int, life: int = 1) -> None:
        for version in versions:
            for rank in range(RANKS):
                self.truth.heard(life, rank, event, level, version, "complete")

    def owed_after(self, *losses: tuple[str, int]) -> int:
        for level, node in losses:
            self.truth.lost(level, node)
        return self.truth.promised()


def told(survives: int = 1) -> Told:
    """Versions 1 to 9 sealed; 4 and 8 committed; 4 protected; 4 flushed."""
    made = Told(survives)
    made.all_say("sealed", "memory", *range(1, 10))
    made.all_say("committed", "local", 4, 8)
    made.all_say("committed", "peer", 4)
    made.all_say("committed", "persistent", 4)
    return made


def test_the_owed_versions_are_those_of_the_table_in_the_design() -> None:
    everywhere = [("memory", node) for node in range(RANKS)]
    disks = [("local", node) for node in range(RANKS)]
    assert told().owed_after() == 9, "a trainer died"
    assert told().owed_after(*everywhere) == 8, "the power failed"
    assert told().owed_after(*everywhere, disks[1]) == 4, "a node is gone: peers"
    assert told().owed_after(*everywhere, *disks[:2]) == 4, "two are: the persistent level"
    assert told().owed_after(*everywhere, *disks) == 4, "all are"
    assert Told().owed_after() == 0, "nothing was ever reported"


def test_versions_are_owed_by_the_levels_that_hold_them() -> None:
    made = told()
    assert made.truth.owed() == {"memory": 9, "disks": 8, "persistent": 4}
    made.truth.lost("memory", 1)
    assert made.truth.owed() == {"memory": 0, "disks": 8, "persistent": 4}


def test_damage_is_owed_the_next_source() -> None:
    made = told()
    made.truth.damaged("memory", 2, 1, 9)
    assert made.truth.promised() == 8
    made.truth.damaged("local", 0, 1, 8)  # not protected yet
    assert made.truth.promised() == 4
    made.truth.damaged("local", 0, 1, 4)
    assert made.truth.promised() == 4
    made.truth.damaged("local", 1, 1, 4)
    assert made.truth.promised() == 4
    made.truth.damaged("persistent", 1, 1, 4)
    assert made.truth.promised() == 0


def test_versions_of_another_run_count_up_to_the_start_of_this_one() -> None:
    made = told()
    made.truth.damaged("memory", 2, 1, 9)
    made.truth.began(2, 2, (1, 8))
    assert made.truth.promised() == 8
    made.all_say("sealed", "memory", 9, life=2)
    assert made.truth.promised() == 9
    made.truth.damaged("memory", 0, 2, 9)
    assert made.truth.promised() == 8
    made.truth.began(3, 3, (1, 4))
    assert made.truth.promised() == 4, "v8 is nobody's past now"
