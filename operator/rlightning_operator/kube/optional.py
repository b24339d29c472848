"""Watches of what may not be there, or not be ours to read: RayClusters without KubeRay, Nodes without the right.

kopf waits for a missing resource by reading every CustomResourceDefinition, asks discovery the moment one appears
(which may be a moment too early), and complains of a missing right without end. Here a kind is simply listed until
that works, and watched from there on; what stood in the way is remembered in words.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable

from rlightning_operator import metrics
from rlightning_operator.kube.cache import Cache, version
from rlightning_operator.kube.client import ApiError, Client, Unreachable
from rlightning_operator.kube.kinds import Kind, Object

log = logging.getLogger(__name__)

MISSING_SECONDS = 3.0  # between looks for something that is not there
RECONNECT_SECONDS = 0.1
LONGEST_BACKOFF = 10.0


class OptionalWatch:
    """Keeps the cache's objects of one kind (in one namespace, or in all) as they are.

    Args:
        observe: told of each changed or vanished object.
        available: told None when the kind can be read, else the server's refusal (403 or 404); only when that changes.
    """

    def __init__(
        self,
        client: Client,
        cache: Cache,
        kind: Kind,
        namespace: str | None,
        observe: Callable[[Kind, Object], None],
        available: Callable[[str | None, ApiError | None], None],
    ) -> None:
        self._client = client
        self._cache = cache
        self._kind = kind
        self._namespace = namespace
        self._observe = observe
        self._available = available
        self._code: int | None = None  # of the last refusal; 0: there was none
        self.looked = asyncio.Event()
        self.last_sign = time.monotonic()

    async def run(self) -> None:
        """List and watch, forever."""
        failures = 0
        while True:
            delay = RECONNECT_SECONDS
            try:
                await self._list_and_watch()
                failures = 0
            except ApiError as error:
                if error.code in (403, 404):
                    self._tell(error)
                    delay = MISSING_SECONDS
                elif error.code != 410:
                    failures += 1
                    delay = self._complain(error, failures)
            except Unreachable as error:
                failures += 1
                delay = self._complain(error, failures)
            self.last_sign = time.monotonic()
            await asyncio.sleep(delay * random.uniform(0.8, 1.2))

    async def _list_and_watch(self) -> None:
        """Returns when the server has ended a watch, or it was silent for too long: then a new list is due anyway."""
        items, at = await self._client.list_all(self._kind, self._namespace, self._kind.selector)
        metrics.RELISTS.labels(self._kind.name).inc()
        changed = self._cache.replace(self._kind, self._namespace, items, at)
        self._tell(None)
        for obj in changed:
            self._observe(self._kind, obj)
        while True:
            self.last_sign = time.monotonic()
            events = 0
            async for change, obj in self._client.watch(self._kind, self._namespace, self._kind.selector, at):
                self.last_sign = time.monotonic()
                at = obj["metadata"]["resourceVersion"]
                events += 1
                if change == "BOOKMARK":
                    continue
                metrics.OBSERVED.labels(self._kind.name).inc()
                if change == "DELETED":
                    self._cache.remove(self._kind, obj["metadata"]["uid"], version(obj))
                    self._observe(self._kind, obj)
                elif self._cache.put(self._kind, obj):
                    self._observe(self._kind, obj)
            if not events:
                return
            await asyncio.sleep(RECONNECT_SECONDS)

    def _tell(self, refusal: ApiError | None) -> None:
        code = 0 if refusal is None else refusal.code
        if code != self._code:
            self._code = code
            if refusal is not None:
                for obj in self._cache.clear(self._kind, self._namespace):
                    self._observe(self._kind, obj)
                log.warning("%s are not watched: %s", self._kind.plural, refusal)
            else:
                log.info("%s are watched", self._kind.plural)
            self._available(self._namespace, refusal)
        self.looked.set()

    def _complain(self, error: ApiError | Unreachable, failures: int) -> float:
        metrics.ERRORS.labels("watch").inc()
        if failures == 3:  # one line, and only if it lasts
            log.warning("the watch of %s fails again and again: %s", self._kind.plural, error)
        return min(0.5 * 2.0 ** min(failures, 10), LONGEST_BACKOFF)
