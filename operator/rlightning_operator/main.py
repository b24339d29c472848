"""``rlightning-operator``: find the API server and the CRDs, then hand over to kopf until told to stop."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import signal
import sys
import time
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import kopf

from rlightning_operator import handlers, logs, metrics
from rlightning_operator.config import Settings, parse
from rlightning_operator.controller import WATCHED, Controller
from rlightning_operator.health import HealthServer
from rlightning_operator.kube import kinds
from rlightning_operator.kube.client import ApiError, Client, LoginError, Unreachable, login
from rlightning_operator.reconcile.plan import reconcile
from rlightning_operator.reconcile.snapshot import OperatorConfig

log = logging.getLogger(__name__)

T = TypeVar("T")

LOOK_SECONDS = 2.0


class StartError(Exception):
    """The operator cannot work here; the message says why, and what to do."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns the exit status: 0 after SIGTERM or SIGINT, else 1 with a sentence in the log."""
    settings = parse(arguments)
    logs.configure(settings.log_level, settings.log_format)
    try:
        return asyncio.run(run(settings))
    except KeyboardInterrupt:
        return 130
    except (StartError, LoginError) as error:
        log.error("%s", error)
        return 1


async def run(settings: Settings) -> int:
    """Everything, until the process is told to stop. Raises StartError, LoginError."""
    client = Client(login())
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):  # kopf puts its own in their place when it starts
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    health = HealthServer(settings.host, settings.port)
    try:
        await health.start()
    except OSError as error:
        raise StartError(f"health and metrics cannot be served at {settings.host}:{settings.port}: {error}") from error
    try:
        config = await _result_before(stop, _begin(client, settings))
        if config is None:
            log.info("stopped before it could begin")
            return 0
        return await _operate(client, settings, config, health, stop)
    finally:
        await health.stop()
        await client.close()


async def _begin(client: Client, settings: Settings) -> OperatorConfig:
    """Wait for what is needed. Raises StartError."""
    await wait_until_usable(client, settings)
    try:
        return await _refreshed(client, settings, settings.jobs)
    except (ApiError, Unreachable) as error:
        raise StartError(f"the API server's own addresses could not be asked for: {error}") from error


async def _refreshed(client: Client, settings: Settings, config: OperatorConfig) -> OperatorConfig:
    """The configuration with the API server's addresses of now. Raises ApiError, Unreachable."""
    if not settings.detect_endpoints:
        return config
    found = await api_server_endpoints(client)
    # What was found once is not given up for wider policies because it cannot be found now.
    return dataclasses.replace(config, api_server_endpoints=found or config.api_server_endpoints)


async def _result_before(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """What the work returns; None if the process is told to stop before that: the work is cancelled then."""
    loop = asyncio.get_running_loop()
    task, told = loop.create_task(work), loop.create_task(stop.wait())
    try:
        await asyncio.wait({task, told}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            return None
        return await task
    finally:
        for one in (task, told):
            one.cancel()
        await asyncio.gather(task, told, return_exceptions=True)


async def _operate(
    client: Client, settings: Settings, config: OperatorConfig, health: HealthServer, stop_flag: asyncio.Event
) -> int:
    failures: list[BaseException] = []

    def failed(error: BaseException) -> None:
        failures.append(error)
        stop_flag.set()

    controller = Controller(
        client,
        config,
        reconcile,
        namespaces=settings.namespaces,
        workers=settings.workers,
        refresh=lambda config: _refreshed(client, settings, config),
        failed=failed,
    )
    health.controller = controller
    metrics.register(controller.states, lambda: len(controller.queue), lambda: controller.queue.overdue)

    async def cleanup() -> None:
        # kopf takes every task that is left for one of its own that hangs, and waits for it.
        await health.stop()
        await controller.stop()
        stop_flag.set()  # kopf's own waiter for it would be such a task

    where = "all namespaces" if settings.namespaces is None else f"namespaces {', '.join(settings.namespaces)}"
    log.info("watching %s of %s", where, client.server)
    try:
        await kopf.operator(
            registry=handlers.registry(controller, cleanup),
            clusterwide=settings.namespaces is None,
            namespaces=settings.namespaces or (),
            stop_flag=stop_flag,
        )
    except Exception as error:
        failures.append(error)
    for failure in failures:
        log.error("the operator ends, to be started anew: %s: %s", type(failure).__name__, failure, exc_info=failure)
    if not failures:
        log.info("stopped")
    return 1 if failures else 0


async def wait_until_usable(client: Client, settings: Settings) -> None:
    """Wait for the API server, the CRDs and the rights that the operator needs. Raises StartError."""
    deadline = time.monotonic() + settings.startup_seconds
    said = ""
    while True:
        obstacle = await _obstacle(client, settings)
        if not obstacle:
            return
        if time.monotonic() >= deadline:
            raise StartError(f"{obstacle} (waited {settings.startup_seconds:g} s)")
        if obstacle != said:
            log.warning("waiting: %s", obstacle)
            said = obstacle
        await asyncio.sleep(LOOK_SECONDS)


async def _obstacle(client: Client, settings: Settings) -> str:
    """Why the operator cannot work yet; "" if it can."""
    try:
        served = await client.request("GET", f"/apis/{kinds.RLJOB.group}/{kinds.RLJOB.version}")
    except Unreachable as error:
        return f"the API server cannot be reached: {error}"
    except ApiError as error:
        if error.code == 401:
            return f"the API server at {client.server} does not accept the operator's credentials: {error.message}"
        if error.code != 404:
            return f"the API server does not say what it serves: {error}"
        served = {}
    plurals = {resource.get("name") for resource in served.get("resources", ())}
    missing = [kind.plural for kind in (kinds.RLJOB, kinds.POLICY_GROUP) if kind.plural not in plurals]
    if missing:
        names = ", ".join(f"{plural}.{kinds.RLJOB.group}" for plural in missing)
        return f"these CustomResourceDefinitions are missing: {names}; install the chart, or its CRDs, first"
    for kind in WATCHED:
        for namespace in settings.namespaces or (None,):
            try:
                query = {"limit": "1"} | ({"labelSelector": kind.selector} if kind.selector else {})
                await client.request("GET", kind.path(namespace), kind, verb="list", query=query)
            except Unreachable as error:
                return f"the API server cannot be reached: {error}"
            except ApiError as error:
                return f"{kind.plural} cannot be listed: {error.message}"
    return ""


async def api_server_endpoints(client: Client) -> tuple[tuple[str, int], ...]:
    """Where the API server really listens: NetworkPolicies see addresses after the service's was translated.

    Empty if it does not say; policies then allow its usual ports at every address. Raises ApiError, Unreachable:
    something that passes.
    """
    selector = "kubernetes.io/service-name=kubernetes"
    try:
        slices, _ = await client.list_all(kinds.ENDPOINT_SLICE, "default", selector)
    except ApiError as error:
        if error.code not in (403, 404):
            raise
        log.warning("the API server's own addresses are not known (%s); --api-server-endpoints names them", error)
        slices = []
    found = {
        (address, int(port["port"]))
        for piece in slices
        for port in piece.get("ports") or ()
        if port.get("port")
        for endpoint in piece.get("endpoints") or ()
        for address in endpoint.get("addresses") or ()
    }
    return tuple(sorted(found))


if __name__ == "__main__":
    sys.exit(main())
