"""Modules in a row, as a user's setting names them, and as a manifest does.

A setting is `"name parameter=value ..., name ..."`. A name is one of ours, or an entry point of the
group `tierckpt.codecs`, which is a class as `codec.Module` says:

    [options.entry_points]
    tierckpt.codecs =
        mine = my_package:MyModule
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tierckpt.errors import ConfigError, TierckptError
from tierckpt.format.encoding import Buffer, Description, Parameter

from .codec import BlockId, Codec, CodecError

GROUP = "tierckpt.codecs"
OURS = {
    "aes-gcm": ("aes_gcm", "AesGcm"),
    "zstd": ("zstd", "Zstd"),
}
INCREMENTAL = "incremental"
FULL_EVERY = 8
"""Of so many versions one is whole, unless the user says otherwise."""


@dataclass(frozen=True)
class Pipeline:
    """What a level does to blocks. False when that is nothing. Any thread."""

    codecs: tuple[Codec, ...] = ()
    full_every: int = 0
    """Of so many versions one is whole, the others refer to it; 0: all are whole."""

    @staticmethod
    def of_setting(text: str, what: str) -> Pipeline:
        """The pipeline that the setting called `what` asks for.

        Raises ConfigError for what is not known or cannot be used here: a package or a key is
        missing.
        """
        codecs, full_every = [], 0
        for number, part in enumerate(text.split(",") if text.strip() else ()):
            name, *rest = part.split() or [""]
            parameters = dict(_parameter(each, what) for each in rest)
            if name == INCREMENTAL:
                if number:
                    raise ConfigError(
                        f"{what} is {text!r}: {INCREMENTAL} compares blocks as they are, so it "
                        "must come first"
                    )
                full_every = _full_every(parameters, what)
                continue
            try:
                codecs.append(make_codec(name, parameters))
            except CodecError as error:
                raise ConfigError(f"{what} is {text!r}: {error}") from error
        return Pipeline(tuple(codecs), full_every)

    @staticmethod
    def of_description(description: Description) -> Pipeline:
        """What undoes that which a manifest names. Raises CodecError when it cannot be had."""
        codecs = []
        for name, values in description:
            try:
                codecs.append(make_codec(name, values))
            except CodecError as error:
                raise CodecError(f"it went through the codec {name!r}: {error}") from error
        return Pipeline(tuple(codecs))

    def __bool__(self) -> bool:
        return bool(self.codecs) or self.full_every > 0

    @property
    def hides(self) -> bool:
        """True when nobody can learn the content from what is stored."""
        return any(codec.hides for codec in self.codecs)

    @property
    def description(self) -> Description:
        """For manifests."""
        return tuple((codec.name, dict(codec.parameters())) for codec in self.codecs)

    def encode(self, block: Buffer, where: BlockId) -> Buffer:
        """See `Codec.encode`; in the order of the setting. Whatever else than they may raise comes
        out as a CodecError that names the codec."""
        for codec in self.codecs:
            with _named(codec, "encode", where):
                block = codec.encode(block, where)
        return block

    def decode(self, block: Buffer, where: BlockId) -> Buffer:
        """See `Codec.decode`; in the reverse order. Errors as from `encode`."""
        for codec in reversed(self.codecs):
            with _named(codec, "decode", where):
                block = codec.decode(block, where)
        return block

    def most_bytes(self, image_bytes: int) -> int:
        """A bound on the length of an encoded shard, from that of its image alone.

        Writers that share a file have to agree on places before they know how small theirs gets.
        The layout's blocks are a quarter of a mebibyte or more, but for the last of each kind.
        """
        blocks = image_bytes // (128 * 1024) + 64
        extra = sum(codec.most_extra_bytes for codec in self.codecs)
        manifest_bytes = (1 << 16) + 16 * blocks
        return image_bytes + manifest_bytes + blocks * extra


@contextlib.contextmanager
def _named(codec: Codec, what: str, where: BlockId) -> Iterator[None]:
    try:
        yield
    except TierckptError:
        raise
    except Exception as error:  # whatever a user's codec does
        raise CodecError(
            f"the codec {codec.name} cannot {what} block {where.index}: "
            f"{type(error).__name__}: {error}"
        ) from error


def make_codec(name: str, parameters: Mapping[str, Parameter]) -> Codec:
    """The codec of that name. Raises CodecError, saying which there are, and what they take."""
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
    except Exception as error:  # one that a rank alone met would leave the others waiting for it
        raise CodecError(
            f"the codec {name} cannot be made: {type(error).__name__}: {error}"
        ) from error
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
    from importlib.metadata import entry_points  # which is slow to import

    theirs = {point.name: point for point in entry_points(group=GROUP)}
    if name not in theirs:
        known = ", ".join(sorted({*OURS, INCREMENTAL, *theirs}))
        raise CodecError(
            f"there is no codec {name!r}; those there are: {known}. If it is a package's, "
            "install that on every node"
        )
    try:
        return theirs[name].load()  # type: ignore[no-any-return]
    except Exception as error:  # whatever somebody else's package does when it is imported
        raise CodecError(
            f"the codec {name} ({theirs[name].value}) cannot be loaded: {error}"
        ) from error


def _parameter(text: str, what: str) -> tuple[str, Parameter]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise ConfigError(f"{what}: cannot read {text!r}; parameters are given as name=value")
    for kind in (int, float):
        try:
            return name, kind(value)
        except ValueError:
            continue
    return name, value


def _full_every(parameters: Mapping[str, Parameter], what: str) -> int:
    value = dict(parameters).pop("full_every", FULL_EVERY)
    if parameters.keys() - {"full_every"} or not isinstance(value, int) or value < 2:
        raise ConfigError(
            f"{what}: {INCREMENTAL} takes full_every, a whole number from 2 on, and nothing else"
        )
    return value
