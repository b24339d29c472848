"""Whole listings of what kopf watches: before the first reconcile, now and then, and when a watch has had a gap.

kopf hands on the events of its watches, but after a gap it lists anew without a word about objects that vanished
meanwhile. A deleted RayCluster's pod would stay in the cache for good. So whenever objects come from a new listing of
kopf's, and every few minutes anyway, all kinds are listed here too and the cache made equal to that. All, because a
gap mostly hits all watches, and a kind of which nothing is left would give no sign.

It also is the proof that the watches live: what a listing found must arrive through the watch soon, or the watch is
dead and the process says so at /healthz.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Sequence

from rlightning_operator import metrics
from rlightning_operator.kube.cache import Cache, version
from rlightning_operator.kube.client import ApiError, Client, Unreachable
from rlightning_operator.kube.kinds import Kind, Object

log = logging.getLogger(__name__)

PERIOD_SECONDS = 120.0
SETTLE_SECONDS = 1.0  # the listing that made us suspicious may still be under way
WATCH_DELAY_SECONDS = 150.0  # a watch that is later than this, and than the next listing, is dead


class Relister:
    """Keeps the cache equal to what the API server lists.

    Args:
        kinds: those that kopf watches.
        namespaces: None for all.
        observe: told of each object that changed or vanished without an event.
    """

    def __init__(
        self,
        client: Client,
        cache: Cache,
        kinds: Sequence[Kind],
        namespaces: Sequence[str] | None,
        observe: Callable[[Kind, Object], None],
    ) -> None:
        self._client = client
        self._cache = cache
        self._kinds = kinds
        self._namespaces: Sequence[str | None] = [None] if namespaces is None else list(namespaces)
        self._observe = observe
        self._suspected = asyncio.Event()
        # What a listing found before the watch did: the watch owes it until then.
        self._owed: dict[Kind, tuple[str, int, float]] = {}  # uid, version, deadline

    def suspect(self) -> None:
        """A watch has had a gap: list, soon."""
        self._suspected.set()

    def delivered(self, kind: Kind, obj: Object) -> None:
        """Its watch has brought this object."""
        owed = self._owed.get(kind)
        if owed is not None and version(obj) >= owed[1]:
            del self._owed[kind]

    @property
    def late(self) -> list[str]:
        """The kinds whose watch has not brought what a listing found minutes ago, and what is there still."""
        now = time.monotonic()
        return sorted(
            kind.plural
            for kind, (uid, _, deadline) in self._owed.items()
            if now > deadline and self._cache.has(kind, uid)
        )

    async def run(self) -> None:
        """List on suspicion and from time to time, forever."""
        due = time.monotonic() + 5.0  # kopf's own first listing is over by then
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(due - time.monotonic(), 0.0)):
                    await self._suspected.wait()
                    await asyncio.sleep(SETTLE_SECONDS)
            self._suspected.clear()
            try:
                await self.relist()
                due = time.monotonic() + PERIOD_SECONDS * random.uniform(0.9, 1.1)
            except (ApiError, Unreachable) as error:
                metrics.ERRORS.labels("relist").inc()
                log.warning("a listing failed, and is tried again: %s", error)
                due = time.monotonic() + random.uniform(1.0, 5.0)

    async def relist(self) -> None:
        """List all kinds now. Raises ApiError, Unreachable."""
        for kind in self._kinds:
            for namespace in self._namespaces:
                await self._relist(kind, namespace)

    async def _relist(self, kind: Kind, namespace: str | None) -> None:
        highest = self._cache.highest(kind)
        items, at = await self._client.list_all(kind, namespace, kind.selector)
        metrics.RELISTS.labels(kind.name).inc()
        if at.isdigit() and int(at) < highest:
            # Versions only ever rise, except where etcd was restored from a backup.
            log.warning("the API server's %s are older than what was seen before; starting from them", kind.plural)
            self._cache.start_over(kind)
        changed = self._cache.replace(kind, namespace, items, at)
        if changed:
            metrics.MISSED.labels(kind.name).inc(len(changed))
        listed = {item["metadata"]["uid"] for item in items}
        for obj in changed:
            uid = obj["metadata"]["uid"]
            if uid in listed and not self._cache.has(kind, self._owed.get(kind, ("",))[0]):
                self._owed[kind] = (uid, version(obj), time.monotonic() + WATCH_DELAY_SECONDS)
            self._observe(kind, obj)
