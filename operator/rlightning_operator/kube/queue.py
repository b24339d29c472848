"""A queue of keys: each at most once in it, each in the hands of at most one worker, due now or later."""

from __future__ import annotations

import asyncio
import heapq
import random
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

FIRST_RETRY_SECONDS = 0.5
LONGEST_RETRY_SECONDS = 60.0


class Closed(Exception):
    """No more keys are given out."""


class WorkQueue(Generic[K]):
    """Keys that want work. For one event loop; nothing here blocks or fails.

    A key that is added again keeps its earliest time. One that is added while a worker has it is given out again
    afterwards. ``clock`` and ``jitter`` (1 or less, times each retry's delay) are for tests.
    """

    def __init__(
        self,
        clock: Callable[[], float] | None = None,
        jitter: Callable[[], float] = lambda: random.uniform(0.5, 1.0),
    ) -> None:
        self._clock = clock or (lambda: asyncio.get_running_loop().time())
        self._jitter = jitter
        self._due: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._count = 0
        self._busy: dict[K, float] = {}
        self._failures: dict[K, int] = {}
        self._closed = False
        self._changed = asyncio.Event()

    def add(self, key: K, delay: float = 0.0) -> None:
        """Give the key out after ``delay`` seconds, or earlier if that was asked before."""
        due = self._clock() + max(delay, 0.0)
        if self._closed or self._due.get(key, float("inf")) <= due:
            return
        self._due[key] = due
        self._push(key, due)

    async def get(self) -> K:
        """Wait for a key to be due, and take it: :meth:`done` must follow. Raises Closed."""
        while not self._closed:
            self._changed.clear()
            key, wait = self._pop()
            if key is not None:
                return key
            try:
                async with asyncio.timeout(wait):
                    await self._changed.wait()
            except TimeoutError:
                continue
        raise Closed

    def done(self, key: K) -> None:
        """The worker is finished with the key."""
        self._busy.pop(key, None)
        if key in self._due:
            self._push(key, self._due[key])

    def retry(self, key: K) -> tuple[int, float]:
        """Add the key again after a failure, in 0.5, 1, … 60 s, jittered; returns the count, and the delay."""
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        delay = min(FIRST_RETRY_SECONDS * 2.0 ** min(failures - 1, 30), LONGEST_RETRY_SECONDS) * self._jitter()
        self.add(key, delay)
        return failures, delay

    def forgive(self, key: K) -> None:
        """The next failure is the first one."""
        self._failures.pop(key, None)

    def close(self) -> None:
        """Give out nothing any more; waiting workers get Closed."""
        self._closed = True
        self._due.clear()
        self._heap.clear()
        self._changed.set()

    def __len__(self) -> int:
        """Keys that are due, or will be."""
        return len(self._due)

    @property
    def overdue(self) -> float:
        """For how long the key that waits longest has been due, in seconds; 0 if none is."""
        now = self._clock()
        return max((now - due for key, due in self._due.items() if due <= now and key not in self._busy), default=0.0)

    @property
    def longest_work(self) -> float:
        """For how long the slowest worker has had its key, in seconds."""
        now = self._clock()
        return max((now - start for start in self._busy.values()), default=0.0)

    @property
    def idle(self) -> bool:
        """Whether no worker has a key."""
        return not self._busy

    def _push(self, key: K, due: float) -> None:
        self._count += 1
        heapq.heappush(self._heap, (due, self._count, key))
        self._changed.set()

    def _pop(self) -> tuple[K | None, float | None]:
        """A key that is due, or None and for how long to wait (None: until something changes)."""
        now = self._clock()
        while self._heap:
            due, _, key = self._heap[0]
            if self._due.get(key) != due or key in self._busy:
                heapq.heappop(self._heap)  # taken or moved meanwhile; a busy one comes back with done()
                continue
            if due > now:
                return None, due - now
            heapq.heappop(self._heap)
            del self._due[key]
            self._busy[key] = now
            return key, None
        return None, None
