"""Models of many types, shapes, memory orders and kinds of layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from tests.support import exact
from tests.support.state_matrix.jobs import (
    Cases,
    Job,
    adam,
    adamw,
    flat_inputs,
    pictures,
    sgd,
    trained,
)
from tests.support.state_matrix.models import (
    Buffers,
    Complex,
    Float8,
    OddShapes,
    Renormed,
    Replaced,
    Tied,
    TiedRenormed,
    Transposed,
    Unused,
    channels_last,
    large,
    many_small,
    mixed,
    mlp,
    normalised,
    partly_compiled,
    spectral,
)

CASES = Cases()


def add_models() -> None:
    half = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
    for name, dtype in half.items():
        CASES.add(f"{name} sgd", lambda d=dtype: trained(mlp(d), inputs=flat_inputs(d)))
        CASES.add(f"{name} adamw", lambda d=dtype: trained(mlp(d), adamw, inputs=flat_inputs(d)))
    CASES.add("mixed types", lambda: trained(mixed(), adamw))
    CASES.add("complex sgd", lambda: trained(Complex(), sgd))
    CASES.add("complex adam", lambda: trained(Complex(), adam))
    CASES.add("channels_last adam", lambda: trained(channels_last(), adam, inputs=pictures()))
    CASES.add(
        "channels_last rmsprop foreach",
        lambda: trained(
            channels_last(), partial(torch.optim.RMSprop, foreach=True), inputs=pictures()
        ),
    )
    CASES.add("weights stored column by column", lambda: trained(Transposed(), adam))
    CASES.add("buffers of many types", lambda: trained(Buffers(), sgd))
    CASES.add("float8 buffers", lambda: trained(Float8(), adam))
    CASES.add("a buffer replaced by every forward", lambda: trained(Replaced(), sgd))
    CASES.add("batch norm cumulative", lambda: trained(normalised(), adamw))
    CASES.add("parametrized by spectral norm", lambda: trained(spectral(), adam))
    CASES.add("odd shapes adamw", lambda: trained(OddShapes(), adamw))
    CASES.add("tied weights adam", lambda: trained(Tied(), adam))
    CASES.add("unused and frozen parameters adam", lambda: trained(Unused(), adam))
    CASES.add("compiled", lambda: trained(torch.compile(mlp(), backend="eager"), adam))
    CASES.add(
        "compiled through autograd",
        lambda: trained(torch.compile(normalised(), backend="aot_eager"), sgd),
    )
    CASES.add("a compiled submodule", lambda: trained(partly_compiled(), adam))
    CASES.add("several thousand small tensors", lambda: trained(many_small(), adam))
    CASES.add("tensors larger than a block", lambda: trained(large(), adam))
    CASES.add("a parameter outside the model", outside)
    for name, optimizer in {"sgd": sgd, "adam": partial(adam, weight_decay=0.1)}.items():
        CASES.add(
            f"embeddings with a largest norm {name}", lambda o=optimizer: trained(Renormed(), o)
        )
    CASES.add("a tied embedding with a largest norm", lambda: trained(TiedRenormed(), adam))
    CASES.add(
        "sparse embeddings with a largest norm",
        lambda: trained(Renormed(sparse=True), partial(torch.optim.SGD, lr=0.05)),
    )


def outside() -> Job:
    model, scale = mlp(), torch.randn((), requires_grad=True)
    optimizer = adam([*model.parameters(), scale])

    def update(job: Job, loss_now: Callable[[], torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_now() * scale.square()
        loss.backward()
        optimizer.step()
        return loss

    job = Job(model, {"optimizer": optimizer}, flat_inputs(), update=update)
    job.image = lambda: {**Job.image(job), "scale": exact.tensor_image(scale)}
    return job


add_models()
