"""Known differences, each with its reason: documented refusals.

Each suite has the test's name, its failure's text (both regular expressions), and the reason.
"""

from __future__ import annotations

REFUSED = "refused with a way out"
"""Prefix of reasons for a second run: the test follows the refusal's advice, and must pass then."""
JOIN = "join() is refused: all ranks must make the same number of steps (docs/models.md)"
LOCAL_SGD = "local SGD is refused: between two averagings the models differ (docs/models.md)"
NO_MODEL = (
    f"{REFUSED}: without named_parameters straight from the model it is not known whose buffers "
    "belong to the checkpoint; model= says it (docs/horovod.md)"
)
ELASTIC = f"{REFUSED}: commits are of a model and Horovod's optimizer (docs/horovod.md)"
FETCHES = "a training step that fetches its batches itself is refused (docs/lightning.md)"
CALLBACKS = "callbacks that a restart would repeat, or that rename, are refused (docs/lightning.md)"
LOADED = "load_state() after the boundary changes what is being copied: that version is given up"
CLOCK = "the test's clock has as many values as Lightning alone reads"
SHARDED = "strategies that shard are refused (docs/lightning.md)"

EXPLAINED = {
    "ddp": [
        ("test_ddp_(uneven_inputs|.*_uneven_inputs|join_.*)", "under join\\(\\)", JOIN),
        (".*_post_localSGD", "PostLocalSGDState", LOCAL_SGD),
    ],
    "horovod": [
        ("test_(optimizer_)?no_named_parameters", "the model is needed", NO_MODEL),
        ("test_sparse_embeddings", "the model is needed", NO_MODEL),
    ],
    "elastic": [
        ("test_elastic_state", "not a result of hvd.DistributedOptimizer", ELASTIC),
        ("test_elastic_sampler", "found no torch.nn.Module", ELASTIC),
    ],
    "lightning": [
        (".*", "training_step has an argument dataloader_iter", FETCHES),
        (".*", "the callback \\w+: it would search|the callback \\w+: it adds", CALLBACKS),
        (".*", "the callback ModelPruning", CALLBACKS),
        (".*", "it shards the model", SHARDED),
        (".*test_throughput_monitor.*", "StopIteration|raised an unexpected", CLOCK),
    ],
    "accelerate": [(".*", "a version was lost.*changed between the boundary", LOADED)],
    "transformers": [],
}
