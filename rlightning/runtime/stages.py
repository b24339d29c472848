"""Where the time of a start goes, stage by stage: from the first line of a driver to the first iteration."""

from __future__ import annotations

import time


class Stages:
    """A stopwatch with names. One after another, so that the seconds add up to the whole."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def done(self, stage: str) -> None:
        """``stage`` ended now; it began when the one before it ended."""
        now = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._last
        self._last = now


def in_words(seconds: dict[str, float]) -> str:
    """``34.1 s: imports 5.0, Ray 2.1, members 24.3``; stages of less than 50 ms are not named."""
    shown = ", ".join(f"{stage} {spent:.1f}" for stage, spent in seconds.items() if spent >= 0.05)
    return f"{sum(seconds.values()):.1f} s: {shown}"
