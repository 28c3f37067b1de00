"""One rank of a job of launched_job.py. The argument is the order as JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

ORDER: dict[str, Any] = json.loads(sys.argv[1])
HERE = Path(ORDER["folder"]) / f"rank{os.environ['RANK']}"
_part = HERE.with_suffix(".part")
_part.write_text(str(os.getpid()))
_part.rename(HERE)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from lib.goodput.killed_job import Order, leave, train  # noqa: E402

if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    places = {name: Path(ORDER[name]) for name in ("folder", "memory")}
    train(Order(**{**ORDER, **places}), int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
    leave(0)
