#!/bin/sh
# Elastic Horovod: two workers on three hosts. It excludes a host after the death of a worker there.
# With --blacklist-cooldown-range 10 60 (seconds) it uses the host again, but only if --min-np is
# less than -np.
#
#   ./horovod_elastic.sh [options of ../digits/train_horovod.py]
#
# HOSTS has the names of the hosts, with one slot each. The default is three ways to write the
# loopback address of this machine. (Its host name does not work everywhere: on Debian and Ubuntu it
# is an address without an interface, 127.0.1.1, and Horovod would use ssh.) These hosts share one
# memory, from which the job resumes. For separate machines set TIERCKPT_PEER_REDUNDANCY=partner.
hosts=${HOSTS:-127.0.0.1 127.0.0.01 127.0.0.001}
python=${PYTHON:-python}

# Time limit for the start of a worker; the default of 30 is short for a busy host.
export HOROVOD_GLOO_TIMEOUT_SECONDS="${HOROVOD_GLOO_TIMEOUT_SECONDS:-120}"

# The first line is horovodrun of this Python. The discovery script is any command that prints the
# current hosts; on a cluster it asks the scheduler.
exec "$python" -m horovod.runner.launch --gloo -np 2 --min-np 2 --max-np 2 \
    --host-discovery-script "printf '%s:1\n' $hosts" --network-interfaces "${INTERFACES:-lo}" \
    "$python" "$(dirname "$0")/../digits/train_horovod.py" "$@"
