"""The Transformers package: tested versions, private names, and jobs that are not supported."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import transformers
import transformers.trainer
from torch.utils.data import IterableDataset

from tierckpt import _tested_versions
from tierckpt.errors import UnsupportedStateError
from tierckpt.integrations.frameworks import Framework, Say

TRANSFORMERS = Framework(*_tested_versions.TRANSFORMERS)
PRIVATE = (
    *("_evaluate", "_finalize_training", "_init_training_state", "_inner_training_loop"),
    *("_load_rng_state", "_maybe_log_save_evaluate", "_prepare_for_training", "_run_epoch"),
    *("callback_handler.callbacks", "control", "current_flos", "state.log_history"),
)
"""The private attributes of a Trainer that this package uses."""
MARK = "the version of Tierckpt"
"""Passed to the Trainer as `resume_from_checkpoint` in a resumed epoch."""
SHARDS = (
    "{name}: Tierckpt stores states that are the same on all ranks. Train with plain DDP (launch "
    "with torchrun, without {name}), or use the Trainer without TierTrainerMixin"
)
ONE_PROCESS = (
    "several GPUs in one process (DataParallel) are not supported: launch one process for each "
    "GPU, with torchrun --nproc-per-node {count}"
)
BATCH_SIZE = (
    "auto_find_batch_size=True: each restart would begin with the first batch size. Set "
    "per_device_train_batch_size to the size that it found, and auto_find_batch_size=False"
)
SIGNAL = (
    "enable_jit_checkpoint=True: Tierckpt handles SIGTERM, and stores the job's last version then. "
    "Set enable_jit_checkpoint=False"
)
STREAM = (
    "the training data set, a {kind}, is iterable: it has no place from which a restart could go "
    "on. Use a data set with indices (__getitem__ and __len__); datasets.load_dataset without "
    "streaming=True makes one"
)


def check(trainer: Any, say: Say) -> None:
    """Warn of an untested version. Raises ConfigError for one without the private names, and
    UnsupportedStateError for a job that cannot be resumed exactly."""
    TRANSFORMERS.require(transformers.__version__, trainer, PRIVATE)
    TRANSFORMERS.require(transformers.__version__, transformers.trainer, ["skip_first_batches"])
    TRANSFORMERS.warn_if_unknown(transformers.__version__, say)
    for refusal in _refusals(trainer):
        raise UnsupportedStateError(refusal)


def _refusals(trainer: Any) -> Iterator[str]:
    args, data = trainer.args, trainer.train_dataset
    parallel = getattr(trainer.accelerator, "parallelism_config", None)
    shards = {
        "FSDP": trainer.is_fsdp_enabled or args.fsdp,
        "DeepSpeed": trainer.is_deepspeed_enabled,
        "a model that from_pretrained has sharded": getattr(
            trainer, "is_distributed_loading_by_transformers", False
        ),
        "a ParallelismConfig": parallel is not None,
    }
    for name, is_used in shards.items():
        if is_used:
            yield SHARDS.format(name=name)
    if args.n_gpu > 1:
        yield ONE_PROCESS.format(count=args.n_gpu)
    if args.auto_find_batch_size:
        yield BATCH_SIZE
    if getattr(args, "enable_jit_checkpoint", False):
        yield SIGNAL
    if isinstance(data, IterableDataset):
        yield STREAM.format(kind=type(data).__name__)


@contextlib.contextmanager
def skipping(skipped: Callable[[Any, int], Any]) -> Iterator[None]:
    """Let `skipped` replace the next call of Accelerate's function by which a Trainer makes a
    loader for the rest of an epoch."""
    module = transformers.trainer
    original = module.skip_first_batches

    def once(loader: Any, num_batches: int = 0) -> Any:
        module.skip_first_batches = original
        return skipped(loader, num_batches)

    module.skip_first_batches = once
    try:
        yield
    finally:
        module.skip_first_batches = original


__all__ = ["MARK", "check", "skipping"]
