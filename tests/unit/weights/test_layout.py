from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from rlightning.errors import WeightsError
from rlightning.weights.digest import digest_module, digest_tensors, persistent_tensors
from rlightning.weights.layout import StateLayout
from tests.unit.weights.policies import TinyPolicy
from tests.unit.weights.test_digest import DTYPES


@given(
    st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3), st.booleans()), max_size=6),
    st.integers(0, 2**31),
)
def test_packing_and_viewing_gives_the_same_tensors(
    specs: list[tuple[torch.dtype, list[int], bool]], seed: int
) -> None:
    module = nn.Module()
    generator = torch.Generator().manual_seed(seed)
    for i, (dtype, shape, transposed) in enumerate(specs):
        tensor = (torch.randn(shape, generator=generator).abs() * 9).to(dtype)
        module.register_buffer(f"t{i}", tensor.transpose(0, -1) if transposed and shape else tensor)
    layout = StateLayout.of(module)
    packed = layout.pack(module)
    views = layout.views(packed)
    assert digest_tensors(views) == digest_module(module)
    assert all(entry.offset % 64 == 0 for entry in layout.entries)
    assert all(views[n].dtype == t.dtype and views[n].shape == t.shape for n, t in persistent_tensors(module).items())
    assert StateLayout.from_json(json.loads(json.dumps(layout.to_json()))) == layout


def test_entries_lie_behind_each_other_on_64_byte_boundaries() -> None:
    module = nn.Module()
    module.register_buffer("a", torch.zeros(17))  # 68 bytes: the next one starts at 128
    module.register_buffer("b", torch.zeros((), dtype=torch.bool))
    module.register_buffer("c", torch.zeros(0))
    layout = StateLayout.of(module)
    assert [(e.name, e.offset, e.nbytes) for e in layout.entries] == [("a", 0, 68), ("b", 128, 1), ("c", 192, 0)]
    assert layout.nbytes == 192


def test_views_alias_the_buffer_and_keep_it_alive() -> None:
    policy = TinyPolicy()
    layout = StateLayout.of(policy)
    packed = layout.pack(policy)
    views = layout.views(packed)
    start = packed.ctypes.data
    assert all(start <= view.data_ptr() < start + packed.nbytes for view in views.values())
    views["log_std"].fill_(7)
    assert layout.views(packed)["log_std"].item() == 7
    address = views["mean"].data_ptr()
    del packed
    _ = [np.full(layout.nbytes, 255, np.uint8) for _ in range(50)]  # would land in freed memory
    assert views["mean"].data_ptr() == address
    assert torch.equal(views["mean"], policy.mean)


def test_a_packed_copy_is_independent_of_the_module_and_aligned() -> None:
    policy = TinyPolicy()
    layout = StateLayout.of(policy)
    packed = layout.pack(policy)
    before = digest_module(policy)
    policy.learn()
    assert digest_tensors(layout.views(packed)) == before
    assert packed.ctypes.data % 64 == 0
    assert layout.pack(policy, packed) is packed
    assert digest_tensors(layout.views(packed)) == digest_module(policy)


@pytest.mark.filterwarnings("error")
def test_read_only_buffers_are_viewed_without_a_warning() -> None:
    policy = TinyPolicy()
    layout = StateLayout.of(policy)
    frozen = layout.pack(policy)
    frozen.flags.writeable = False
    assert digest_tensors(layout.views(frozen)) == digest_module(policy)
    assert digest_tensors(layout.views(frozen.tobytes())) == digest_module(policy)


def test_a_buffer_of_another_size_is_refused() -> None:
    layout = StateLayout.of(TinyPolicy())
    with pytest.raises(WeightsError, match=str(layout.nbytes)):
        layout.views(np.zeros(layout.nbytes - 1, np.uint8))


def test_equal_modules_share_one_layout_object() -> None:
    assert StateLayout.of(TinyPolicy(1)) is StateLayout.of(TinyPolicy(2))


def test_differences_name_the_tensor() -> None:
    layout = StateLayout.of(TinyPolicy())
    extra, missing, wide, untied = TinyPolicy(), TinyPolicy(), TinyPolicy(hidden=9), TinyPolicy()
    extra.register_buffer("zeta", torch.zeros(1))
    del missing.log_std
    with pytest.raises(WeightsError, match="'zeta'"):
        layout.require(StateLayout.of(extra), "member eval-0")
    with pytest.raises(WeightsError, match="member eval-0 lacks tensor 'log_std'"):
        layout.require(StateLayout.of(missing), "member eval-0")
    with pytest.raises(WeightsError, match=r"'actor\.0\.bias' of member eval-0 is float32\[9\]; published .*\[8\]"):
        layout.require(StateLayout.of(wide), "member eval-0")
    untied.critic[0].weight = nn.Parameter(untied.get_parameter("actor.0.weight").detach().clone())
    with pytest.raises(WeightsError, match=r"'critic\.0\.weight'"):
        layout.require(StateLayout.of(untied), "member eval-0")
    with pytest.raises(WeightsError, match=r"'critic\.0\.weight'"):
        StateLayout.of(untied).require(layout, "member eval-0")


def test_uninitialised_tensors_are_named() -> None:
    with pytest.raises(WeightsError, match=r"tensors bias, weight have no shape yet"):
        StateLayout.of(nn.LazyLinear(3))
