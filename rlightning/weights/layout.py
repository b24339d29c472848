"""Where each tensor of a state lies in one flat byte buffer."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rlightning.errors import WeightsError
from rlightning.weights.digest import PersistentState, dtype_name, persistent_state, plain_tensor

ALIGNMENT = 64  # torch's own: BLAS kernels may round differently on memory that is aligned differently

ByteArray = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class LayoutEntry:
    """One tensor: ``nbytes`` contiguous bytes at ``offset``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class StateLayout:
    """Names, dtypes, shapes and places of all persistent tensors of a module.

    Attributes:
        entries: in byte order of names; each offset is a multiple of 64.
        nbytes: size of the buffer.
        aliases: (further name, name it is tied to), sorted.
    """

    entries: tuple[LayoutEntry, ...]
    nbytes: int
    aliases: tuple[tuple[str, str], ...] = ()

    @staticmethod
    def of(module: nn.Module) -> StateLayout:
        """The layout of a module's persistent state."""
        return layout_of(persistent_state(module))

    def pack(self, module: nn.Module, out: ByteArray | None = None) -> ByteArray:
        """Copy the module's live tensors into a flat buffer.

        Args:
            module: has exactly this layout.
            out: uint8 ``(nbytes,)``, writable; a new 64-byte aligned one if None. Padding between tensors is left as
                it is.

        Raises:
            WeightsError: the module's tensors differ from the layout; names the first.
        """
        state = persistent_state(module)
        self.require(layout_of(state), "the packed module")
        return self.pack_tensors(state.tensors, out)

    def pack_tensors(self, tensors: Mapping[str, Tensor], out: ByteArray | None = None) -> ByteArray:
        """Copy tensors that have this layout into a flat buffer (:meth:`pack`)."""
        if out is None:
            out = aligned_bytes(self.nbytes)
        address = out.ctypes.data
        for entry in self.entries:
            tensor = plain_tensor(entry.name, tensors[entry.name])
            ctypes.memmove(address + entry.offset, tensor.data_ptr(), entry.nbytes)
        return out

    def views(self, buffer: Any) -> dict[str, Tensor]:
        """Tensors that lie in ``buffer``, by name; nothing is copied and each keeps the buffer alive.

        Writing to a tensor over a read-only buffer kills the process (SIGSEGV, not an exception).

        Args:
            buffer: uint8 ``(nbytes,)`` array, or any C-contiguous buffer of that size.

        Raises:
            WeightsError: the buffer has another size.
        """
        array = np.frombuffer(buffer, np.uint8) if not isinstance(buffer, np.ndarray) else buffer
        if array.dtype != np.uint8 or array.shape != (self.nbytes,) or not array.flags.c_contiguous:
            raise WeightsError(
                f"a buffer of {array.dtype} {array.shape} cannot hold this layout: uint8 ({self.nbytes},) is needed"
            )
        # A ctypes array over the address instead of the array itself: torch warns, once per process and with no way
        # to silence it for one call only, about each buffer that is not writable.
        memory = (ctypes.c_ubyte * self.nbytes).from_address(array.ctypes.data)
        memory.owner = array  # type: ignore[attr-defined]
        views: dict[str, Tensor] = {}
        for entry in self.entries:
            dtype = torch_dtype(entry.dtype)
            if entry.nbytes == 0:
                views[entry.name] = torch.empty(entry.shape, dtype=dtype)
            else:
                flat = torch.frombuffer(memory, dtype=dtype, count=prod(entry.shape), offset=entry.offset)
                views[entry.name] = flat.view(entry.shape)
        return views

    def require(self, other: StateLayout, whose: str) -> None:
        """Nothing if ``other`` describes the same tensors.

        Raises:
            WeightsError: it does not; names the first tensor and what differs.
        """
        if other is self or other == self:
            return
        ours = {entry.name: entry for entry in self.entries}
        theirs = {entry.name: entry for entry in other.entries}
        for name in sorted(ours.keys() | theirs.keys()):
            if name not in theirs:
                raise WeightsError(f"{whose} lacks tensor {name!r}: build every member from the same configuration")
            if name not in ours:
                raise WeightsError(f"{whose} has tensor {name!r}, which the published weights do not have")
            want, have = ours[name], theirs[name]
            if (want.dtype, want.shape) != (have.dtype, have.shape):
                raise WeightsError(
                    f"tensor {name!r} of {whose} is {have.dtype}{list(have.shape)}; "
                    f"published is {want.dtype}{list(want.shape)}"
                )
        raise WeightsError(f"{whose} ties {dict(other.aliases)}; the published weights tie {dict(self.aliases)}")

    def to_json(self) -> dict[str, Any]:
        """A JSON object; :meth:`from_json` reads it."""
        return {
            "nbytes": self.nbytes,
            "tensors": [
                {"name": e.name, "dtype": e.dtype, "shape": list(e.shape), "offset": e.offset, "nbytes": e.nbytes}
                for e in self.entries
            ],
            "aliases": dict(self.aliases),
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> StateLayout:
        """The layout that :meth:`to_json` wrote."""
        entries = tuple(
            LayoutEntry(t["name"], t["dtype"], tuple(t["shape"]), t["offset"], t["nbytes"]) for t in value["tensors"]
        )
        return StateLayout(entries, value["nbytes"], tuple(value["aliases"].items()))


def layout_of(state: PersistentState) -> StateLayout:
    """The layout of tensors in hand. Equal states get the same object, so that comparing them costs nothing.

    Raises:
        WeightsError: a tensor is not initialised; names it.
    """
    try:
        signature = tuple([(name, tensor.dtype, tensor.shape) for name, tensor in state.tensors.items()])
    except RuntimeError as cause:  # a lazy module that has not seen data yet
        lazy = [n for n, t in state.tensors.items() if nn.parameter.is_lazy(t)]
        raise WeightsError(f"tensors {', '.join(lazy)} have no shape yet: run one forward pass first") from cause
    return _layout(signature, tuple(state.aliases.items()))


@lru_cache(maxsize=64)
def _layout(
    signature: tuple[tuple[str, torch.dtype, torch.Size], ...], aliases: tuple[tuple[str, str], ...]
) -> StateLayout:
    entries: list[LayoutEntry] = []
    end = 0
    for name, dtype, shape in signature:
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        nbytes = prod(shape) * dtype.itemsize
        entries.append(LayoutEntry(name, dtype_name(dtype), tuple(shape), offset, nbytes))
        end = offset + nbytes
    return StateLayout(tuple(entries), -(-end // ALIGNMENT) * ALIGNMENT, aliases)


def aligned_bytes(nbytes: int) -> ByteArray:
    """An uninitialised uint8 buffer whose address is a multiple of 64.

    From NumPy, which aligns to 16 only but asks for huge pages: filling a new 100 MB buffer is 3 times as fast as in
    memory of torch's allocator.
    """
    memory = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + nbytes]


def torch_dtype(name: str) -> torch.dtype:
    """``torch.float32`` for ``float32``.

    Raises:
        WeightsError: torch has no such dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise WeightsError(f"torch {torch.__version__} has no dtype {name!r}")
    return dtype
