"""Users' callbacks receive the same calls from both adapters."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

import tierckpt
from tests.support.rank_pool import GLOO, HOROVODRUN
from tests.support.training import (
    Place,
    attach,
    make_horovod_job,
    make_job,
    train,
    under_horovod,
)

BOTH = pytest.mark.parametrize("kind", [GLOO, HOROVODRUN])


class Diary(tierckpt.Callbacks):
    """Callbacks that record all calls."""

    def __init__(self) -> None:
        self.launched: list[int] = []
        self.boundaries: list[int] = []
        self.sealed: list[int] = []
        self.committed: list[tuple[int, str]] = []
        self.restored: list[tuple[int, bool]] = []

    def on_allreduce_launched(self, params: Any) -> None:
        self.launched += [id(p) for p in params]

    def on_step_boundary(self, version: int) -> None:
        self.boundaries.append(version)

    def on_sealed(self, event: tierckpt.Event) -> None:
        self.sealed.append(event.version)

    def on_committed(self, event: tierckpt.Event) -> None:
        self.committed.append((event.version, event.level))

    def on_restored(self, restored: tierckpt.Restored) -> None:
        self.restored.append((int(restored), bool(restored.levels)))


def new_job(seed: int = 1) -> Any:
    return make_horovod_job(seed=seed) if under_horovod() else make_job(seed=seed)


def heard(place: Place) -> dict[str, Any]:
    job = new_job()
    first, second = Diary(), Diary()
    ckpt = attach(job, place, callbacks=[first], local_every_steps=3).ckpt
    ckpt.add_callbacks(second)
    ckpt.restore()
    train(job, ckpt, range(4))
    ckpt.wait()
    ckpt.abandon()
    job_again = new_job(seed=2)
    third = Diary()
    ckpt = attach(job_again, place, callbacks=(third,)).ckpt
    ckpt.restore()
    ckpt.abandon()
    params = [id(p) for p in job.bare.parameters()]
    return {
        "launched": sorted(first.launched) == sorted(params * 4),
        "boundaries": first.boundaries,
        "sealed": first.sealed,
        "committed": first.committed,
        "restored": (first.restored, third.restored),
        "alike": vars(first) == vars(second),
    }


HEARD = {
    "launched": True,
    "boundaries": [1, 2, 3, 4],
    "sealed": [1, 2, 3, 4],
    "committed": [(3, "local")],
    "restored": ([(0, False)], [(4, True)]),
    "alike": True,
}


@BOTH
def test_callbacks_receive_the_same_from_both_adapters(kind: str, ranks: Any, place: Place) -> None:
    assert ranks(2, kind).run(heard, place) == [HEARD] * 2


def events_in_order(place: Place) -> list[str]:
    """One iteration, as a line of events."""
    job = new_job()
    line: list[str] = []

    class Order(Diary):
        def on_allreduce_launched(self, params: Any) -> None:
            if line[-1:] != ["launched"]:
                line.append("launched")

        def on_step_boundary(self, version: int) -> None:
            line.append(f"boundary {version}")

        def on_sealed(self, event: tierckpt.Event) -> None:
            line.append(f"sealed {event.version}")

    ckpt = attach(job, place, callbacks=[Order()]).ckpt
    job.optimizer.register_step_post_hook(partial(_note, line))
    train(job, ckpt, range(2))
    line.append("the end")
    ckpt.abandon()
    return line


def _note(line: list[str], *_: Any) -> None:
    if line[-1] != "stepped":
        line.append("stepped")


@BOTH
def test_the_order_is_that_of_the_iteration(kind: str, ranks: Any, place: Place) -> None:
    """Launches, the barrier with the sealed version, the step, the boundary; the last at the
    end."""
    for line in ranks(2, kind).run(events_in_order, place):
        assert line == [
            *("launched", "stepped", "boundary 1"),
            *("launched", "sealed 1", "stepped", "boundary 2"),
            *("the end", "sealed 2"),
        ]
