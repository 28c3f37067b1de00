"""Redundancy: what the members of a group store for one another, and how a lost shard comes back.

Nothing here opens a socket or a file: plans are plain values, kernels work on memory they are
given. By module, each resting on those before it:

- `field`: the numbers that the code counts in, and its coefficients;
- `codes`: which bytes of which members belong together;
- `schedule`: who sends what to whom, to encode and to rebuild;
- `groups`: which ranks protect one another;
- `isal`, `kernels`: the arithmetic over windows of memory;
- `checks`: digests of parity, and the proof that rebuilt bytes are right.

All but the last two lines need the standard library only.
"""
