"""The codec `aes-gcm`: encryption at rest, with a key never stored, sent or logged.

Every block is encrypted by itself with AES-256-GCM, and bound to its place: job, run, version,
shard and number of the block are authenticated with it, so blocks cannot be swapped, replayed into
another version or changed. Each block has its own key, which HKDF-SHA256 derives from the job's key
and 32 random bytes stored with the block (as in Tink's streaming AEAD). So no counter has
to survive a crash, and a nonce cannot repeat under one key. AES-GCM-SIV would need no derived key,
and took eight times the CPU (docs/decisions.md).

The key is 32 bytes, and is looked up in this order:

1. the file that TIERCKPT_ENCRYPTION_KEY_FILE names: 32 bytes, or 64 hexadecimal digits;
2. TIERCKPT_ENCRYPTION_KEY itself: 64 hexadecimal digits.

Not encrypted: the manifest's facts (job, version, lengths), the length of each stored block, and
checksums of the encrypted bytes.
"""

from __future__ import annotations

import hashlib
import hmac
import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tierckpt.errors import CorruptShardError
from tierckpt.format.manifest import Buffer, Parameter

from .codec import BlockId, CodecError

FILE_VARIABLE = "TIERCKPT_ENCRYPTION_KEY_FILE"
KEY_VARIABLE = "TIERCKPT_ENCRYPTION_KEY"
KEY_BYTES = 32
SALT_BYTES, TAG_BYTES = 32, 16
NONCE = bytes(12)
"""The same for all blocks, as each has its own key."""
GIVE = f"Give that key in the file that {FILE_VARIABLE} names, or in {KEY_VARIABLE}, on every node"
MAKE_ONE = "openssl rand -hex 32 makes one"


class AesGcm:
    """`key_id` is for readers: the key must be the one that the shard was written with.

    Raises CodecError, naming the places, when there is no key, or another one.
    """

    name = "aes-gcm"
    most_extra_bytes = SALT_BYTES + TAG_BYTES
    hides = True

    def __init__(self, key_id: str = "") -> None:
        found = find_key()
        if found is None:
            raise CodecError(_no_key(key_id))
        key, where = found
        self.key_id = fingerprint(key)
        if key_id and key_id != self.key_id:
            raise CodecError(
                f"{_needs(key_id)}, and the key in {where} has the id {self.key_id}. {GIVE}"
            )
        self._key, self._ciphers = key, _Ciphers()

    def __repr__(self) -> str:
        return f"AesGcm(key_id={self.key_id!r})"

    def parameters(self) -> Mapping[str, Parameter]:
        """A fingerprint, which does not reveal the key."""
        return {"key_id": self.key_id}

    def encode(self, block: Buffer, where: BlockId) -> Buffer:
        """Encrypt one block, see `Codec.encode`."""
        salt = os.urandom(SALT_BYTES)
        cipher = self._ciphers.of_block(self._key, salt)
        return b"".join((salt, cipher.encrypt(NONCE, block, where.as_bytes())))

    def decode(self, block: Buffer, where: BlockId) -> Buffer:
        """Decrypt one block, see `Codec.decode`. Raises CorruptShardError for a changed one."""
        view = memoryview(block)
        try:
            cipher = self._ciphers.of_block(self._key, bytes(view[:SALT_BYTES]))
            plain: bytes = cipher.decrypt(NONCE, view[SALT_BYTES:], where.as_bytes())
            return plain
        except (self._ciphers.invalid, ValueError) as error:
            raise CorruptShardError(
                f"block {where.index} of shard {where.shard} was changed, or was encrypted for "
                "another place"
            ) from error


class _Ciphers:
    """The classes used of the package `cryptography`. Threads may share one instance."""

    def __init__(self) -> None:
        try:
            aead = importlib.import_module("cryptography.hazmat.primitives.ciphers.aead")
            hashes = importlib.import_module("cryptography.hazmat.primitives.hashes")
            hkdf = importlib.import_module("cryptography.hazmat.primitives.kdf.hkdf")
            self.invalid = importlib.import_module("cryptography.exceptions").InvalidTag
        except ImportError as error:
            raise CodecError(
                f"the codec aes-gcm needs a package that is not installed ({error}); run: pip "
                "install 'tierckpt[encryption]'"
            ) from error
        self._aesgcm: Any = aead.AESGCM
        self._hkdf: Any = hkdf.HKDF
        self._hash: Any = hashes.SHA256

    def of_block(self, key: bytes, salt: bytes) -> Any:
        """AES-256-GCM with the block's key, which HKDF-SHA256 (RFC 5869) derives from `key`."""
        derive = self._hkdf(self._hash(), KEY_BYTES, salt, b"tierckpt block key")
        return self._aesgcm(derive.derive(key))


def _needs(key_id: str) -> str:
    return f"it is encrypted with the key whose id is {key_id}"


def _no_key(key_id: str) -> str:
    if key_id:
        return f"{_needs(key_id)}, and no key is given. {GIVE}"
    return (
        f"the codec aes-gcm has no key: neither {FILE_VARIABLE} (a file with it) nor "
        f"{KEY_VARIABLE} is set; it is 64 hexadecimal digits ({MAKE_ONE})"
    )


def find_key() -> tuple[bytes, str] | None:
    """The key, and a description of its place; None when none is given. Raises CodecError for an
    invalid key."""
    path, text = os.environ.get(FILE_VARIABLE, ""), os.environ.get(KEY_VARIABLE, "")
    if path:
        where = f"the file {path}, which {FILE_VARIABLE} names"
        try:
            found = Path(path).read_bytes()
        except OSError as error:
            raise CodecError(f"the key of aes-gcm: cannot read {where}: {error}") from error
    elif text:
        found, where = text.encode(), f"the environment variable {KEY_VARIABLE}"
    else:
        return None
    if len(found) == KEY_BYTES and path:
        return found, where
    try:
        key = bytes.fromhex(found.decode("ascii"))
    except ValueError:  # its text would show the key
        key = b""
    if len(key) != KEY_BYTES:
        raise CodecError(
            f"{where} does not hold a key of {KEY_BYTES} bytes: there are {len(found)} characters, "
            f"and it should be {2 * KEY_BYTES} hexadecimal digits ({MAKE_ONE})"
        )
    return key, where


def fingerprint(key: bytes) -> str:
    """Identify a key without revealing it: 64 bits of a MAC of a fixed text under the key."""
    return hmac.new(key, b"tierckpt key id", hashlib.sha256).hexdigest()[:16]
