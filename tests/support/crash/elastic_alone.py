"""Elastic state in one process, without a launcher: refused arguments, and effects of a commit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import pytest
import torch
from horovod.common.elastic import run_fn
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from horovod.runner.elastic.worker import HostUpdateResult

from horovod_ckpt import elastic
from horovod_ckpt.elastic import TorchState
from tests.support import exact
from tierckpt import ConfigError, UnsupportedStateError


class Thing:
    """An object that no checkpoint can hold."""


def main(folder: Path, shm_dir: Path) -> None:
    hvd.init()
    model = torch.nn.Linear(4, 2)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        named_parameters=model.named_parameters(),
        backward_passes_per_step=2,
    )
    optimizer._register_hooks()  # Horovod omits it for one process, but not in an elastic job

    for given, lacking in (({"net": model}, "Optimizer"), ({"opt": optimizer}, "Module")):
        with pytest.raises(
            ConfigError, match=rf"no torch\S+{lacking} among.*{next(iter(given))}: "
        ):
            TorchState(**given, batch=0)
    with pytest.raises(ConfigError, match="by name instead"):
        TorchState(model, optimizer, tierckpt={"extra": {}})
    with pytest.raises(UnsupportedStateError, match=r"attribute 'thing' is a .*Thing"):
        TorchState(model, optimizer, epoch=0, thing=Thing())
    with pytest.raises(UnsupportedStateError, match=r"attribute 'things'\[1\]"):
        TorchState(model, optimizer, things=[1, Thing()])
    for name in ("restored", "checkpointer", "save", "commit", "_live", "_rank", "_attributes"):
        with pytest.raises(ConfigError, match=f"{name}=.*TorchState uses this name.*my_{name}="):
            TorchState(model, optimizer, **{name: 0})
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 1.0)
    with pytest.raises(
        ConfigError, match=r"attributes=.*the checkpoint uses this name.*my_attributes="
    ):
        TorchState(model, optimizer, attributes=schedule)
    assert TorchState(model, optimizer, attributes=3, type=4).attributes == 3

    for wrong, text in (
        ({"callbacks": [3]}, "3 is not a tierckpt."),
        ({"on_event": 3}, "on_event is 3"),
    ):
        with pytest.raises(TypeError, match=text):  # and not only at the first `sync()`
            TorchState(model, optimizer, tierckpt={"path": str(folder / "ckpts"), **wrong})

    told: list[str] = []
    settings: dict[str, Any] = {"path": str(folder / "ckpts"), "shm_dir": str(shm_dir)}
    settings |= {"local_every_seconds": 0, "on_event": lambda event: told.append(event.text())}
    state = TorchState(model, optimizer, batch=0, epoch=0, tierckpt=settings)
    state.sync()

    def go(batches: int) -> None:
        for _ in range(batches):
            if state.batch % 2 == 0:
                optimizer.zero_grad()
            model(torch.full((3, 4), float(state.batch))).sum().backward()
            if state.batch % 2 == 1:
                optimizer.step()
            state.batch += 1
            state.commit()

    def fail() -> tuple[int, int, int]:
        """A rank fails, as in Horovod's loop; the restored state, and its version."""
        failures = iter([HorovodInternalError("a rank is gone")])

        def train(_: TorchState) -> None:
            for failure in failures:
                raise failure

        # MPI, if Horovod has it, could not be started again.
        run_fn(train, reset=lambda: None)(state)
        return state.batch, state.epoch, state.restored.version

    go(3)
    weights = exact.replicated(model, optimizer)
    assert fail() == (2, 0, 1)  # the step; no gradients between the backward passes of the next
    assert exact.replicated(model, optimizer) == weights

    go(2)
    state.epoch = 1
    state.commit()
    assert fail() == (4, 1, 3)  # values alone

    state.epoch = Thing()
    state.commit()
    assert any("extra['attributes']['epoch'] is a" in text for text in told), told
    assert fail() == (4, 1, 3)

    # Hosts come in the middle of a step, and the script itself asks there: back to its start.
    state.on_hosts_updated(1, HostUpdateResult.added)
    go(1)  # this commit does not ask
    with pytest.raises(HostsUpdatedInterrupt):
        state.check_host_updates()
    state.sync()
    assert (state.batch, state.restored.version) == (4, 3)

    # After a step: nothing to undo. Horovod would not sync when hosts only leave.
    go(1)
    state.on_hosts_updated(2, HostUpdateResult.removed)
    with pytest.raises(HostsUpdatedInterrupt) as interrupt:
        go(1)
    assert not interrupt.value.skip_sync
    weights = exact.replicated(model, optimizer)
    state.sync()
    assert (state.batch, state.restored) == (6, None)
    assert exact.replicated(model, optimizer) == weights
    go(2)
    assert fail() == (8, 1, 5)

    # In a loop that commits often, Horovod's broadcast comes only when there is news.
    elastic.RARE_SECONDS = float("inf")
    asked = []
    ask = state.check_host_updates
    state.check_host_updates = lambda: (asked.append(state.batch), ask())
    go(8)
    assert asked == [10, 12]  # after a step, until two votes were cast, and the second is known
    state.on_hosts_updated(3, HostUpdateResult.added)
    go(3)
    with pytest.raises(HostsUpdatedInterrupt):
        go(1)
    assert state.batch == 20
    state.sync()

    state.checkpointer.close()
    assert list(shm_dir.rglob("*")) == []


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
