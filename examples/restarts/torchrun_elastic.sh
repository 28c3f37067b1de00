#!/bin/sh
# Run it on every node: the job uses two to four nodes. It shrinks when a node is lost and grows when
# another one joins; the shards of a lost node are rebuilt from the others.
#
#   ./torchrun_elastic.sh HOST:PORT [options of train.py]
#
# HOST:PORT is the rendezvous, the same for all nodes, on a node that stays.
meeting=$1
shift
export TIERCKPT_PATH="${TIERCKPT_PATH:-ckpts}" TIERCKPT_PEER_REDUNDANCY=xor
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

exec torchrun --nnodes=2:4 --nproc-per-node="${PROCESSES:-1}" --max-restarts=10 \
    --rdzv-backend=c10d --rdzv-endpoint="$meeting" --rdzv-id=restarts \
    --rdzv-conf="last_call_timeout=${LAST_CALL_SECONDS:-30}" train.py "$@"
