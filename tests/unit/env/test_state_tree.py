"""Attributes of environments as trees and back."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest
from gymnasium.wrappers.utils import RunningMeanStd
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from rlightning.env.state import decode, encode, generator_state, set_generator_state
from rlightning.errors import CheckpointError, EnvironmentFault
from tests.unit.env.support import through_file

DTYPES = st.sampled_from([np.dtype(name) for name in ("bool", "int8", "uint64", "float16", "float32", "float64")])
LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
    | npst.arrays(DTYPES, npst.array_shapes(min_dims=0, min_side=0, max_side=3))
    | DTYPES.flatmap(npst.from_dtype)
)  # fmt: skip
KEYS = st.text(max_size=3) | st.integers() | st.sampled_from(["$scalar", "$items"]) | st.tuples(st.integers())
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.lists(inner, max_size=3).map(lambda items: deque(items, maxlen=4))
    ),
    max_leaves=8,
)


def same(a: Any, b: Any) -> bool:
    """Equal with types, bits of floats included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, (np.ndarray, np.generic)):
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple, deque)):
        return len(a) == len(b) and all(map(same, a, b)) and getattr(a, "maxlen", 0) == getattr(b, "maxlen", 0)
    return bool(a == b or (a != a and b != b))


@given(VALUES)
def test_what_is_encoded_is_a_tree_and_comes_back_as_it_was(value: Any) -> None:
    assert same(decode(through_file(encode(value, "it"))), value)


@pytest.mark.parametrize("kind", ["PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"])
def test_random_generators_come_back_in_place_where_they_can(kind: str) -> None:
    generator = np.random.Generator(getattr(np.random, kind)(3))
    generator.integers(0, 10, size=3, dtype=np.uint8)  # leaves half a word in the buffer
    state = through_file(generator_state(generator))
    expected = generator.integers(0, 100, size=9, dtype=np.uint8).tolist()
    assert set_generator_state(generator, state) is generator
    assert generator.integers(0, 100, size=9, dtype=np.uint8).tolist() == expected
    for other in (None, np.random.default_rng(0)):
        assert set_generator_state(other, state).integers(0, 100, size=9, dtype=np.uint8).tolist() == expected
    with pytest.raises(CheckpointError, match=r"'Generator', which numpy.random does not have"):
        set_generator_state(None, {**state, "bit_generator": "Generator"})


def test_running_statistics_are_set_in_the_object_that_wrappers_hold() -> None:
    statistics = RunningMeanStd(shape=(2,))
    statistics.update(np.array([[1.0, 2.0], [3.0, 4.0]]))
    tree, mean = through_file(encode(statistics, "it")), statistics.mean.copy()
    statistics.update(np.zeros((5, 2)))
    assert decode(tree, statistics) is statistics
    assert statistics.mean.tolist() == mean.tolist()


@pytest.mark.parametrize(
    "value",
    [object(), {1, 2}, np.array([object()]), np.array(["a"]), 1j, range(3)],
    ids=["object", "set", "array of objects", "array of strings", "complex", "range"],
)
def test_what_is_not_a_tree_is_named_with_its_place(value: Any) -> None:
    with pytest.raises(EnvironmentFault, match=r"Thing\.x\[1\]\['key'\] holds a "):
        encode([0, {"key": value}], "Thing.x")
