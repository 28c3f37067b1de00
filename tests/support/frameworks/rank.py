"""Parts of a rank with a record of every step."""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.support.exact import digest_of_tensors as digest
from tests.support.frameworks.scenario import Scenario


class Journal:
    """The records of one rank and run: a line of JSON each. `rank` may be set before the first."""

    def __init__(self, scenario: Scenario, rank: int = 0) -> None:
        self.scenario, self.rank = scenario, rank
        self._file: Any = None

    def write(self, kind: str, **facts: Any) -> None:
        if self._file is None:
            path = Path(self.scenario.folder) / f"run{self.scenario.run}-rank{self.rank}"
            self._file = path.open("a")
        self._file.write(json.dumps({"kind": kind, **facts}) + "\n")
        self._file.flush()

    def reach(self, point: str, step: int) -> None:
        """Pass a point where this rank may have to end."""
        here = f"{point}:{self.rank}:{step}"
        for order, number in (
            (self.scenario.kill, signal.SIGKILL),
            (self.scenario.signal, signal.Signals[self.scenario.sent]),
        ):
            mark = Path(self.scenario.folder) / f"fired {order.replace(':', ' ')}"
            if order == here and not mark.exists():
                mark.touch()
                if self.scenario.error:
                    raise RuntimeError("the script's own error")
                os.kill(os.getpid(), number)


def with_lora(model: Any, layers: list[str], **options: Any) -> Any:
    """The model with trained adapters of PEFT, in which everything else is frozen."""
    import peft

    config = peft.LoraConfig(r=2, lora_dropout=0.1, target_modules=layers, **options)
    return peft.get_peft_model(model, config)


def random_state() -> str:
    return digest([torch.get_rng_state()])


def be_forked(work: Callable[[], Any]) -> None:
    """Do the work of a rank that was forked, and end the process. The result lives until then."""
    status = 1
    try:
        _kept = work()
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    sys.stdout.flush()
    atexit._run_exitfuncs()
    os._exit(status)


__all__ = ["Journal", "be_forked", "digest", "random_state", "with_lora"]
