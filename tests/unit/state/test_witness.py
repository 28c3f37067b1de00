"""Fingerprints of batches: equal for equal ones, and others differ as text."""

from __future__ import annotations

import json
from collections import UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from tierckpt.state import Comparison, Fingerprint, batch_fingerprint, witness_difference

Pair = namedtuple("Pair", "image target")


@dataclass
class Batch:
    ids: torch.Tensor
    name: str = "a"


class Lazy:
    """An object of another library: nothing of it is called."""

    def __len__(self) -> int:
        raise AssertionError

    @property
    def pixels(self) -> Any:
        raise AssertionError


def made(number: float = 0) -> dict[str, Any]:
    """A batch of everything, with values that depend on `number`."""
    source = torch.Generator().manual_seed(int(1000 * number))
    image = torch.rand(64, 3, 40, 40, generator=source)
    array = image.numpy()
    return {
        "one number": torch.tensor(number),
        "large": image,
        "channels last": image.to(memory_format=torch.channels_last),
        "view": image[:, :, ::2, 1:],
        "bfloat16": image.bfloat16()[:, 0],
        "with gradient": image[0].clone().requires_grad_(),
        "subclass": torch.nn.Parameter(image[1]),
        "arrays": (array, array.T, array.astype(np.uint8), np.float32(number)),
        "pair": Pair(image[:2], [1, number]),
        "encoding": UserDict({"ids": image[3], "n": number}),
        "dataclass": Batch(image[0, 0], f"{number}"),
        "strings": [f"sample {i} of {number}" for i in range(300)],
        "bytes": str(number).encode(),
        "paths": [f"/data/{number}/{i}.png" for i in range(4)],
        "uncollated": [
            {"ids": [int(2 * number), *range(50)], "x": torch.zeros(i)} for i in range(40)
        ],
        "empty": [[], {}, (), torch.zeros(0), None, set()],
        "other": [Lazy(), Lazy(), object],
        "sparse": torch.eye(3).mul(number + 1).to_sparse(),
    }


def seen(batch: Any) -> Fingerprint:
    """As it comes back from a checkpoint."""
    packed = batch_fingerprint(batch).packed()
    return Fingerprint.unpacked(json.loads(json.dumps({**packed, "on_device": []})))


def test_equal_batches_have_equal_fingerprints_and_each_field_counts() -> None:
    one, other = made(), made(0.5)
    assert witness_difference(seen(one), batch_fingerprint(made())) == ""
    without_content = {"empty", "other", "paths"}
    for name, value in one.items():
        text = witness_difference(seen(value), batch_fingerprint(other[name]))
        assert bool(text) == (name not in without_content), (name, text)


def test_each_sample_of_a_large_batch_counts() -> None:
    ids = torch.arange(64 * 600).reshape(64, 600)
    before = batch_fingerprint(ids)
    for sample in range(64):
        assert witness_difference(
            before, batch_fingerprint(ids.index_fill(0, torch.tensor(sample), 7))
        )


def image(number: int = 0, rows: int = 8) -> torch.Tensor:
    return torch.full((rows, 3), float(number))


@pytest.mark.parametrize(
    ("had", "has", "said"),
    [
        (image(), image(1), "other samples, or another augmentation of the same: the batch diff"),
        (image(), image(0, 6), "other samples or shapes: the batch is float32[6, 3], and was floa"),
        (
            [image(), torch.arange(8)],
            [image(1), torch.arange(8)],
            "other augmentation, or other samples: batch[0] differs, and batch[1] is the same",
        ),
        (
            {"ids": [[1, 2], [3]] * 9},
            {"ids": [[1], [2, 3]] * 9},
            "batch['ids'] is list[18], with other sizes inside than before",
        ),
        ({"ids": image()}, {"x": image()}, "shapes: batch['ids'] is absent, and was float32[8, 3]"),
        (["/a/1.png", "/a/2.png"], ["/tmp/7/1.png", "/tmp/7/2.png"], ""),
        (["/a/1.png", "/a/2.png"], ["/a/1.png", "/a/3.png"], "the batch differs"),
    ],
)
def test_differences_are_text(had: Any, has: Any, said: str) -> None:
    found = witness_difference(seen(had), batch_fingerprint(has))
    assert said in found
    assert bool(said) == bool(found)


def test_causes_follow_from_the_difference() -> None:
    same, other = {"a {b}": image(), "c": image()}, {"a {b}": image(), "c": image(1)}
    text = Comparison(
        differences=[witness_difference(seen(same), batch_fingerprint(other))], epoch=2
    ).text()
    assert "batch['c'] differs, and batch['a {b}'] is the same. Usual causes, the likel" in text
    assert text.index("has changed") < text.index("from a generator that Tierckpt did not find")
    had = batch_fingerprint(image()).with_indices([1])
    text = witness_difference(had, batch_fingerprint(image(1)).with_indices([1]))
    text = Comparison(differences=[text], epoch=2).text()
    assert text.index("has changed") > text.index("from a generator that Tierckpt did not find")
    text = Comparison(differences=["another length, {x}"], epoch=2).text()
    assert text.startswith("another length, {x}. So the data set, its order")
    assert text.endswith("data.set_epoch(3)")


def test_indices_tell_other_samples_from_other_augmentation() -> None:
    had = batch_fingerprint(image()).with_indices([1, 5, 2, 9, 3])
    text = witness_difference(had, batch_fingerprint(image(1)).with_indices([1, 5, 2, 9, 3]))
    assert text == "other augmentation: the samples have the same indices, and the batch differs"
    text = witness_difference(had, batch_fingerprint(image(1)).with_indices([1, 5, 2, 9, 4]))
    assert text == "other samples: the batch had the indices 1, 5, 2, 9, ..., now 1, 5, 2, 9, ..."
    many = batch_fingerprint(image()).with_indices([*range(5000)])
    assert witness_difference(many, batch_fingerprint(image()).with_indices([*range(1, 5001)]))
    assert (
        witness_difference(batch_fingerprint(image()), batch_fingerprint(image()).with_indices([1]))
        == ""
    )


def test_a_sample_on_a_device_is_kept_until_it_is_needed() -> None:
    """Meta tensors have no data; here, samples of a device stand beside the rows."""
    had, has = batch_fingerprint(image()), batch_fingerprint(image())
    for found, value in ((had, 1.0), (has, 2.0)):
        found.rows[0][2], found.on_device = "device", [torch.tensor([value])]
    assert "the batch differs" in witness_difference(had, has)
    assert witness_difference(had, Fingerprint(has.rows, had.on_device)) == ""
    assert witness_difference(had, batch_fingerprint(image(3))) == "", (
        "a sample is not all of its bytes"
    )


def test_a_batch_that_cannot_be_read_is_no_error() -> None:
    class Broken(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            raise KeyError(index)

        def __iter__(self) -> Any:
            raise KeyError

    batch = {"image": image(), "broken": Broken([1]), "target": image(1)}
    paths = {path: kind for path, kind, _ in batch_fingerprint(batch).rows}
    assert paths["['broken']"] == "unreadable: KeyError"
    assert witness_difference(batch_fingerprint(batch), batch_fingerprint(batch)) == ""
    assert "batch['target'] differs" in witness_difference(
        batch_fingerprint(batch), batch_fingerprint({**batch, "target": image()})
    )
