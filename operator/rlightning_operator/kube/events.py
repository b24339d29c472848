"""Kubernetes Events on RLJobs: each note once, few enough, and never in the way of anything.

A note that is in plan after plan is news only when its message changes. An Event's name is made from what it says, so
an operator that has just started does not say everything again.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections import OrderedDict
from datetime import UTC, datetime

from rlightning_operator import metrics
from rlightning_operator.kube import kinds
from rlightning_operator.kube.client import ApiError, Client, Unreachable
from rlightning_operator.kube.kinds import Object
from rlightning_operator.reconcile.snapshot import Note

log = logging.getLogger(__name__)

COMPONENT = "rlightning-operator"
REMEMBERED = 5_000  # (job, reason) pairs
WAITING = 200
BURST, REFILL_SECONDS = 25, 30.0  # per job: so many at once, then one each so often
MESSAGE = 1024  # the API server's limit


class Recorder:
    """Sends notes, one after the other, in a task of its own."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._said: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._allowance: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._waiting: asyncio.Queue[tuple[Object, Note, bool]] = asyncio.Queue(WAITING)

    def record(self, job: Object, note: Note) -> None:
        """Send the note unless it was the last one of its reason. Never fails, never waits."""
        key = (job["metadata"]["uid"], note.reason)
        before = self._said.get(key)
        if before == note.message:
            return
        self._said[key] = note.message
        self._said.move_to_end(key)
        while len(self._said) > REMEMBERED:
            self._said.popitem(last=False)
        if not self._allowed(job["metadata"]["uid"]) or self._waiting.full():
            metrics.EVENTS.labels("dropped").inc()
            return
        self._waiting.put_nowait((job, note, before is not None))

    async def run(self) -> None:
        """Send what is recorded, forever."""
        while True:
            job, note, news = await self._waiting.get()
            try:
                await self._send(job, note, news)
            except (ApiError, Unreachable) as error:
                ended = isinstance(error, ApiError) and (error.namespace_ending or error.code == 404)
                metrics.EVENTS.labels("failed").inc()
                log.log(
                    logging.DEBUG if ended else logging.WARNING,
                    "the event %s was not recorded: %s",
                    note.reason,
                    error,
                    extra={"job": _name(job)},
                )
            finally:
                self._waiting.task_done()

    async def drain(self, seconds: float) -> None:
        """Wait until all is sent, but not for long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._waiting.join()

    async def _send(self, job: Object, note: Note, news: bool) -> None:
        event = event_of(job, note, datetime.now(UTC))
        try:
            await self._client.create(kinds.EVENT, event)
            metrics.EVENTS.labels("sent").inc()
            metrics.WRITES.labels("Event", "create").inc()
        except ApiError as error:
            if not error.already_exists:
                raise
            metrics.EVENTS.labels("repeated").inc()
            if not news:
                return  # said by the operator that ran before this one
            metadata = event["metadata"]
            known = await self._client.get(kinds.EVENT, metadata["namespace"], metadata["name"])
            patch = {"count": int(known.get("count") or 1) + 1, "lastTimestamp": event["lastTimestamp"]}
            await self._client.patch(kinds.EVENT, metadata["namespace"], metadata["name"], patch)
            metrics.WRITES.labels("Event", "patch").inc()

    def _allowed(self, uid: str) -> bool:
        now = time.monotonic()
        left, at = self._allowance.pop(uid, (float(BURST), now))
        left = min(left + (now - at) / REFILL_SECONDS, float(BURST))
        self._allowance[uid] = (left - 1 if left >= 1 else left, now)
        while len(self._allowance) > REMEMBERED:
            self._allowance.popitem(last=False)
        return left >= 1


def event_of(job: Object, note: Note, now: datetime) -> Object:
    """A core/v1 Event, as `kubectl describe` shows it."""
    metadata = job["metadata"]
    message = note.message if len(note.message) <= MESSAGE else note.message[: MESSAGE - 1] + "…"
    digest = hashlib.sha256(f"{metadata['uid']}\n{note.reason}\n{note.message}".encode()).hexdigest()[:16]
    time_text = now.strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"namespace": metadata["namespace"], "name": f"{metadata['name']}.{digest}"},
        "involvedObject": {
            "apiVersion": job["apiVersion"],
            "kind": job["kind"],
            "namespace": metadata["namespace"],
            "name": metadata["name"],
            "uid": metadata["uid"],
        },
        "type": note.type,
        "reason": note.reason,
        "message": message,
        "count": 1,
        "firstTimestamp": time_text,
        "lastTimestamp": time_text,
        "source": {"component": COMPONENT},
        "reportingComponent": COMPONENT,
    }


def _name(job: Object) -> str:
    return f"{job['metadata']['namespace']}/{job['metadata']['name']}"
