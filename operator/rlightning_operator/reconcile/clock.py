"""Now, and the next moment at which time alone changes the plan."""

from __future__ import annotations

from datetime import datetime


class Clock:
    """Answers whether deadlines have passed, and remembers the nearest that has not."""

    def __init__(self, now: datetime) -> None:
        self.now = now
        self._nearest: float | None = None

    def passed(self, start: datetime, seconds: float) -> bool:
        """Whether ``seconds`` have gone by since ``start``; if not, the plan is due again when they have."""
        # Not start + timedelta(seconds): the longest deadlines that the CRD allows are past the calendar's end.
        left = seconds - (self.now - start).total_seconds()
        if left <= 0:
            return True
        self._nearest = left if self._nearest is None else min(left, self._nearest)
        return False

    @property
    def requeue_after(self) -> float | None:
        """Seconds until then, and a little more: a timer that wakes early would ask twice."""
        return None if self._nearest is None else self._nearest + 0.05
