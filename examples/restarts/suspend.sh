#!/bin/sh
# Stops a launcher and all it started, or lets them go on. (Under Slurm: scontrol suspend, resume.)
#
#   ./suspend.sh STOP|CONT PID
family() {
    echo "$1"
    for child in $(ps -o pid= --ppid "$1"); do family "$child"; done
}

kill -s "$1" $(family "$2")
