"""The manifest: it decodes to the same values, or is refused."""

from __future__ import annotations

import json

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from tierckpt.errors import CorruptShardError, FormatError
from tierckpt.format import (
    ITERATION_COUNTS,
    Manifest,
    VersionFacts,
    VersionId,
    VersionManifest,
)

numbers = st.integers(0, 2**62)
ids = st.builds(VersionId, numbers, numbers)
facts = st.builds(
    VersionFacts,
    job=st.text(max_size=30),
    run_id=st.text(max_size=16),
    id=ids,
    shards=numbers,
    lineage=st.lists(st.tuples(numbers, numbers), max_size=4).map(tuple),
    iteration=numbers,
    iteration_counts=st.sampled_from(ITERATION_COUNTS),
    metric=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    complete=st.none() | ids,
    suspect=st.text(max_size=30),
)
manifests = st.builds(
    Manifest,
    facts=facts,
    shard=numbers,
    image_bytes=numbers,
    header_bytes=numbers,
    rank_state_bytes=numbers,
    digests=st.binary(max_size=80),
    created_seconds=st.floats(allow_nan=False, allow_infinity=False),
)

EXAMPLE = Manifest(
    facts=VersionFacts(
        job="ckpts-0123456789ab",
        run_id="5eed",
        id=VersionId(3, 12),
        shards=2,
        lineage=((1, 0), (3, 10)),
        iteration=14,
        iteration_counts="calls",
    ),
    shard=1,
    image_bytes=12288,
    header_bytes=4096,
    rank_state_bytes=77,
    digests=bytes(range(24)),
    created_seconds=1700000000.25,
)


@given(manifests)
def test_it_comes_back_as_it_was(manifest: Manifest) -> None:
    assert Manifest.decode(manifest.encode()) == manifest


@given(manifests)
@settings(max_examples=25)
def test_every_truncation_is_rejected(manifest: Manifest) -> None:
    encoded = manifest.encode()
    for length in range(len(encoded)):
        with pytest.raises(CorruptShardError):
            Manifest.decode(encoded[:length])


def test_it_names_the_unit_of_its_iteration() -> None:
    """Calls of `step()`, or optimizer steps; any other unit is refused."""
    steps = structs.replace(EXAMPLE, facts=structs.replace(EXAMPLE.facts, iteration_counts="steps"))
    assert Manifest.decode(steps.encode()) == steps != EXAMPLE
    assert (values_of(EXAMPLE)["iteration_counts"], values_of(steps)["iteration_counts"]) == (
        "calls",
        "steps",
    )
    silent = values_of(EXAMPLE)
    del silent["iteration_counts"]
    for values in (silent, silent | {"iteration_counts": "epochs"}):
        with pytest.raises(FormatError, match="iteration_counts"):
            Manifest.decode(sign(values))


def test_every_flipped_bit_is_rejected() -> None:
    encoded = EXAMPLE.encode()
    for position in range(8 * len(encoded)):
        damaged = bytearray(encoded)
        damaged[position // 8] ^= 1 << position % 8
        with pytest.raises(CorruptShardError):
            Manifest.decode(bytes(damaged))


def test_trailing_bytes_are_rejected() -> None:
    with pytest.raises(CorruptShardError):
        Manifest.decode(EXAMPLE.encode() + b"\0")


def sign(values: object) -> bytes:
    """Any text, with a valid checksum."""
    text = json.dumps(values).encode()
    return text + b"\n" + xxhash.xxh3_128_hexdigest(text).encode() + b"\n"


def values_of(manifest: Manifest) -> dict[str, object]:
    return dict(json.loads(manifest.encode().partition(b"\n")[0]))


def test_a_newer_major_version_is_refused_with_the_remedy() -> None:
    newer = values_of(EXAMPLE) | {"format_version": "2.0"}
    with pytest.raises(FormatError, match=r"format version 2\.0.*reads up to 1\.x.*newer"):
        Manifest.decode(sign(newer))


@pytest.mark.parametrize("version", ["1.0", "1.9"])
def test_one_of_another_minor_version_that_lacks_a_field_is_refused_with_the_remedy(
    version: str,
) -> None:
    other = values_of(EXAMPLE) | {"format_version": version}
    del other["iteration_counts"]
    told = rf"format version {version}, and it has no 'iteration_counts'.*reads 1\.1.*export"
    with pytest.raises(FormatError, match=told):
        Manifest.decode(sign(other))
    records = {"format": "tierckpt-version", "format_version": version}
    with pytest.raises(FormatError, match=rf"version record has format version {version}"):
        VersionManifest.decode(sign(records))


def test_a_newer_minor_version_is_read() -> None:
    newer = values_of(EXAMPLE) | {"format_version": "1.9", "added_later": [1, 2]}
    assert Manifest.decode(sign(newer)) == EXAMPLE


@pytest.mark.parametrize(
    "stranger",
    [
        [],
        "text",
        None,
        {},
        {"format": "something-else"},
        {"format": "tierckpt-manifest"},
        {"format": "tierckpt-manifest", "format_version": "one"},
        values_of(EXAMPLE) | {"lineage": [[1]]},
        values_of(EXAMPLE) | {"lineage": 7},
        values_of(EXAMPLE) | {"digests": 7},
        {k: v for k, v in values_of(EXAMPLE).items() if k != "iteration"},
    ],
)
def test_intact_bytes_that_are_no_manifest_are_refused(stranger: object) -> None:
    with pytest.raises(FormatError):
        Manifest.decode(sign(stranger))
