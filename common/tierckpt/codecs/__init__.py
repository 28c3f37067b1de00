"""Codecs: transformations of a shard's blocks on their way to a level, in the user's order.

    local_codecs = "zstd level=3"
    persistent_codecs = "incremental, zstd, aes-gcm"

| file | content |
|---|---|
| `codec` | the interface of a codec |
| `zstd`, `aes_gcm` | the codecs that come with Tierckpt |
| `pipeline` | a sequence of codecs; their names, also from entry points |
| `encoder`, `decoder` | encoding and decoding of a shard, block by block |
| `delta` | incremental versions: unchanged blocks refer to an earlier version |

Nothing is imported here: the agent imports only the codecs that it uses.
"""
