"""Erasure: parity that the members of a group store for each other, and how to rebuild from it.

Nothing here opens a socket or a file: plans are plain values, and kernels work on memory that they
are given. Each module builds on the ones before it:

- `codes`: which bytes belong together, their coefficients, and who sends which segment to whom;
- `groups`: which ranks protect one another;
- `parity_manifest`: the contents of a parity file's manifest;
- `kernels`: the arithmetic over windows of memory.

All but the last line need only the standard library and xxhash.
"""

from typing import TYPE_CHECKING

from tierckpt import lazy_exports

if TYPE_CHECKING:
    from .codes import Code, Matrix, MemberPlan, Round, Segment, Stripes, Task, coefficient
    from .codes import decoding, inverse, invert, multiply, plan_encode, plan_member, plan_rebuild
    from .codes import transfers
    from .groups import RedundancyGroup, Scheme, TooFewDomainsError, plan_groups
    from .kernels import ISAL_MISSING, Product, find_isal
    from .parity_manifest import ParityManifest

__getattr__ = lazy_exports(__name__)
