"""``Double``: two private slots per member; one is run, the next version is copied into the other."""

from __future__ import annotations

from typing import ClassVar

from rlightning.weights.strategies.strategy import PayloadStrategy


class DoubleStrategy(PayloadStrategy):
    """A version arrives while the member acts, and is bound between two fragments by moving pointers only."""

    name: ClassVar[str] = "Double"
