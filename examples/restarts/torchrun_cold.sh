#!/bin/sh
# One node, two processes. After one dies, torchrun starts both again, and they resume from this
# node's memory.
#
#   ./torchrun_cold.sh [options of train.py]
export TIERCKPT_PATH="${TIERCKPT_PATH:-ckpts}"
# Otherwise restarted processes may read the addresses of dead ones from torchrun's store.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

exec torchrun --standalone --nproc-per-node="${PROCESSES:-2}" --max-restarts=10 train.py "$@"
