"""Checkpoints for loops that use Hugging Face Accelerate.

::

    from tierckpt.accelerate import attach

    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    with attach(accelerator, path="ckpts") as ckpt:
        data = ckpt.resume(loader)
        for epoch in range(data.epoch, epochs):
            for batch in data:
                with accelerator.accumulate(model):
                    ...
                ckpt.step()

A restart resumes at the next batch, in the middle of an epoch, bit for bit.
"""

from .checkpointer import Checkpointer, attach
from .resumed_loader import ResumedLoader

__all__ = ["Checkpointer", "ResumedLoader", "attach"]
