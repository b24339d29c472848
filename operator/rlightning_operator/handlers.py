"""The operator as kopf sees it: what it watches, and what it does with an event, which is to make a job due.

There is no ``on.create``, ``on.delete``, daemon or timer here, for each of them writes annotations or finalizers into
users' objects; and no state machine that misses an edge while the process is away.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any

import kopf

from rlightning_operator.controller import WATCHED, Controller
from rlightning_operator.kube.client import REQUEST_SECONDS, SILENCE_SECONDS, WATCH_SECONDS, login
from rlightning_operator.kube.kinds import Kind


def registry(controller: Controller, cleanup: Callable[[], Awaitable[None]]) -> kopf.OperatorRegistry:
    """All handlers. ``cleanup`` is called last, when kopf's watches have ended."""
    handlers = kopf.OperatorRegistry()

    @kopf.on.login(registry=handlers)
    async def authenticate(**_: Any) -> kopf.ConnectionInfo:
        return login()

    @kopf.on.startup(registry=handlers)
    async def start(settings: kopf.OperatorSettings, **_: Any) -> None:
        configure(settings, WATCHED)
        await controller.start()

    @kopf.on.cleanup(registry=handlers)
    async def stop(**_: Any) -> None:
        await cleanup()

    for kind in WATCHED:
        kopf.on.event(group=kind.group, version=kind.version, plural=kind.plural, id=kind.name, registry=handlers)(
            _observer(controller, kind)
        )
    return handlers


def _observer(controller: Controller, kind: Kind) -> Callable[..., Awaitable[None]]:
    async def observe(event: kopf.RawEvent, **_: Any) -> None:
        controller.observe(kind, event["type"], dict(event["object"]))

    return observe


def configure(settings: kopf.OperatorSettings, watched: Iterable[Kind]) -> None:
    """Watches that notice when they are dead, retries without end, nothing ever written."""
    settings.watching.server_timeout = WATCH_SECONDS
    settings.watching.client_timeout = WATCH_SECONDS + 10
    settings.watching.connect_timeout = 30
    settings.watching.inactivity_timeout = SILENCE_SECONDS
    settings.watching.chunk_size = 500
    for kind in watched:
        if kind.selector:
            settings.watching.label_selectors[kind.group, kind.version, kind.plural] = kind.selector
    settings.networking.request_timeout = REQUEST_SECONDS
    settings.networking.connect_timeout = 10
    settings.networking.error_backoffs = Backoffs()
    settings.scanning.disabled = True  # the CRDs are there (main.py); what may be missing is watched without kopf
    settings.peering.standalone = True
    settings.posting.enabled = False
    settings.posting.level = logging.CRITICAL
    # A limit would hold slots of idle objects and, with it, objects that wait; ours is the number of workers.
    settings.queueing.worker_limit = None
    settings.process.ultimate_exiting_timeout = 20


class Backoffs:
    """0.5 s, 1 s, … 5 s, 5 s, …, jittered: an API server that comes back is noticed within seconds."""

    def __iter__(self) -> Iterator[float]:
        delay = 0.5
        while True:
            yield delay * random.uniform(0.7, 1.0)
            delay = min(delay * 2, 5.0)
