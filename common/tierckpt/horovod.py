"""`tierckpt.horovod` is `horovod_ckpt`: the same module under a second name, with its modules for
users, `torch` and `elastic`."""

import sys

import horovod_ckpt
import horovod_ckpt.elastic
import horovod_ckpt.torch
from horovod_ckpt import *  # noqa: F403 - what type checkers and editors see

sys.modules[__name__] = horovod_ckpt
sys.modules[f"{__name__}.elastic"] = horovod_ckpt.elastic
sys.modules[f"{__name__}.torch"] = horovod_ckpt.torch
