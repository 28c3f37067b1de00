"""The `peer` level's exchange: how agents of different nodes make and keep one another's parity.

`erasure` says which bytes belong together and who sends what; here it is done. By module, each
resting on those before it:

- `errors`: what goes wrong with a peer;
- `address`: where an agent listens;
- `wire`: frames on one connection between two agents that know the same secret;
- `read_server`, `remote`: what an agent lets others read, and how they do;
- `transport`: one agent's connections;
- `inbox`: what an exchange receives, put straight where it belongs;
- `parity`: the parity file and its manifest;
- `exchange`: one version of one group: meet, go round by plan, commit;
- `rebuild`: lost shards from what survived; knows no transport.

    transport = Transport(secret, own_host)                       # one an agent and life
    Exchange(transport, party, offer, store).run()                # one a version and rank
    rebuild(record, shards, parities, into)                       # at a restart

Standard library, numpy and xxhash; never torch.
"""
