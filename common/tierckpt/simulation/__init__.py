"""Simulation of a job: how much of its time trains, under failures of processes, nodes and stores.

`scenario` is the description of a job, `scenario_file` reads it from TOML, `examples` has some to
start from, `units` times and sizes. `costs` computes durations from bandwidths, `intervals` chooses
intervals, `redundancy` has the groups of nodes that protect each other. `course` is one course of
the job, `replicas` simulates several, and gives means with confidence intervals. `report` and
`picture` are their forms as JSON and as a picture.

Failures are events of one superposed process, however many ranks there are. No step and no version
is an event: at a failure, the versions that exist are computed. docs/simulate.md has the model.
"""
