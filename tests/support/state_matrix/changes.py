"""Changes that scripts make to their state while they run: groups, freezing, several optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.support.state_matrix.jobs import Cases, Job, adam, adamw, flat_inputs, sgd, trained
from tests.support.state_matrix.models import Late, mlp

CASES = Cases()


def add_changes() -> None:
    """Cases of scripts that change their state while they run."""

    def groups(optimizer: Callable[..., Any]) -> Job:
        model = mlp()
        settings = [
            {"params": model[0].parameters(), "lr": 0.02},
            {"params": [model[3].weight], "weight_decay": 0.3},
            {"params": [model[3].bias]},
        ]
        return Job(model, {"optimizer": optimizer(settings)}, flat_inputs())

    def add_group(job: Job) -> None:
        job.optimizers["optimizer"].add_param_group({"params": job.model.late.parameters()})
        job.model.joined = True

    def growing(optimizer: Callable[..., Any]) -> Job:
        model = Late()
        parts = {"optimizer": optimizer(model.first.parameters())}
        return Job(model, parts, flat_inputs(), before={1: add_group})

    def freeze(job: Job) -> None:
        job.model[0].requires_grad_(False)

    def join(job: Job) -> None:
        job.model.joined = True

    def change_options(job: Job) -> None:
        for group in job.optimizers["optimizer"].param_groups:
            group.update(lr=0.3 / 7, weight_decay=1e-17)

    def forget(job: Job) -> None:
        job.optimizers["optimizer"].state.pop(job.model[0].weight)

    CASES.add("several groups sgd", lambda: groups(sgd))
    CASES.add("several groups adamw", lambda: groups(adamw))
    CASES.add("a group added while running, sgd", lambda: growing(sgd))
    CASES.add("a group added while running, adam", lambda: growing(adam))
    for when in (1, 2):
        CASES.add(
            f"a layer frozen before iteration {when}",
            lambda w=when: trained(mlp(), adam, before={w: freeze}),
        )
        CASES.add(
            f"state created in iteration {when}",
            lambda w=when: trained(Late(), adamw, before={w: join}),
        )
    CASES.add(
        "a branch that joins after the restored version", lambda: trained(Late(), before={3: join})
    )
    CASES.add("options changed while running", lambda: trained(mlp(), before={2: change_options}))
    CASES.add("optimizer state thrown away", lambda: trained(mlp(), adam, before={3: forget}))
    CASES.add("two optimizers", two_optimizers)
    CASES.add("two optimizers by turns", lambda: two_optimizers(update=by_turns, versions=2))


def two_optimizers(**job: Any) -> Job:
    model = mlp()
    parts = {"first": adam(model[0].parameters()), "second": sgd(model[3].parameters())}
    return Job(model, parts, flat_inputs(), **job)


def by_turns(job: Job, loss_now: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Two steps of one optimizer for each step of the other."""
    for name in ("first", "first", "second"):
        job.model.zero_grad()
        loss = loss_now()
        loss.backward()
        job.optimizers[name].step()
    return loss


add_changes()
