"""Torch and the copy engine, looked at in a process of their own: prints JSON."""

from __future__ import annotations

import json
import os
from typing import Any

from tierckpt._children import end_with_parent


def main() -> None:
    """Import torch, and try the copy engine and the layout of tensors with it."""
    end_with_parent()
    import torch

    from tierckpt.snapshot import copy_engine, tensor_memory

    found: dict[str, Any] = {
        "version": torch.__version__,
        "cuda": torch.version.cuda or torch.version.hip or "",
        "devices": torch.cuda.device_count() if torch.cuda.is_available() else 0,
        "engine": copy_engine.find() is not None,
        "copies": copy_engine.describe(),
        "layout": tensor_memory.find() is not None,
        "forbidden": os.environ.get(copy_engine.VARIABLE) == "torch",
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
