"""The safetensors format: 8 bytes of header length, a JSON header, then every tensor's bytes without gaps.

It is written in pieces, so that a large model is not copied once more in memory and every write goes through
``durable``; and it is read in ranges, so that the one tensor that a damaged byte belongs to can be named.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from rlightning.checkpoint.tree import Array, plain_tensor, tensor_bytes
from rlightning.errors import CheckpointError

if TYPE_CHECKING:
    import torch

_ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "F64": 8, "I64": 8, "U64": 8, "C64": 8,
}  # fmt: skip
_NAMES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "uint16": "U16", "float16": "F16", "bfloat16": "BF16",
    "int32": "I32", "uint32": "U32", "float32": "F32", "float64": "F64", "int64": "I64", "uint64": "U64",
    "complex64": "C64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}  # fmt: skip
#: dtype in the file -> dtype as torch (and, where it knows it, NumPy) calls it
DTYPES = {short: name for name, short in _NAMES.items()}
_NUMPY = {np.dtype(name): short for name, short in _NAMES.items() if name != "bfloat16" and "float8" not in name}

# safetensors' own limit; a damaged length must not make us read gigabytes.
_LONGEST_HEADER = 100_000_000


@dataclass(frozen=True)
class Stored:
    """One tensor ready to be written: ``dtype`` as the file calls it, ``data`` its ``(n,)`` uint8 bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: Array


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: ``start`` and ``end`` count from the file's first byte."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def store_array(array: Array) -> Stored:
    """A C-contiguous array, of a dtype that the format knows, for :func:`pieces`; shares its memory."""
    data = array.reshape(-1).view(np.uint8) if array.nbytes else np.empty(0, np.uint8)
    return Stored(_NUMPY[array.dtype], array.shape, data)


def store_tensor(name: str, tensor: torch.Tensor) -> Stored:
    """Any dense tensor for :func:`pieces`; shares its memory if it is on the CPU and contiguous.

    Raises:
        CheckpointError: the tensor is sparse, quantised, without data, or of a dtype that the format does not know.
    """
    plain = plain_tensor(tensor, f"tensor {name!r}")
    dtype = _NAMES.get(str(plain.dtype).removeprefix("torch."))
    if dtype is None:
        raise CheckpointError(
            f"tensor {name!r} has dtype {plain.dtype}, which safetensors cannot hold; convert it, or register it as a "
            "non-persistent buffer and save it in the policy's training state"
        )
    return Stored(dtype, tuple(plain.shape), tensor_bytes(plain))


def pieces(tensors: Mapping[str, Stored]) -> list[bytes | memoryview]:
    """The whole file, in order; nothing is copied.

    Tensors with larger items come first and the header is padded to 8 bytes, so every tensor is aligned in the file.
    """
    if "__metadata__" in tensors:
        raise CheckpointError("a tensor cannot be called '__metadata__' in a safetensors file; rename it")
    order = sorted(tensors, key=lambda name: (-_ITEM_BYTES[tensors[name].dtype], name))
    header: dict[str, Any] = {}
    offset = 0
    for name in order:
        tensor = tensors[name]
        end = offset + tensor.data.nbytes
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (offset, end)}
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little") + text, *(tensors[name].data.data for name in order)]


def read_header(file: BinaryIO) -> list[Entry]:
    """All tensors of an open file, in the order of their bytes. The file may end before they do.

    Raises:
        CheckpointError: not a safetensors header; says what is wrong with it, without the file's name.
    """
    size = os.fstat(file.fileno()).st_size
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(size - 8, _LONGEST_HEADER):
        raise CheckpointError(f"the header should have {length} bytes, the file has {size}")
    try:
        header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        entries = [_entry(name, fields, 8 + length) for name, fields in header.items()]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"the header cannot be read: {type(error).__name__}: {error}") from error
    entries.sort(key=lambda entry: (entry.start, entry.end))
    position = 8 + length
    for entry in entries:
        if entry.start != position:
            raise CheckpointError(f"tensor {entry.name!r} should start at byte {position}, not {entry.start}")
        position = entry.end
    return entries


def read(file: BinaryIO, entry: Entry, into: Array) -> None:
    """Fill ``into``, ``(n,)`` uint8, with the bytes of one tensor.

    Raises:
        CheckpointError: the file ends before the tensor does.
    """
    file.seek(entry.start)
    view = memoryview(into.data)
    while view:
        n = file.readinto(view)  # type: ignore[attr-defined]
        if not n:
            raise CheckpointError(f"tensor {entry.name!r} is cut off: the file ends {len(view)} bytes too early")
        view = view[n:]


def read_arrays(file: BinaryIO) -> dict[str, Array]:
    """All tensors of a file as new arrays.

    Raises:
        CheckpointError: not a safetensors file, or cut off, or a dtype that NumPy does not have.
    """
    arrays: dict[str, Array] = {}
    for entry in _whole(file):
        try:
            array: Array = np.empty(entry.shape, DTYPES[entry.dtype])
        except TypeError:
            raise CheckpointError(f"tensor {entry.name!r} has dtype {entry.dtype}, which NumPy does not have") from None
        if array.nbytes:
            read(file, entry, array.reshape(-1).view(np.uint8))
        arrays[entry.name] = array
    return arrays


def read_tensors(file: BinaryIO) -> dict[str, torch.Tensor]:
    """All tensors of a file as new torch tensors.

    Raises:
        CheckpointError: not a safetensors file, or cut off.
    """
    return {entry.name: read_tensor(file, entry) for entry in _whole(file)}


def read_tensor(file: BinaryIO, entry: Entry) -> torch.Tensor:
    """One tensor of a file that is known to be long enough, as a new torch tensor."""
    import torch

    tensor = torch.empty(entry.shape, dtype=getattr(torch, DTYPES[entry.dtype]))
    read(file, entry, tensor_bytes(tensor))
    return tensor


def chunks(file: BinaryIO, start: int, end: int, size: int) -> Iterator[bytes]:
    """The bytes ``start`` to ``end`` in chunks of ``size``; ends early where the file does."""
    file.seek(start)
    while start < end:
        data = file.read(min(size, end - start))
        if not data:
            return
        yield data
        start += len(data)


def _whole(file: BinaryIO) -> list[Entry]:
    """As :func:`read_header`, for a file that has all its bytes: a damaged header must not make us allocate more."""
    entries, size = read_header(file), os.fstat(file.fileno()).st_size
    for entry in entries:
        if entry.end > size:
            raise CheckpointError(f"tensor {entry.name!r} is cut off: it ends at byte {entry.end}, the file at {size}")
    return entries


def _entry(name: str, fields: dict[str, Any], base: int) -> Entry:
    start, end = fields["data_offsets"]
    dtype, shape = fields["dtype"], tuple(fields["shape"])
    numbers = (start, end, *shape)
    if not all(type(n) is int and n >= 0 for n in numbers):
        raise ValueError(f"tensor {name!r}: offsets and shape must be whole numbers from 0")
    if end - start != math.prod(shape) * _ITEM_BYTES[dtype]:
        raise ValueError(f"tensor {name!r}: {dtype} {list(shape)} does not take {end - start} bytes")
    return Entry(name, dtype, shape, base + start, base + end)
