"""Scenarios to start from, as `tierckpt simulate --example NAME` prints them."""

from __future__ import annotations

EXAMPLES = {
    "cluster": """\
# 128 ranks on 16 nodes, all four levels.
# Times: 20ms, 1.5s, 3m, 8h, 2d, 1y. Sizes: 201MB, 1.5GB, 64GiB.
replicas = 10
seed = 1

[job]
ranks = 128
ranks_per_node = 8
step = "1s"
state = "14GB"              # parameters and optimizer, one copy
length = "90d"              # wall time to simulate

# Mean times between failures of ONE rank or node. Left out: never.
[failures]
process_every = "1y"        # the process dies, the memory of its node survives
reboot_every = "2y"         # the node loses its memory and keeps its disk
node_every = "1y"           # the node is lost with its memory and its disk
store_out_every = "60d"     # the store of all nodes does not answer
store_out = "1h"

[nodes]
spares = 1
repair = "2d"

[restart]
notice = "5s"
start = "40s"               # processes, imports, rendezvous, first step
warm_start = "3s"           # the same under `tierckpt run`, after the failure of a process
node = "2m"                 # until a spare has taken the place of a lost node

[bandwidth]
disk = "2GB"                # bytes a second, of one node
network = "5GB"             # of one node
store = "5GB"               # of the store, all nodes together

[levels.memory]
every_steps = 1
cost = "2ms"                # time that a version here adds to the training
[levels.local]
every = "60s"
cost = "20ms"
[levels.peer]
scheme = "xor"              # or "partner", "partner 2", "rs 4+2"
[levels.persistent]
every = "10m"               # or "young", "daly", "best" (of all levels together), "budget"
cost = "20ms"
""",
    "llama3": """\
# A job of the size of Llama 3 405B's: 16,384 GPUs, and 419 unexpected interruptions in 54 days
# (A. Dubey et al., 2024), of which 258 by parts of a node that had to be replaced.
replicas = 10
seed = 1

[job]
ranks = 16384
ranks_per_node = 8
step = "5s"
state = "5.7TB"             # 405 billion parameters, 14 bytes each
node_state = "356GB"        # a sixteenth; left out: a node needs all, as in data-parallel jobs
length = "54d"

[failures]
process_every = "5495d"     # 161 in 54 days, of 16,384 ranks
node_every = "429d"         # 258 in 54 days, of 2,048 nodes
store_out_every = "30d"
store_out = "30m"

[nodes]
spares = 32
repair = "2d"

[restart]
notice = "30s"
start = "3m"
warm_start = "20s"
node = "2m"

[bandwidth]
disk = "4GB"
network = "50GB"
store = "2TB"

[levels.memory]
every_steps = 1
cost = "10ms"
[levels.local]
every = "60s"
cost = "50ms"
[levels.peer]
scheme = "rs 4+2"
[levels.persistent]
every = "10m"
cost = "50ms"
""",
    "torch-save": """\
# Rank 0 writes everything with torch.save, all others wait, every rank reads the file.
replicas = 10
seed = 1

[job]
ranks = 128
ranks_per_node = 8
step = "1s"
state = "14GB"
length = "90d"

[failures]
process_every = "1y"
reboot_every = "2y"
node_every = "1y"

[restart]
notice = "30s"              # the launcher's
start = "40s"
node = "2m"

[bandwidth]
network = "1.5GB"           # what one rank writes: serialization, one stream
store = "5GB"

[levels.persistent]
every = "daly"
blocking = true
writers = 1
readers = "ranks"
""",
    "spot": """\
# 8 spot machines that are taken away once a day each, without local disks that survive.
replicas = 20
seed = 1

[job]
ranks = 64
ranks_per_node = 8
step = "500ms"
state = "6GB"
length = "14d"

[failures]
node_every = "1d"
process_every = "180d"

[restart]
notice = "5s"
start = "40s"
warm_start = "3s"
node = "90s"                # until another machine has joined

[bandwidth]
network = "3GB"
store = "10GB"

[levels.memory]
every_steps = 1
cost = "2ms"
[levels.local]
every = "15s"
cost = "20ms"
[levels.peer]
scheme = "partner"
[levels.persistent]
every = "best"
cost = "20ms"
""",
    "constant": """\
# No levels: a recovery takes a constant time and loses no work, as in other models.
replicas = 10

[job]
ranks = 4096
ranks_per_node = 1
length = "inf"
work = "256d"

[failures]
node_every = "100d"
during_restart = false

[nodes]
spares = 264
repair = "40.4h"
bad_share = 0.15            # these fail bad_factor times as often, until a repair cures them
bad_factor = 6
repair_cures = 0.76

[constant]
recovery = "20m"
""",
}
