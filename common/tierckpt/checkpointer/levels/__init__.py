"""The levels of one job, without torch: for a training state, and for files of any program.

| module | content |
|---|---|
| `place_in_job` | what callbacks are told about a rank |
| `job_parts` | one rank's event log, agreement, node resources and levels |
| `node_resources` | the job's directory, its lock, and the slots of this rank |
| `tiers` | access to all levels, and their updates at the start of a run |
| `promotion` | the way of a version from local to other nodes and to the persistent level |
| `sealed_versions` | versions in memory that become durable outside a boundary |
| `rounds` | rounds of votes: which levels the version of a boundary goes to |
| `repair` | a restored version becomes complete and protected again |
"""
