"""A job of Hugging Face's Trainer that is killed goes on with exactly the steps of an undisturbed
one: batches, gradients, weights, learning rates, random states, and all that is logged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.lightning.jobs import LightningJob, Run

MakeJob = Callable[..., LightningJob]
Undisturbed = Callable[..., Run]

BEST = {
    "save_strategy": "steps",
    "save_steps": 4,
    "save_total_limit": 2,
    "load_best_model_at_end": True,
    "metric_for_best_model": "loss",
}
CASES: dict[str, tuple[list[str], dict[str, Any]]] = {
    # Kills of one job, one after the other; the scenario. 7 batches an epoch.
    "every phase": (
        [
            *("begin:0:0", "backward:1:2", "evaluation:0:4", "epoch end:1:7"),
            *("save:0:8", "step end:1:12", "backward:0:15", "epoch end:0:21"),
        ],
        {"arguments": BEST},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_killed_job_goes_on_exactly(
    name: str, make_job: MakeJob, undisturbed: Undisturbed
) -> None:
    kills, scenario = CASES[name]
    plain, job = undisturbed(**scenario), make_job(**scenario)
    for number, kill in enumerate([*kills, ""]):
        run = job.start(kill)
        assert job.fired(kill) or not kill, run.output()
        assert run.ended() is not bool(kill), run.output()
        begins = number == 0 or (number == 1 and "begin" in kills[0])
        for rank in range(run.scenario.ranks):
            first = run.place_in(plain, rank)
            assert first == 0 if begins else first > 0, run.output()
