"""Codecs: what is done to a shard's blocks on their way to a level, in the order the user gives.

    local_codecs = "zstd level=3"
    persistent_codecs = "incremental, zstd, aes-gcm"

| file | what |
|---|---|
| `codec` | what a codec is |
| `zstd`, `aes_gcm` | the codecs that come with Tierckpt |
| `pipeline` | several in a row; their names, also from entry points |
| `encoder`, `decoder` | a shard, block by block, there and back |
| `delta` | blocks that did not change are those of an earlier version |

Nothing is imported here: the agent pays only for what is used.
"""
