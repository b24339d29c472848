"""Nested state as JSON plus arrays, and back, exactly; no pickle.

A *tree* is made of dicts (keys ``str`` or ``int``), lists, tuples, None, bool, int of any size, float, str, bytes,
NumPy arrays and scalars of any dtype but object and structured ones, and torch tensors of any dtype. What JSON cannot
hold is written as an object with one key that starts with ``$``:

==========  ============================================================================================
``$array``  name of an array; ``dtype`` and ``shape`` beside it where the array holds its raw bytes
``$tensor`` the same for a torch tensor
``$scalar`` a NumPy scalar: [dtype, bytes in hex]
``$tuple``  its items
``$dict``   [key, value] pairs, when a key is an int or starts with ``$``
``$int``    an int that does not fit into 53 bits, in hex
``$float``  a float that is not finite: its 8 bytes, big-endian, in hex (so that a NaN keeps its payload)
``$bytes``  in base64
``$text``   a str with lone surrogates: UTF-8 with ``surrogatepass``, in base64
==========  ============================================================================================
"""

from __future__ import annotations

import base64
import binascii
import math
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from rlightning.errors import CheckpointError

if TYPE_CHECKING:
    import torch

Tree: TypeAlias = Any
Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

# What a safetensors file holds under its own name and NumPy knows; other dtypes are held as their raw bytes.
_NATIVE = frozenset(
    {"bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"}
    | {"float16", "float32", "float64", "complex64"}
)
_NATIVE_DTYPES = frozenset(map(np.dtype, _NATIVE))  # in this machine's byte order; `dtype.name` is slow
_DEEPEST = 200
_EXACT_IN_JSON = 1 << 53


def encode(tree: Tree) -> tuple[Any, dict[str, Array]]:
    """Split ``tree`` into what ``json`` can write and the arrays it refers to by name.

    The arrays are not copied: they share memory with the tree's. Names are paths ("optimizer/state/0/exp_avg").

    Raises:
        CheckpointError: something in the tree cannot be saved exactly; names where it is.
    """
    encoder = _Encoder()
    return encoder.encode(tree, (), 0), encoder.arrays


def decode(data: Any, arrays: Mapping[str, Array]) -> Tree:
    """Undo :func:`encode`. The tree's arrays are copies.

    Raises:
        CheckpointError: ``data`` is not what :func:`encode` writes, or an array is missing or of another size.
    """
    try:
        return _decode(data, arrays)
    except CheckpointError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError, struct.error) as error:
        raise CheckpointError(f"not an encoded tree: {type(error).__name__}: {error}") from error


class _Encoder:
    def __init__(self) -> None:
        self.arrays: dict[str, Array] = {}

    def encode(self, x: Tree, path: tuple[str | int, ...], depth: int) -> Any:
        kind = type(x)
        if x is None or kind is bool:
            return x
        if kind is int:
            return x if -_EXACT_IN_JSON <= x <= _EXACT_IN_JSON else {"$int": hex(x)}
        if kind is float:
            return x if math.isfinite(x) else {"$float": struct.pack(">d", x).hex()}
        if kind is str:
            return _encode_text(x)
        if depth > _DEEPEST:
            raise CheckpointError(f"{_where(path)}: nested more than {_DEEPEST} deep; a tree that contains itself?")
        if kind is dict or kind is OrderedDict:
            return self._encode_dict(x, path, depth)
        if kind is list:
            return [self.encode(item, (*path, i), depth + 1) for i, item in enumerate(x)]
        if kind is tuple:
            return {"$tuple": [self.encode(item, (*path, i), depth + 1) for i, item in enumerate(x)]}
        if kind is np.ndarray:
            return self._encode_array(x, path)
        if kind is bytes:
            return {"$bytes": base64.b64encode(x).decode("ascii")}
        if isinstance(x, np.generic):
            scalar = np.asarray(x)
            return {"$scalar": [_dtype_name(scalar.dtype, path), scalar.tobytes().hex()]}
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(x, torch.Tensor):
            return self._encode_tensor(x, path)
        raise CheckpointError(
            f"{_where(path)}: a {kind.__module__}.{kind.__qualname__} cannot be saved; make it of dict, list, tuple, "
            "None, bool, int, float, str, bytes, NumPy arrays or torch tensors"
        )

    def _encode_dict(self, x: dict[Any, Tree], path: tuple[str | int, ...], depth: int) -> Any:
        plain = True
        for key in x:
            if type(key) is int:
                plain = False
            elif type(key) is not str:
                raise CheckpointError(
                    f"{_where(path)}: the key {key!r} is a {type(key).__name__}; keys must be str or int"
                )
            elif key.startswith("$") or not _is_text(key):
                plain = False
        if plain:
            return {key: self.encode(value, (*path, key), depth + 1) for key, value in x.items()}
        pairs = [[self.encode(k, path, 0), self.encode(v, (*path, k), depth + 1)] for k, v in x.items()]
        return {"$dict": pairs}

    def _encode_array(self, x: Array, path: tuple[str | int, ...]) -> Any:
        data = x if x.flags.c_contiguous else x.copy(order="C")
        if x.dtype in _NATIVE_DTYPES:
            return {"$array": self._keep(data, path)}
        dtype = _dtype_name(x.dtype, path)
        return {"$array": self._keep(_raw(data), path), "dtype": dtype, "shape": list(x.shape)}

    def _encode_tensor(self, x: torch.Tensor, path: tuple[str | int, ...]) -> Any:
        data = plain_tensor(x, _where(path))
        dtype = str(x.dtype).removeprefix("torch.")
        if dtype in _NATIVE:
            return {"$tensor": self._keep(data.numpy(), path)}
        return {"$tensor": self._keep(tensor_bytes(data), path), "dtype": dtype, "shape": list(x.shape)}

    def _keep(self, array: Array, path: tuple[str | int, ...]) -> str:
        base = "/".join(map(str, path)) or "value"
        base = base.encode("utf-8", "backslashreplace").decode("utf-8")
        # "__metadata__" is safetensors' own; {"a/b": …} and {"a": {"b": …}} give the same path.
        name, n = base, 1
        while name in self.arrays or name == "__metadata__":
            n += 1
            name = f"{base}#{n}"
        self.arrays[name] = array
        return name


def plain_tensor(x: torch.Tensor, where: str) -> torch.Tensor:
    """``x`` without its graph: dense, contiguous, on the CPU; shares memory where that is possible.

    Raises:
        CheckpointError: ``x`` is sparse, quantised or without data.
    """
    import torch

    if x.layout is not torch.strided or x.is_quantized or x.is_meta:
        kind = "quantised" if x.is_quantized else "meta" if x.is_meta else str(x.layout)
        raise CheckpointError(f"{where}: a {kind} tensor cannot be saved; convert it to a dense one")
    return x.detach().cpu().resolve_conj().resolve_neg().contiguous()


def tensor_bytes(x: torch.Tensor) -> Array:
    """The bytes of a plain tensor, ``(n,)`` uint8, sharing its memory."""
    import torch

    flat: Array = x.reshape(-1).view(torch.uint8).numpy()
    return flat


def _decode(x: Any, arrays: Mapping[str, Array]) -> Tree:
    if isinstance(x, list):
        return [_decode(item, arrays) for item in x]
    if not isinstance(x, dict):
        return x
    for key in x:  # the first key tells
        if key.startswith("$"):
            return _decode_tagged(key, x, arrays)
        break
    return {key: _decode(value, arrays) for key, value in x.items()}


def _decode_tagged(tag: str, x: dict[str, Any], arrays: Mapping[str, Array]) -> Tree:
    value = x[tag]
    if tag in ("$array", "$tensor"):
        if value not in arrays:
            raise CheckpointError(f"the array {value!r} is missing")
        raw = (x["dtype"], tuple(x["shape"])) if "dtype" in x else None
        rebuild = _decode_array if tag == "$array" else _decode_tensor
        return rebuild(value, arrays[value], raw)
    if len(x) != 1 or tag not in _SIMPLE:
        raise CheckpointError(f"not an encoded tree: unknown object with the keys {sorted(x)}")
    return _SIMPLE[tag](value, arrays)


def _decode_array(name: str, array: Array, raw: tuple[str, tuple[int, ...]] | None) -> Array:
    if raw is None:
        return array.copy(order="C")
    dtype, shape = np.dtype(raw[0]), raw[1]
    _check_size(name, array, dtype.itemsize, shape)
    result: Array = np.zeros(shape, dtype)
    if array.nbytes:
        result[...] = array.view(dtype).reshape(shape)
    return result


def _decode_tensor(name: str, array: Array, raw: tuple[str, tuple[int, ...]] | None) -> torch.Tensor:
    import torch

    # The copy goes into memory of torch's own, so that a restored tensor is aligned like any other.
    if raw is None:
        plain = torch.empty(array.shape, dtype=getattr(torch, array.dtype.name))
        tensor_bytes(plain)[...] = _raw(array if array.flags.c_contiguous else array.copy(order="C"))
        return plain
    dtype = getattr(torch, raw[0], None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"the tensor {name!r} has the dtype {raw[0]!r}, which this torch does not know")
    _check_size(name, array, dtype.itemsize, raw[1])
    result = torch.empty(raw[1], dtype=dtype)
    tensor_bytes(result)[...] = array
    return result


def _check_size(name: str, array: Array, itemsize: int, shape: tuple[int, ...]) -> None:
    if array.dtype != np.uint8 or array.ndim != 1 or array.nbytes != itemsize * math.prod(shape):
        raise CheckpointError(f"the array {name!r} has {array.nbytes} bytes, shape {shape} needs another number")


def _decode_dict(pairs: Any, arrays: Mapping[str, Array]) -> Tree:
    return {_decode(key, arrays): _decode(value, arrays) for key, value in pairs}


def _decode_scalar(value: Any, arrays: Mapping[str, Array]) -> Any:
    dtype, data = np.dtype(value[0]), bytes.fromhex(value[1])
    return np.frombuffer(data, dtype)[0] if dtype.itemsize else np.zeros((), dtype)[()]


def _decode_float(value: Any, arrays: Mapping[str, Array]) -> float:
    number: float = struct.unpack(">d", bytes.fromhex(value))[0]
    return number


_SIMPLE: dict[str, Callable[[Any, Mapping[str, Array]], Any]] = {
    "$tuple": lambda value, arrays: tuple(_decode(item, arrays) for item in value),
    "$dict": _decode_dict,
    "$int": lambda value, arrays: int(value, 16),
    "$float": _decode_float,
    "$bytes": lambda value, arrays: _from_base64(value),
    "$text": lambda value, arrays: _from_base64(value).decode("utf-8", "surrogatepass"),
    "$scalar": _decode_scalar,
}


def _from_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise CheckpointError(f"not an encoded tree: {error}") from error


def _is_text(x: str) -> bool:
    """False for a str with lone surrogates; two of them in a row would come back from JSON as one character."""
    if x.isascii():
        return True
    try:
        x.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _encode_text(x: str) -> Any:
    if _is_text(x):
        return x
    return {"$text": base64.b64encode(x.encode("utf-8", "surrogatepass")).decode("ascii")}


def _raw(x: Array) -> Array:
    """The bytes of a C-contiguous array, ``(n,)`` uint8; shares its memory."""
    if not x.nbytes:
        return np.empty(0, np.uint8)
    return x.reshape(-1).view(np.uint8)


def _dtype_name(dtype: np.dtype[Any], path: tuple[str | int, ...]) -> str:
    # The name must say all: NumPy writes a structured dtype and bfloat16 of ml_dtypes alike as "|V2" or so.
    if dtype not in _NATIVE_DTYPES and (dtype.hasobject or np.dtype(dtype.str) != dtype):
        raise CheckpointError(
            f"{_where(path)}: an array of dtype {dtype} cannot be saved; use a numeric, bool, bytes or text dtype"
        )
    return dtype.str


def _where(path: tuple[str | int, ...]) -> str:
    return "/".join(map(str, path)) or "the tree"
