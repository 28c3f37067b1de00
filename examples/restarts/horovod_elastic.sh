#!/bin/sh
# Elastic Horovod: two workers on three hosts. It does not use a host again on which a worker died;
# with --blacklist-cooldown-range 10 60 (seconds) it does, but only where --min-np is less than -np:
# a host that the job has to wait for gets no new worker.
#
#   ./horovod_elastic.sh [options of ../digits/train_horovod.py]
#
# HOSTS names the hosts, a slot each. As given here they are three ways to write the address of this
# machine's loopback interface. Its own name would not do everywhere: where that stands for an
# address of no interface (127.0.1.1 on Debian and Ubuntu), Horovod wants to reach it by ssh.
# So they share one memory, from which another host goes on. Machines of their own don't: set
# TIERCKPT_PEER_REDUNDANCY=partner there.
hosts=${HOSTS:-127.0.0.1 127.0.0.01 127.0.0.001}
python=${PYTHON:-python}

# So long may a new worker take to start; the default of 30 is short for a busy host.
export HOROVOD_GLOO_TIMEOUT_SECONDS="${HOROVOD_GLOO_TIMEOUT_SECONDS:-120}"

# The first line is horovodrun, of this very Python. Its "script" may be any command that tells the
# hosts there are now; a cluster's asks the scheduler.
exec "$python" -m horovod.runner.launch --gloo -np 2 --min-np 2 --max-np 2 \
    --host-discovery-script "printf '%s:1\n' $hosts" --network-interfaces "${INTERFACES:-lo}" \
    "$python" "$(dirname "$0")/../digits/train_horovod.py" "$@"
