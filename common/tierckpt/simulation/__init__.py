"""Simulation of a job: how much of its time trains, under failures of processes, nodes and stores.

`scenario` is the description of a job, `scenario_file` reads it from TOML, `examples` has some to
start from. `costs` computes durations from bandwidths, `intervals` chooses intervals, and
`schedule` places versions on the time axis. `job` is the simulated job, `machines` its nodes and
spares, `shared_store` the file system of all, `redundancy` the groups of nodes that protect each
other. `replicas` runs a scenario several times and gives means with confidence intervals, `report`
has its forms as JSON and as a picture.

Failures are events of one superposed process, however many ranks there are. No step and no version
is an event: `schedule` computes at a failure which versions exist. docs/simulate.md has the model.
"""
