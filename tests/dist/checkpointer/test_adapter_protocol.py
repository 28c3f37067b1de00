"""The adapter protocol: a third adapter, written against the protocol alone, is exact after a
kill."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.manual_allreduce import make_manual_job
from tests.support.training import Place, attach, only_layers_release, rank, train
from tierckpt import Callbacks

KILLED, END = 5, 8
SETTINGS: dict[str, Any] = {"release": "backward", "agent": "inline"}


class Launches(Callbacks):
    """An adapter that counts the parameters with a launched reduction."""

    def __init__(self) -> None:
        self.count = 0

    def on_allreduce_launched(self, params: Sequence[torch.Tensor]) -> None:
        self.count += len(params)


def the_course() -> dict[int, str]:
    """The course without checkpoints."""
    job = make_manual_job()
    course = {}
    for iteration in range(END):
        job.iterate(iteration)
        course[iteration + 1] = job.digest()
    return course


@only_layers_release()
def killed_within_an_iteration(place: Place, told: str) -> None:
    """SIGKILL between the launch of the last reduction and the optimizer's step."""
    job, launches = make_manual_job(), Launches()
    attached = attach(job, place, callbacks=[launches], **job.as_given(), **SETTINGS)
    course = train(job, attached.ckpt, range(KILLED))
    snapshot = attached.ckpt._active.snapshot
    assert snapshot is not None
    held, launched = [len(snapshot.held_blocks())], launches.count
    job.backward(KILLED)
    held.append(len(snapshot.held_blocks()))
    assert job.reducer is not None
    seen = {
        "course": course,
        "launched": [launches.count - launched, len(job.reducer.params)],
        "held": held,
        "agreed": attached.ckpt.adapter.agreed,
    }
    Path(told, f"rank{rank()}.json").write_text(json.dumps(seen))
    os.kill(os.getpid(), signal.SIGKILL)


def resumed(place: Place) -> tuple[int, str, dict[int, str]]:
    job = make_manual_job(seed=2)
    attached = attach(job, place, **job.as_given(), **SETTINGS)
    start = attached.ckpt.restore()
    digest = job.digest()
    course = train(job, attached.ckpt, range(start, END))
    attached.ckpt.close()
    assert job.reducer is not None
    assert job.reducer.on_launch is None
    return int(start), digest, course


def test_a_loop_that_reduces_by_hand_is_killed_and_continues_exactly(
    ranks: Any, own_ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    place = Place.under(tmp_path, shm_dir)
    with pytest.raises(AssertionError, match="ended with status -9"):
        own_ranks([{}, {}]).run(killed_within_an_iteration, place, str(tmp_path))
    expected = ranks(2).run(the_course)
    assert expected[0] != expected[1]  # the centres, and the random streams
    for number, (start, digest, course) in enumerate(ranks(2).run(resumed, place)):
        before = json.loads((tmp_path / f"rank{number}.json").read_text())
        assert before["course"] == {str(i): expected[number][i] for i in range(1, KILLED + 1)}
        assert before["launched"][0] == before["launched"][1] > 0
        assert before["held"][0] > before["held"][1] == 0
        assert before["agreed"] == [0] + [1] * (KILLED - 1)
        assert start in (KILLED - 1, KILLED)
        assert digest == expected[number][start]
        assert course == {i: expected[number][i] for i in range(start + 1, END + 1)}
