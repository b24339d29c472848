r"""Digest v1: one xxh3-128 over everything a policy's forward pass remembers.

What is hashed is the *persistent state*: parameters and persistent buffers, found through the modules themselves
(never through ``get_trainable_parameters``, which may leave some out). Wrappers (DDP, ``torch.compile``) are removed
by object, not by name, so that a wrapped learner and a plain actor agree. A tensor registered under several names
counts once, under the lexicographically first one.

Per tensor: xxh3-128 of ``name \0 dtype \0 shape \0`` (UTF-8, dtype without ``torch.``, shape joined by ``x``)
followed by the 16-byte xxh3-128 digests of its contiguous little-endian bytes in 4 MiB chunks (an empty tensor has no
chunk). Root: xxh3-128 over the lines ``name \0 hex \n`` in byte order of the names.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor, nn

from rlightning.errors import WeightsError

PREFIX = "xxh3-128:"
CHUNK_BYTES = 4 << 20


@dataclass(frozen=True)
class StateDigest:
    """Digest of a whole state and of each tensor in it.

    Attributes:
        root: ``xxh3-128:`` and 32 hex digits.
        tensors: 32 hex digits by tensor name.
    """

    root: str
    tensors: dict[str, str]


@dataclass(frozen=True)
class PersistentState:
    """The live tensors of a module.

    Attributes:
        tensors: parameters and persistent buffers by name, in byte order of the names, ties once.
        aliases: for each further name of a tied tensor, the name it counts under.
    """

    tensors: dict[str, Tensor]
    aliases: dict[str, str]


def digest_module(module: nn.Module) -> StateDigest:
    """Digest of the tensors that ``module`` runs right now."""
    return digest_tensors(persistent_state(module).tensors)


def digest_tensors(tensors: Mapping[str, Tensor | npt.NDArray[Any]]) -> StateDigest:
    """Digest of named tensors or arrays, taken as they are (names are not resolved for ties).

    Raises:
        WeightsError: a tensor has no bytes to hash (meta, sparse, quantised, uninitialised, object dtype).
    """
    return state_digest({name: _tensor_digest(name, tensor) for name, tensor in tensors.items()})


def state_digest(tensor_digests: Mapping[str, str]) -> StateDigest:
    """The state digest that follows from the tensors' own hex digests."""
    names = sorted(tensor_digests)  # code point order is UTF-8 byte order
    lines = "".join([f"{name}\0{tensor_digests[name]}\n" for name in names]).encode()
    return StateDigest(PREFIX + xxhash.xxh3_128_hexdigest(lines), {name: tensor_digests[name] for name in names})


def first_difference(expected: StateDigest, found: StateDigest) -> str | None:
    """The first tensor (in byte order of names) on which two states differ, or None.

    Sets of names are compared both ways: a tensor that only one side has is a difference, and is marked so.
    """
    if expected == found:
        return None
    for name in sorted(expected.tensors.keys() | found.tensors.keys()):
        if name not in found.tensors:
            return f"{name} (missing)"
        if name not in expected.tensors:
            return f"{name} (unexpected)"
        if expected.tensors[name] != found.tensors[name]:
            return name
    return "(root)"  # equal tensors under different roots: somebody else's digest is malformed


def persistent_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, wrappers removed, ties once under their first name.

    The tensors are the live objects themselves.
    """
    return persistent_state(module).tensors


def aliases(module: nn.Module) -> dict[str, str]:
    """For each further name of a tied tensor, the lexicographically first name, under which it counts."""
    return persistent_state(module).aliases


def persistent_state(module: nn.Module) -> PersistentState:
    """:func:`persistent_tensors` and :func:`aliases` in one walk (it is taken anew at each call: modules change)."""
    tensors: dict[str, Tensor] = {}
    further: dict[str, str] = {}
    first_name: dict[int, str] = {}
    for name, tensor in sorted(_named_tensors(module), key=_name_of):
        first = first_name.setdefault(id(tensor), name)
        if first is name:
            tensors[name] = tensor
        elif first != name:
            further[name] = first
    return PersistentState(tensors, further)


def _name_of(named: tuple[str, Tensor]) -> str:
    return named[0]


def _named_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Every registered name with its tensor, tied ones under each of their names."""
    found: list[tuple[str, Tensor]] = []
    ancestors: set[int] = set()  # a module that contains itself is not entered again from within

    def walk(node: nn.Module, prefix: str) -> None:
        while _is_wrapper(node):
            node = _wrapped(node)
        for name, parameter in node._parameters.items():
            if parameter is not None:
                found.append((prefix + name, parameter))
        if node._buffers:
            transient = node._non_persistent_buffers_set
            for name, buffer in node._buffers.items():
                if buffer is not None and name not in transient:
                    found.append((prefix + name, buffer))
        if node._modules:
            ancestors.add(id(node))
            for name, child in node._modules.items():
                if child is not None and id(child) not in ancestors:
                    walk(child, f"{prefix}{name}.")
            ancestors.discard(id(node))

    walk(module, "")
    return found


_WRAPPERS: dict[type[nn.Module], bool] = {}  # by class: isinstance against DDP, an ABC, would cost most of the walk


def _is_wrapper(module: nn.Module) -> bool:
    kind = type(module)
    if kind not in _WRAPPERS:
        dynamo = sys.modules.get("torch._dynamo.eval_frame")  # not imported: then nothing can be compiled
        _WRAPPERS[kind] = issubclass(kind, (nn.parallel.DistributedDataParallel, nn.DataParallel)) or (
            dynamo is not None and issubclass(kind, dynamo.OptimizedModule)
        )
    return _WRAPPERS[kind]


def _wrapped(wrapper: nn.Module) -> nn.Module:
    inner = wrapper._modules.get("module") or wrapper._modules.get("_orig_mod")
    assert inner is not None, f"{type(wrapper).__name__} wraps nothing"
    return inner


def _tensor_digest(name: str, tensor: Tensor | npt.NDArray[Any]) -> str:
    if isinstance(tensor, Tensor):
        tensor = plain_tensor(name, tensor)
        header = _tensor_header(name, tensor.dtype, tensor.shape)
        nbytes: int = tensor.nbytes
        # Read by address: NumPy knows neither bfloat16 nor the 8-bit floats, and each view of a tensor costs more
        # than the hash of a small one.
        buffer: Any = (ctypes.c_char * nbytes).from_address(tensor.data_ptr())
    else:
        header = _array_header(name, tensor.dtype, tensor.shape)
        # ascontiguousarray would make 0-d arrays 1-d: the shape above is already taken
        array = np.ascontiguousarray(tensor, tensor.dtype.newbyteorder("<")).reshape(-1)
        buffer, nbytes = array.view(np.uint8), array.nbytes
    if nbytes <= CHUNK_BYTES:
        chunks = xxhash.xxh3_128_digest(buffer) if nbytes else b""
    else:
        chunks = b"".join([xxhash.xxh3_128_digest(chunk) for chunk in _chunks(buffer)])
    return xxhash.xxh3_128_hexdigest(header + chunks)


def _chunks(buffer: Any) -> Iterator[memoryview]:
    view = memoryview(buffer).cast("B")
    for start in range(0, len(view), CHUNK_BYTES):
        yield view[start : start + CHUNK_BYTES]


def plain_tensor(name: str, tensor: Tensor) -> Tensor:
    """The tensor itself if its bytes lie in CPU memory in order, else a copy of which that is true.

    Raises:
        WeightsError: the tensor has no such bytes (meta, sparse, quantised, uninitialised); says why.
    """
    try:
        if tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj():
            tensor.data_ptr()
            return tensor
        if tensor.is_meta:
            raise RuntimeError("it is on the meta device")
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        plain.data_ptr()
        return plain
    except (RuntimeError, ValueError) as cause:
        raise WeightsError(f"tensor {name!r} ({type(tensor).__name__}) has no bytes to read: {cause}") from cause


@lru_cache(maxsize=1 << 16)
def _tensor_header(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    return _header(name, dtype_name(dtype), shape)


@lru_cache(maxsize=1 << 16)
def _array_header(name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    if dtype.hasobject:
        raise WeightsError(f"array {name!r} has dtype {dtype}: only numbers and booleans can be hashed")
    return _header(name, dtype.name, shape)


def _header(name: str, dtype: str, shape: tuple[int, ...]) -> bytes:
    if "\0" in name or "\n" in name:
        raise WeightsError(f"tensor name {name!r} contains a NUL or a line break: rename it")
    return f"{name}\0{dtype}\0{'x'.join(map(str, shape))}\0".encode()


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")
