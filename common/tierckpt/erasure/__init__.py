"""Erasure: what the members of a group store for one another, and how a lost shard is rebuilt.

Nothing here opens a socket or a file: plans are plain values, kernels work on memory that they are
given. Each module rests on those before it:

- `gf256`: the field that the code computes in, and its coefficients;
- `codes`: which bytes of which members belong together;
- `exchange_plan`: who sends what to whom, to encode and to rebuild;
- `groups`: which ranks protect one another;
- `parity_manifest`: what a parity file records about itself;
- `isal`, `kernels`: the arithmetic over windows of memory.

All but the last line need the standard library and xxhash only.
"""
