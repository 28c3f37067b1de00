"""Peer: how agents of different nodes make and keep one another's parity.

`erasure` plans which bytes belong together and who sends what; this package does it. Each module
rests on those before it:

- `address`: where an agent listens;
- `wire`: frames on one connection between two agents that know the same secret;
- `read_server`, `read_client`: what an agent lets others read, and how they read it;
- `transport`: one agent's connections;
- `inbox`: received windows, placed where they belong;
- `parity_file`: the parity file on disk;
- `window_loop`, `exchange`: one version of one group: meet, go through the plan, commit;
- `rebuild`: lost shards from what survived; knows no transport.

    transport = Transport(secret, own_host)                       # one for an agent and run
    Exchange(transport, party, offer, store).run()                # one for a version and rank
    rebuild(record, shards, parities, into)                       # at a restart

Standard library, numpy and xxhash; never torch.
"""
