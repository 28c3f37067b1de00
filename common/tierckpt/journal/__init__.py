"""The gradient journal: the reduced gradients of every optimizer step, on the node's disk.

A restart loads the newest version and makes the journal's steps again, with the same optimizer and
the same gradients, bit for bit; see docs/internals/journal.md.

| module | content |
|---|---|
| `frames` | the bytes of a journal, and the names of its files; pure |
| `chain` | the records that follow a version, found alike on all ranks; pure |
| `segments` | journal files: reading and removal |
| `listing` | how far a journal leads, for `tierckpt list` |
| `images` | gradients and small state as the bytes of a shard |
| `writer` | the thread that appends them |
| `recorder` | one rank's journal, during the training |
| `journal` | the journal of a job that keeps none, and the interface to `recorder` |
| `copies` | a copy of another rank's journal |
| `search` | a restart: the records that lead on, and the rank that reads each |
| `replay` | a restart: the steps, made again |
| `unused` | the steps in a journal that a restart does not make again, in words |
| `support` | state that a journal cannot repeat, refused by name |

That a log of gradients is as good as checkpoints at every step is the idea of LowDiff (Yao et al.,
2025, arXiv:2509.04084), which logs compressed gradients; a log of inputs that a deterministic
program repeats is the redo log of databases (ARIES: Mohan et al., 1992).
"""
