"""``None``: no buffer; a version is copied into the live tensors on arrival."""

from __future__ import annotations

from typing import ClassVar

from rlightning.weights.strategies.strategy import PayloadStrategy


class NoneStrategy(PayloadStrategy):
    """Least memory. A member that acts makes the publisher wait until its fragment is over."""

    name: ClassVar[str] = "None"
