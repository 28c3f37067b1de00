"""Erasure: parity that the members of a group store for each other, and how to rebuild from it.

Nothing here opens a socket or a file: plans are plain values, and kernels work on memory that they
are given. Each module builds on the ones before it:

- `gf256`: the field that the code computes in, and its coefficients;
- `codes`: which bytes of which members belong together;
- `exchange_plan`: which member sends which segment where, to encode and to rebuild;
- `groups`: which ranks protect one another;
- `parity_manifest`: the contents of a parity file's manifest;
- `isal`, `kernels`: the arithmetic over windows of memory.

All but the last line need only the standard library and xxhash.
"""
