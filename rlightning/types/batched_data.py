"""Values keyed by environment id, in a fixed order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


class BatchedData:
    """An ordered batch: one value per id, ids unique.

    Raises:
        ValueError: ids and values differ in number, or an id occurs twice.
    """

    def __init__(self, ids: Sequence[str], data: Sequence[Any]) -> None:
        self._ids, self._data = list(ids), list(data)
        if len(self._ids) != len(self._data):
            raise ValueError(f"{len(self._ids)} ids for {len(self._data)} values; give one value per id")
        if len(set(self._ids)) != len(self._ids):
            twice = sorted({i for i in self._ids if self._ids.count(i) > 1})
            raise ValueError(f"ids must be unique; repeated: {', '.join(twice)}")

    @staticmethod
    def from_dict(data_dict: Mapping[str, Any]) -> BatchedData:
        """A batch with the mapping's keys as ids, in its order."""
        return BatchedData(list(data_dict), list(data_dict.values()))

    def ids(self) -> list[str]:
        """Ids in order."""
        return list(self._ids)

    def values(self) -> list[Any]:
        """Values in the order of the ids."""
        return list(self._data)

    def items(self) -> Iterable[tuple[str, Any]]:
        """Pairs of id and value in order."""
        return zip(self._ids, self._data, strict=True)

    def __len__(self) -> int:
        return len(self._ids)
