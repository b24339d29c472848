"""Kubernetes quantities: ``500m``, ``16Gi``, ``1e3``."""

from __future__ import annotations

from decimal import Decimal, InvalidOperation

_SUFFIXES = {
    "n": Decimal("1e-9"),
    "u": Decimal("1e-6"),
    "m": Decimal("1e-3"),
    "": Decimal(1),
    **{letter: Decimal(1000) ** (i + 1) for i, letter in enumerate("kMGTPE")},
    **{f"{letter}i": Decimal(1024) ** (i + 1) for i, letter in enumerate("KMGTPE")},
}


def parse_quantity(value: str | int) -> Decimal:
    """The number. Raises ValueError for anything else."""
    text = str(value).strip()
    for suffix in sorted(_SUFFIXES, key=len, reverse=True):
        if suffix and text.endswith(suffix):
            return _number(text.removesuffix(suffix), value) * _SUFFIXES[suffix]
    return _number(text, value)


def _number(text: str, value: str | int) -> Decimal:
    try:
        number = Decimal(text)
    except InvalidOperation:
        raise ValueError(f"{value!r} is no Kubernetes quantity") from None
    if not number.is_finite():
        raise ValueError(f"{value!r} is no Kubernetes quantity")
    return number


def show_quantity(resource: str, amount: Decimal) -> str:
    """For people: memory in binary units, everything else plain."""
    if resource == "memory":
        for suffix in ("Ti", "Gi", "Mi"):
            if amount >= _SUFFIXES[suffix]:
                return f"{(amount / _SUFFIXES[suffix]).quantize(Decimal('0.1')).normalize():f}{suffix}"
    return f"{amount.normalize():f}"
