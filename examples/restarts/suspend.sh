#!/bin/sh
# Stops a launcher and all its processes, or continues them. (Under Slurm: scontrol suspend, resume.)
#
#   ./suspend.sh STOP|CONT PID
usage="usage: ./suspend.sh STOP|CONT PID"

family() {
    echo "$1"
    for child in $(ps -o pid= --ppid "$1"); do family "$child"; done
}

kill -s "${1:?$usage}" $(family "${2:?$usage}")
