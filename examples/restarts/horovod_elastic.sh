#!/bin/sh
# Elastic Horovod: two workers on three hosts. It never again uses a host on which a worker died.
#
#   ./horovod_elastic.sh [options of ../digits/train_horovod.py]
#
# HOSTS names the hosts, a slot each; as given here, they are three names of this machine.
hosts=$(mktemp)
trap 'rm -f "$hosts"' EXIT
chmod +x "$hosts"
{
    echo '#!/bin/sh'
    for host in ${HOSTS:-localhost 127.0.0.1 $(hostname)}; do echo "echo $host:1"; done
} > "$hosts"

# So long may a new worker take to start; the default of 30 is short for a busy host.
export HOROVOD_GLOO_TIMEOUT_SECONDS="${HOROVOD_GLOO_TIMEOUT_SECONDS:-120}"

horovodrun --gloo -np 2 --min-np 2 --max-np 2 --host-discovery-script "$hosts" \
    --network-interfaces "${INTERFACES:-lo}" python ../digits/train_horovod.py "$@"
