"""Weight strategies, by the name that ``spec.weights.strategy`` gives them."""

from __future__ import annotations

from rlightning.errors import WeightsError
from rlightning.weights.strategies.double import DoubleStrategy
from rlightning.weights.strategies.none import NoneStrategy
from rlightning.weights.strategies.shared import SharedStrategy
from rlightning.weights.strategies.strategy import WeightStrategy

__all__ = ["DoubleStrategy", "NoneStrategy", "SharedStrategy", "WeightStrategy", "build_strategy"]


def build_strategy(name: str, lease_seconds: float) -> WeightStrategy:
    """The strategy of that name.

    Args:
        name: ``None``, ``Double`` or ``Shared``.
        lease_seconds: ``spec.deadlines.leaseSeconds``; only ``Shared`` has leases.

    Raises:
        WeightsError: there is no such strategy.
    """
    if name == "None":
        return NoneStrategy()
    if name == "Double":
        return DoubleStrategy()
    if name == "Shared":
        return SharedStrategy(lease_seconds)
    raise WeightsError(f"spec.weights.strategy {name!r} is not one of None, Double, Shared")
