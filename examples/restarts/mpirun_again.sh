#!/bin/sh
# mpirun ends a job after the death of a process; this starts it again until the training is done.
#
#   ./mpirun_again.sh [options of train.py]
#
# MPIRUN_OPTIONS has options for mpirun, such as --hostfile and --map-by.
export TIERCKPT_PATH="${TIERCKPT_PATH:-ckpts}"
export MASTER_ADDR="${MASTER_ADDR:-$(hostname)}" MASTER_PORT="${MASTER_PORT:-29500}"

for attempt in 1 2 3 4 5 6 7 8 9 10; do
    mpirun -np "${PROCESSES:-2}" ${MPIRUN_OPTIONS:-} \
        -x TIERCKPT_PATH -x MASTER_ADDR -x MASTER_PORT python train.py "$@" && exit
    echo "attempt $attempt ended with status $?" >&2
done
exit 1
