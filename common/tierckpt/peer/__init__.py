"""Peer: how agents of different nodes make and keep parity for each other.

`erasure` plans which bytes belong together and which member sends which segment; this package
executes the plans. Each module builds on the ones before it:

- `address`, `party`: the address where an agent listens; a group with the addresses of its members;
- `wire`: frames on one connection between two agents that know the same secret;
- `read_server`, `read_client`: reading shards and parity through another node's agent;
- `transport`: the connections of one agent;
- `inbox`: received windows, written straight to their final memory;
- `parity_file`: the parity file on disk;
- `blame`: the member that is the cause when one waits for another in vain;
- `window_loop`, `exchange`: one version of one group: meet, process the windows, commit;
- `rebuild`: lost shards, computed from the surviving ones; knows no transport.

    transport = Transport(secret, own_host)                       # one for an agent and run
    Exchange(transport, party, shard, store).run()                # one for a version and rank
    rebuild(record, shards, parities, into)                       # at a restart

Standard library, numpy and xxhash; never torch.
"""
