"""`tierckpt.ddp` is `ddp_ckpt`: the same module under a second name."""

import sys

import ddp_ckpt
from ddp_ckpt import *  # noqa: F403 - what type checkers and editors see

sys.modules[__name__] = ddp_ckpt
