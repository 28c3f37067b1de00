"""Trees: the result of a state_dict() is restored exactly, or is refused by name."""

from __future__ import annotations

import collections
import datetime
import enum
import itertools
import math
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from tests.support.exact import image
from tierckpt.errors import FormatError, UnsupportedStateError
from tierckpt.state import FileWindows, KeptFile, RoutedState, tree_codec
from tierckpt.storage import end_without, files_at_end


def encoded(node: Any, arena: tree_codec.Arena) -> bytes:
    whole = tree_codec.EncodedTree(node, arena)
    target = torch.empty(whole.nbytes, dtype=torch.uint8)
    whole.copy(0, target)
    return target.numpy().tobytes()


def through(value: Any) -> Any:
    arena = tree_codec.Arena()
    node = tree_codec.pack(value, "extra['x']", arena.keep)
    return tree_codec.decode(encoded(node, arena))


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**2000), 2**2000),
    st.floats(),
    st.complex_numbers(),
    st.text(st.characters()),
    st.binary(),
)
keys = st.one_of(
    st.text(max_size=5),
    st.integers(),
    st.booleans(),
    st.none(),
    st.tuples(st.integers(), st.text()),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4).map(collections.OrderedDict),
        st.dictionaries(st.just("~"), inner),
        st.lists(inner, max_size=4).map(lambda v: collections.deque(v, maxlen=5)),
        st.sets(st.one_of(st.integers(), st.text(), st.booleans(), st.none()), max_size=5),
        st.frozensets(st.tuples(st.one_of(st.integers(), st.text())), max_size=4),
        st.dictionaries(keys, st.integers(), max_size=3).map(collections.Counter),
        st.binary().map(bytearray),
    ),
    max_leaves=20,
)


def exact(value: Any) -> Any:
    """Equal for equal types, NaNs and signs of zero included."""
    if isinstance(value, float):
        return ("float", "nan" if math.isnan(value) else value.hex())
    if isinstance(value, complex):
        return ("complex", exact(value.real), exact(value.imag))
    if isinstance(value, dict):
        return (type(value), [(exact(k), exact(v)) for k, v in value.items()])
    if isinstance(value, (set, frozenset)):
        return (type(value), sorted(map(repr, value)))
    if isinstance(value, collections.deque):
        return (type(value), value.maxlen, [exact(v) for v in value])
    if isinstance(value, (list, tuple)):
        return (type(value), [exact(v) for v in value])
    return (type(value), value)


@given(values)
def test_nested_values_come_back_exactly(value: Any) -> None:
    assert exact(through(value)) == exact(value)


def test_nothing_mutable_is_shared_with_the_live_object() -> None:
    live = {"list": [1], "tensor": torch.zeros(2), "array": np.zeros(2), "bytes": bytearray(b"a")}
    arena = tree_codec.Arena()
    node = tree_codec.pack(live, "x", arena.keep)
    live["list"].append(2)
    live["tensor"] += 1
    live["array"] += 1
    live["bytes"] += b"b"
    kept = tree_codec.decode(encoded(node, arena))
    assert kept["list"] == [1]
    assert kept["tensor"].tolist() == kept["array"].tolist() == [0, 0]
    assert kept["bytes"] == b"a"


# --- arrays --------------------------------------------------------------------------------------

ARRAYS = {
    "float": np.arange(6.0).reshape(2, 3),
    "fortran order": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "strided": np.arange(10)[::3],
    "0-dim": np.array(3.5),
    "empty": np.zeros((2, 0), dtype=np.int16),
    "bool": np.array([True, False]),
    "complex": np.array([1 + 2j]),
    "big endian": np.array([1, 2], dtype=">i4"),
    "half": np.array([1, np.nan], dtype=np.float16),
    "long double": np.array([1], dtype=np.longdouble) / 3,
    "text": np.array(["a", "long text"]),
    "bytes": np.array([b"a", b"bc"]),
    "date": np.array(["2024-01-01T00:00:00.000000001"], dtype="datetime64[ns]"),
    "structure": np.array([(1, 2.5), (3, 4.5)], dtype=[("a", "i4"), ("b", "f8")]),
    "structure with gaps": np.zeros(2, dtype=np.dtype([("a", "u1"), ("b", "f8")], align=True)),
    "nested structure": np.zeros(2, dtype=[("a", [("x", "u1")]), ("b", "f4", (2, 2))]),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_come_back_exactly(name: str) -> None:
    array = ARRAYS[name]
    back = through(array)
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert back.tobytes() == array.tobytes()
    back[...] = back  # writable, and not shared


@pytest.mark.parametrize(
    "scalar",
    [
        np.float64(1.5),
        np.float32("nan"),
        np.int8(-3),
        np.bool_(True),
        np.uint64(2**63),
        np.str_("a"),
    ],
    ids=repr,
)
def test_array_scalars_keep_their_type(scalar: np.generic) -> None:
    back = through(scalar)
    assert type(back) is type(scalar)
    assert back.tobytes() == scalar.tobytes()


# --- tensors -------------------------------------------------------------------------------------

ALL_DTYPES = sorted(
    {
        value
        for value in vars(torch).values()
        if isinstance(value, torch.dtype)
        and not str(value).startswith(("torch.q", "torch.bits"))
        # Dtypes that this torch can name, but neither fill nor copy.
        and str(value).removeprefix("torch.")
        not in {f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)}
    },
    key=str,
)


def random_bits(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=dtype)
    if tensor.numel():
        high = 2 if dtype is torch.bool else 256
        raw = torch.randint(high, (tensor.numel() * tensor.element_size(),), dtype=torch.uint8)
        tensor.view(-1).view(torch.uint8).copy_(raw)
    return tensor


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_tensors_of_every_type_come_back_to_the_bit(dtype: torch.dtype) -> None:
    for shape in ((), (0,), (3, 0, 2), (7,), (2, 3, 4)):
        tensor = random_bits(shape, dtype)
        assert image(through(tensor)) == image(tensor)


STRIDED = {
    "transposed": lambda t: t.transpose(0, 3),
    "channels last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "permuted": lambda t: t.permute(2, 0, 3, 1),
    "sliced": lambda t: t[:, ::2],
    "narrowed": lambda t: t[1:, :, 1:3],
}


@pytest.mark.parametrize("name", STRIDED)
def test_values_and_dense_memory_orders_are_kept(name: str) -> None:
    tensor = STRIDED[name](torch.randn(2, 4, 3, 5))
    back = through(tensor)
    assert torch.equal(back, tensor)
    if tree_codec.is_dense(tensor):
        assert back.stride() == tensor.stride()


def test_lazy_conjugates_and_negatives_come_back_by_value() -> None:
    tensor = torch.randn(3, dtype=torch.complex64)
    for lazy in (tensor.conj(), tensor.conj().imag):
        assert torch.equal(through(lazy), lazy)


def test_a_parameter_comes_back_as_its_values() -> None:
    parameter = torch.nn.Parameter(torch.randn(3))
    assert torch.equal(through(parameter), parameter.detach())


@pytest.mark.filterwarnings("ignore:torch.quantize:UserWarning")
@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint8, torch.qint32], ids=str)
def test_quantized_tensors_come_back(dtype: torch.dtype) -> None:
    values, places = torch.randn(4, 3), torch.arange(3)
    whole = torch.quantize_per_tensor(values, 1 / 3, 2, dtype)
    each = torch.quantize_per_channel(values, torch.rand(3).double(), places, 1, dtype)
    back = through({"whole": whole, "each": each})
    for found, expected in zip(back.values(), (whole, each), strict=True):
        assert found.dtype == expected.dtype
        assert found.qscheme() == expected.qscheme()
        assert torch.equal(found, expected)
    assert back["whole"].q_scale() == 1 / 3
    assert torch.equal(back["each"].q_per_channel_scales(), each.q_per_channel_scales())
    assert torch.equal(back["each"].q_per_channel_zero_points(), places)
    assert back["each"].q_per_channel_axis() == 1


@pytest.mark.parametrize(
    "value", [torch.Size([2, 3]), torch.bfloat16, torch.device("cuda:1")], ids=str
)
def test_torchs_small_types_come_back(value: Any) -> None:
    back = through(value)
    assert back == value
    assert type(back) is type(value)


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), min_size=1, max_size=4))
def test_density_is_that_of_the_memory(dims: list[tuple[int, int]]) -> None:
    """Compared with the definition: every address of the range occurs exactly once."""
    shape = [size for size, _ in dims]
    stride = [step for _, step in dims]
    tensor = torch.arange(200.0).as_strided(shape, stride)
    hit = sorted(tensor.reshape(-1).long().tolist())
    assert tree_codec.is_dense(tensor) == (hit == list(range(len(hit))))


# --- bytes written in their place -----------------------------------------------------------------


@given(
    st.lists(st.integers(0, 40), max_size=6),
    st.lists(st.integers(1, 60), min_size=1, max_size=9),
    st.sampled_from([0, 30, tree_codec.SMALL_BYTES]),
    st.randoms(use_true_random=False),
)
def test_bytes_are_the_same_in_whatever_parts_and_order_they_are_copied(
    sizes: list[int], cuts: list[int], small: int, order: Any
) -> None:
    def arena() -> tree_codec.Arena:
        kept = tree_codec.Arena()
        kept.tensors = [torch.arange(n, dtype=torch.int16) for n in sizes]
        return kept

    expected = encoded({"a": 1}, arena())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_codec, "SMALL_BYTES", small)
        whole = tree_codec.EncodedTree({"a": tree_codec.Packed(1)}, arena())
    # Beyond the end, too, where zeros belong.
    bounds = [0, *itertools.takewhile(lambda n: n < len(expected) + 70, itertools.accumulate(cuts))]
    bounds.append(len(expected) + 70)
    target = torch.full((bounds[-1],), 7, dtype=torch.uint8)
    parts = list(itertools.pairwise(bounds))
    order.shuffle(parts)
    for low, high in parts:
        whole.copy(low, target[low:high])
    assert target.numpy().tobytes() == expected + bytes(70)


def test_a_tensor_goes_with_its_last_copied_byte() -> None:
    count = tree_codec.SMALL_BYTES + 100  # smaller ones are copied at once
    arrays = [np.ones(count, dtype=np.uint8), np.ones(count, dtype=np.uint8)]
    memory = [weakref.ref(array) for array in arrays]
    arena = tree_codec.Arena()
    arena.tensors = list(map(torch.from_numpy, arrays))
    arrays.clear()
    whole = tree_codec.EncodedTree(None, arena)
    head_bytes = whole.nbytes - 2 * count

    def copy(low: int, high: int) -> list[bool]:
        """Which of the two still exist."""
        whole.copy(head_bytes + low, torch.empty(high - low, dtype=torch.uint8))
        return [ref() is not None for ref in memory]

    assert arena.tensors == []
    assert copy(50, count + 50) == [True, True]
    assert copy(0, 50) == [False, True]
    assert copy(count + 50, 2 * count) == [False, False]


# --- refusals ------------------------------------------------------------------------------------


class Color(enum.IntEnum):
    RED = 1


class Way(enum.Flag):
    UP, LEFT = 1, 2


Place = collections.namedtuple("Place", "x y")


class Own:
    pass


@pytest.mark.parametrize(
    "value",
    [
        Color.RED,
        Way.UP | Way.LEFT,
        Place(1, [Place(Color.RED, float("nan"))]),
        collections.defaultdict(list, {1: [2]}),
        collections.defaultdict(None, {"a": collections.defaultdict(int)}),
    ],
    ids=repr,
)
def test_classes_that_the_script_has_imported_are_the_same_again(value: Any) -> None:
    found = through({"deep": [0, value]})["deep"][1]
    assert type(found) is type(value)
    assert repr(found) == repr(value)
    if isinstance(value, collections.defaultdict):
        assert found.default_factory is value.default_factory


@pytest.mark.parametrize(
    "stranger",
    [
        Own(),
        Own,
        lambda: 0,
        enum.Enum("Inline", "A").A,
        datetime.datetime(2024, 1, 1),
        collections.defaultdict(lambda: 0),
        range(3),
        np.array([object()]),
        np.ma.masked_array([1], [True]),
        collections.namedtuple("Pair", "a b")(1, 2),
    ],
    ids=lambda v: type(v).__name__,
)
def test_anything_else_is_refused_with_the_path_to_it(stranger: Any) -> None:
    with pytest.raises(UnsupportedStateError, match=r"extra\['x'\]\['deep'\]\[1\]"):
        through({"deep": [0, stranger]})


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch.eye(3).to_sparse(), "sparse"),
        (lambda: torch.empty(2, device="meta"), "meta device"),
        (lambda: torch.zeros(1).expand(5), "expanded"),
        (
            lambda: torch.quantize_per_channel(
                torch.ones(2, 2), torch.ones(2), torch.zeros(2), 0, torch.quint4x2
            ),
            "quantized",
        ),
        (torch.nn.parameter.UninitializedParameter, "forward pass"),
        (torch.nn.parameter.UninitializedBuffer, "forward pass"),
        (lambda: torch.ones(2).as_subclass(type("Own", (torch.Tensor,), {})), "subclass"),
    ],
    ids=["sparse", "meta", "expanded", "quantized", "lazy parameter", "lazy buffer", "subclass"],
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_tensors_that_cannot_be_taken_are_named_with_a_reason(
    make: Callable[[], torch.Tensor], reason: str
) -> None:
    tensor = make()
    with pytest.raises(UnsupportedStateError, match=reason) as caught:
        through({"a": (tensor,)})
    assert str(caught.value).startswith("extra['x']['a'][0]")


@given(st.binary(max_size=60))
def test_bytes_that_are_no_tree_are_refused(data: bytes) -> None:
    with pytest.raises(FormatError):
        tree_codec.decode(data)


def test_a_node_of_unknown_kind_is_refused() -> None:
    text = b'{"tree":{"~":"invented later"},"tensors":[]}'
    with pytest.raises(FormatError, match="invented later"):
        tree_codec.decode(len(text).to_bytes(8, "little") + text)


def test_a_type_that_this_torch_lacks_is_refused_by_name() -> None:
    text = b'{"tree":0,"tensors":[["float3_e1m1",[1],null,"cpu"]]}'
    with pytest.raises(FormatError, match="float3_e1m1"):
        tree_codec.decode(len(text).to_bytes(8, "little") + text)


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.integers(2, 3),
    st.data(),
)
def test_part_of_a_tensor_with_gaps_in_row_major_order(
    shape: list[int], step: int, data: st.DataObject
) -> None:
    wide = torch.arange(step * math.prod(shape)).reshape(*shape[:-1], step * shape[-1])
    for sliced in (wide[..., ::step], wide[..., : shape[-1]], wide[..., ::step].movedim(0, -1)):
        low = data.draw(st.integers(0, sliced.numel() - 1))
        high = data.draw(st.integers(low + 1, sliced.numel()))
        part = tree_codec.row_major(sliced, low, high)
        assert part.is_contiguous()
        assert part.tolist() == sliced.flatten()[low:high].tolist()


def test_reading_a_column_slice_part_by_part_copies_it_about_once() -> None:
    rows, columns, part = 4096, 8, 256
    sliced = torch.arange(2 * rows * columns).reshape(rows, 2 * columns)[:, :columns]
    copied = 0

    class Counting(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
            nonlocal copied
            result = func(*args, **(kwargs or {}))
            if func is torch.Tensor.reshape:
                copied += result.numel()
            return result

    with Counting():
        for low in range(0, sliced.numel(), part):
            tree_codec.row_major(sliced, low, low + part)
    assert sliced.numel() <= copied < 2 * sliced.numel()


def test_files_at_the_end_of_a_tree_can_be_left_out() -> None:
    arena = tree_codec.Arena()
    value = {"a": torch.arange(70_000), "b": b"x" * 999}
    rest = tree_codec.pack(value, "value", arena.keep)
    routed = RoutedState()
    for name, size in (("big", 100_000), ("empty", 0), ("small", 7)):
        routed.kept[name] = KeptFile(torch.full((size,), len(name), dtype=torch.uint8), 0o640)
    data = encoded({"value": rest, "files": routed.pack(arena)}, arena)
    ranges = files_at_end(len(data), lambda low, high: data[low:high])
    assert {name: set(data[low:high]) for name, (low, high) in ranges.items()} == {
        "big": {3},
        "empty": set(),
        "small": {5},
    }
    end = end_without(len(data), ranges)
    assert end == len(data) - 100_007
    decoded = tree_codec.decode(data[:end], cut=True)
    assert torch.equal(decoded["value"]["a"], torch.arange(70_000))
    filled = FileWindows(ranges, decoded["files"]["contents"])
    assert not filled.wants(0, end)
    for low in range(0, len(data), 30_000):
        filled.take(low, memoryview(data)[low : low + 30_000])
    again = tree_codec.decode(data)["files"]["contents"]
    for name, content in decoded["files"]["contents"].items():
        assert torch.equal(content, again[name])


def test_files_that_are_not_the_end_of_a_tree_are_refused() -> None:
    arena = tree_codec.Arena()
    routed = RoutedState()
    routed.kept["x"] = KeptFile(torch.zeros(9, dtype=torch.uint8), 0o600)
    files = routed.pack(arena)
    data = encoded({"files": files, "value": arena.keep(torch.ones(2), "v")}, arena)
    with pytest.raises(FormatError, match="not its last tensors"):
        files_at_end(len(data), lambda low, high: data[low:high])
