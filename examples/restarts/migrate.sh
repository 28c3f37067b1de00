#!/bin/sh
# Resumes here from the persistent level of a job on another machine.
#
#   ./migrate.sh FROM TO [options of train.py]
#
# FROM is that job's TIERCKPT_PERSISTENT_PATH, TO the new one, both as directories on this machine.
# If both machines see one store (such as an object store), no copy is needed.
set -e  # without the old job's files this would be a fresh start
from=${1:?usage: ./migrate.sh FROM TO [options of train.py]} to=${2:?}
shift 2
mkdir -p "$to"
cp -a "$from/." "$to"
rm -f "$to"/lease.* "$to"/halt.json  # the old job's lease, and its request to halt

# Otherwise restarted processes may read the addresses of dead ones from torchrun's store.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export TIERCKPT_PATH="${TIERCKPT_PATH:-ckpts}" TIERCKPT_PERSISTENT_PATH="$to"
exec torchrun --standalone --nproc-per-node="${PROCESSES:-2}" --max-restarts=10 train.py "$@"
