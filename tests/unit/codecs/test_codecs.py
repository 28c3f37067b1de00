"""Codecs by themselves: the suite that each must pass, names and settings, keys."""

from __future__ import annotations

import base64
import hmac
import importlib.metadata
import itertools
import json
import os
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import zstandard

from tierckpt.codecs import (
    FILE_VARIABLE,
    KEY_VARIABLE,
    AesGcm,
    BlockId,
    Codec,
    CodecError,
    Pipeline,
    Zstd,
    gather_planes,
    key_fingerprint,
    scatter_planes,
)
from tierckpt.codecs.difference import difference, undone
from tierckpt.config import Config, LocalConfig, PeerConfig, PersistentConfig, load_config
from tierckpt.errors import ConfigError, CorruptShardError
from tierckpt.format import Buffer, Encoding, Parameter, VersionId
from tierckpt.storage.persistent import PersistentStore, PosixBackend
from tierckpt.testing import BLOCKS, PLACE, CodecConformance, HidingConformance, noise

KEY, OTHER_KEY = "5e" * 32, "a7" * 32


@pytest.fixture(autouse=True)
def a_key_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FILE_VARIABLE, raising=False)
    monkeypatch.setenv(KEY_VARIABLE, KEY)


class TestZstd(CodecConformance):
    def make_codec(self) -> Codec:
        return Zstd(level=3)


class TestAesGcm(HidingConformance):
    def make_codec(self) -> Codec:
        return AesGcm()


class Mirror:
    """A user's own codec, as short as possible."""

    name = "mirror"
    most_extra_bytes = 1
    hides = False

    def __init__(self, mark: int = 1) -> None:
        self.mark = mark

    def parameters(self) -> Mapping[str, Parameter]:
        return {"mark": self.mark}

    def encode(self, block: Buffer, where: BlockId) -> Buffer:
        return bytes([self.mark]) + bytes(block)[::-1]

    def decode(self, block: Buffer, where: BlockId) -> Buffer:
        if block[0] != self.mark:
            raise CorruptShardError("another mark")
        return bytes(block)[:0:-1]


# --- the codecs ---------------------------------------------------------------------------------


def test_planes_are_gathered_and_scattered() -> None:
    assert bytes(gather_planes(b"aA1bB2cC3", 3)) == b"abcABC123"
    assert bytes(scatter_planes(b"abcABC123", 3)) == b"aA1bB2cC3"
    with pytest.raises(CorruptShardError):
        scatter_planes(b"abcd", 3)


def test_numbers_compress_better_when_their_size_is_known() -> None:
    block = BLOCKS["numbers"]
    plain = Zstd().encode(block, PLACE)
    shuffled = Zstd().encode(block, BlockId("job", "5eed", 1, 8, 0, 2, 3, item_bytes=4))
    assert len(shuffled) < len(plain) < len(block)


def test_noise_is_stored_as_it_is() -> None:
    assert bytes(Zstd().encode(noise(5000), PLACE)) == b"\0" + noise(5000)


@pytest.mark.parametrize("level", [23, -101, 1.5, "fast"])
def test_a_level_that_does_not_exist_is_refused(level: Any) -> None:
    with pytest.raises(CodecError, match="levels are whole, -100 to 22"):
        Zstd(level)


def test_encryption_follows_format_md(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decrypted with HKDF written out (RFC 5869) and AES-256-GCM alone."""
    aead = pytest.importorskip("cryptography.hazmat.primitives.ciphers.aead")
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    stored = bytes(AesGcm().encode(b"a block", PLACE))
    extracted = hmac.digest(stored[:32], bytes.fromhex(KEY), "sha256")
    block_key = hmac.digest(extracted, b"tierckpt block key\x01", "sha256")
    plain = aead.AESGCM(block_key).decrypt(bytes(12), stored[32:], PLACE.as_bytes())
    assert plain == b"a block"


# --- keys ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [bytes.fromhex(KEY), KEY.encode(), f"{KEY}\n".encode()])
def test_a_key_file_holds_bytes_or_digits(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "key"
    path.write_bytes(content)
    monkeypatch.setenv(FILE_VARIABLE, str(path))
    monkeypatch.setenv(KEY_VARIABLE, OTHER_KEY)  # the file comes first
    assert AesGcm().key_id == key_fingerprint(bytes.fromhex(KEY))


def test_without_a_key_the_error_says_where_it_was_looked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(KEY_VARIABLE)
    with pytest.raises(CodecError, match=f"{FILE_VARIABLE}.*{KEY_VARIABLE}"):
        AesGcm()


def test_a_missing_key_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "nowhere"))
    with pytest.raises(CodecError, match=f"{tmp_path}/nowhere, which {FILE_VARIABLE} names"):
        AesGcm()


@pytest.mark.parametrize("text", ["5e" * 31, "not hexadecimal at all, but secret", "5e" * 32 + "x"])
def test_an_invalid_key_is_not_shown(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, text)
    with pytest.raises(CodecError, match="64 hexadecimal digits") as caught:
        AesGcm()
    assert text not in str(caught.value)


def test_another_key_is_named_by_its_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    written = AesGcm()
    monkeypatch.setenv(KEY_VARIABLE, OTHER_KEY)
    with pytest.raises(CodecError, match=f"{written.key_id}.*{KEY_VARIABLE}") as caught:
        Pipeline.of_description((("aes-gcm", written.parameters()),))
    assert KEY not in str(caught.value)


def test_a_key_is_in_nothing_shown_or_written() -> None:
    codec = AesGcm()
    shown = f"{codec!r} {codec.parameters()} {json.dumps(dict(codec.parameters()))}"
    assert KEY not in shown.lower()
    assert repr(bytes.fromhex(KEY)) not in shown
    assert "\\x5e" not in shown


# --- settings ------------------------------------------------------------------------------------


def test_a_setting_is_a_row_of_modules() -> None:
    made = Pipeline.of_setting("incremental full_every=4, zstd level=-3, zstd, aes-gcm", "here")
    assert [codec.name for codec in made.codecs] == ["zstd", "zstd", "aes-gcm"]
    assert made.full_every == 4
    assert made.hides
    assert made.description[0] == ("zstd", {"level": -3})
    assert not Pipeline.of_setting(" ", "here")
    assert Pipeline.of_setting("incremental", "here").full_every == 8


def test_a_row_is_undone_in_reverse() -> None:
    made = Pipeline.of_setting("zstd level=1, zstd, aes-gcm", "here")
    block = BLOCKS["numbers"]
    stored = made.encode(block, PLACE)
    again = Pipeline.of_description(json.loads(json.dumps(made.description)))
    assert bytes(again.decode(stored, PLACE)) == block
    assert len(stored) < len(block) / 2, "encryption first would leave nothing to compress"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("zsdt", "the codec 'zsdt' is unknown; known are: aes-gcm, delta, incremental, zstd"),
        ("zstd levle=3", "takes these parameters: level"),
        ("zstd 3", "cannot read '3'; parameters are given as name=value"),
        ("zstd level=99", "levels are whole"),
        ("zstd, incremental", "it must come first"),
        ("incremental full_every=1", "a whole number from 2 on"),
        ("incremental depth=1", "takes full_every"),
        ("incremental, delta, zstd", "only one of incremental and delta can"),
        ("zstd,,aes-gcm", "the codec '' is unknown"),
    ],
)
def test_an_impossible_setting_is_reported_before_the_first_commit(text: str, why: str) -> None:
    for level, kind in (("local", LocalConfig), ("persistent", PersistentConfig)):
        with pytest.raises(ConfigError, match=f"{level}_codecs.*{why}"):
            Config(**{level: kind(codecs=text)})


@pytest.mark.parametrize(
    ("text", "every", "why"),
    [
        ("delta", 5, "a codec that compresses must follow: delta, zstd"),
        ("delta, aes-gcm", 5, "a codec that compresses must follow"),
        ("zstd, delta", 5, "delta compares blocks as they are, so it must come first"),
        ("delta full_every=1, zstd", 5, "delta takes full_every, a whole number from 2 on"),
        (
            "delta, zstd",
            0,
            "only versions that are kept every so many steps, and persistent_keep is '2'",
        ),
    ],
)
def test_differences_need_a_compression_and_versions_to_keep(
    text: str, every: int, why: str
) -> None:
    keep = f"2, every {every}" if every else "2"
    with pytest.raises(ConfigError, match=f"persistent_codecs.*{why}"):
        Config(persistent=PersistentConfig(path="/x", codecs=text, keep=keep))
    Config(persistent=PersistentConfig(path="/x", codecs="delta, zstd", keep="2, every 5"))
    with pytest.raises(ConfigError, match="local_codecs takes incremental"):
        Config(local=LocalConfig(codecs="delta, zstd"))


def test_a_difference_is_read_as_format_md_says() -> None:
    """Bytes that were made without this package's encoder, and the record that names them."""
    base, block = (bytes((7 * i * k) % 256 for i in range(64)) for k in (3, 5))
    changed = b""
    for at in range(0, 64, 4):
        x, y = (int.from_bytes(each[at : at + 4], "little") for each in (block, base))
        s = (x - y + 2**31) % 2**32 - 2**31
        changed += (2 * s if s >= 0 else -2 * s - 1).to_bytes(4, "little")
    planes = bytes(changed[i] for first in range(4) for i in range(first, 64, 4))
    packed = zstandard.ZstdCompressor().compress(planes)
    made = Pipeline.of_description((("delta", {}), ("zstd", {"level": 3})))
    assert (made.delta, [codec.name for codec in made.codecs]) == (True, ["zstd"])
    decoded = made.decode(b"\4" + packed, PLACE)
    assert bytes(undone(decoded, base, 4)) == block
    text = {
        "codecs": [["delta", {}], ["zstd", {"level": 3}]],
        "blocks": [[3, 64]],
        "lengths": base64.b64encode(b"".join(n.to_bytes(4, "little") for n in (0, 9, 9, 9))),
        "base": [1, 40],
        "differences": [[1, 0], [2, 4]],
    }
    encoding = Encoding.of_json(text)
    assert (encoding.differences, encoding.base) == ({1: 4, 2: 4}, VersionId(1, 40))
    assert json.loads(json.dumps(encoding.as_json()))["differences"] == [[1, 0], [2, 4]]
    lengths = base64.b64encode(b"\1\0\0\0" * 4)
    for wrong in ({"base": None, "lengths": lengths}, {"differences": [[2, 4]]}):
        with pytest.raises(ValueError, match="differences to another version"):
            Encoding.of_json({**text, **wrong})
    with pytest.raises(ValueError, match="have \\[3\\] bytes"):
        Encoding.of_json({**text, "differences": [[3, 3]]})


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_differences_of_any_bits_are_undone(size: int) -> None:
    chance = random.Random(size)
    edges = b"".join(n.to_bytes(size, "little") for n in (0, 1, 2 ** (8 * size) - 1)) * 24
    edges = edges.ljust(600, b"\x80")[: 600 // size * size]
    others = [chance.randbytes(len(edges)), edges, bytes(len(edges)), edges[::-1]]
    for block, base in itertools.product(others, others):
        assert bytes(undone(difference(block, base, size), base, size)) == block
    with pytest.raises(CorruptShardError, match="no difference to"):
        undone(edges + bytes(8), edges, size)


def test_a_missing_package_is_reported_with_the_package_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ConfigError, match=r"pip install 'tierckpt\[compression\]'"):
        Config(local=LocalConfig(codecs="zstd"))
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(ConfigError, match=r"pip install 'tierckpt\[encryption\]'"):
        Config(local=LocalConfig(codecs="aes-gcm"))


def test_the_key_variables_are_no_settings() -> None:
    environment = {
        **os.environ,
        KEY_VARIABLE: KEY,
        FILE_VARIABLE: "x",
        "TIERCKPT_LOCAL_CODECS": "",
    }
    assert KEY not in str(load_config(environment=environment))


def test_encrypted_shards_get_no_parity_in_the_clear() -> None:
    peer = PeerConfig(redundancy="xor")
    with pytest.raises(ConfigError, match="parity is made of unencrypted shards"):
        Config(local=LocalConfig(codecs="zstd, aes-gcm"), peer=peer)
    Config(local=LocalConfig(codecs="incremental, zstd"), peer=peer)


def install(monkeypatch: pytest.MonkeyPatch, group: str, **found: str) -> None:
    """Pretend that packages with these entry points are installed."""
    here = sys.modules[__name__]
    monkeypatch.setitem(sys.modules, "somebodys", here)
    points = [importlib.metadata.EntryPoint(name, at, group) for name, at in found.items()]
    found_points = importlib.metadata.EntryPoints(points)
    monkeypatch.setattr(importlib.metadata, "entry_points", found_points.select)


def test_a_module_of_somebody_elses_is_an_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "tierckpt.codecs", mirror="somebodys:Mirror", broken="no_such_package:It")
    made = Pipeline.of_setting("mirror mark=9, zstd", "here")
    assert made.description == (("mirror", {"mark": 9}), ("zstd", {"level": 1}))
    assert bytes(made.decode(made.encode(b"content", PLACE), PLACE)) == b"content"
    with pytest.raises(ConfigError, match=r"broken \(no_such_package:It\) cannot be loaded"):
        Pipeline.of_setting("broken", "here")
    with pytest.raises(ConfigError, match="broken, delta, incremental, mirror, zstd"):
        Pipeline.of_setting("mirrors", "here")


class Moody:
    """A user's codec that needs a file."""

    def __init__(self) -> None:
        raise FileNotFoundError("/etc/mood")


def test_a_module_that_cannot_be_made_is_a_setting_that_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On one node alone, perhaps: all ranks get a ConfigError, and no other error."""
    install(monkeypatch, "tierckpt.codecs", moody="somebodys:Moody")
    with pytest.raises(ConfigError, match=r"moody cannot be made: FileNotFoundError: /etc/mood"):
        Pipeline.of_setting("moody", "here")
    with pytest.raises(CodecError, match="was encoded with the codec 'moody'"):
        Pipeline.of_description((("moody", {}),))


class Shelf(PosixBackend):
    """A user's own store, selected by its URL."""

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(url.removeprefix("shelf:/"), **options)


def test_a_store_of_somebody_elses_is_an_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, "tierckpt.backends", shelf="somebodys:Shelf", broken="no_such_package:It")
    store = PersistentStore(f"shelf:/{tmp_path}/place", shared_writes=False)
    store.create()
    assert (tmp_path / "place").is_dir()
    assert not store.backend.shared_writes
    assert store.versions() == []
    with pytest.raises(
        ConfigError, match=r"backend broken \(no_such_package:It\) cannot be loaded"
    ):
        PersistentStore("broken://place")
