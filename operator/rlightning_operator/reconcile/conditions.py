"""The conditions of a job, and the word for its state that is made from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rlightning.api.models import Condition
from rlightning_operator.reconcile.objects import shorten

Status = Literal["True", "False", "Unknown"]


@dataclass(frozen=True)
class Said:
    """One condition without the times."""

    type: str
    status: Status
    reason: str
    message: str


def merge(stored: Sequence[Condition], said: Sequence[Said], generation: int | None, now: str) -> list[Condition]:
    """The new list. A condition keeps its time as long as its status stays, whatever becomes of reason and message."""
    before = {condition.type: condition for condition in stored}
    merged = []
    for entry in said:
        old = before.get(entry.type)
        same = old is not None and old.status == entry.status
        merged.append(
            Condition(
                type=entry.type,
                status=entry.status,
                observed_generation=generation,
                last_transition_time=old.last_transition_time if old is not None and same else now,
                reason=entry.reason,
                # The end of a message that is too long is the end of a traceback.
                message=shorten(entry.message, 32768, keep="end"),
            )
        )
    return merged


def as_said(stored: Sequence[Condition], type_: str) -> Said | None:
    """A stored condition, to be said again."""
    found = next((c for c in stored if c.type == type_), None)
    return Said(found.type, found.status, found.reason, found.message) if found is not None else None
