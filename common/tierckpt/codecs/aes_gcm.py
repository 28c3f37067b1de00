"""The module `aes-gcm`: encryption at rest, with a key that is never stored, sent or logged.

Every block is sealed by itself with AES-256-GCM, and bound to its place: job, life, version, shard
and number of the block are authenticated with it, so blocks cannot be swapped, replayed into
another version or changed. Nonces are 192 random bits, half of which go into a key of the block's
own (XAES-256-GCM, as the C2SP project specifies it): no counter has to survive a crash, and no
number of blocks that anybody could ever store makes a repetition likely. With GCM's own 96 bits
a job of a thousand nodes would be at the recommended limit of 2^32 blocks within weeks.

The key is 32 bytes, looked for in this order:

1. the file that TIERCKPT_ENCRYPTION_KEY_FILE names: 32 bytes, or 64 hexadecimal digits;
2. TIERCKPT_ENCRYPTION_KEY itself: 64 hexadecimal digits.

What is left in the clear: the manifest's facts (job, version, lengths), how long each stored block
is, and checksums of what was encrypted.
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
from tierckpt.format.encoding import Buffer, Parameter

from .codec import BlockId, CodecError

FILE_VARIABLE = "TIERCKPT_ENCRYPTION_KEY_FILE"
KEY_VARIABLE = "TIERCKPT_ENCRYPTION_KEY"
KEY_BYTES = 32
NONCE_BYTES, TAG_BYTES = 24, 16
GIVE = f"Give that one in the file that {FILE_VARIABLE} names, or in {KEY_VARIABLE}, on every node"
MAKE_ONE = "openssl rand -hex 32 makes one"


class AesGcm:
    """`key_id` is for readers: the key must be the one that it was written with.

    Raises CodecError, naming the places, when there is no key, or another one.
    """

    name = "aes-gcm"
    most_extra_bytes = NONCE_BYTES + TAG_BYTES
    hides = True

    def __init__(self, key_id: str = "") -> None:
        found = find_key()
        if found is None:
            raise CodecError(_no_key(key_id))
        key, where = found
        self.key_id = fingerprint(key)
        if key_id and key_id != self.key_id:
            raise CodecError(f"{_needs(key_id)}, and the one in {where} has {self.key_id}. {GIVE}")
        self._xaes = Xaes(key)

    def __repr__(self) -> str:
        return f"AesGcm(key_id={self.key_id!r})"

    def parameters(self) -> Mapping[str, Parameter]:
        """A fingerprint, from which the key cannot be found."""
        return {"key_id": self.key_id}

    def encode(self, block: Buffer, where: BlockId) -> Buffer:
        """See `Module.encode`."""
        nonce = os.urandom(NONCE_BYTES)
        return b"".join((nonce, self._xaes.seal(nonce, block, where.as_bytes())))

    def decode(self, block: Buffer, where: BlockId) -> Buffer:
        """See `Module.decode`. Raises CorruptShardError for what was changed, or moved."""
        view = memoryview(block)
        try:
            return self._xaes.open(view[:NONCE_BYTES], view[NONCE_BYTES:], where.as_bytes())
        except (self._xaes.invalid, ValueError) as error:
            raise CorruptShardError(
                f"block {where.index} of shard {where.shard} is not what was encrypted for this "
                "place: it was changed, or is another's"
            ) from error


class Xaes:
    """XAES-256-GCM, https://c2sp.org/XAES-256-GCM. Threads may share one."""

    def __init__(self, key: bytes) -> None:
        try:
            ciphers = importlib.import_module("cryptography.hazmat.primitives.ciphers")
            aead = importlib.import_module("cryptography.hazmat.primitives.ciphers.aead")
            self.invalid = importlib.import_module("cryptography.exceptions").InvalidTag
        except ImportError as error:
            raise CodecError(
                f"the module aes-gcm needs a package that is not installed ({error}); run: pip "
                "install 'tierckpt[encryption]'"
            ) from error
        self._gcm: Any = aead.AESGCM
        self._cipher: Any = ciphers.Cipher(ciphers.algorithms.AES(key), ciphers.modes.ECB())
        doubled = int.from_bytes(self._aes(bytes(16)), "big") << 1
        if doubled >> 128:  # multiplied by x in GF(2^128)
            doubled ^= (1 << 128) | 0x87
        self._mask = doubled

    def seal(self, nonce: Buffer, data: Buffer, bound: bytes) -> bytes:
        """Ciphertext and tag."""
        sealed: bytes = self._of(nonce).encrypt(bytes(nonce[12:]), data, bound)
        return sealed

    def open(self, nonce: Buffer, sealed: Buffer, bound: bytes) -> bytes:
        """The inverse. Raises `invalid`."""
        data: bytes = self._of(nonce).decrypt(bytes(nonce[12:]), sealed, bound)
        return data

    def _of(self, nonce: Buffer) -> Any:
        """The cipher of one block: two blocks of CMAC over the first half of its nonce are its
        key."""
        if len(nonce) != NONCE_BYTES:
            raise ValueError(f"a nonce of {len(nonce)} bytes")
        halves = []
        for number in (1, 2):
            message = bytes((0, number)) + b"X\x00" + bytes(nonce[:12])
            masked = int.from_bytes(message, "big") ^ self._mask
            halves.append(self._aes(masked.to_bytes(16, "big")))
        return self._gcm(b"".join(halves))

    def _aes(self, block: bytes) -> bytes:
        encryptor = self._cipher.encryptor()
        made: bytes = encryptor.update(block)
        return made


def _needs(key_id: str) -> str:
    return f"it is encrypted with the key whose id is {key_id}"


def _no_key(key_id: str) -> str:
    if key_id:
        return f"{_needs(key_id)}, and no key is given. {GIVE}"
    return (
        f"the module aes-gcm has no key: neither {FILE_VARIABLE} (a file with it) nor "
        f"{KEY_VARIABLE} is set; it is 64 hexadecimal digits ({MAKE_ONE})"
    )


def find_key() -> tuple[bytes, str] | None:
    """The key, and in words where it was found; None when none is given. Raises CodecError for
    what is no key."""
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
    except ValueError:  # whose text would show the key
        key = b""
    if len(key) != KEY_BYTES:
        raise CodecError(
            f"{where} does not hold a key of {KEY_BYTES} bytes: there are {len(found)} characters, "
            f"and it should be {2 * KEY_BYTES} hexadecimal digits ({MAKE_ONE})"
        )
    return key, where


def fingerprint(key: bytes) -> str:
    """Names a key without telling it: 64 bits of a MAC that the key makes of a fixed text."""
    return hmac.new(key, b"tierckpt key id", hashlib.sha256).hexdigest()[:16]
