"""Connections between machines. Each module builds on the ones before it:

- `limits`: limits of sizes, numbers and time;
- `addresses`: where a process listens, and this machine's own address;
- `link`: frames on one connection;
- `handshake`: both sides prove that they know a secret; a listener that admits only those.

What a connection says is its users': agents (`peer`), node leaders (`coordination.leader_tree`),
and the copies of a journal (`journal.copies`).
"""

from typing import TYPE_CHECKING

from tierckpt import lazy_exports

if TYPE_CHECKING:
    from .addresses import Address, address_of, own_host, own_network
    from .handshake import PROTOCOL, Admission, Caller, Listener, admit, greet
    from .limits import HELLO_SECONDS
    from .link import Link, reach

__getattr__ = lazy_exports(__name__)
