#!/bin/sh
# On every node: the job runs on two to four nodes, whichever there are. It shrinks when a node is
# lost and grows when another one joins; what a lost node had is rebuilt from the others.
#
#   ./torchrun_elastic.sh HOST:PORT [options of train.py]
#
# HOST:PORT is where the nodes meet, the same for all: on a node that stays.
meeting=$1
shift
export TIERCKPT_PATH="${TIERCKPT_PATH:-ckpts}" TIERCKPT_PEER_REDUNDANCY=xor
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

exec torchrun --nnodes=2:4 --nproc-per-node="${PROCESSES:-1}" --max-restarts=10 \
    --rdzv-backend=c10d --rdzv-endpoint="$meeting" --rdzv-id=restarts \
    --rdzv-conf="last_call_timeout=${LAST_CALL_SECONDS:-30}" train.py "$@"
