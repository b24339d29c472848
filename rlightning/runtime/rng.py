"""Random number streams: one seed, many independent streams, and the global generators as a value.

User code draws from the *global* Python, NumPy and torch generators. Members that share a process must not disturb
one another, and a resumed run must draw what the undisturbed one would have drawn. So the three generators are
treated as one value that is swapped in around every call into a member (:class:`RngState`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import torch


class Stream(IntEnum):
    """What a stream is for. The number is part of the seed: never renumber, or every digest changes."""

    LEARNER = 1
    SHARD_POLICY = 2
    EVALUATION = 3
    MEMBER = 4


def seed_words(seed: int, stream: Stream, index: int = 0, words: int = 4) -> list[int]:
    """Independent 32-bit words for ``(seed, stream, index)`` (NumPy's SeedSequence, hash-based)."""
    return [int(w) for w in np.random.SeedSequence([seed, int(stream), index]).generate_state(words)]


@dataclass
class RngState:
    """State of the global Python, NumPy and torch CPU generators."""

    python: tuple[Any, ...]
    numpy: tuple[Any, ...]
    torch: torch.Tensor

    @staticmethod
    def capture() -> RngState:
        """The generators as they are now."""
        legacy: Any = np.random.get_state(legacy=True)
        return RngState(random.getstate(), legacy, torch.get_rng_state())

    def restore(self) -> None:
        """Put the generators into this state."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)

    @staticmethod
    def seeded(seed: int, stream: Stream, index: int = 0) -> RngState:
        """A fresh state for a stream; the generators themselves are left as they were."""
        before = RngState.capture()
        python, legacy, low, high = seed_words(seed, stream, index)
        random.seed(python)
        np.random.seed(legacy)
        torch.manual_seed(low | (high & 0x7FFFFFFF) << 32)
        fresh = RngState.capture()
        before.restore()
        return fresh

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Run a block under this state, keep what the block made of it, and give back what was there before."""
        before = RngState.capture()
        self.restore()
        try:
            yield
        finally:
            after = RngState.capture()
            self.python, self.numpy, self.torch = after.python, after.numpy, after.torch
            before.restore()

    def state_dict(self) -> dict[str, Any]:
        """As arrays and numbers, for a checkpoint."""
        version, words, gauss = self.python
        name, key, pos, has_gauss, cached = self.numpy
        return {
            "python": {"version": version, "words": np.array(words, dtype=np.uint32), "gauss": gauss},
            "numpy": {
                "name": name,
                "key": np.asarray(key),
                "pos": int(pos),
                "has_gauss": int(has_gauss),
                "cached": float(cached),
            },
            "torch": self.torch.numpy().copy(),
        }

    @staticmethod
    def from_state_dict(state: dict[str, Any]) -> RngState:
        """The inverse of :meth:`state_dict`."""
        python, legacy = state["python"], state["numpy"]
        return RngState(
            (python["version"], tuple(int(w) for w in python["words"]), python["gauss"]),
            (legacy["name"], np.asarray(legacy["key"]), legacy["pos"], legacy["has_gauss"], legacy["cached"]),
            torch.from_numpy(np.array(state["torch"], dtype=np.uint8)),
        )
