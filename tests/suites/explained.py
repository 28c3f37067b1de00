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
}
