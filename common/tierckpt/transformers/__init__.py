"""Checkpoints for jobs of Hugging Face's Trainer.

::

    from tierckpt.transformers import TierTrainer

    TierTrainer(model, args, train_dataset=data, tierckpt={"path": "ckpts"}).train()

A restart resumes at the next optimizer step, in the middle of an epoch, bit for bit. A trainer of
your own gets the same: `class MyTrainer(TierTrainerMixin, Seq2SeqTrainer)`.
"""

from __future__ import annotations

from .trainer import TierTrainer, TierTrainerMixin

__all__ = ["TierTrainer", "TierTrainerMixin"]
