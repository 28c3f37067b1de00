"""Codecs: transformations of a shard's blocks on their way to a level, in the user's order.

    local_codecs = "zstd level=3"
    persistent_codecs = "incremental, zstd, aes-gcm"

| file | content |
|---|---|
| `codec` | a codec's interface; a sequence of codecs; their names, also from entry points |
| `zstd`, `aes_gcm` | the codecs that come with Tierckpt |
| `shard_coding` | encoding and decoding of a shard by blocks, also against an earlier version |
| `difference` | the difference of two blocks |

Nothing is imported here: the agent imports only the codecs that it uses.
"""

from typing import TYPE_CHECKING

from tierckpt import lazy_exports

if TYPE_CHECKING:
    from .aes_gcm import FILE_VARIABLE, KEY_VARIABLE, AesGcm, fingerprint as key_fingerprint
    from .codec import OURS as OUR_CODECS, BlockId, Codec, CodecError, Pipeline
    from .shard_coding import Base, Decoder, Read, cut
    from .zstd import Zstd, gather_planes, scatter_planes

__getattr__ = lazy_exports(__name__)
