"""Two weight slots of one member's own memory (strategy ``Double``)."""

from __future__ import annotations

from torch import Tensor

from rlightning.weights.layout import ByteArray, StateLayout, aligned_bytes

SLOTS = 2


class PrivateSlots:
    """While a member runs version v out of one slot, v+1 is copied into the other.

    Args:
        layout: of the weights.
    """

    def __init__(self, layout: StateLayout) -> None:
        self._data: list[ByteArray] = [aligned_bytes(layout.nbytes) for _ in range(SLOTS)]
        self._views = [layout.views(data) for data in self._data]

    def write(self, slot: int, data: ByteArray) -> dict[str, Tensor]:
        """Copy a packed state into a slot; its tensors by name, the same objects at each call."""
        self._data[slot][:] = data
        return self._views[slot]

    def slots_of(self, tensors: dict[str, Tensor]) -> set[int]:
        """Which slots these tensors lie in."""
        found: set[int] = set()
        for slot, data in enumerate(self._data):
            first = data.ctypes.data
            if any(first <= t.data_ptr() < first + data.nbytes for t in tensors.values() if t.nbytes):
                found.add(slot)
        return found
