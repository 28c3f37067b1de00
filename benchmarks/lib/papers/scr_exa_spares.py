"""Nodes and spares: a node is lost every ten epochs, with its processes, memory and disk.

Ours runs under `tierckpt run`: its spares take the places of lost nodes. The job with root
checkpointing ends with its first lost node; here it is also started again, at once and with a spare
in the place of the node, as one would by hand.
"""

from __future__ import annotations

from contextlib import closing
from typing import Any

from lib.jobs.nodes import Namespaces
from lib.jobs.plan import Plan, compared, figures_of, have_done, lines_of, losses_of, starts_of
from tierckpt.testing.network import network


def measure(plan: Plan, spares: int, limit_s: float) -> dict[str, Any]:
    """Run the undisturbed job, and the one that loses nodes when rank 0 has done the steps in
    `held_at`; return a row's figures. Raises JobError, and NoNetworkError without namespaces."""
    calm = plan.calm()
    _run(calm, 0, limit_s)
    since = _run(plan, spares, limit_s)
    step_seconds = _wall_seconds(calm) / plan.steps
    wall_seconds = _wall_seconds(plan)
    return {
        **compared(plan, losses_of(calm)),
        **figures_of(starts_of(plan, since)),
        "spares": spares,
        "lost_at": list(plan.held_at),
        "survived": len(since),
        "steps": plan.steps,
        "calm_step_seconds": step_seconds,
        "wall_seconds": wall_seconds,
        "goodput": plan.steps * step_seconds / wall_seconds,
    }


def _run(plan: Plan, spares: int, limit_s: float) -> list[float]:
    """Run the job to its end; return the times of the losses."""
    since = []
    with (
        network(plan.world + spares) as cables,
        closing(Namespaces(plan, limit_s, cables)) as nodes,
    ):
        nodes.start_all()
        for _ in range(spares if nodes.has_shims else 0):
            nodes.add_spare()
        for number, step in enumerate(plan.held_at):
            # Never rank 0: its node is the meeting place.
            rank = 1 + 3 * number % (plan.world - 1)
            since.append(nodes.lose(rank, step, spare=plan.world + number))
            if not nodes.has_shims:
                nodes.start_again()
            nodes.wait_for_a_step(since[-1])
        nodes.job.wait(lambda: have_done(plan, plan.steps), limit_s)
    return since


def _wall_seconds(plan: Plan) -> float:
    """From the moment when all ranks first were ready to train, to the end of the last step."""
    first = max(lines_of(plan, rank)[0]["restored"] for rank in range(plan.world))
    steps = [line["end"] for line in lines_of(plan, 0) if "end" in line]
    return float(steps[-1]) - first
