from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from rlightning.errors import WeightsError
from rlightning.weights.digest import (
    StateDigest,
    aliases,
    digest_module,
    digest_tensors,
    first_difference,
    persistent_tensors,
    state_digest,
)
from tests.unit.weights.policies import TinyPolicy, flip_bit

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.bool,
    torch.complex64,
    torch.complex128,
]


def independent_digest(tensors: dict[str, torch.Tensor]) -> StateDigest:
    """Digest v1 written down again, slowly: bytes are packed element by element, nothing is shared with the product."""
    hexes: dict[str, str] = {}
    for name in sorted(tensors, key=lambda n: n.encode()):
        tensor = tensors[name].detach()
        body = b""
        for element in tensor.reshape(-1).resolve_conj().resolve_neg():
            if tensor.dtype.is_complex:
                code = "<f" if tensor.dtype == torch.complex64 else "<d"
                body += struct.pack(code, element.real.item()) + struct.pack(code, element.imag.item())
            elif tensor.dtype in (torch.bfloat16, torch.float8_e4m3fn):
                body += element.view(torch.int16 if tensor.itemsize == 2 else torch.int8).numpy().tobytes()
            else:
                codes = {torch.float32: "<f", torch.float64: "<d", torch.float16: "<e", torch.bool: "<?"}
                codes |= {torch.int64: "<q", torch.int32: "<i", torch.int16: "<h", torch.int8: "<b"}
                codes |= {torch.uint8: "<B", torch.uint16: "<H"}
                body += struct.pack(codes[tensor.dtype], element.item())
        chunks = [body[i : i + 4194304] for i in range(0, len(body), 4194304)]
        head = "\0".join([name, str(tensor.dtype)[len("torch.") :], "x".join(str(n) for n in tensor.shape), ""])
        inner = b"".join(xxhash.xxh3_128(chunk).digest() for chunk in chunks)
        hexes[name] = xxhash.xxh3_128(head.encode() + inner).hexdigest()
    lines = b"".join(name.encode() + b"\0" + value.encode() + b"\n" for name, value in hexes.items())
    return StateDigest("xxh3-128:" + xxhash.xxh3_128(lines).hexdigest(), hexes)


@st.composite
def small_tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    seed = draw(st.integers(0, 2**31))
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 50
    tensor = (values.abs() if dtype in (torch.uint8, torch.uint16) else values).to(dtype)
    if draw(st.booleans()) and len(shape) >= 2:
        tensor = tensor.transpose(0, 1)
    if draw(st.booleans()) and len(shape) >= 1 and dtype != torch.float8_e4m3fn:
        tensor = torch.stack([tensor, tensor])[:, ...].select(0, 1)
    if draw(st.booleans()) and dtype.is_complex:
        tensor = tensor.conj()
    return tensor


NAMES = st.text(st.characters(blacklist_characters="\0\n", blacklist_categories=["Cs"]), min_size=1, max_size=8)


@given(st.dictionaries(NAMES, small_tensors(), max_size=5))
def test_digest_equals_an_independent_implementation(tensors: dict[str, torch.Tensor]) -> None:
    assert digest_tensors(tensors) == independent_digest(tensors)


def test_published_test_vector() -> None:
    tensors = {
        "w": torch.tensor([[0.0, 1.0], [2.0, 3.0]]),
        "b": torch.tensor([1, 2, 3]),
        "s": torch.tensor(0.5),
        "e": torch.zeros(0, dtype=torch.bool),
    }
    expected = "xxh3-128:e26a145245e682b6c83126085c6a8044"  # docs: digest v1
    assert digest_tensors(tensors).root == expected
    assert digest_tensors({name: tensor.numpy() for name, tensor in tensors.items()}).root == expected


def test_numpy_arrays_and_tensors_have_one_digest_whatever_their_memory_order() -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    want = digest_tensors({"x": torch.from_numpy(array.T.copy())})
    layouts: list[np.ndarray[Any, Any]] = [array.T, array.T.astype(">f4"), np.asfortranarray(array.T)]
    assert all(digest_tensors({"x": layout}) == want for layout in layouts)


@pytest.mark.parametrize("size", [4194303, 4194304, 4194305, 2 * 4194304 + 7])
def test_large_tensors_are_hashed_in_chunks_of_4_mib(size: int) -> None:
    data = torch.arange(size, dtype=torch.int64).to(torch.uint8)
    raw = data.numpy().tobytes()
    inner = b"".join(xxhash.xxh3_128(raw[i : i + 4194304]).digest() for i in range(0, size, 4194304))
    expected = xxhash.xxh3_128(f"x\0uint8\0{size}\0".encode() + inner).hexdigest()
    assert digest_tensors({"x": data}).tensors["x"] == expected
    assert digest_tensors({"x": data.numpy()}).tensors["x"] == expected


def test_values_seen_through_lazy_negation_and_conjugation_are_hashed() -> None:
    z = torch.tensor([1 + 2j, 3 - 4j])
    assert digest_tensors({"z": z.conj()}) == digest_tensors({"z": torch.tensor([1 - 2j, 3 + 4j])})
    assert digest_tensors({"z": z.conj().imag}) == digest_tensors({"z": torch.tensor([-2.0, 4.0])})


def test_dtype_and_shape_count_even_when_bytes_agree() -> None:
    zeros = torch.zeros(4)
    roots = {digest_tensors({"x": x}).root for x in (zeros, zeros.view(2, 2), zeros.view(torch.int32), zeros[:, None])}
    assert len(roots) == 4


def test_one_flipped_bit_changes_exactly_its_tensor() -> None:
    policy = TinyPolicy()
    before = digest_module(policy)
    for name, tensor in persistent_tensors(policy).items():
        flip_bit(tensor)
        after = digest_module(policy)
        assert first_difference(before, after) == name
        assert [n for n in before.tensors if before.tensors[n] != after.tensors[n]] == [name]
        flip_bit(tensor)
        assert digest_module(policy) == before


def test_persistent_state_is_top_level_parameters_buffers_and_ties_once() -> None:
    policy = TinyPolicy()
    assert list(persistent_tensors(policy)) == [
        "actor.0.bias",
        "actor.0.weight",
        "actor.2.bias",
        "actor.2.weight",
        "count",
        "critic.0.bias",
        "critic.2.bias",
        "critic.2.weight",
        "log_std",
        "mean",
    ]
    assert aliases(policy) == {"critic.0.weight": "actor.0.weight"}
    assert persistent_tensors(policy)["actor.0.weight"] is policy.critic[0].weight


def test_a_module_registered_twice_and_one_that_contains_itself_are_walked_to_an_end() -> None:
    root = nn.Module()
    root.b = nn.Linear(1, 1)
    root.a = root.b
    root.b.parent = root
    assert sorted(persistent_tensors(root)) == ["a.bias", "a.weight"]
    assert aliases(root) == {"b.bias": "a.bias", "b.weight": "a.weight"}


def test_wrappers_are_removed_by_object_at_any_depth() -> None:
    plain, wrapped = TinyPolicy(), TinyPolicy()
    wrapped.actor = nn.DataParallel(wrapped.actor)  # type: ignore[assignment]
    assert digest_module(wrapped) == digest_module(plain)
    assert digest_module(nn.DataParallel(wrapped)) == digest_module(plain)


@pytest.mark.slow  # importing torch's compiler alone takes longer than all other tests here
def test_compiled_modules_are_unwrapped_too() -> None:
    plain, wrapped = TinyPolicy(), TinyPolicy()
    wrapped.critic = torch.compile(wrapped.critic, backend="eager")  # type: ignore[assignment]
    assert "_orig_mod" in dict(wrapped.critic.named_children())
    assert digest_module(wrapped) == digest_module(plain)
    assert digest_module(torch.compile(wrapped, backend="eager")) == digest_module(plain)  # type: ignore[arg-type]


@pytest.mark.slow  # DDP imports the compiler too
def test_ddp_is_removed_too() -> None:
    from torch import distributed as dist
    from torch._C._distributed_c10d import HashStore

    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        module = nn.Linear(2, 2)
        assert digest_module(nn.parallel.DistributedDataParallel(module)) == digest_module(module)
    finally:
        dist.destroy_process_group()


def test_a_child_that_is_merely_called_module_is_kept() -> None:
    parent = nn.Module()
    parent.module = nn.Linear(1, 1)
    assert list(persistent_tensors(parent)) == ["module.bias", "module.weight"]


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(2, device="meta"), torch.zeros(2, 2).to_sparse(), nn.parameter.UninitializedParameter()],
    ids=["meta", "sparse", "uninitialised"],
)
def test_tensors_without_bytes_are_refused_by_name(tensor: torch.Tensor) -> None:
    with pytest.raises(WeightsError, match=r"'actor\.w'"):
        digest_tensors({"actor.w": tensor})


@pytest.mark.parametrize("name", ["a\0b", "a\nb"])
def test_names_that_would_be_ambiguous_are_refused(name: str) -> None:
    with pytest.raises(WeightsError, match="rename"):
        digest_tensors({name: torch.zeros(1)})


def test_object_arrays_are_refused() -> None:
    with pytest.raises(WeightsError, match="object"):
        digest_tensors({"x": np.array([None])})


def test_names_are_compared_both_ways() -> None:
    one, two = torch.zeros(1), torch.ones(1)
    both, first = digest_tensors({"a": one, "b": two}), digest_tensors({"a": one})
    assert first_difference(both, both) is None
    assert first_difference(both, first) == "b (missing)"
    assert first_difference(first, both) == "b (unexpected)"
    assert first_difference(both, digest_tensors({"a": two, "b": one})) == "a"


def test_the_root_follows_from_the_tensors_digests() -> None:
    digest = digest_module(TinyPolicy())
    assert state_digest(dict(reversed(digest.tensors.items()))) == digest
