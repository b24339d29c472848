"""Nested state must come back exactly: type by type and bit by bit."""

from __future__ import annotations

import json
import struct
from collections import OrderedDict, namedtuple
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rlightning.checkpoint.tree import decode, encode
from rlightning.errors import CheckpointError

TORCH_DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip

array_dtypes = st.one_of(
    hnp.scalar_dtypes(),
    hnp.complex_number_dtypes(endianness="?"),
    hnp.byte_string_dtypes(endianness="?"),
    hnp.unicode_string_dtypes(endianness="?"),
)
arrays = array_dtypes.flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(TORCH_DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    size = int(np.prod(shape)) * dtype.itemsize
    data = draw(st.binary(min_size=size, max_size=size))
    if dtype is torch.bool:
        data = bytes(byte & 1 for byte in data)
    flat = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
    return flat.view(dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)


leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**200), 2**200),
    st.floats(),
    st.text(st.characters(exclude_categories=())),  # with lone surrogates
    st.binary(),
    arrays,
    st.sampled_from([np.float32(0.1), np.float64("nan"), np.int64(-1), np.bool_(True), np.datetime64("2026-01-01")]),
    tensors(),
)
keys = st.one_of(st.text(st.characters(exclude_categories=()), max_size=5), st.integers(), st.just("$array"))
trees = st.recursive(
    leaves,
    lambda x: st.one_of(
        st.lists(x, max_size=4), st.lists(x, max_size=4).map(tuple), st.dictionaries(keys, x, max_size=4)
    ),
    max_leaves=12,
)


def same(a: Any, b: Any) -> bool:
    """Equal in type and in every bit; NaN equals the same NaN, 0.0 does not equal -0.0, 1 does not equal True."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return [(type(k), k) for k in a] == [(type(k), k) for k in b] and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, np.ndarray | np.generic):
        return bool(a.dtype.str == b.dtype.str and a.shape == b.shape and a.tobytes() == b.tobytes())
    if isinstance(a, torch.Tensor):
        raw_a, raw_b = (bytes(x.contiguous().reshape(-1).view(torch.uint8).tolist()) for x in (a, b))
        return bool(a.dtype == b.dtype and a.shape == b.shape and raw_a == raw_b)
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    return bool(a == b)


def round_trip(tree: Any) -> Any:
    data, found = encode(tree)
    assert all(type(array) is np.ndarray for array in found.values())
    return decode(json.loads(json.dumps(data, allow_nan=False)), found)


@given(trees)
def test_any_tree_comes_back_exactly(tree: Any) -> None:
    assert same(round_trip(tree), tree)


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (2, 3)], ids=str)
def test_tensors_of_every_dtype_and_shape_come_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape).to(dtype)
    assert same(round_trip({"x": tensor}), {"x": tensor})


def test_the_128_bit_state_of_pcg64_continues_the_stream() -> None:
    first = np.random.Generator(np.random.PCG64(1))
    second = np.random.Generator(np.random.PCG64(2))
    state = first.bit_generator.state
    assert state["state"]["state"] > 2**64
    second.bit_generator.state = round_trip(state)
    assert second.random(5).tolist() == first.random(5).tolist()


def test_ints_beyond_any_decimal_limit_come_back() -> None:
    huge = -(1 << 100_000)  # more than the 4300 decimal digits that Python converts
    assert round_trip([huge, 2**53, 2**53 + 1]) == [huge, 2**53, 2**53 + 1]


def test_nan_keeps_its_payload() -> None:
    odd = struct.unpack(">d", bytes.fromhex("7ff8000000000bad"))[0]
    assert struct.pack(">d", round_trip(odd)).hex() == "7ff8000000000bad"


def test_ints_that_json_readers_round_are_written_in_hex() -> None:
    assert encode({"a": 2**53 + 1})[0] == {"a": {"$int": "0x20000000000001"}}


def test_plain_state_stays_readable_json() -> None:
    state = {"iteration": 3, "lr": 0.1, "name": "größe", "flags": [True, None]}
    assert encode(state) == (state, {})


def test_arrays_are_named_by_their_path_and_names_are_unique() -> None:
    a, b, c = np.zeros(1), np.ones(1), np.full(1, 2.0)
    data, found = encode({"a/b": a, "a": {"b": b}, "__metadata__": c})
    assert list(found) == ["a/b", "a/b#2", "__metadata__#2"]
    assert data == {
        "a/b": {"$array": "a/b"},
        "a": {"b": {"$array": "a/b#2"}},
        "__metadata__": {"$array": "__metadata__#2"},
    }


def test_encoding_copies_nothing_and_decoding_shares_nothing() -> None:
    array, tensor = np.zeros(4), torch.zeros(4)
    data, found = encode([array, tensor])
    assert np.shares_memory(found["0"], array)
    assert found["1"].ctypes.data == tensor.data_ptr()
    restored = decode(data, found)
    restored[0][0], restored[1][0] = 1, 1
    assert array[0] == 0
    assert tensor[0] == 0


def test_parameters_and_views_are_saved_by_value() -> None:
    weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    restored = round_trip([weight, weight.t(), np.arange(6).reshape(2, 3).T[::-1]])
    assert restored[0].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert not restored[0].requires_grad
    assert restored[1].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert restored[2].tolist() == [[2, 5], [1, 4], [0, 3]]


def test_an_ordered_dict_comes_back_as_a_dict_in_its_order() -> None:
    restored = round_trip(OrderedDict([("b", 1), ("a", 2)]))
    assert type(restored) is dict
    assert list(restored) == ["b", "a"]


class Color(IntEnum):
    RED = 1


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ({1, 2}, "builtins.set"),
        (Color.RED, "Color"),
        (Point(1, 2), "Point"),
        (bytearray(b"x"), "bytearray"),
        (np.array([object()]), "dtype object"),
        (np.zeros(2, [("a", "f4"), ("b", "i2")]), "dtype"),
        (np.ma.masked_array([1], mask=[True]), "MaskedArray"),
        ({True: 1}, "key True"),
        ({1.5: 1}, "key 1.5"),
        (torch.zeros(2, 2).to_sparse(), "sparse"),
        (torch.zeros(2, device="meta"), "meta"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_would_not_come_back_exactly_is_refused_with_its_place(value: Any, what: str) -> None:
    with pytest.raises(CheckpointError) as error:
        encode({"shards": [0, {"env": value}]})
    assert "shards/1/env" in str(error.value)
    assert what in str(error.value)


def test_a_tree_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(CheckpointError, match="contains itself"):
        encode(loop)


@pytest.mark.parametrize(
    "data",
    [
        {"$array": "gone"},
        {"$unknown": 1},
        {"$tuple": [1], "x": 2},
        {"$int": "zz"},
        {"$float": "00"},
        {"$bytes": "?"},
        {"$dict": [1]},
        {"$tensor": "a", "dtype": "nn", "shape": [2]},
        {"$array": "a", "dtype": "<f8", "shape": [7]},
        {"$scalar": ["<f8", "00"]},
        {"$scalar": ["O", "0000000000000000"]},
    ],
    ids=str,
)
def test_foreign_data_is_refused(data: Any) -> None:
    with pytest.raises(CheckpointError):
        decode(data, {"a": np.zeros(8, np.uint8)})
