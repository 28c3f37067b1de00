"""Codecs: reversible operations on every block of a shard, and their sequence.

A `Codec` knows nothing of files, levels or other blocks, and keeps nothing between calls. So one
instance serves any number of shards and threads, a block can be read without its neighbours, and
memory stays bounded by a few blocks. (Filters in sequence over chunks are HDF5's idea.)

A `Pipeline` is a sequence of codecs, as a setting or a manifest names them. A setting is `"name
parameter=value ..., name ..."`. A name is one of ours, or an entry point of the group
`tierckpt.codecs`: a class with the interface `Codec`:

    [options.entry_points]
    tierckpt.codecs =
        mine = my_package:MyCodec
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from msgspec import Struct
from msgspec.structs import replace

from tierckpt._entry_points import load
from tierckpt._text import error_text
from tierckpt.errors import ConfigError, TierckptError
from tierckpt.format.manifest import Buffer, Description, Parameter


class CodecError(TierckptError):
    """A codec cannot work: its package or its key is missing, or is another one."""


class BlockId(Struct, frozen=True):
    """Identity of a block. No two blocks of a job agree in all fields but the last."""

    job: str
    run_id: str
    generation: int
    version: int
    shard: int
    shards: int
    index: int
    """Number of the block in the shard."""
    item_bytes: int = 1
    """Size of the numbers in the block (of most of them). Known only when encoding."""

    def as_bytes(self) -> bytes:
        """Everything but `item_bytes`, for codecs that bind a block to its place."""
        place = (self.job, self.run_id, self.generation, self.version, self.shard, self.shards)
        return json.dumps([*place, self.index], separators=(",", ":")).encode()


class Codec(Protocol):
    """A codec's class is called with the user's parameters as keywords. To read the blocks of
    another instance, it is called with that instance's `parameters`.

    Any thread may call it, several at once. Long work should release the GIL.
    `testing.CodecConformance` checks this contract.
    """

    name: str
    """Name in the settings and in manifests."""
    most_extra_bytes: int
    """The result of `encode` is at most this much longer than its input."""
    hides: bool
    """True when the result of `encode` reveals nothing of the content."""

    def parameters(self) -> Mapping[str, Parameter]:
        """Parameters that a reader needs. Manifests show them to anybody: no secrets."""
        ...

    def encode(self, block: Buffer, where: BlockId) -> Buffer:
        """Bytes to store for a block; at least one. `block` is the caller's and not kept.

        Raises CodecError.
        """
        ...

    def decode(self, block: Buffer, where: BlockId) -> Buffer:
        """The exact inverse of `encode`.

        Raises CorruptShardError when it detects that `block` is not a result of `encode`; the
        shard's own checksums find the rest later. Raises CodecError. The result must have a bounded
        length, whatever the input.
        """
        ...


GROUP = "tierckpt.codecs"
DIFFERENCES: Description = (("delta", {}),)
"""First in the description of a version with differences to another one."""
OURS = {
    "aes-gcm": ("aes_gcm", "AesGcm"),
    "zstd": ("zstd", "Zstd"),
}
INCREMENTAL, DELTA = "incremental", "delta"
WAYS_TO_REFER = (INCREMENTAL, DELTA)
FULL_EVERY = 8
"""One in this number of versions is whole, unless the user sets another number."""


class Pipeline(Struct, frozen=True):
    """The operations of a level on blocks. False when there are none. Any thread."""

    codecs: tuple[Codec, ...] = ()
    full_every: int = 0
    """One in this number of versions is whole, the others refer to it; 0: all are whole."""
    delta: bool = False
    """Changed blocks are stored as differences to that version's."""

    @staticmethod
    def of_setting(text: str, setting: str) -> Pipeline:
        """The pipeline that the value `text` of `setting` asks for.

        Raises ConfigError for an unknown codec, and for one that cannot be used here because a
        package or a key is missing.
        """
        codecs, full_every, delta = [], 0, False
        for number, part in enumerate(text.split(",") if text.strip() else ()):
            name, *rest = part.split() or [""]
            parameters = dict(_parameter(each, setting) for each in rest)
            if name in WAYS_TO_REFER:
                if number:
                    raise ConfigError(
                        f"{setting} is {text!r}: {name} compares blocks as they are, so it must "
                        "come first, and only one of "
                        f"{' and '.join(WAYS_TO_REFER)} can"
                    )
                full_every, delta = _full_every(name, parameters, setting), name == DELTA
                continue
            try:
                codecs.append(make_codec(name, parameters))
            except CodecError as error:
                raise ConfigError(f"{setting} is {text!r}: {error}") from error
        if delta and (not codecs or codecs[0].hides):
            raise ConfigError(
                f"{setting} is {text!r}: {DELTA} makes blocks that compress well, so a codec that "
                f"compresses must follow: {DELTA}, zstd"
            )
        return Pipeline(tuple(codecs), full_every, delta)

    @staticmethod
    def of_description(description: Description) -> Pipeline:
        """The pipeline that a manifest names, to decode. Raises CodecError if one is missing."""
        codecs = []
        delta = description[:1] == DIFFERENCES
        for name, values in description[delta:]:
            try:
                codecs.append(make_codec(name, values))
            except CodecError as error:
                raise CodecError(f"it was encoded with the codec {name!r}: {error}") from error
        return Pipeline(tuple(codecs), delta=delta)

    def whole(self) -> Pipeline:
        """The same codecs, for versions that refer to no other."""
        return replace(self, full_every=0, delta=False)

    def wrote(self, description: Description) -> bool:
        """Whether a manifest with this description is of this pipeline."""
        return description in (self.description, DIFFERENCES + self.description)

    def __bool__(self) -> bool:
        return bool(self.codecs) or self.full_every > 0

    @property
    def hides(self) -> bool:
        """True when the stored bytes reveal nothing of the content."""
        return any(codec.hides for codec in self.codecs)

    @property
    def description(self) -> Description:
        """Names and parameters, for manifests of whole versions."""
        return tuple((codec.name, dict(codec.parameters())) for codec in self.codecs)

    def encode(self, block: Buffer, where: BlockId) -> Buffer:
        """Apply all codecs in the order of the setting, see `Codec.encode`. Any unexpected
        exception is raised as a CodecError that names the codec."""
        for codec in self.codecs:
            with _named(codec, "encode", where):
                block = codec.encode(block, where)
        return block

    def decode(self, block: Buffer, where: BlockId) -> Buffer:
        """Undo all codecs in the reverse order, see `Codec.decode`. Errors as from `encode`."""
        for codec in reversed(self.codecs):
            with _named(codec, "decode", where):
                block = codec.decode(block, where)
        return block

    def most_bytes(self, image_bytes: int) -> int:
        """A bound on the length of an encoded shard, from the length of its image alone.

        Writers that share a file have to agree on offsets before the encoded lengths are known. The
        layout's blocks have at least a quarter of a mebibyte, except the last of each kind.
        """
        blocks = image_bytes // (128 * 1024) + 64
        extra = sum(codec.most_extra_bytes for codec in self.codecs)
        manifest_bytes = (1 << 16) + 16 * blocks
        return image_bytes + manifest_bytes + blocks * extra


@contextlib.contextmanager
def _named(codec: Codec, operation: str, where: BlockId) -> Iterator[None]:
    try:
        yield
    except TierckptError:
        raise
    except Exception as error:  # a user's codec may raise anything
        raise CodecError(
            f"the codec {codec.name} cannot {operation} block {where.index}: {error_text(error)}"
        ) from error


def make_codec(name: str, parameters: Mapping[str, Parameter]) -> Codec:
    """The codec of that name. Raises CodecError, listing the known codecs, or the parameters."""
    made = _class_of(name)
    try:
        inspect.signature(made).bind(**parameters)
    except TypeError as error:
        known = ", ".join(inspect.signature(made).parameters) or "none"
        raise CodecError(f"the codec {name} takes these parameters: {known}; {error}") from None
    try:
        codec: Codec = made(**parameters)
    except TierckptError:
        raise
    except Exception as error:  # unhandled on one rank, it would leave the others waiting
        raise CodecError(f"the codec {name} cannot be made: {error_text(error)}") from error
    return codec


def _class_of(name: str) -> Callable[..., Any]:
    if name in OURS:
        file, attribute = OURS[name]
        try:
            found: Callable[..., Any] = getattr(
                importlib.import_module(f".{file}", __package__), attribute
            )
        except ImportError as error:
            raise CodecError(f"the codec {name} cannot be used here: {error}") from error
        return found
    return load(GROUP, "codec", name, {*OURS, *WAYS_TO_REFER}, CodecError)


def _parameter(text: str, setting: str) -> tuple[str, Parameter]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise ConfigError(f"{setting}: cannot read {text!r}; parameters are given as name=value")
    for kind in (int, float):
        try:
            return name, kind(value)
        except ValueError:
            continue
    return name, value


def _full_every(name: str, parameters: Mapping[str, Parameter], setting: str) -> int:
    value = dict(parameters).pop("full_every", FULL_EVERY)
    if parameters.keys() - {"full_every"} or not isinstance(value, int) or value < 2:
        raise ConfigError(
            f"{setting}: {name} takes full_every, a whole number from 2 on, and nothing else"
        )
    return value
