"""Peer: how agents of different nodes make and keep parity for each other.

`erasure` plans which bytes belong together and which member sends which segment; this package
executes the plans, over connections of `net`. Each module builds on the ones before it:

- `remote_reads`: reading shards and parity through another node's agent;
- `transport`: the connections of one agent;
- `parity_file`: the parity file on disk;
- `windows`: windows, received straight into their final memory; lost shards, computed from the
  surviving ones, without a transport;
- `exchange`: one version of one group: meet, process the windows, commit; the cause when one member
  waits for another for too long.

    transport = Transport(secret, host)                           # one for an agent and run
    Exchange(transport, party, shard, store).run()                # one for a version and rank
    rebuild(record, shards, parities, into)                       # at a restart

Standard library, numpy and xxhash; never torch.
"""

from typing import TYPE_CHECKING

from tierckpt import lazy_exports

if TYPE_CHECKING:
    from .exchange import Exchange, Party, Report, Shard
    from .parity_file import Read, check_parity
    from .remote_reads import RemoteNode
    from .transport import Limits, Transport
    from .windows import AHEAD, rebuild, window_bytes_of

__getattr__ = lazy_exports(__name__)
