"""How fast a run goes and when it will end."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable


class Pace:
    """An estimate of the remaining time from the steps of the last minute.

    A window rather than the whole run: a run that got slower (evaluations, a longer episode) is not promised the end
    that its first minute would have had. Evaluations and checkpoints are inside the window, as they recur.

    Args:
        total: environment steps at which the run ends.
        done: steps that were done before this attempt.
        window: seconds.
    """

    def __init__(
        self, total: int, done: int, *, window: float = 60.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.total, self.done = total, done
        self._window, self._clock = window, clock
        self._samples: deque[tuple[float, int]] = deque([(clock(), done)])

    def update(self, env_steps: int) -> None:
        """Take note that ``env_steps`` are done, now."""
        self.done = env_steps
        now = self._clock()
        self._samples.append((now, env_steps))
        while len(self._samples) > 2 and now - self._samples[1][0] >= self._window:
            self._samples.popleft()

    @property
    def percent(self) -> float:
        """0..100; the last iteration may overshoot the total, the percentage does not."""
        return min(100.0, 100.0 * self.done / self.total)

    def remaining_seconds(self) -> float | None:
        """Seconds from the last update to the total; None before the first update."""
        (start, first), (end, last) = self._samples[0], self._samples[-1]
        if last <= first or end <= start:
            return None
        return max(0.0, (self.total - last) * (end - start) / (last - first))
