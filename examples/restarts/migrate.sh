#!/bin/sh
# Goes on here with what a job on another machine left on its persistent level.
#
#   ./migrate.sh FROM TO [options of train.py]
#
# FROM is that job's TIERCKPT_PERSISTENT_PATH, TO the one here, both as directories seen from here;
# where both machines see one store (an object store, say), nothing needs to be copied.
from=$1 to=$2
shift 2
mkdir -p "$to"
cp -a "$from/." "$to"
rm -f "$to"/lease.* "$to"/halt.json  # the old job's, and what made it end

# Or restarted processes may read the addresses of dead ones from torchrun's store.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export TIERCKPT_PATH="${TIERCKPT_PATH:-ckpts}" TIERCKPT_PERSISTENT_PATH="$to"
exec torchrun --standalone --nproc-per-node="${PROCESSES:-2}" --max-restarts=10 train.py "$@"
