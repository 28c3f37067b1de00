"""Peer: how agents of different nodes make and keep parity for each other.

`erasure` plans which bytes belong together and which member sends which segment; this package
executes the plans. Each module builds on the ones before it:

- `wire`: frames on one connection between two agents that know the same secret; their addresses;
- `remote_reads`: reading shards and parity through another node's agent;
- `transport`: the connections of one agent;
- `parity_file`: the parity file on disk;
- `windows`: windows, received straight into their final memory; lost shards, computed from the
  surviving ones, without a transport;
- `exchange`: one version of one group: meet, process the windows, commit; the cause when one member
  waits for another for too long.

    transport = Transport(secret, own_host)                       # one for an agent and run
    Exchange(transport, party, shard, store).run()                # one for a version and rank
    rebuild(record, shards, parities, into)                       # at a restart

Standard library, numpy and xxhash; never torch.
"""
